"""API keys and roles."""

import stat
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from service.kit.clock import now
from service.organizations import authentication
from service.organizations.permissions import ROLES, may
from service.organizations.service import (
    InvalidKeyRequest,
    create_key,
    identify,
    list_keys,
    revoke_key,
)
from service.settings import Settings
from service.store.models import ApiKey


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer sk-tg-wrong", "Basic abc", "sk-tg-x", "Bearer käse"],
)
def test_every_wrong_key_gets_the_same_answer(local: Any, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = httpx2.get(f"{local.installation.url}/v1/models", headers=headers)
    expected = httpx2.get(f"{local.installation.url}/v1/models")
    assert answer.status_code == 401
    assert answer.json() == expected.json()
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["x-request-id"]


def test_a_revoked_key_is_refused_at_once(tenant: Any) -> None:
    key = tenant.key_with("member")
    client = openai.OpenAI(base_url=f"{tenant.installation.url}/v1", api_key=key, max_retries=0)
    client.models.list()
    with tenant.transaction() as session:
        row = session.scalars(
            select(ApiKey).where(ApiKey.role == "member").order_by(ApiKey.created_at.desc())
        ).first()
        revoke_key(session, row.id)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_key_is_stored_as_digest_only(tenant: Any) -> None:
    with tenant.transaction() as session:
        row = session.scalars(select(ApiKey).where(ApiKey.prefix == tenant.key[:12])).one()
        stored = [str(value) for value in vars(row).values()]
    assert not any(tenant.key in value for value in stored)
    assert not any(tenant.key.removeprefix("sk-tg-") in value for value in stored)


def test_a_key_has_256_random_bits(session: Any, database: Any) -> None:
    keys = {create_key(session, database.settings, "many", "ci")["key"] for _ in range(20)}
    assert len(keys) == 20
    assert all(key.startswith("sk-tg-") and len(key) == 6 + 43 for key in keys)


def test_another_pepper_knows_no_key(session: Any, database: Any) -> None:
    key = create_key(session, database.settings, "peppered", "admin")["key"]
    assert identify(session, database.settings.pepper(), key) is not None
    assert identify(session, b"other", key) is None


def test_two_keys_of_one_name_share_an_organisation(session: Any, database: Any) -> None:
    made = [create_key(session, database.settings, "shared", role) for role in ("owner", "ci")]
    pepper = database.settings.pepper()
    callers = [identify(session, pepper, one["key"]) for one in made]
    assert callers[0].organization_id == callers[1].organization_id
    assert [caller.role for caller in callers] == ["owner", "ci"]
    assert list(made[0]) == ["id", "key", "organization", "role"]


def test_the_list_of_keys_shows_no_secret(session: Any, database: Any) -> None:
    made = create_key(session, database.settings, "listed", "admin")
    (row,) = list_keys(session, "listed")
    assert (row["id"], row["role"], row["revoked_at"]) == (made["id"], "admin", None)
    assert made["key"] not in str(row)
    assert made["key"].startswith(row["prefix"])


def test_revoking_twice_keeps_the_first_time(session: Any, database: Any) -> None:
    made = create_key(session, database.settings, "revoked", "admin")
    revoke_key(session, made["id"])
    first = list_keys(session, "revoked")[0]["revoked_at"]
    revoke_key(session, made["id"])
    assert list_keys(session, "revoked")[0]["revoked_at"] == first


@pytest.mark.parametrize(("name", "role"), [("a b", "admin"), ("", "admin"), ("ok", "king")])
def test_a_key_that_cannot_be_made_is_explained(
    session: Any, database: Any, name: str, role: str
) -> None:
    with pytest.raises(InvalidKeyRequest):
        create_key(session, database.settings, name, role)


def test_revoking_an_unknown_key_is_explained(session: Any) -> None:
    with pytest.raises(InvalidKeyRequest, match="key-none"):
        revoke_key(session, "key-none")


def test_last_use_is_written_at_most_once_a_minute(tenant: Any) -> None:
    def last_use() -> int:
        with tenant.transaction() as session:
            return session.scalars(
                select(ApiKey.last_used_at).where(ApiKey.prefix == tenant.key[:12])
            ).one()

    assert last_use() is None
    tenant.client.models.list()
    assert last_use() == pytest.approx(now(), abs=30)
    with tenant.transaction() as session:
        session.query(ApiKey).where(ApiKey.prefix == tenant.key[:12]).update(
            {"last_used_at": int(now()) - 30}
        )
    before = last_use()
    tenant.client.models.list()
    assert last_use() == before
    with tenant.transaction() as session:
        session.query(ApiKey).where(ApiKey.prefix == tenant.key[:12]).update(
            {"last_used_at": int(now()) - 61}
        )
    tenant.client.models.list()
    assert last_use() > before


@pytest.mark.parametrize("role", ROLES)
def test_a_role_reads_and_writes_as_it_may(tenant: Any, role: str) -> None:
    client = openai.OpenAI(
        base_url=f"{tenant.installation.url}/v1", api_key=tenant.key_with(role), max_retries=0
    )
    file_id = tenant.upload()
    assert client.files.retrieve(file_id).id == file_id
    assert client.fine_tuning.jobs.list().data == []
    calls = [
        lambda: client.files.create(file=("a.jsonl", b"x"), purpose="evals"),
        lambda: client.fine_tuning.jobs.create(
            model=client.models.list().data[0].id, training_file=file_id
        ),
    ]
    for call in calls:
        if role == "auditor":
            with pytest.raises(openai.PermissionDeniedError) as caught:
                call()
            assert caught.value.code == "insufficient_permissions"
        else:
            assert call().id


def test_only_owners_and_admins_delete_models() -> None:
    assert {role for role in ROLES if may(role, "models.delete")} == {"owner", "admin"}


def test_an_unknown_role_may_nothing() -> None:
    assert not may("guest", "jobs.read")


def test_the_pepper_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    first = Settings(data_dir=tmp_path / "data").pepper()
    assert Settings(data_dir=tmp_path / "data").pepper() == first
    assert len(first) == 64
    assert stat.S_IMODE((tmp_path / "data" / "pepper").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["pepper"]


def test_a_configured_pepper_is_used_and_not_shown(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, key_pepper="s3cret")
    assert settings.pepper() == b"s3cret"
    assert "s3cret" not in repr(settings)
    assert list(tmp_path.iterdir()) == []


def test_a_last_use_that_cannot_be_written_fails_no_request(
    local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OperationalError("UPDATE", {}, Exception("locked"))

    monkeypatch.setattr(authentication, "touch", fail)
    assert local.client.models.list().data
