"""Analyses through the same queue and supervisor: what the process gets, what is stored."""

import json
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select

from service.fine_tuning import service
from service.fine_tuning.kinds import ANALYSIS
from service.kit.ids import new_id
from service.store.models import File
from workers.supervisor import PIPELINE, Supervisor

RISK = {"noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 10}
# An analysis's process that leaves its spec where a test can read it.
ANSWERS = """
say("stage", stage="validating")
say("stage", stage="analyzing")
(pathlib.Path(__file__).parent / "seen.json").write_text(json.dumps(spec))
folder = work / "result"
folder.mkdir(exist_ok=True)
write(folder, {"result.json": b"{}", "index.html": b"<p>", "curve.parquet": b"PAR1"})
say("result", bundle=str(folder), report={"epsilon": 1.5, "warnings": ["Mind it."],
    "tables": ["curve.parquet"]})
"""


class Source(NamedTuple):
    """A finished job in the store."""

    job_id: str
    location: str
    manifest_sha256: str


@pytest.fixture
def source(workshop: Any) -> Source:
    job_id = workshop.new_job(status="succeeded", stage=None)
    location = f"released/{job_id}/1"
    contents = {
        "adapter_model.safetensors": b"weights",
        "adapter_config.json": b"{}",
        "report.json": b"{}",
        "safety_weights.parquet": b"weights of rows",
    }
    files = {
        path: {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
        for path, content in contents.items()
    }
    manifest = json.dumps({"files": files}).encode()
    for path, content in (contents | {"manifest.json": manifest}).items():
        workshop.artifacts.put_stream(f"{location}/{path}", [content])
    return Source(job_id, location, sha256(manifest).hexdigest())


@pytest.fixture
def new_analysis(workshop: Any) -> Callable[..., str]:
    """An analysis as the gateway creates it."""

    def make(source: Source | None = None, **request: Any) -> str:
        asked = {
            "kind": "privacy.risk",
            "input": RISK,
            "files": {},
            "job_id": None,
            "location": None,
            "manifest_sha256": None,
        }
        columns: dict[str, Any] = {"training_file_id": "", "model": ""}
        if source is not None:
            made_by = workshop.job(source.job_id)
            asked |= source._asdict()
            columns = {
                "model": made_by.model,
                "organization_id": made_by.organization_id,
                "training_file_id": made_by.training_file_id,
            }
        return str(
            workshop.new_job(
                id=new_id("analysis"),
                kind=ANALYSIS,
                status="queued",
                method={},
                hyperparameters={},
                request=asked | request,
                **columns,
            )
        )

    return make


def seen(workshop: Any) -> dict[str, Any]:
    return dict(json.loads((workshop.scripts / "seen.json").read_text()))


def test_the_result_is_stored_under_a_key_of_the_attempt(workshop: Any, new_analysis: Any) -> None:
    job = workshop.run_to_the_end(workshop.supervisor(ANSWERS), new_analysis())
    assert (job.status, job.report["epsilon"]) == ("succeeded", 1.5)
    assert job.artifact == f"analyses/{job.id}/1"
    names = ("curve.parquet", "index.html", "manifest.json", "result.json")
    assert workshop.artifacts.list("analyses") == [f"{job.artifact}/{name}" for name in names]
    assert not (workshop.settings.work_dir / job.id).exists()
    assert workshop.messages(job.id) == [
        "Answering with privacy.risk",
        "Mind it.",
        "The analysis has successfully completed",
    ]


def test_the_spec_names_request_seed_and_job(
    workshop: Any, new_analysis: Any, source: Source
) -> None:
    job = workshop.run_to_the_end(workshop.supervisor(ANSWERS), new_analysis(source))
    spec, folder = seen(workshop), workshop.settings.work_dir / job.id
    assert (spec["analysis_id"], spec["kind"], spec["request"]) == (job.id, "privacy.risk", RISK)
    assert spec["seed"] == 7
    assert spec["job"]["job_id"] == source.job_id
    assert spec["job"]["base"]["name"] == "smollm2-135m"
    assert spec["job"]["bundle"] == str(folder / "bundle")
    assert spec["job"]["training_file"] == str(folder / "training.jsonl")


def test_files_lie_under_their_names(workshop: Any, new_analysis: Any, source: Source) -> None:
    file_id = workshop.job(source.job_id).training_file_id
    script = ANSWERS + 'assert pathlib.Path(spec["files"]["buffer"]).stat().st_size > 0\n'
    job_id = new_analysis(source, files={"buffer": file_id})
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert job.status == "succeeded"
    assert seen(workshop)["files"] == {
        "buffer": str(workshop.settings.work_dir / job.id / "files" / "buffer")
    }


def test_a_file_that_is_gone_fails_the_analysis_with_its_name(
    workshop: Any, new_analysis: Any
) -> None:
    job_id = new_analysis(files={"buffer": "file-gone"})
    job = workshop.run_to_the_end(workshop.supervisor(ANSWERS), job_id)
    assert (job.status, job.error["code"]) == ("failed", "invalid_file")
    assert job.error["param"] == "files.buffer"
    assert workshop.attempts(job_id)[0].pid is None


def test_a_training_file_that_was_deleted_fails_the_analysis(
    workshop: Any, new_analysis: Any, source: Source
) -> None:
    job_id = new_analysis(source)
    with workshop.transaction() as session:
        name = workshop.job(source.job_id).training_file_id
        session.scalars(select(File).where(File.id == name)).one().deleted_at = 5
    job = workshop.run_to_the_end(workshop.supervisor(ANSWERS), job_id)
    assert (job.status, job.error["code"]) == ("failed", "invalid_file")


@pytest.mark.parametrize(
    ("harm", "words"),
    [("remove", "no longer in the artifact store"), ("change", "does not match its hash")],
)
def test_a_bundle_that_is_gone_or_changed_is_not_read(
    workshop: Any, new_analysis: Any, source: Source, harm: str, words: str
) -> None:
    if harm == "remove":
        workshop.artifacts.delete(source.location)
    else:
        workshop.artifacts.put_stream(f"{source.location}/report.json", [b"[]"])
    job = workshop.run_to_the_end(workshop.supervisor(ANSWERS), new_analysis(source))
    assert (job.status, job.error["code"]) == ("failed", "model_unavailable")
    assert words in job.error["message"]


def test_a_request_without_an_answer_fails_with_its_field_and_is_not_repeated(
    workshop: Any, new_analysis: Any
) -> None:
    script = (
        'say("failure", code="invalid_analysis", message="targets: empty", param="targets",\n'
        "    retryable=False)\nsys.exit(10)\n"
    )
    job = workshop.run_to_the_end(workshop.supervisor(script), new_analysis())
    assert (job.status, job.attempt) == ("failed", 1)
    assert job.error == {
        "code": "invalid_analysis",
        "message": "targets: empty",
        "param": "targets",
    }


def test_a_crashed_analysis_goes_on_with_what_it_kept(workshop: Any, new_analysis: Any) -> None:
    script = (
        """
if not (work / "partial").exists():
    (work / "partial").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
        + ANSWERS
    )
    job_id = new_analysis()
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    messages = workshop.messages(job_id)
    assert "attempt 2 goes on from what is kept of the last one" in messages[1]
    assert messages[2] == "Analysis continues (attempt 2)"


def test_a_running_analysis_shows_its_progress_and_can_be_cancelled(
    workshop: Any, new_analysis: Any, eventually: Any
) -> None:
    job_id = new_analysis()
    script = (
        'say("stage", stage="analyzing")\nsay("progress", stage="rows", done=3, total=9)\n'
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(15))\ntime.sleep(60)"
    )
    thread = workshop.in_background(workshop.supervisor(script), job_id)
    eventually(lambda: workshop.job(job_id).progress)
    job = workshop.job(job_id)
    assert (job.stage, job.progress["done"], job.progress["total"]) == ("analyzing", 3, 9)
    with workshop.transaction() as session:
        service.cancel(session, job.organization_id, job_id, kind=ANALYSIS)
    thread.join(30)
    job = workshop.job(job_id)
    assert (job.status, job.report, job.artifact) == ("cancelled", None, None)
    assert workshop.messages(job_id)[-1] == "Analysis cancelled"


def test_a_damaged_result_is_not_stored(workshop: Any, new_analysis: Any) -> None:
    script = ANSWERS + '(folder / "result.json").write_text("[]")\n'
    job = workshop.run_to_the_end(workshop.supervisor(script), new_analysis())
    assert (job.status, job.error["code"]) == ("failed", "internal_error")
    assert workshop.artifacts.list("analyses") == []


def test_the_real_pipeline_answers_without_a_model(workshop: Any, new_analysis: Any) -> None:
    assert PIPELINE[0] == sys.executable
    real = Supervisor(
        workshop.settings, workshop.factory, workshop.artifacts, stopping=threading.Event()
    )
    job = workshop.run_to_the_end(real, new_analysis(input={"mu": 1.0, "baselines": [0.01]}))
    assert job.status == "succeeded", job.error
    with workshop.artifacts.open(f"{job.artifact}/result.json") as stream:
        result = json.loads(stream.read())
    # Closed form of mu-GDP: Phi(Phi^-1(0.01) + 1).
    assert result["risks"][0]["max_success"] == pytest.approx(0.0923622, abs=1e-6)
    assert job.report["attack"] == "reconstruction"
