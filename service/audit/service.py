"""The audit log: every entry names who, what and why, and is chained to the one before it.

hash = SHA-256(previous_hash + canonical JSON of the entry), where the JSON holds id,
organization_id, number, created_at, api_key_id, role, action, subject, reason and data, with sorted
keys, no blanks, and all beyond ASCII escaped. The first previous_hash is 64 zeros.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from service.audit.repository import AuditRepository
from service.kit.clock import now
from service.kit.ids import new_id
from service.organizations.service import Caller
from service.store.models import AuditEntry

GENESIS = "0" * 64
HASHED = (
    *("id", "organization_id", "number", "created_at", "api_key_id", "role"),
    *("action", "subject", "reason", "data"),
)


class ChainCheck(NamedTuple):
    """What a walk over an organisation's entries found.

    head: the last hash, to be kept elsewhere: only somebody who knows an earlier head can tell that
    entries were cut off at the end. broken_at: number of the first entry that is wrong.
    """

    entries: int
    head: str
    broken_at: int | None = None
    problem: str | None = None

    @property
    def intact(self) -> bool:
        return self.broken_at is None


def record(
    session: Session,
    caller: Caller,
    action: str,
    subject: str,
    *,
    reason: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> AuditEntry:
    """Append an entry in the caller's transaction, so that it stands or falls with the deed."""
    repository = AuditRepository(session, caller.organization_id)
    last = repository.newest()
    entry = AuditEntry(
        id=new_id("audit"),
        organization_id=caller.organization_id,
        number=1 if last is None else last.number + 1,
        created_at=int(now()),
        api_key_id=caller.key_id,
        role=caller.role,
        action=action,
        subject=subject,
        reason=reason,
        data=dict(data or {}),
        previous_hash=GENESIS if last is None else last.hash,
    )
    entry.hash = entry_hash(entry)
    repository.add(entry)
    return entry


def entry_hash(entry: AuditEntry) -> str:
    """The hash that the entry must carry."""
    content = {name: getattr(entry, name) for name in HASHED}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256((entry.previous_hash + canonical).encode()).hexdigest()


def verify_chain(
    session: Session, organization_id: str, known_head: str | None = None
) -> ChainCheck:
    """Walk all entries of an organisation and stop at the first that is missing or was changed.

    known_head: a hash noted earlier; the chain must still contain it.
    """
    previous, count, seen = GENESIS, 0, known_head in (None, GENESIS)
    for entry in AuditRepository(session, organization_id).chain():
        problem = _problem(entry, count + 1, previous)
        if problem is not None:
            return ChainCheck(count, previous, count + 1, problem)
        previous, count = entry.hash, count + 1
        seen = seen or entry.hash == known_head
    if not seen:
        problem = f"the noted hash {known_head} is not in the chain: entries were cut off"
        return ChainCheck(count, previous, count + 1, problem)
    return ChainCheck(count, previous)


def _problem(entry: AuditEntry, number: int, previous: str) -> str | None:
    if entry.number != number:
        return f"entry {number} is missing"
    if entry.previous_hash != previous:
        return f"entry {number} does not follow on the entry before it"
    return None if entry.hash == entry_hash(entry) else f"entry {number} was changed"
