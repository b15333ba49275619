"""Who may do what: five roles and one function."""

from typing import Literal

Role = Literal["owner", "admin", "member", "auditor", "ci"]
Action = Literal[
    "files.read",
    "files.write",
    "jobs.read",
    "jobs.write",
    "models.read",
    "models.delete",
]

ROLES: tuple[Role, ...] = ("owner", "admin", "member", "auditor", "ci")

_READ: frozenset[Action] = frozenset({"files.read", "jobs.read", "models.read"})
_WRITE: frozenset[Action] = _READ | {"files.write", "jobs.write"}
_ALL: frozenset[Action] = _WRITE | {"models.delete"}

_ALLOWED: dict[str, frozenset[Action]] = {
    "owner": _ALL,
    "admin": _ALL,
    "member": _WRITE,
    "auditor": _READ,
    "ci": _WRITE,
}


def may(role: str, action: Action) -> bool:
    """Whether a key with `role` may do `action` inside its own organisation."""
    return action in _ALLOWED.get(role, frozenset())
