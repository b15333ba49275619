"""Analyses over HTTP: who may ask what about which job and files, and what is answered."""

import json
import secrets
import subprocess
import sys
from hashlib import sha256
from typing import Any

import httpx2
import openai
import pytest
from sqlalchemy import select

import analyses.registry
from service.fine_tuning.kinds import ANALYSIS
from service.fine_tuning.lifecycle import RUNNING, SUCCEEDED, move
from service.fine_tuning.repository import JobRepository
from service.store.models import Attempt, AuditEntry, Job, ReleasedModel

URL = "/v1/analyses"
RISK = {"noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 1000, "baselines": [0.01]}
ATTRIBUTION = {"targets": [{"prompt": "Say it", "completion": "No"}]}
ROUND = {"target": {"kind": "return"}}


def start(tenant: Any, kind: str = "privacy.risk", **fields: Any) -> dict[str, Any]:
    if kind == "privacy.risk":
        fields.setdefault("input", RISK)
    answer = tenant.http.post(URL, json={"kind": kind, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(tenant: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = tenant.http.post(URL, json=body)
    return answer.status_code, answer.json()["error"]


def blocked_job(tenant: Any) -> str:
    """The id of a job whose model is in quarantine."""
    job_id = str(tenant.job())
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        job.status, job.stage = "failed", None
        job.artifact = f"quarantine/{job_id}/1"
        job.report = {"gate": {"verdict": "failed"}}
    return job_id


def released_job(tenant: Any, **columns: Any) -> str:
    """The id of a job whose model was released."""
    job_id = blocked_job(tenant)
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        job.status = "succeeded"
        job.artifact = f"released/{job_id}/1"
        session.add(
            ReleasedModel(
                id=f"ft:{job.model}:{tenant.organization}::{secrets.token_hex(4)}",
                organization_id=job.organization_id,
                job_id=job_id,
                base_model=job.model,
                location=job.artifact,
                manifest_sha256=sha256(b"manifest").hexdigest(),
                created_at=job.created_at,
                **columns,
            )
        )
    return job_id


def row(tenant: Any, analysis_id: str) -> Job:
    with tenant.transaction() as session:
        return session.scalars(select(Job).where(Job.id == analysis_id)).one()


def finished(tenant: Any) -> str:
    """An analysis that a worker has brought to its end."""
    analysis_id = str(start(tenant)["id"])
    contents = {
        "result.json": b'{"kind": "privacy.risk", "risks": [1]}',
        "index.html": b"<!doctype html><title>Privacy</title>",
        "curve.parquet": b"PAR1",
    }
    files = {
        name: {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in contents.items()
    }
    contents["manifest.json"] = json.dumps({"files": files}).encode()
    key = f"analyses/{analysis_id}/1"
    for name, content in contents.items():
        tenant.installation.artifacts.put_stream(f"{key}/{name}", [content])
    with tenant.transaction() as session:
        job = JobRepository(session, None, ANALYSIS).get(analysis_id)
        move(job, RUNNING, stage="analyzing")
        job.report = {"epsilon": 1.8, "warnings": [], "tables": ["curve.parquet"]}
        job.artifact = key
        move(job, SUCCEEDED)
    return analysis_id


def test_an_analysis_waits_in_the_queue_with_its_cost(tenant: Any) -> None:
    made = start(tenant, seed=3)
    assert made["id"].startswith("analysis-")
    assert (made["object"], made["status"], made["stage"]) == ("analysis", "queued", "queued")
    assert (made["kind"], made["input"], made["seed"]) == ("privacy.risk", RISK, 3)
    assert made["cost"]["seconds"] > 0
    assert (made["result"], made["job_id"], made["files"]) == (None, None, {})
    with tenant.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == made["id"])).one()
        audit = session.scalars(select(AuditEntry).where(AuditEntry.subject == made["id"])).one()
    assert (attempt.state, attempt.number) == ("queued", 1)
    assert (audit.action, audit.data["kind"]) == ("analysis.create", "privacy.risk")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "kind", "Missing"),
        ({"kind": "privacy.nothing"}, "kind", "known: "),
        ({"kind": "privacy.risk", "output": {}}, "output", "Unknown"),
        ({"kind": "privacy.risk", "input": {}}, "input", "exactly one of"),
        ({"kind": "privacy.risk", "input": RISK | {"steps": 0}}, "input.steps", "greater than"),
        ({"kind": "privacy.risk", "input": RISK | {"sampling_rate": 2}}, "input.sampling_rate", ""),
        ({"kind": "privacy.risk", "input": RISK, "files": {"A B": "file-1"}}, None, "pattern"),
        (
            {"kind": "attribution.final_model", "input": {"targets": [{"prompt": "a"}]}},
            "input.targets[0].completion",
            "required",
        ),
        ({"kind": "attribution.final_model", "input": ATTRIBUTION}, "job_id", "job_id"),
    ],
)
def test_bad_input_is_refused_with_its_field(
    local: Any, body: dict[str, Any], param: str | None, words: str
) -> None:
    status, error = refused(local, **body)
    assert status == 400
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("make", [blocked_job, released_job])
def test_a_released_and_a_blocked_job_can_be_analysed(tenant: Any, make: Any) -> None:
    job_id = make(tenant)
    made = start(tenant, "attribution.final_model", input=ATTRIBUTION, job_id=job_id)
    job, source = row(tenant, made["id"]), row(tenant, job_id)
    assert made["job_id"] == job_id
    assert (job.model, job.training_file_id) == (source.model, source.training_file_id)
    assert job.request["location"] == source.artifact
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.files.delete(source.training_file_id)
    assert caught.value.code == "file_in_use"


