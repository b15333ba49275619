"""Published measurement protocols, so that a number can stand beside a paper's."""

from collections.abc import Mapping
from types import MappingProxyType

from evaluators.protocols.beavertails import (
    BEAVERTAILS,
    ProtocolPrompts,
    ProtocolSpec,
    repeats_a_word,
)

PROTOCOLS: Mapping[str, ProtocolSpec] = MappingProxyType({BEAVERTAILS.name: BEAVERTAILS})

__all__ = ["BEAVERTAILS", "PROTOCOLS", "ProtocolPrompts", "ProtocolSpec", "repeats_a_word"]
