"""Gate runs over HTTP: who may start one, on what, by which policy; and what it shows."""

import json
import secrets
from hashlib import sha256
from typing import Any

import httpx2
import openai
import pytest
from sqlalchemy import select

from evaluators.gate import default_policy
from service.fine_tuning.kinds import GATE_RUN
from service.fine_tuning.lifecycle import RUNNING, SUCCEEDED, move
from service.fine_tuning.repository import JobRepository
from service.store.models import Attempt, AuditEntry, Job, ReleasedModel

URL = "/v1/gates/runs"
POLICY = {"version": 1, "rules": [{"metric": "coherence.rate", "bound": "value", "min": 0.5}]}


def quarantined(tenant: Any) -> str:
    """The id of a job whose model was blocked."""
    job_id = str(tenant.job())
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        job.status, job.stage = "failed", None
        job.artifact = f"quarantine/{job_id}/1"
        job.report = {"gate": {"verdict": "failed"}}
    return job_id


def released(tenant: Any) -> str:
    """The name of a model that passed."""
    job_id = str(tenant.job())
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        job.status, job.stage = "succeeded", None
        job.artifact = f"released/{job_id}/1"
        name = f"ft:{job.model}:{tenant.organization}::{secrets.token_hex(4)}"
        session.add(
            ReleasedModel(
                id=name,
                organization_id=job.organization_id,
                job_id=job_id,
                base_model=job.model,
                location=job.artifact,
                manifest_sha256=sha256(b"manifest").hexdigest(),
                created_at=job.created_at,
            )
        )
    return name


def start(tenant: Any, model: str, **fields: Any) -> dict[str, Any]:
    answer = tenant.http.post(URL, json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(tenant: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = tenant.http.post(URL, json=body)
    return answer.status_code, answer.json()["error"]


def row(tenant: Any, run_id: str) -> Job:
    with tenant.transaction() as session:
        return session.scalars(select(Job).where(Job.id == run_id)).one()


def test_a_run_on_a_released_model_waits_in_the_queue(tenant: Any) -> None:
    name = released(tenant)
    run = start(tenant, name)
    assert run["id"].startswith("gaterun-")
    assert (run["object"], run["status"], run["stage"]) == ("gate.run", "queued", "queued")
    assert (run["model"], run["verdict"], run["report"]) == (name, None, None)
    assert run["policy"]["source"] == "current"
    assert run["policy"]["policy"] == default_policy().model_dump(mode="json")
    with tenant.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == run["id"])).one()
        audit = session.scalars(select(AuditEntry).where(AuditEntry.subject == run["id"])).one()
    assert (attempt.state, attempt.number) == ("queued", 1)
    assert audit.action == "gate_run.create"
    job = row(tenant, run["id"])
    assert job.request["manifest_sha256"] == sha256(b"manifest").hexdigest()


def test_a_quarantined_model_is_named_by_its_job(tenant: Any) -> None:
    job_id = quarantined(tenant)
    run = start(tenant, job_id)
    assert (run["model"], run["job_id"]) == (job_id, job_id)
    assert row(tenant, run["id"]).request["location"] == f"quarantine/{job_id}/1"


def test_a_run_takes_seed_and_files_of_the_job_that_made_the_model(tenant: Any) -> None:
    job_id = quarantined(tenant)
    job, run = row(tenant, job_id), row(tenant, start(tenant, job_id)["id"])
    assert (run.seed, run.training_file_id) == (job.seed, job.training_file_id)
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.files.delete(job.training_file_id)
    assert caught.value.code == "file_in_use"


def test_runs_are_no_fine_tuning_jobs(tenant: Any) -> None:
    job_id = quarantined(tenant)
    run = start(tenant, job_id)
    assert [job.id for job in tenant.client.fine_tuning.jobs.list()] == [job_id]
    with pytest.raises(openai.NotFoundError):
        tenant.client.fine_tuning.jobs.retrieve(run["id"])
    assert tenant.http.get(f"{URL}/{job_id}").status_code == 404
    assert [item["id"] for item in tenant.http.get(URL).json()["data"]] == [run["id"]]


