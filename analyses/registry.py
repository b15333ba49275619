"""Kinds of analysis by name, built in and of other packages, imported only when asked for."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

from analyses.kind import Kind

ENTRY_POINT_GROUP = "tunegate.analyses"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "attribution.final_model": "analyses.attribution.spec:FINAL_MODEL",
        "attribution.online_rl": "analyses.online_rl.spec:ONLINE_RL",
        "privacy.risk": "analyses.privacy.spec:RISK",
        "privacy.calibrate": "analyses.privacy.spec:CALIBRATE",
    }
)


class UnknownKindError(LookupError):
    """No installed package offers an analysis of this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no analysis is called {name!r}; known: {', '.join(names())}")


class InvalidKindError(TypeError):
    """What a package offers as an analysis is not an analyses.kind.Kind of the same name."""


def names() -> list[str]:
    """All names, sorted; nothing is imported. A package cannot take over a built-in name."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find(name: str) -> Kind:
    """The kind of this name. Raises UnknownKindError and InvalidKindError."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return _checked(name, getattr(import_module(module), attribute))
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _checked(name, point.load())
    raise UnknownKindError(name)


def _checked(name: str, found: object) -> Kind:
    if not isinstance(found, Kind) or found.name != name:
        raise InvalidKindError(
            f"the analysis {name!r} is no analyses.kind.Kind with that name; give the entry point "
            "an object of this class"
        )
    return found
