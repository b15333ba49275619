"""API keys: made, listed, revoked, recognised."""

import hashlib
import hmac
import re
import secrets
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from service.kit.clock import now
from service.kit.errors import ApiError
from service.kit.ids import new_id
from service.organizations import repository
from service.organizations.permissions import ROLES, Action, may
from service.settings import Settings
from service.store.models import ApiKey, Organization

KEY_PREFIX = "sk-tg-"
SHOWN_CHARACTERS = 12
LAST_USED_SECONDS = 60

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class InvalidKeyRequest(ValueError):
    """A key cannot be made or revoked as asked; the message says why."""


class Caller(NamedTuple):
    """Who sent a request, as its key tells."""

    organization_id: str
    organization: str
    key_id: str
    role: str
    last_used_at: int | None

    def require(self, action: Action) -> None:
        """Raises ApiError 403 unless the key's role allows `action`."""
        if not may(self.role, action):
            raise ApiError(
                403,
                f"A key with role {self.role} may not do this ({action}). Use another key.",
                "insufficient_permissions",
            )


def digest(pepper: bytes, key: str) -> str:
    """HMAC-SHA256 of the key under the pepper. A key has 256 random bits, so no slow hash."""
    return hmac.new(pepper, key.encode(), hashlib.sha256).hexdigest()


def create_key(
    session: Session, settings: Settings, organization: str, role: str
) -> dict[str, str]:
    """Make a key, and the organisation if there is none of this name.

    Returns {"id", "key", "organization", "role"}; the key is never shown again. Raises
    InvalidKeyRequest.
    """
    if role not in ROLES:
        raise InvalidKeyRequest(f"unknown role {role!r}; use one of: {', '.join(ROLES)}")
    if not _NAME.fullmatch(organization):
        raise InvalidKeyRequest(
            "an organisation's name is 1 to 64 letters, digits, '.', '_' or '-', and starts with "
            "a letter or digit, since it becomes part of model names"
        )
    moment = int(now())
    owner = repository.organization_by_name(session, organization)
    if owner is None:
        owner = Organization(id=new_id("org"), name=organization, created_at=moment)
        session.add(owner)
        session.flush()
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(
        id=new_id("key"),
        organization_id=owner.id,
        prefix=key[:SHOWN_CHARACTERS],
        digest=digest(settings.pepper(), key),
        role=role,
        created_at=moment,
    )
    session.add(row)
    session.flush()
    return {"id": row.id, "key": key, "organization": organization, "role": role}


def list_keys(session: Session, organization: str | None = None) -> list[dict[str, Any]]:
    """Keys without their secret part, oldest first."""
    return [
        {
            "id": key.id,
            "prefix": key.prefix,
            "organization": owner.name,
            "role": key.role,
            "created_at": key.created_at,
            "last_used_at": key.last_used_at,
            "revoked_at": key.revoked_at,
        }
        for key, owner in repository.keys(session, organization)
    ]


def revoke_key(session: Session, key_id: str) -> None:
    """End a key at once; a second time changes nothing. Raises InvalidKeyRequest."""
    row = session.get(ApiKey, key_id)
    if row is None:
        raise InvalidKeyRequest(f"no key with id {key_id}; `tunegate keys list` shows them")
    if row.revoked_at is None:
        row.revoked_at = int(now())


def identify(session: Session, pepper: bytes, key: str) -> Caller | None:
    """The caller behind a key; None for a key that is unknown or revoked."""
    if not key.startswith(KEY_PREFIX):
        return None
    expected = digest(pepper, key)
    found = repository.key_by_digest(session, expected)
    if found is None:
        return None
    row, owner = found
    if row.revoked_at is not None or not hmac.compare_digest(row.digest, expected):
        return None
    return Caller(owner.id, owner.name, row.id, row.role, row.last_used_at)


def touch(session: Session, key_id: str) -> None:
    """Note that the key was used."""
    row = session.get(ApiKey, key_id)
    if row is not None:
        row.last_used_at = int(now())