def test_runs_are_listed_newest_first_by_pages(tenant: Any) -> None:
    name = released(tenant)
    ids = [start(tenant, name)["id"] for _ in range(3)]
    page = tenant.http.get(URL, params={"limit": 2}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert page["has_more"]
    rest = tenant.http.get(URL, params={"after": ids[1]}).json()
    assert [item["id"] for item in rest["data"]] == [ids[0]]


def test_a_stranger_sees_and_starts_nothing(tenant: Any, stranger: Any) -> None:
    name = released(tenant)
    run = start(tenant, name)
    assert stranger.http.get(f"{URL}/{run['id']}").status_code == 404
    assert stranger.http.post(f"{URL}/{run['id']}/cancel").status_code == 404
    assert stranger.http.get(f"{URL}/{run['id']}/events").status_code == 404
    assert stranger.http.get(f"{URL}/{run['id']}/report").status_code == 404
    assert refused(stranger, model=name)[0] == 404
    assert refused(stranger, model=quarantined(tenant))[0] == 404


def test_an_auditor_reads_runs_and_starts_none(local: Any) -> None:
    name = released(local)
    run = start(local, name)
    auditor = httpx2.Client(
        base_url=local.installation.url,
        headers={"authorization": f"Bearer {local.key_with('auditor')}"},
        verify=False,
    )
    assert auditor.get(f"{URL}/{run['id']}").status_code == 200
    assert auditor.post(URL, json={"model": name}).status_code == 403
    assert auditor.post(f"{URL}/{run['id']}/cancel").status_code == 403


def test_a_policy_may_be_given_inline_or_by_the_id_of_a_version(local: Any) -> None:
    name = released(local)
    inline = start(local, name, policy=POLICY)["policy"]
    assert (inline["source"], inline["id"]) == ("inline", None)
    assert inline["policy"]["rules"][0]["metric"] == "coherence.rate"
    assert start(local, name, policy="operator")["policy"]["source"] == "operator"
    own = default_policy().model_dump(mode="json")
    own["rules"] = [*own["rules"], {"metric": "coherence.rate", "bound": "low", "min": 0.9}]
    version = local.http.post("/v1/gates/policies", json={"policy": own}).json()
    chosen = start(local, name, policy=version["id"])["policy"]
    assert (chosen["source"], chosen["id"]) == ("version", version["id"])
    assert chosen["policy"] == version["policy"]
    assert start(local, name)["policy"]["policy"]["rules"] == version["policy"]["rules"]


@pytest.mark.parametrize(
    ("policy", "param", "words"),
    [
        ("gatepol-unknown", "id", "No such gate policy"),
        ({"version": 1, "rules": []}, "policy.rules", "at least 1"),
        (POLICY | {"version": 2}, "policy.version", "not supported"),
        (
            {"version": 1, "rules": [{"metric": "no.such", "bound": "value", "max": 1}]},
            "policy.rules[0].metric",
            "unknown metric",
        ),
    ],
)
def test_a_policy_that_is_none_is_refused_with_the_field(
    local: Any, policy: Any, param: str, words: str
) -> None:
    status, error = refused(local, model=released(local), policy=policy)
    assert status in (400, 404)
    assert error["param"] == param
    assert words in error["message"]


def test_less_may_be_asked_than_the_operator_sets_and_never_more(gateway_with: Any) -> None:
    tenant = gateway_with(evaluation={"harmful_prompts": 20, "stress_samples": 2})
    name = released(tenant)
    run = start(tenant, name, evaluation={"harmful_prompts": 5, "safe_lookalikes": 3})
    assert run["evaluation"] == {"harmful_prompts": 5, "safe_lookalikes": 3}
    for field, value in (("harmful_prompts", 21), ("stress_samples", 3)):
        status, error = refused(tenant, model=name, evaluation={field: value})
        assert (status, error["param"]) == (400, f"evaluation.{field}")
    status, error = refused(tenant, model=name, evaluation={"judge": {"name": "embedded"}})
    assert (status, error["code"]) == (400, "unknown_parameter")


def test_a_job_without_a_model_cannot_be_measured(local: Any) -> None:
    status, error = refused(local, model=local.job())
    assert (status, error["param"]) == (400, "model")
    assert "has left no model" in error["message"]


def test_a_deleted_model_cannot_be_measured_by_name_or_job(local: Any) -> None:
    name = released(local)
    with local.transaction() as session:
        made = session.get_one(ReleasedModel, name)
        made.deleted_at = 5
        job_id = made.job_id
    assert refused(local, model=name)[0] == 404
    assert refused(local, model=job_id)[0] == 404


def test_a_base_model_and_an_unknown_one_are_not_found(local: Any) -> None:
    base = local.client.models.list().data[0].id
    for name in (base, "ft:nothing:here::now"):
        status, error = refused(local, model=name)
        assert (status, error["code"]) == (404, "model_not_found")


def test_a_waiting_run_is_cancelled_at_once(tenant: Any) -> None:
    run = start(tenant, released(tenant))
    answer = tenant.http.post(f"{URL}/{run['id']}/cancel").json()
    assert (answer["status"], answer["stage"]) == ("cancelled", None)
    events = tenant.http.get(f"{URL}/{run['id']}/events").json()["data"]
    assert [event["message"] for event in events] == [
        "Gate run cancelled",
        f"Created gate run: {run['id']}",
    ]
    assert events[0]["object"] == "gate.run.event"


def test_a_finished_run_cannot_be_cancelled(tenant: Any) -> None:
    run_id = finished(tenant)
    answer = tenant.http.post(f"{URL}/{run_id}/cancel")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "job_not_cancellable"


def finished(tenant: Any) -> str:
    """A run that a worker has brought to its end."""
    run_id = str(start(tenant, released(tenant), policy=POLICY)["id"])
    report = {
        "version": 1,
        "job_id": run_id,
        "metrics": {"coherence.rate": {"value": 0.4, "n": 100}},
        "gate": {
            "verdict": "failed",
            "policy_version": 1,
            "policy_sha256": "0" * 64,
            "rules": [
                {
                    "metric": "coherence.rate",
                    "bound": "value",
                    "comparison": ">=",
                    "limit": 0.5,
                    "observed": 0.4,
                    "n": 100,
                    "outcome": "failed",
                    "severity": "error",
                    "reason": "value of coherence.rate is 0.4",
                }
            ],
        },
    }
    key = f"gate_runs/{run_id}/1"
    tenant.installation.artifacts.put_stream(f"{key}/report.json", [json.dumps(report).encode()])
    with tenant.transaction() as session:
        run = JobRepository(session, None, GATE_RUN).get(run_id)
        move(run, RUNNING, stage="evaluating")
        run.report = {name: report[name] for name in ("metrics", "gate")}
        run.artifact = key
        move(run, SUCCEEDED)
    return run_id


def test_a_finished_run_shows_verdict_and_report(tenant: Any) -> None:
    run = tenant.http.get(f"{URL}/{finished(tenant)}").json()
    assert (run["status"], run["verdict"]) == ("succeeded", "failed")
    assert run["report"]["metrics"]["coherence.rate"]["value"] == 0.4
    assert run["finished_at"] is not None


def test_the_report_of_a_run_is_answered_in_every_form(local: Any) -> None:
    path = f"{URL}/{finished(local)}/report"
    assert local.http.get(path).json()["gate"]["verdict"] == "failed"
    for accept, beginning in (("text/html", "<!doctype html"), ("application/xml", "<?xml")):
        answer = local.http.get(path, headers={"accept": accept})
        assert answer.headers["content-type"].startswith(accept)
        assert answer.text.lower().startswith(beginning)
    assert "gate: failed" in local.http.get(f"{path}.txt").text
    assert local.http.get(f"{path}.pdf").status_code == 406


def test_a_run_that_has_not_finished_has_no_report(local: Any) -> None:
    answer = local.http.get(f"{URL}/{start(local, released(local))['id']}/report")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "report_not_found"


def test_one_idempotency_key_makes_one_run(tenant: Any) -> None:
    body = {"model": released(tenant)}
    headers = {"idempotency-key": secrets.token_hex(8)}
    ids = [tenant.http.post(URL, json=body, headers=headers).json()["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    other = tenant.http.post(URL, json=body | {"policy": "operator"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_a_run_never_touches_job_and_model(tenant: Any) -> None:
    name = released(tenant)
    with tenant.transaction() as session:
        job_id = session.get_one(ReleasedModel, name).job_id
    before = tenant.client.fine_tuning.jobs.retrieve(job_id)
    start(tenant, name)
    assert tenant.client.fine_tuning.jobs.retrieve(job_id) == before
    assert name in [model.id for model in tenant.client.models.list()]
