"""Private jobs through the API: asking, refusals, and the guarantee afterwards."""

import json
from typing import Any

import openai
import pytest
from sqlalchemy import select

from service.fine_tuning.lifecycle import QUEUED, RUNNING, SUCCEEDED, move
from service.store.models import Job

PRIVATE = {
    "defense": {"scheduler": "none"},
    "privacy": {"target": {"attack": "reconstruction", "baseline": 0.01, "max_success": 0.05}},
}


def refusal(tenant: Any, body: dict[str, Any], **fields: Any) -> Any:
    with pytest.raises(openai.APIStatusError) as caught:
        tenant.job(extra_body=body, **fields)
    return caught.value


def with_report(tenant: Any, job_id: str, extra: dict[str, Any]) -> None:
    """Does what a worker does when the gate has passed a job."""
    report = {
        "version": 1,
        "job_id": job_id,
        "metrics": {},
        "gate": {"verdict": "passed", "rules": []},
        "artifact": {"adapter_sha256": "f" * 64},
        **extra,
    }
    location = f"released/{job_id}/1"
    stored = json.dumps(report).encode()
    tenant.installation.artifacts.put_stream(f"{location}/report.json", [stored])
    with tenant.transaction() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        for status in (QUEUED, RUNNING, SUCCEEDED):
            move(job, status)
        job.artifact, job.report = location, report


def test_a_private_job_says_what_it_was_asked_for(local: Any) -> None:
    job_id = local.job(extra_body=PRIVATE)
    shown = local.http.get(f"/v1/fine_tuning/jobs/{job_id}").json()
    assert shown["privacy"] == {
        "noise_multiplier": None,
        "target": {"attack": "reconstruction", "baseline": 0.01, "max_success": 0.05},
        "clip": 1.0,
        "delta": 1e-5,
    }


def test_a_job_that_does_not_ask_for_privacy_has_none(local: Any) -> None:
    shown = local.http.get(f"/v1/fine_tuning/jobs/{local.job()}").json()
    assert shown["privacy"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"defense": {}}, "defense.scheduler"),
        ({"defense": {"scheduler": "none", "perturbation": "joint"}}, "defense.perturbation"),
        ({"method": {"type": "dpo"}}, "method"),
        ({"privacy": {}}, "privacy"),
        ({"privacy": {"target": {"baseline": 0.1, "max_success": 0.05}}}, "privacy.target"),
    ],
)
def test_what_privacy_cannot_be_had_with_is_refused_by_name(
    local: Any, change: dict[str, Any], param: str
) -> None:
    error = refusal(local, {**PRIVATE, **change})
    assert error.status_code == 400
    assert error.param == param


def test_a_server_that_demands_the_data_scheduler_has_no_private_jobs(gateway_with: Any) -> None:
    error = refusal(gateway_with(require_defense=True), PRIVATE)
    assert (error.code, error.param) == ("policy_violation", "privacy")
    assert "cannot run with privacy" in error.message


def test_the_guarantee_of_a_private_job_comes_with_the_hash_of_its_adapter(local: Any) -> None:
    job_id = local.job(extra_body=PRIVATE)
    with_report(local, job_id, {"privacy": {"statement": "The adapter was tuned ..."}})
    found = local.http.get(f"/v1/fine_tuning/jobs/{job_id}/privacy")
    assert found.json() == {
        "job_id": job_id,
        "adapter_sha256": "f" * 64,
        "privacy": {"statement": "The adapter was tuned ..."},
    }


def test_a_job_without_privacy_has_no_guarantee_afterwards(local: Any) -> None:
    job_id = local.job()
    with_report(local, job_id, {})
    answer = local.http.get(f"/v1/fine_tuning/jobs/{job_id}/privacy")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_privacy_guarantee"
    assert "Create it again with 'privacy'" in answer.json()["error"]["message"]


def test_there_is_no_guarantee_before_the_gate_has_decided(local: Any) -> None:
    answer = local.http.get(f"/v1/fine_tuning/jobs/{local.job(extra_body=PRIVATE)}/privacy")
    assert answer.json()["error"]["code"] == "report_not_found"


def test_the_guarantee_of_another_organisation_is_not_found(tenant: Any, stranger: Any) -> None:
    job_id = tenant.job(extra_body=PRIVATE)
    assert stranger.http.get(f"/v1/fine_tuning/jobs/{job_id}/privacy").status_code == 404