def test_a_job_without_a_model_or_file_is_refused(local: Any) -> None:
    waiting = local.job()
    deleted = released_job(local, deleted_at=5)
    gone = blocked_job(local)
    local.client.files.delete(row(local, gone).training_file_id)
    for job_id, words in (
        (waiting, "has left no model"),
        (deleted, "its model was deleted"),
        (gone, "was deleted"),
    ):
        status, error = refused(
            local, kind="attribution.final_model", input=ATTRIBUTION, job_id=job_id
        )
        assert (status, error["param"]) == (400, "job_id")
        assert words in error["message"]


def test_a_file_becomes_the_field_of_its_name_and_stays_until_it_was_read(tenant: Any) -> None:
    buffer, policy = tenant.upload(), tenant.upload()
    files = {"buffer": buffer, "policy": policy}
    made = start(tenant, "attribution.online_rl", input=ROUND, files=files)
    assert made["files"] == files
    assert made["input"] == {**ROUND, **files}
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.files.delete(policy)
    assert caught.value.code == "file_in_use"
    tenant.http.post(f"{URL}/{made['id']}/cancel")
    assert tenant.client.files.delete(policy).deleted


def test_a_file_with_faults_is_refused(local: Any) -> None:
    broken = local.upload(b'{"messages": []}\n')
    status, error = refused(local, kind="attribution.online_rl", input={}, files={"buffer": broken})
    assert (status, error["param"]) == (400, "files.buffer")


def test_another_organisations_jobs_files_and_analyses_do_not_exist(
    tenant: Any, stranger: Any
) -> None:
    made = finished(tenant)
    for path in ("", "/events", "/files", "/result", "/result/index.html"):
        assert stranger.http.get(f"{URL}/{made}{path}").status_code == 404
    assert stranger.http.post(f"{URL}/{made}/cancel").status_code == 404
    assert stranger.http.get(URL).json()["data"] == []
    asked = {"kind": "attribution.final_model", "input": ATTRIBUTION}
    status, error = refused(stranger, job_id=blocked_job(tenant), **asked)
    assert (status, error["param"]) == (404, "job_id")
    status, error = refused(
        stranger, kind="attribution.online_rl", input={}, files={"buffer": tenant.upload()}
    )
    assert (status, error["param"]) == (404, "files.buffer")


def test_an_auditor_reads_analyses_and_starts_none(local: Any) -> None:
    made = start(local)
    auditor = httpx2.Client(
        base_url=local.installation.url,
        headers={"authorization": f"Bearer {local.key_with('auditor')}"},
        verify=False,
    )
    assert auditor.get(f"{URL}/{made['id']}").status_code == 200
    assert auditor.get(f"{URL}/kinds").status_code == 200
    assert auditor.post(URL, json={"kind": "privacy.risk", "input": RISK}).status_code == 403
    assert auditor.post(f"{URL}/{made['id']}/cancel").status_code == 403


