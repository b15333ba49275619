"""The audit log: append-only, chained, read by those who review."""

import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Barrier
from typing import Any

import httpx2
import pytest
from sqlalchemy import delete, text, update
from sqlalchemy.exc import DatabaseError
from typer.testing import CliRunner

from service.audit.service import GENESIS, record, verify_chain
from service.cli.audit import app
from service.cli.output import CommandError, Ended
from service.organizations.permissions import ROLES
from service.organizations.service import Caller
from service.store.database import transaction
from service.store.models import AuditEntry, GatePolicy


def caller(organization: str) -> Caller:
    return Caller(organization, "name", "key-a", "admin", None)


def write(database: Any, organization: str, count: int = 3) -> None:
    with transaction(database.factory) as session:
        for number in range(count):
            record(
                session,
                caller(organization),
                "test.write",
                f"subject-{number}",
                reason="käse \N{SNOWMAN}",
                data={"share": 0.1 + 0.2, "list": [1, None], "ä": {"deep": True}},
            )


def withdrawal(organization: str, version: int) -> GatePolicy:
    return GatePolicy(
        id=f"gatepol-{organization}-{version}",
        organization_id=organization,
        version=version,
        api_key_id="key-a",
        created_at=0,
    )


def check(database: Any, organization: str, head: str | None = None) -> Any:
    with transaction(database.factory, read_only=True) as session:
        return verify_chain(session, organization, head)


def test_a_chain_that_nobody_touched_is_intact(database: Any) -> None:
    organization = database.organization()
    assert check(database, organization) == (0, GENESIS, None, None)
    write(database, organization)
    found = check(database, organization)
    assert (found.entries, found.intact) == (3, True)
    assert check(database, organization, found.head).intact


def test_organisations_have_chains_of_their_own(database: Any) -> None:
    mine, theirs = database.organization(), database.organization()
    for organization in (mine, theirs, mine):
        write(database, organization, 1)
    assert [check(database, one).entries for one in (mine, theirs)] == [2, 1]


def test_entries_that_are_written_at_once_follow_on_each_other(database: Any) -> None:
    organization = database.organization()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write(database, organization, 5), range(8)))
    assert check(database, organization)[:3:2] == (40, None)


