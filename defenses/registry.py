"""Defences by name, imported only when asked for, and open to other packages."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

ENTRY_POINT_GROUP = "tunegate.defenses"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "bds": "defenses.bds.scheduler:ScalarScheduler",
        "joint": "defenses.panacea.perturbation:panacea_gradients",
        "post_hoc": "defenses.panacea.perturbation:post_hoc_perturbation",
    }
)


class UnknownDefenseError(LookupError):
    """No built-in defence and no installed package answers to this name."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        super().__init__(
            f"no defence is called {name!r}; known are {', '.join(known)}. Another package can add "
            f"one through the entry point group {ENTRY_POINT_GROUP!r}"
        )


def available_defenses() -> list[str]:
    """Names that resolve_defense knows, sorted; nothing is imported."""
    return sorted({*BUILT_IN, *_installed()})


def resolve_defense(name: str) -> Any:
    """The class or function behind a name. A built-in name can't be taken over by a package.

    Raises UnknownDefenseError.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    installed = _installed()
    if name in installed:
        return installed[name].load()
    raise UnknownDefenseError(name, available_defenses())


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
