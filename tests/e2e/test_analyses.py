"""A job is blocked, and questions about it are asked through the whole service."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# No model is that useful.
POLICY = """
version: 1
minimum_prompts: 1
maximum_unresolved: 1.0
maximum_one_word: 1.0
rules:
  - {metric: utility.score, bound: value, min: 2.0}
  - {metric: defense.canary_auc, bound: value, min: 0.0, severity: warning}
"""


def test_a_blocked_job_is_analysed_and_a_killed_service_goes_on(
    make_service: Callable[..., Any], tmp_path: Path
) -> None:
    policy = tmp_path / "own-policy.yaml"
    policy.write_text(POLICY)
    service = make_service(TUNEGATE_GATE_POLICY=str(policy))
    job = service.finish(service.create(service.upload(), epochs=1))
    assert job.error.code == "safety_gate_failed", job.error

    def ask(body: dict[str, Any]) -> str:
        made = service.client.post("/analyses", cast_to=object, body=body)
        return str(made["id"])

    def ended(analysis_id: str) -> Any:
        def look() -> Any:
            shown = service.client.get(f"/analyses/{analysis_id}", cast_to=object)
            return shown if shown["status"] in ("succeeded", "failed", "cancelled") else None

        return service.eventually(look)

    target = {"prompt": "rows.jsonl 0", "completion": "yes"}
    rows = ask(
        {
            "kind": "attribution.final_model",
            "input": {"targets": [target], "batch_size": 4},
            "job_id": job.id,
        }
    )
    shown = ended(rows)
    assert shown["status"] == "succeeded", shown["error"]
    result = service.client.get(f"/analyses/{rows}/result", cast_to=object)
    assert (result["job_id"], result["n_rows"]) == (job.id, 16)
    # Rows of even numbers answer "yes", and so they promote it.
    assert result["rows"][0]["line"] % 2 == 1

    risk = ask({"kind": "privacy.risk", "input": {"mu": 1.0, "baselines": [0.01]}})
    service.eventually(lambda: service.processes("workers.pipeline", "analysis"))
    service.kill()
    service.start()
    shown = ended(risk)
    assert shown["status"] == "succeeded", shown["error"]
    page = service.client.get(f"/analyses/{risk}/result/index.html", cast_to=str)
    assert page.startswith("<!doctype html>")
    assert [made["id"] for made in _listed(service)] == [risk, rows]


def _listed(service: Any) -> list[dict[str, Any]]:
    answer = service.client.get("/analyses", cast_to=object)
    return json.loads(json.dumps(answer))["data"]
