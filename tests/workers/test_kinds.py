"""Other kinds of work through the same queue: gate runs, and jobs that continue from a model."""

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select

from service.fine_tuning import service
from service.fine_tuning.kinds import GATE_RUN
from service.fine_tuning.repository import JobRepository
from service.kit.ids import new_id
from service.store.models import Job, ReleasedModel

CANARY = {"value": 0.9, "n": 40, "low": 0.8, "high": 1.0, "note": None}


class Stored(NamedTuple):
    """A model in the store: its job, its name, where its bundle is, its manifest's hash."""

    job_id: str
    name: str
    location: str
    manifest_sha256: str


def beside(workshop: Any, parent: Stored) -> dict[str, Any]:
    """The columns of a job that continues from a model."""
    made_by = workshop.job(parent.job_id)
    return {
        "parent_model": parent.name,
        "organization_id": made_by.organization_id,
        "training_file_id": made_by.training_file_id,
    }


@pytest.fixture
def stored(workshop: Any) -> Callable[..., Stored]:
    """Leaves what a finished job leaves; with a parent, in the parent's organisation."""

    def make(parent: Stored | None = None) -> Stored:
        job_id = workshop.new_job(
            status="succeeded",
            stage=None,
            report={"metrics": {"defense.canary_auc": CANARY, "harmfulness.score": {}}},
            **({} if parent is None else beside(workshop, parent)),
        )
        location, name = f"released/{job_id}/1", f"ft:smollm2-135m:acme::{job_id[-8:]}"
        contents = {
            "adapter_model.safetensors": job_id.encode(),
            "adapter_config.json": b"{}",
            "report.json": b"{}",
            "perturbation/adapter_before.safetensors": b"not needed here",
        }
        files = {
            path: {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
            for path, content in contents.items()
        }
        manifest = json.dumps({"files": files}).encode()
        for path, content in (contents | {"manifest.json": manifest}).items():
            workshop.artifacts.put_stream(f"{location}/{path}", [content])
        found = Stored(job_id, name, location, sha256(manifest).hexdigest())
        with workshop.transaction() as session:
            session.add(
                ReleasedModel(
                    id=name,
                    organization_id=workshop.job(job_id).organization_id,
                    job_id=job_id,
                    base_model="smollm2-135m",
                    location=location,
                    manifest_sha256=found.manifest_sha256,
                    created_at=1,
                )
            )
        return found

    return make


@pytest.fixture
def new_run(workshop: Any) -> Callable[..., str]:
    """A gate run on a stored model, as the gateway creates it."""

    def make(model: Stored, **changes: Any) -> str:
        source = workshop.job(model.job_id)
        return str(
            workshop.new_job(
                **{
                    "id": new_id("gaterun"),
                    "kind": GATE_RUN,
                    "organization_id": source.organization_id,
                    "status": "queued",
                    "training_file_id": source.training_file_id,
                    "policy": {"version": 1, "rules": []},
                    "request": {
                        "model": model.name,
                        "source_job_id": model.job_id,
                        "location": model.location,
                        "manifest_sha256": model.manifest_sha256,
                        "policy": {"source": "current", "id": None},
                        "evaluation": {"harmful_prompts": 7},
                    },
                    **changes,
                }
            )
        )

    return make


# A gate run's process that leaves its spec where a test can read it.
MEASURES = """
say("stage", stage="validating")
say("stage", stage="evaluating")
(pathlib.Path(__file__).parent / "seen.json").write_text(json.dumps(spec))
gate_result("%s")
"""


def columns(job: Job) -> dict[str, Any]:
    return {column.name: getattr(job, column.name) for column in Job.__table__.columns}


@pytest.mark.parametrize("verdict", ["passed", "failed", "inconclusive"])
def test_a_gate_run_succeeds_whatever_its_verdict_and_changes_nothing_else(
    workshop: Any, stored: Any, new_run: Any, verdict: str
) -> None:
    model = stored()
    before = columns(workshop.job(model.job_id))
    run = workshop.run_to_the_end(workshop.supervisor(MEASURES % verdict), new_run(model))
    assert (run.status, run.report["gate"]["verdict"]) == ("succeeded", verdict)
    assert run.artifact == f"gate_runs/{run.id}/1"
    names = ("evaluation_samples.parquet", "manifest.json", "report.json")
    assert workshop.artifacts.list("gate_runs") == [f"{run.artifact}/{name}" for name in names]
    assert run.fine_tuned_model is None
    assert columns(workshop.job(model.job_id)) == before
    with workshop.transaction() as session:
        assert [row.id for row in session.scalars(select(ReleasedModel))] == [model.name]
    assert not (workshop.settings.work_dir / run.id).exists()


def test_the_log_of_a_gate_run_speaks_of_a_gate_run(
    workshop: Any, stored: Any, new_run: Any
) -> None:
    model = stored()
    run_id = new_run(model)
    workshop.run_to_the_end(workshop.supervisor(MEASURES % "passed"), run_id)
    assert workshop.messages(run_id) == [
        f"Measuring the model {model.name}",
        "The verdict of the gate is: passed",
        "The gate run has successfully completed",
    ]


def test_the_spec_names_adapter_policy_lineage_and_what_tuning_measured(
    workshop: Any, stored: Any, new_run: Any
) -> None:
    first = stored()
    second = stored(parent=first)
    run = workshop.run_to_the_end(workshop.supervisor(MEASURES % "passed"), new_run(second))
    spec = json.loads((workshop.scripts / "seen.json").read_text())
    assert spec["run_id"] == run.id
    assert spec["model"]["name"] == "smollm2-135m"
    assert spec["adapter"] == str(workshop.settings.work_dir / run.id / "adapter")
    assert spec["lineage"] == [first.name, second.name]
    assert spec["policy"] == {"version": 1, "rules": []}
    assert spec["evaluation"]["harmful_prompts"] == 7
    assert spec["measured"] == {"defense.canary_auc": CANARY}
    assert spec["training_file"].endswith("training.jsonl")
    assert spec["seed"] == 7


def test_a_file_that_was_deleted_since_is_left_out(
    workshop: Any, stored: Any, new_run: Any
) -> None:
    model = stored()
    workshop.change(model.job_id, training_file_id="file-gone", validation_file_id="file-gone")
    run_id = new_run(model)
    run = workshop.run_to_the_end(workshop.supervisor(MEASURES % "passed"), run_id)
    assert run.status == "succeeded"
    assert json.loads((workshop.scripts / "seen.json").read_text())["training_file"] is None


@pytest.mark.parametrize(
    ("harm", "words"),
    [("remove", "no longer in the artifact store"), ("change", "does not match its hash")],
)
def test_an_adapter_that_is_gone_or_changed_is_not_judged(
    workshop: Any, stored: Any, new_run: Any, harm: str, words: str
) -> None:
    model = stored()
    key = f"{model.location}/adapter_model.safetensors"
    if harm == "remove":
        workshop.artifacts.delete(key)
    else:
        workshop.artifacts.put_stream(key, [b"other weights"])
    run = workshop.run_to_the_end(workshop.supervisor(MEASURES % "passed"), new_run(model))
    assert (run.status, run.error["code"]) == ("failed", "model_unavailable")
    assert words in run.error["message"]
    assert workshop.attempts(run.id)[0].pid is None


def test_a_crashed_gate_run_is_tried_again(workshop: Any, stored: Any, new_run: Any) -> None:
    script = """
if spec["run_id"] and not (work / "tried").exists():
    (work / "tried").touch()
    os.kill(os.getpid(), signal.SIGKILL)
""" + (MEASURES % "passed")
    run_id = new_run(stored())
    run = workshop.run_to_the_end(workshop.supervisor(script), run_id)
    assert (run.status, run.attempt) == ("succeeded", 2)
    messages = workshop.messages(run_id)
    assert "attempt 2 goes on from the last kept answers" in messages[1]
    assert messages[2] == "Gate run continues (attempt 2)"


def test_a_running_gate_run_can_be_cancelled(
    workshop: Any, stored: Any, new_run: Any, eventually: Any
) -> None:
    run_id = new_run(stored())
    script = 'say("stage", stage="evaluating")\nleave_on_sigterm(1)\ntime.sleep(60)'
    thread = workshop.in_background(workshop.supervisor(script), run_id)
    eventually(lambda: workshop.job(run_id).stage == "evaluating")
    owner = workshop.job(run_id).organization_id
    with workshop.transaction() as session:
        service.cancel(session, owner, run_id, kind=GATE_RUN)
    thread.join(30)
    run = workshop.job(run_id)
    assert (run.status, run.report, run.artifact) == ("cancelled", None, None)
    assert workshop.messages(run_id)[-1] == "Gate run cancelled"


def test_a_damaged_result_is_not_stored(workshop: Any, stored: Any, new_run: Any) -> None:
    script = MEASURES % "passed" + '(work / "result" / "report.json").write_text("{}")\n'
    run = workshop.run_to_the_end(workshop.supervisor(script), new_run(stored()))
    assert (run.status, run.error["code"]) == ("failed", "internal_error")
    assert workshop.artifacts.list("gate_runs") == []


def test_a_kind_that_the_worker_does_not_know_fails_with_a_reason(workshop: Any) -> None:
    job_id = workshop.new_job(kind="something", status="queued", stage="queued")
    job = workshop.run_to_the_end(workshop.supervisor("sys.exit(1)"), job_id)
    assert (job.status, job.error["code"]) == ("failed", "internal_error")
    assert "does not know the kind something" in job.error["message"]


def test_a_gate_run_is_no_fine_tuning_job(workshop: Any, stored: Any, new_run: Any) -> None:
    model = stored()
    run_id = new_run(model)
    owner = workshop.job(model.job_id).organization_id
    with workshop.transaction() as session:
        assert JobRepository(session, owner).get(run_id) is None
        assert JobRepository(session, owner, GATE_RUN).get(run_id) is not None
        assert JobRepository(session, owner, GATE_RUN).get(model.job_id) is None


CONTINUES = """
(pathlib.Path(__file__).parent / "seen.json").write_text(json.dumps(spec))
adapter = pathlib.Path(spec["parent_adapter"], "adapter_model.safetensors")
(pathlib.Path(__file__).parent / "parent").write_bytes(adapter.read_bytes())
say("failure", code="internal_error", message="enough was seen", retryable=False)
"""


def test_a_job_that_continues_gets_the_parents_adapter_and_its_lineage(
    workshop: Any, stored: Any
) -> None:
    first = stored()
    second = stored(parent=first)
    job_id = workshop.new_job(**beside(workshop, second))
    workshop.run_to_the_end(workshop.supervisor(CONTINUES), job_id)
    spec = json.loads((workshop.scripts / "seen.json").read_text())
    assert spec["model"]["name"] == "smollm2-135m"
    assert spec["lineage"] == [first.name, second.name]
    assert (workshop.scripts / "parent").read_bytes() == second.job_id.encode()


def test_a_parent_that_was_deleted_meanwhile_fails_the_job_with_a_reason(
    workshop: Any, stored: Any
) -> None:
    parent = stored()
    job_id = workshop.new_job(**beside(workshop, parent))
    with workshop.transaction() as session:
        session.get_one(ReleasedModel, parent.name).deleted_at = 2
    job = workshop.run_to_the_end(workshop.supervisor(CONTINUES), job_id)
    assert (job.status, job.error["code"]) == ("failed", "model_unavailable")
    assert "was deleted before the job began" in job.error["message"]


def test_a_bundle_whose_report_is_about_another_adapter_is_not_released(
    workshop: Any, rules: Callable[..., str]
) -> None:
    script = f'validated()\nresult("passed", {rules("passed")}, judged=b"other weights")\n'
    job = workshop.run_to_the_end(workshop.supervisor(script), workshop.new_job())
    assert (job.status, job.error["code"]) == ("failed", "internal_error")
    assert "is not the adapter that the gate judged" in job.error["message"]
    assert workshop.artifacts.list("released") == []
