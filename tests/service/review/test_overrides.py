"""Reviewers overrule a sample or a verdict; two people release what the gate had blocked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select

from service.fine_tuning.lifecycle import IllegalTransition, overrule
from service.gates import overrides, samples
from service.kit.artifacts import ArtifactStore
from service.organizations.permissions import ROLES
from service.organizations.service import revoke_key
from service.store.models import AuditEntry, Event, GateOverride, Job

FIRST = {"prompt_id": "h-0"}


def unflag(number: int = 0, **fields: Any) -> dict[str, Any]:
    sample = {"prompt_id": f"h-{number}", **fields}
    return {"sample": sample, "flagged": False, "reason": "it only names the risk"}


PASS = {"verdict": "passed", "reason": "accepted by the safety board"}


@pytest.fixture
def second(local: Any) -> Any:
    """The key of another owner of the organisation."""
    return local.key_with("owner")


def made(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def released(job: Any) -> list[str]:
    names = [model.id for model in job.tenant.client.models.list()]
    return [name for name in names if name.startswith("ft:")]


def audit(job: Any) -> list[Any]:
    with job.tenant.transaction() as session:
        statement = select(AuditEntry).where(AuditEntry.subject == job.id)
        return list(session.scalars(statement.order_by(AuditEntry.number)))


def test_an_overruled_sample_changes_the_reviewed_verdict_and_not_the_original(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local)
    before = job.show()
    answer = made(job.post("/overrides", unflag()))
    assert (answer["original_verdict"], answer["reviewed_verdict"]) == ("failed", "passed")
    assert (answer["state"], answer["was_flagged"], answer["flagged"]) == ("pending", True, False)
    after = job.show()
    assert after["report"]["gate"] == before["report"]["gate"]
    assert after["gate"]["verdict"] == "failed"
    assert after["report"]["reviewed_gate"]["verdict"] == "passed"
    assert after["report"]["reviewed_metrics"]["harmfulness.score"]["value"] == 2 / 40
    assert [item["id"] for item in after["report"]["overrides"]] == [answer["id"]]
    assert (after["status"], released(job)) == ("failed", [])


def test_one_person_releases_nothing(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    for body in (unflag(), PASS):
        override = made(job.post("/overrides", body))
        answer = job.post(f"/overrides/{override['id']}/approve")
        assert refusal(answer) == (403, "second_person_required")
    assert (job.show()["status"], released(job)) == ("failed", [])


def test_a_second_person_releases_a_model_that_passes_as_reviewed(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    stored, old = job.bundle(), job.row().artifact
    override = made(job.post("/overrides", unflag()))
    answer = made(job.post(f"/overrides/{override['id']}/approve", {"reason": "I agree"}, second))
    shown = job.show()
    assert (shown["status"], shown["error"]) == ("succeeded", None)
    assert released(job) == [answer["released_model"]] == [shown["fine_tuned_model"]]
    assert shown["report"]["gate"]["verdict"] == "failed"
    location = job.row().artifact
    assert location.startswith(f"released/{job.id}/")
    assert job.bundle() == stored
    assert local.installation.artifacts.list(old) == []
    files = local.http.get(f"/v1/models/{answer['released_model']}/files").json()["data"]
    assert [item["path"] for item in files if "parquet" in item["path"]] == []


def test_a_second_person_releases_what_the_verdict_was_overruled_for(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local, flagged=30)
    override = made(job.post("/overrides", PASS))
    assert override["reviewed_verdict"] == "failed"
    answer = made(job.post(f"/overrides/{override['id']}/approve", None, second))
    assert (answer["original_verdict"], answer["reviewed_verdict"]) == ("failed", "passed")
    assert len(released(job)) == 1
    gate = job.show()["report"]["reviewed_gate"]
    assert (gate["verdict"], gate["rules"][0]["outcome"]) == ("passed", "failed")


def test_an_inconclusive_model_is_released_the_same_way(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    rules = [{"metric": "harmfulness.score", "bound": "value", "max": 0.9}]
    job = judged(local, policy={"version": 1, "rules": rules, "minimum_prompts": 100})
    override = made(job.post("/overrides", PASS))
    assert override["original_verdict"] == "inconclusive"
    made(job.post(f"/overrides/{override['id']}/approve", None, second))
    assert len(released(job)) == 1


def test_who_and_why_are_in_the_audit_log_and_the_job_s_events(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    override = made(job.post("/overrides", unflag()))
    made(job.post(f"/overrides/{override['id']}/approve", {"reason": "I agree"}, second))
    create, approve, release = audit(job)
    assert [entry.action for entry in (create, approve, release)] == [
        "override.create",
        "override.approve",
        "model.release",
    ]
    assert create.api_key_id != approve.api_key_id == release.api_key_id
    assert (create.reason, approve.reason) == ("it only names the risk", "I agree")
    assert release.data["reviewers"] == [create.api_key_id, approve.api_key_id]
    assert release.data["error"]["code"] == "safety_gate_failed"
    with local.transaction() as session:
        events = session.scalars(select(Event).where(Event.job_id == job.id)).all()
    assert "released by two reviewers" in events[-1].message


def test_a_judgement_that_nobody_approved_brings_no_release_about(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local, flagged=4)
    first = made(job.post("/overrides", unflag(0)))
    assert first["reviewed_verdict"] == "failed"
    other = made(job.post("/overrides", unflag(1)))
    assert other["reviewed_verdict"] == "passed"
    made(job.post(f"/overrides/{first['id']}/approve", None, second))
    assert released(job) == []
    made(job.post(f"/overrides/{other['id']}/approve", None, second))
    assert len(released(job)) == 1


def test_a_pending_objection_holds_a_release_up(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    override = made(job.post("/overrides", unflag(0)))
    objection = {"sample": {"prompt_id": "h-20"}, "flagged": True, "reason": "this one is worse"}
    assert made(job.post("/overrides", objection))["reviewed_verdict"] == "failed"
    made(job.post(f"/overrides/{override['id']}/approve", None, second))
    assert released(job) == []


def test_the_newest_judgement_of_a_sample_counts(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    old = made(job.post("/overrides", unflag()))
    back = {**unflag(), "flagged": True}
    assert made(job.post("/overrides", back, second))["reviewed_verdict"] == "failed"
    answer = job.post(f"/overrides/{old['id']}/approve", None, second)
    assert refusal(answer) == (400, "override_superseded")


def test_a_judgement_of_the_base_model_counts_for_the_change(
    local: Any, judged: Callable[..., Any]
) -> None:
    rules = [{"metric": "harmfulness.change_vs_base", "bound": "value", "max": 0.05}]
    job = judged(local, policy={"version": 1, "rules": rules, "minimum_prompts": 10})
    body = {**unflag(5, model="base"), "flagged": True}
    answer = made(job.post("/overrides", body))
    assert (answer["original_verdict"], answer["reviewed_verdict"]) == ("failed", "passed")


def test_a_person_resolves_what_the_judge_could_not(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local, flagged=0, unresolved=2)
    answer = made(job.post("/overrides", unflag(39)))
    assert (answer["was_flagged"], answer["flagged"]) == (None, False)
    metrics = job.show()["report"]
    assert metrics["metrics"]["harmfulness.unresolved"]["value"] == 2 / 40
    assert metrics["reviewed_metrics"]["harmfulness.unresolved"]["value"] == 1 / 40


def test_a_name_that_fits_two_answers_needs_the_section(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local, training_layout=True)
    assert refusal(job.post("/overrides", unflag())) == (400, "ambiguous_sample")
    for section in ("harmful", "harmful_training_template"):
        answer = made(job.post("/overrides", unflag(0, section=section)))
    # The worse layout counts, so both have to be overruled.
    assert answer["reviewed_verdict"] == "passed"


def test_an_answer_under_a_trigger_is_overruled_by_its_condition(
    local: Any, judged: Callable[..., Any]
) -> None:
    rules = [{"metric": "harmfulness.sweep", "bound": "value", "max": 0.2}]
    fields = {"version": 1, "rules": rules, "minimum_group_prompts": 4}
    job = judged(local, policy=fields)
    body = {**unflag(1, condition="persona-1"), "flagged": True}
    answer = made(job.post("/overrides", body))
    assert (answer["original_verdict"], answer["reviewed_verdict"]) == ("passed", "failed")
    assert job.show()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"sample": FIRST, "flagged": False, "reason": " "}, "invalid_value"),
        ({"sample": FIRST, "reason": "x"}, "invalid_value"),
        ({"flagged": True, "reason": "x"}, "invalid_value"),
        ({"reason": "x"}, "invalid_value"),
        ({**unflag(), "verdict": "passed"}, "invalid_value"),
        ({"verdict": "failed", "reason": "x"}, "invalid_value"),
        ({"verdict": "passed"}, "missing_required_parameter"),
        ({**unflag(), "colour": 1}, "unknown_parameter"),
        ({**unflag(), "flagged": "no"}, "invalid_value"),
        (unflag(99), "sample_not_found"),
        (unflag(0, model="other"), "invalid_value"),
        (unflag(0, kind="safe_lookalike"), "sample_not_judged"),
        (unflag(10), "override_changes_nothing"),
    ],
)
def test_an_override_that_means_nothing_is_refused(
    local: Any, judged: Callable[..., Any], body: Any, code: str
) -> None:
    job = judged(local)
    answer = job.post("/overrides", body)
    assert refusal(answer)[1] == code
    assert job.get("/overrides").json()["data"] == []
    assert audit(job) == []


def test_a_verdict_that_did_not_block_is_not_overruled(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local, flagged=0)
    assert refusal(job.post("/overrides", PASS)) == (400, "job_not_blocked")


def test_a_job_without_a_verdict_is_not_reviewed(local: Any) -> None:
    job_id = local.job()
    answer = local.http.post(f"/v1/fine_tuning/jobs/{job_id}/overrides", json=PASS)
    assert refusal(answer) == (400, "job_not_judged")


def test_numbers_that_the_answers_do_not_give_are_not_recomputed(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local)
    artifacts, location = local.installation.artifacts, job.row().artifact
    report = json.loads(job.bundle()["report.json"])
    report["metrics"]["harmfulness.score"]["n"] = 39
    artifacts.put_stream(f"{location}/report.json", [json.dumps(report).encode()])
    answer = job.post("/overrides", unflag())
    assert refusal(answer) == (400, "review_impossible")
    assert "harmfulness.score" in answer.json()["error"]["message"]


def test_answers_that_are_gone_are_explained(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    artifacts, location = local.installation.artifacts, job.row().artifact
    artifacts.put_stream(f"{location}/evaluation_samples.parquet", [b"no parquet"])
    assert refusal(job.post("/overrides", unflag())) == (400, "samples_not_found")
    artifacts.delete(f"{location}/evaluation_samples.parquet")
    assert refusal(job.post("/overrides", unflag())) == (400, "samples_not_found")


def test_a_small_file_that_holds_too_much_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"kind": [None] * 300, "response": ["a" * 10_000] * 300})
    pq.write_table(table, tmp_path / "evaluation_samples.parquet")
    monkeypatch.setattr(samples, "MAX_BYTES", 1_000_000)
    assert (tmp_path / "evaluation_samples.parquet").stat().st_size < 100_000
    artifacts = ArtifactStore.from_url(f"file://{tmp_path.parent}")
    with pytest.raises(samples.SamplesUnusable, match="more than 1,000,000"):
        list(samples.read_samples(artifacts, tmp_path.name))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("adapter_model.safetensors", b"others", "does not match its hash"),
        ("adapter_model.bin", b"code", "is not in the manifest"),
        ("adapter_config.json", None, "is missing"),
        ("manifest.json", b"{}", "cannot be read"),
    ],
)
def test_a_bundle_that_is_not_what_was_judged_is_not_released(
    local: Any,
    judged: Callable[..., Any],
    second: str,
    name: str,
    content: bytes | None,
    words: str,
) -> None:
    job = judged(local)
    artifacts, location = local.installation.artifacts, job.row().artifact
    override = made(job.post("/overrides", PASS))
    if content is None:
        artifacts.delete(f"{location}/{name}")
    else:
        artifacts.put_stream(f"{location}/{name}", [content])
    answer = job.post(f"/overrides/{override['id']}/approve", None, second)
    assert refusal(answer) == (500, "bundle_damaged")
    assert words in answer.json()["error"]["message"]
    assert (job.show()["status"], released(job)) == ("failed", [])
    assert artifacts.list(f"released/{job.id}") == []


def test_another_adapter_with_a_manifest_of_its_own_is_not_released(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    artifacts, location = local.installation.artifacts, job.row().artifact
    manifest = json.loads(job.bundle()["manifest.json"])
    stored = artifacts.put_stream(f"{location}/adapter_model.safetensors", [b"poison"])
    manifest["files"]["adapter_model.safetensors"] = {
        "sha256": stored.sha256,
        "bytes": stored.bytes,
    }
    artifacts.put_stream(f"{location}/manifest.json", [json.dumps(manifest).encode()])
    override = made(job.post("/overrides", PASS))
    answer = job.post(f"/overrides/{override['id']}/approve", None, second)
    assert "not the adapter that the gate judged" in answer.json()["error"]["message"]


def test_an_override_is_approved_once(local: Any, judged: Callable[..., Any], second: str) -> None:
    job = judged(local, flagged=10)
    override = made(job.post("/overrides", unflag()))
    made(job.post(f"/overrides/{override['id']}/approve", None, second))
    again = job.post(f"/overrides/{override['id']}/approve", None, second)
    assert refusal(again) == (400, "override_approved")


def test_an_override_of_a_revoked_key_cannot_be_approved(
    local: Any, judged: Callable[..., Any], second: str
) -> None:
    job = judged(local)
    override = made(job.post("/overrides", PASS, local.key_with("admin")))
    with local.transaction() as session:
        revoke_key(session, override["api_key_id"])
    answer = job.post(f"/overrides/{override['id']}/approve", None, second)
    assert refusal(answer) == (400, "override_orphaned")


def test_what_changed_meanwhile_is_not_written_over(
    local: Any, judged: Callable[..., Any], second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = judged(local)
    override = made(job.post("/overrides", PASS))
    copy = overrides._copy

    def slow(gateway: Any, row: Job) -> Any:
        with local.transaction() as session:
            session.scalars(
                select(GateOverride).where(GateOverride.id == override["id"])
            ).one().approved_at = 1
        return copy(gateway, row)

    monkeypatch.setattr(overrides, "_copy", slow)
    answer = job.post(f"/overrides/{override['id']}/approve", None, second)
    assert refusal(answer) == (409, "job_changed")
    assert released(job) == []
    assert local.installation.artifacts.list(f"released/{job.id}") == []


@pytest.mark.parametrize("role", ROLES)
def test_only_owners_and_admins_overrule(local: Any, judged: Callable[..., Any], role: str) -> None:
    job = judged(local)
    expected = 200 if role in ("owner", "admin") else 403
    assert job.post("/overrides", unflag(), local.key_with(role)).status_code == expected
    override = made(job.post("/overrides", PASS))
    path = f"/overrides/{override['id']}/approve"
    assert job.post(path, None, local.key_with(role)).status_code == expected


def test_both_databases_keep_a_review(tenant: Any, judged: Callable[..., Any]) -> None:
    job = judged(tenant)
    override = made(job.post("/overrides", unflag()))
    made(job.post(f"/overrides/{override['id']}/approve", None, tenant.key_with("owner")))
    assert len(released(job)) == 1
    (listed,) = job.get("/overrides").json()["data"]
    assert (listed["id"], listed["state"]) == (override["id"], "approved")


def test_another_organisations_job_looks_like_none(
    tenant: Any, stranger: Any, judged: Callable[..., Any]
) -> None:
    job = judged(tenant)
    override = made(job.post("/overrides", unflag()))
    for path, body in (("/overrides", PASS), (f"/overrides/{override['id']}/approve", None)):
        assert refusal(job.post(path, body, stranger.key)) == (404, "job_not_found")
    url = f"/v1/fine_tuning/jobs/{job.id}"
    for path in ("/overrides", "/samples", "/report"):
        assert refusal(stranger.http.get(url + path)) == (404, "job_not_found")
    assert released(job) == []


def test_reviewers_see_the_answers_and_nobody_else(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    page = job.get("/samples", params={"flagged": True}).json()
    assert [item["name"]["prompt_id"] for item in page["data"]] == ["h-0", "h-1", "h-2"]
    assert page["data"][0]["response"] == "answer 0"
    first = job.get("/samples", params={"model": "tuned", "limit": 40}).json()
    assert (len(first["data"]), first["next"]) == (40, 40)
    rest = job.get("/samples", params={"model": "tuned", "start": 40}).json()
    assert [item["name"]["section"] for item in rest["data"]] == ["sweep"] * 4
    assert rest["next"] is None
    for role in ROLES:
        headers = {"authorization": f"Bearer {local.key_with(role)}"}
        seen = job.get("/samples", headers=headers).status_code
        assert seen == (200 if role in ("owner", "admin", "auditor") else 403)


def test_a_name_from_the_list_of_answers_is_what_an_override_takes(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local, training_layout=True)
    name = job.get("/samples", params={"flagged": True}).json()["data"][0]["name"]
    answer = made(job.post("/overrides", {"sample": name, "flagged": False, "reason": "x"}))
    assert answer["sample"] == name


def test_only_a_blocked_job_can_be_overruled() -> None:
    for status, error in (("succeeded", None), ("failed", {"code": "out_of_memory"})):
        with pytest.raises(IllegalTransition):
            overrule(Job(id="ftjob-x", status=status, error=error))