def test_deeds_that_both_added_a_row_first_do_not_wait_for_each_other(
    postgresql_database: Any,
) -> None:
    organization = postgresql_database.organization()
    # Rows that name the organisation share its key until their transactions end.
    added = Barrier(2)

    def deed(number: int) -> None:
        with transaction(postgresql_database.factory) as session:
            session.add(withdrawal(organization, number))
            session.flush()
            added.wait(timeout=30)
            record(session, caller(organization), "test.write", f"subject-{number}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(deed, (1, 2)))
    assert check(postgresql_database, organization)[:3:2] == (2, None)


@pytest.mark.parametrize("verb", ["update", "delete"])
def test_the_database_refuses_to_change_an_entry(database: Any, verb: str) -> None:
    organization = database.organization()
    write(database, organization)
    statement = (
        update(AuditEntry).values(reason="other") if verb == "update" else delete(AuditEntry)
    )
    with pytest.raises(DatabaseError), transaction(database.factory) as session:
        session.execute(statement.where(AuditEntry.organization_id == organization))
    assert check(database, organization).entries == 3


@pytest.fixture
def unguarded(gateway_with: Any) -> Any:
    """A tenant of a database whose triggers somebody has dropped."""
    tenant = gateway_with()
    with tenant.transaction() as session:
        for verb in ("update", "delete"):
            session.execute(text(f"DROP TRIGGER audit_entries_keep_{verb}"))
    return tenant


@pytest.mark.parametrize(
    ("field", "value"),
    [("reason", "other"), ("api_key_id", "key-b"), ("data", {}), ("created_at", 0)],
)
def test_a_changed_entry_is_found(unguarded: Any, field: str, value: Any) -> None:
    database = unguarded.installation.database
    organization = database.organization()
    write(database, organization)
    with unguarded.transaction() as session:
        session.execute(update(AuditEntry).where(AuditEntry.number == 2).values({field: value}))
    found = check(database, organization)
    assert (found.intact, found.broken_at) == (False, 2)
    assert found.problem == "entry 2 was changed"


def test_a_removed_entry_is_found(unguarded: Any) -> None:
    database = unguarded.installation.database
    organization = database.organization()
    write(database, organization)
    with unguarded.transaction() as session:
        session.execute(delete(AuditEntry).where(AuditEntry.number == 2))
    assert check(database, organization).problem == "entry 2 is missing"


def test_a_chain_that_was_cut_off_does_not_hold_the_noted_head(unguarded: Any) -> None:
    database = unguarded.installation.database
    organization = database.organization()
    write(database, organization)
    head = check(database, organization).head
    with unguarded.transaction() as session:
        session.execute(delete(AuditEntry).where(AuditEntry.number == 3))
    assert check(database, organization).intact
    assert "cut off" in check(database, organization, head).problem


def test_the_answer_holds_what_the_hash_is_made_of(tenant: Any) -> None:
    database = tenant.installation.database
    with tenant.transaction() as session:
        organization = session.execute(
            text("SELECT organization_id FROM api_keys WHERE prefix = :prefix"),
            {"prefix": tenant.key[:12]},
        ).scalar_one()
    write(database, organization, 2)
    first, second = tenant.http.get("/v1/audit", params={"order": "asc"}).json()["data"]
    assert (first["previous_hash"], second["previous_hash"]) == (GENESIS, first["hash"])
    for entry in (first, second):
        content = {
            name: value
            for name, value in entry.items()
            if name not in ("object", "hash", "previous_hash")
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        expected = sha256((entry["previous_hash"] + canonical).encode()).hexdigest()
        assert entry["hash"] == expected


def test_the_log_is_paged_and_filtered(tenant: Any) -> None:
    policy = {"policy": tenant.http.get("/v1/gates/policies/operator").json()["policy"]}
    made = [tenant.http.post("/v1/gates/policies", json=policy).json()["id"] for _ in range(3)]
    page = tenant.http.get("/v1/audit", params={"limit": 2}).json()
    assert ([item["subject"] for item in page["data"]], page["has_more"]) == (made[:0:-1], True)
    rest = tenant.http.get("/v1/audit", params={"after": page["last_id"]}).json()["data"]
    assert [item["subject"] for item in rest] == made[:1]
    found = tenant.http.get("/v1/audit", params={"subject": made[1]}).json()["data"]
    assert [item["number"] for item in found] == [2]
    assert tenant.http.get("/v1/audit", params={"action": "none"}).json()["data"] == []


def test_another_organisation_sees_nothing_of_it(tenant: Any, stranger: Any) -> None:
    policy = {"policy": tenant.http.get("/v1/gates/policies/operator").json()["policy"]}
    tenant.http.post("/v1/gates/policies", json=policy)
    (entry,) = tenant.http.get("/v1/audit").json()["data"]
    assert stranger.http.get("/v1/audit").json()["data"] == []
    answer = stranger.http.get("/v1/audit", params={"after": entry["id"]})
    assert answer.json()["error"]["code"] == "invalid_cursor"


@pytest.mark.parametrize("role", ROLES)
def test_owners_admins_and_auditors_read_the_log(local: Any, role: str) -> None:
    answer = httpx2.get(
        f"{local.installation.url}/v1/audit",
        headers={"authorization": f"Bearer {local.key_with(role)}"},
    )
    assert answer.status_code == (200 if role in ("owner", "admin", "auditor") else 403)


def test_the_command_tells_whether_the_chain_is_intact(
    unguarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = unguarded.installation.database
    monkeypatch.setenv("TUNEGATE_DATA_DIR", str(database.settings.data_dir))
    policy = {"policy": unguarded.http.get("/v1/gates/policies/operator").json()["policy"]}
    for _ in range(2):
        unguarded.http.post("/v1/gates/policies", json=policy)
    arguments = ["verify", "--organization", unguarded.organization, "--json"]
    done = CliRunner().invoke(app, arguments)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["entries"], told["intact"]) == (0, 2, True)
    with unguarded.transaction() as session:
        session.execute(update(AuditEntry).values(reason="other"))
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, Ended)
    assert json.loads(done.stdout)["broken_at"] == 1
    done = CliRunner().invoke(app, ["verify", "--organization", "nobody"])
    assert isinstance(done.exception, CommandError)