def test_analyses_are_no_fine_tuning_jobs_and_are_listed_newest_first(tenant: Any) -> None:
    ids = [start(tenant)["id"] for _ in range(3)]
    assert list(tenant.client.fine_tuning.jobs.list()) == []
    page = tenant.http.get(URL, params={"limit": 2}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert page["has_more"]
    rest = tenant.http.get(URL, params={"after": ids[1]}).json()
    assert [item["id"] for item in rest["data"]] == [ids[0]]


def test_a_waiting_analysis_is_cancelled_at_once(tenant: Any) -> None:
    made = start(tenant)
    answer = tenant.http.post(f"{URL}/{made['id']}/cancel").json()
    assert (answer["status"], answer["stage"]) == ("cancelled", None)
    events = tenant.http.get(f"{URL}/{made['id']}/events").json()["data"]
    assert [event["message"] for event in events] == [
        "Analysis cancelled",
        f"Created analysis: {made['id']}",
    ]
    assert events[0]["object"] == "analysis.event"


def test_one_idempotency_key_makes_one_analysis(tenant: Any) -> None:
    body = {"kind": "privacy.risk", "input": RISK}
    headers = {"idempotency-key": secrets.token_hex(8)}
    ids = [tenant.http.post(URL, json=body, headers=headers).json()["id"] for _ in range(2)]
    assert ids[0] == ids[1]


def test_a_finished_analysis_answers_with_its_files(tenant: Any) -> None:
    made = finished(tenant)
    shown = tenant.http.get(f"{URL}/{made}").json()
    assert (shown["status"], shown["result"]["epsilon"]) == ("succeeded", 1.8)
    listed = tenant.http.get(f"{URL}/{made}/files").json()["data"]
    assert [file["name"] for file in listed] == ["curve.parquet", "index.html", "result.json"]
    result = tenant.http.get(f"{URL}/{made}/result")
    assert result.headers["content-type"] == "application/json"
    assert result.json()["risks"] == [1]
    table = tenant.http.get(f"{URL}/{made}/result/curve.parquet")
    assert table.content == b"PAR1"
    assert table.headers["content-type"] == "application/vnd.apache.parquet"
    assert "attachment" in table.headers["content-disposition"]


def test_a_page_may_run_and_load_nothing(local: Any) -> None:
    page = local.http.get(f"{URL}/{finished(local)}/result/index.html")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.parquet", "manifest.json", "..%2f..%2fx"])
def test_only_files_of_the_result_are_answered(local: Any, name: str) -> None:
    assert local.http.get(f"{URL}/{finished(local)}/result/{name}").status_code == 404


def test_an_analysis_that_has_not_finished_has_no_result(local: Any) -> None:
    answer = local.http.get(f"{URL}/{start(local)['id']}/result")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "result_not_found"


def test_kinds_tell_schema_example_paper_fidelity_and_cost(local: Any) -> None:
    kinds = local.http.get(f"{URL}/kinds").json()["data"]
    assert {kind["kind"] for kind in kinds} >= {"privacy.risk", "privacy.calibrate"}
    for kind in kinds:
        assert kind["fidelity"] in ("faithful", "derived", "simplified")
        assert kind["paper"]
        assert kind["backed_by"]
        assert kind["cost_of_example"]["seconds"] >= 0
        assert kind["request_schema"]["type"] == "object"
    one = local.http.get(f"{URL}/kinds/privacy.risk").json()
    assert one in kinds
    assert start(local, input=one["example"])["status"] == "queued"
    assert local.http.get(f"{URL}/kinds/privacy.nothing").status_code == 404


def test_a_kind_that_cannot_be_loaded_hides_no_other(
    local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {**analyses.registry.BUILT_IN, "other.broken": "no_such_module:KIND"}
    monkeypatch.setattr(analyses.registry, "BUILT_IN", broken)
    kinds = [kind["kind"] for kind in local.http.get(f"{URL}/kinds").json()["data"]]
    assert "privacy.risk" in kinds
    assert "other.broken" not in kinds
    status, error = refused(local, kind="other.broken")
    assert (status, error["code"]) == (503, "analysis_unavailable")


def test_the_gateway_imports_no_method() -> None:
    code = (
        "import sys, service.analyses.endpoints, service.analyses.kinds as kinds\n"
        "kinds.offered()\n"
        "kinds.checked(kinds.known('privacy.risk', 'kind'), {'mu': 1.0})\n"
        "print(sorted({'numpy', 'scipy', 'torch', 'pyarrow', 'dp_accounting'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_body_is_described_in_the_document(local: Any) -> None:
    document = local.http.get("/openapi.json").json()
    schema = document["components"]["schemas"]["AnalysisRequest"]
    assert set(schema["properties"]) == {"kind", "input", "files", "job_id", "seed"}
    assert "/v1/analyses/kinds/{kind}" in document["paths"]
