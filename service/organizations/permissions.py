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
    "moderations.create",
    "gates.read",
    "gates.run",
    "gates.set",
    "gates.override",
    "analyses.read",
    "analyses.write",
    "samples.read",
    "audit.read",
]

ROLES: tuple[Role, ...] = ("owner", "admin", "member", "auditor", "ci")

_READ: frozenset[Action] = frozenset(
    {
        "files.read",
        "jobs.read",
        "models.read",
        "gates.read",
        "analyses.read",
        "moderations.create",
    }
)
_WRITE: frozenset[Action] = _READ | {"files.write", "jobs.write", "gates.run", "analyses.write"}
# What a quarantined model answered is for those who review it.
_REVIEW: frozenset[Action] = frozenset({"samples.read", "audit.read"})
_ALL: frozenset[Action] = _WRITE | _REVIEW | {"models.delete", "gates.set", "gates.override"}

_ALLOWED: dict[str, frozenset[Action]] = {
    "owner": _ALL,
    "admin": _ALL,
    "member": _WRITE,
    "auditor": _READ | _REVIEW,
    "ci": _WRITE,
}


def may(role: str, action: Action) -> bool:
    """Whether a key with `role` may do `action` inside its own organisation."""
    return action in _ALLOWED.get(role, frozenset())
