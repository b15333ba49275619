"""One attempt from claim to end, with a training process that speaks the event protocol."""

import csv
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from service.fine_tuning import attempts
from service.fine_tuning.attempts import Lease
from service.fine_tuning.service import pause, resume
from service.kit.artifacts import ArtifactStore
from service.store.models import File, ReleasedModel
from workers import pulse
from workers.child import process_start
from workers.publish import Publisher, gate_error, gate_results
from workers.sweep import end_strays, host_name, sweep
from workers.workspace import job_folder

PASSES = """
validated()
for step in (1, 2, 3):
    metrics(step)
checkpoint(3)
say("stage", stage="evaluating")
say("progress", stage="evaluating", done=1, total=2)
say("stage", stage="publishing")
result("passed", RULES)
"""

TUNES = """
validated(100)
step = newest()
leave_on_sigterm(step + 2)
metrics(step + 1, 100)
while True:
    time.sleep(0.05)
"""


def passes(rules: Callable[..., str]) -> str:
    return PASSES.replace("RULES", rules("passed"))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_passed_job_is_released_with_everything_it_promised(
    any_workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = any_workshop.new_job(suffix="mine")
    job = any_workshop.run_to_the_end(any_workshop.supervisor(passes(rules)), job_id)
    assert (job.status, job.stage, job.error) == ("succeeded", None, None)
    assert job.trained_tokens == 77
    assert job.hyperparameters["n_epochs"] == 1
    assert job.method["supervised"]["hyperparameters"]["batch_size"] == 4
    assert job.data_report == {"rows": 12}
    assert job.report["gate"]["verdict"] == "passed"
    base, owner, suffix, tag = job.fine_tuned_model.removeprefix("ft:").split(":")
    assert (base, suffix, len(tag)) == ("smollm2-135m", "mine", 8)
    assert owner.startswith("acme-")
    with any_workshop.transaction() as session:
        model = session.scalars(select(ReleasedModel).where(ReleasedModel.job_id == job_id)).one()
    assert model.id == job.fine_tuned_model
    assert any_workshop.artifacts.exists(f"{model.location}/adapter_model.safetensors")
    assert model.location.startswith("released/")
    assert any_workshop.artifacts.list("checkpoints") == []
    assert not job_folder(any_workshop.settings, job_id).exists()


def test_events_come_in_the_order_that_clients_know(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    job = workshop.run_to_the_end(workshop.supervisor(passes(rules)), job_id)
    messages = workshop.messages(job_id)
    snapshot = workshop.checkpoints(job_id)[0].name
    stored = f"Checkpoint created at step 3 with Snapshot ID: {snapshot}"
    # The copy of a checkpoint runs beside the other events, so its place may vary a little.
    assert stored in messages
    messages.remove(stored)
    assert messages == [
        f"Validating training file: {job.training_file_id}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        "Step 1/3: training loss=1.0000",
        "Step 2/3: training loss=0.5000",
        "Step 3/3: training loss=0.3333",
        "The tuned model passed the safety gate",
        f"New fine-tuned model created: {job.fine_tuned_model}",
        "The job has successfully completed",
    ]
    metrics = [event for event in workshop.events(job_id) if event.type == "metrics"]
    assert metrics[0].data == {
        "step": 1,
        "total_steps": 3,
        "train_loss": 1.0,
        "train_mean_token_accuracy": 0.5,
    }
    assert snapshot.endswith(":ckpt-step-3")
    assert snapshot.split(":")[4] != job.fine_tuned_model.split(":")[4]


def test_the_result_file_has_the_columns_that_scripts_expect(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    job = workshop.run_to_the_end(workshop.supervisor(passes(rules)), job_id)
    with workshop.transaction() as session:
        file = session.scalars(select(File).where(File.id == job.result_file_id)).one()
    content = b"".join(workshop.artifacts.iterate(file.location))
    assert (file.purpose, file.status, file.bytes) == (
        "fine-tune-results",
        "processed",
        len(content),
    )
    header = content.decode().splitlines()[0]
    assert header.startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy,")
    first = next(csv.DictReader(io.StringIO(content.decode())))
    assert (first["step"], first["train_loss"], first["train_accuracy"]) == ("1", "1.0", "0.5")
    assert (first["valid_loss"], first["learning_rate"]) == ("", "0.001")


def test_a_model_that_fails_its_gate_is_quarantined_and_never_listed(
    any_workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = any_workshop.new_job()
    script = f"validated(); metrics(1); result('failed', {rules('failed')})"
    job = any_workshop.run_to_the_end(any_workshop.supervisor(script), job_id)
    assert (job.status, job.fine_tuned_model) == ("failed", None)
    assert (job.error["code"], job.error["param"]) == ("safety_gate_failed", None)
    assert "harmfulness.score" in job.error["message"]
    assert job.artifact.startswith("quarantine/")
    assert any_workshop.artifacts.list("released") == []
    with any_workshop.transaction() as session:
        assert session.scalars(select(ReleasedModel)).all() == []
    checks = [event for event in any_workshop.events(job_id) if event.type == "moderation_checks"]
    assert checks[0].data == {
        "blocked": True,
        "results": [
            {
                "category": "harmfulness.score",
                "flagged": True,
                "outcome": "failed",
                "score": 0.5,
                "n": 120,
                "upper_bound": 0.6,
                "threshold": 0.3,
                "enforcement": "blocked",
            }
        ],
    }


def test_a_gate_that_cannot_decide_releases_nothing(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    script = f"validated(); result('inconclusive', {rules('too_few')})"
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.error["code"]) == ("failed", "gate_inconclusive")
    assert workshop.artifacts.list("released") == []


def test_the_error_names_a_rule_that_unresolved_answers_left_open() -> None:
    rule = {"metric": "harmfulness.unresolved", "severity": "error", "outcome": "unresolved"}
    error = gate_error("ftjob-1", "inconclusive", {"gate": {"rules": [rule]}})
    assert error.code == "gate_inconclusive"
    assert "harmfulness.unresolved was missing, rested on too few prompts, or on" in error.message


def test_the_results_of_the_gate_block_by_rules_that_do_not_hold() -> None:
    metrics = {"harmfulness.score": {"value": 0.1, "high": 0.2}}
    rule = {"metric": "harmfulness.score", "severity": "error", "n": 9, "limit": 0.3}
    rules = [
        {**rule, "outcome": "skipped"},
        {**rule, "outcome": "unresolved"},
        {**rule, "outcome": "failed", "group": "weapons"},
    ]
    found = gate_results({"metrics": metrics, "gate": {"rules": rules}})
    assert [one["enforcement"] for one in found] == ["none", "blocked", "blocked"]
    # The number of all prompts is not the group's.
    assert [one["score"] for one in found] == [0.1, 0.1, None]


def test_a_bundle_that_does_not_match_its_manifest_is_never_stored(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job(failures=2)
    script = f"validated(); result('passed', {rules('passed')}, damage='adapter_config.json')"
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.error["code"]) == ("failed", "internal_error")
    assert "adapter_config.json" in job.error["message"]
    assert workshop.artifacts.list("released") == []


def test_a_model_is_not_released_against_the_verdict_in_its_report(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job(failures=2)
    script = f"validated(); result('passed', {rules('failed')}, decided='failed')"
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.error["code"]) == ("failed", "internal_error")
    assert "the verdict is passed, but report.json says failed" in job.error["message"]
    assert workshop.artifacts.list("released") == []


def test_a_bad_file_fails_the_job_at_the_first_try(workshop: Any) -> None:
    job_id = workshop.new_job()
    script = """
say("failure", code="invalid_training_file", message="line 3: no assistant turn",
    param="training_file", retryable=False, details=[{"line": 3}])
sys.exit(10)
"""
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.attempt) == ("failed", 1)
    assert job.error == {
        "code": "invalid_training_file",
        "message": "line 3: no assistant turn",
        "param": "training_file",
        "errors": [{"line": 3}],
    }


def test_noise_on_stdout_is_kept_and_hurts_nothing(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    script = f"""
print("a library's progress bar"); print("{{not json"); print('[1]'); print('{{"other": 1}}')
sys.stdout.buffer.write(b"\\xff\\x00\\n"); sys.stdout.flush()
say("an_event_of_a_later_version", x=1)
print("a warning", file=sys.stderr)
validated(); metrics(1); result('passed', {rules("passed")})
"""
    assert workshop.run_to_the_end(workshop.supervisor(script), job_id).status == "succeeded"
    tail = workshop.attempts(job_id)[0].log_tail
    assert "progress bar" in tail
    assert "a warning" in tail


def test_a_loss_that_is_not_finite_is_told_and_stored_as_null(
    any_workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = any_workshop.new_job()
    script = f"""
validated()
say("metrics", step=1, total_steps=3, train_loss=float("nan"), gradient_norm=float("inf"))
result('passed', {rules("passed")})
"""
    assert any_workshop.run_to_the_end(any_workshop.supervisor(script), job_id).status == (
        "succeeded"
    )
    assert "Step 1/3: training loss=not finite" in any_workshop.messages(job_id)


def test_a_cancelled_job_lets_go_within_seconds(workshop: Any, eventually: Any) -> None:
    job_id = workshop.new_job()
    thread = workshop.in_background(workshop.supervisor(TUNES), job_id)
    eventually(lambda: workshop.job(job_id).stage == "tuning")
    pid = eventually(lambda: workshop.attempts(job_id)[0].pid)
    workshop.change(job_id, cancel_requested=True, stage="cancelling")
    began = time.monotonic()
    thread.join()
    assert time.monotonic() - began < 10
    assert workshop.job(job_id).status == "cancelled"
    assert workshop.attempts(job_id)[0].outcome == "cancelled"
    assert not alive(pid)
    assert not job_folder(workshop.settings, job_id).exists()


def test_a_process_that_ignores_sigterm_is_killed_with_its_whole_group(
    workshop: Any, eventually: Any
) -> None:
    job_id = workshop.new_job()
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(work.parent.parent / "rank").write_text(str(rank.pid))
validated(100)
time.sleep(600)
"""
    thread = workshop.in_background(workshop.supervisor(script, grace_seconds=0.5), job_id)
    eventually(lambda: workshop.job(job_id).stage == "tuning")
    workshop.change(job_id, cancel_requested=True)
    thread.join()
    assert workshop.job(job_id).status == "cancelled"
    rank = int((workshop.settings.data_dir / "rank").read_text())
    eventually(lambda: not alive(rank))


def test_a_paused_job_goes_on_from_its_checkpoint_on_another_machine(
    any_workshop: Any, eventually: Any, rules: Callable[..., str]
) -> None:
    job_id = any_workshop.new_job()
    thread = any_workshop.in_background(any_workshop.supervisor(TUNES), job_id)
    eventually(lambda: any_workshop.job(job_id).stage == "tuning")
    any_workshop.change(job_id, pause_requested=True, stage="pausing")
    thread.join()
    job = any_workshop.job(job_id)
    assert (job.status, job.pause_requested, job.failures) == ("paused", False, 0)
    assert any_workshop.attempts(job_id)[0].state == "released"
    assert [row.step_number for row in any_workshop.checkpoints(job_id)] == [2]

    shutil.rmtree(job_folder(any_workshop.settings, job_id))
    with any_workshop.transaction() as session:
        resume(session, job.organization_id, job_id)
    script = f"assert newest() == 2; validated(); metrics(3); result('passed', {rules('passed')})"
    assert any_workshop.run_to_the_end(any_workshop.supervisor(script), job_id).status == (
        "succeeded"
    )


def test_steps_that_are_repeated_after_a_crash_are_told_once(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    script = f"""
validated()
metrics(1); metrics(2)
if spec["attempt"] == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
metrics(3)
result('passed', {rules("passed")})
"""
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.attempt, job.failures) == ("succeeded", 2, 1)
    steps = [event.data["step"] for event in workshop.events(job_id) if event.type == "metrics"]
    assert steps == [1, 2, 3]
    first = workshop.attempts(job_id)[0]
    assert (first.exit_code, first.outcome) == (-9, "worker_lost")
    assert workshop.messages(job_id).count("Fine-tuning job started") == 1


def test_a_process_that_is_killed_every_time_fails_the_job_after_three_tries(
    workshop: Any,
) -> None:
    job_id = workshop.new_job()
    script = "validated(); os.kill(os.getpid(), signal.SIGKILL)"
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.attempt, job.failures) == ("failed", 3, 3)
    assert job.error["code"] == "worker_lost"
    assert "SIGKILL" in job.error["message"]


def test_a_lack_of_memory_is_told_in_plain_words(workshop: Any) -> None:
    job_id = workshop.new_job(failures=2)
    script = "validated(); x = bytearray(1 << 62)"
    job = workshop.run_to_the_end(workshop.supervisor(script), job_id)
    assert (job.status, job.error["code"]) == ("failed", "out_of_memory")
    assert "batch_size" in job.error["message"]


def test_a_job_that_runs_too_long_is_ended(workshop: Any) -> None:
    job_id = workshop.new_job()
    workshop.settings = workshop.settings.model_copy(update={"time_limit_seconds": 1.0})
    job = workshop.run_to_the_end(workshop.supervisor(TUNES), job_id)
    assert (job.status, job.error["code"]) == ("failed", "time_limit_exceeded")


def test_a_worker_that_shuts_down_gives_the_job_back_without_counting_it(
    workshop: Any, eventually: Any
) -> None:
    job_id = workshop.new_job()
    thread = workshop.in_background(workshop.supervisor(TUNES), job_id)
    eventually(lambda: workshop.job(job_id).stage == "tuning")
    workshop.stopping.set()
    thread.join()
    job = workshop.job(job_id)
    assert (job.status, job.attempt, job.failures) == ("queued", 2, 0)
    assert [row.state for row in workshop.attempts(job_id)] == ["released", "queued"]
    assert [row.step_number for row in workshop.checkpoints(job_id)] == [2]


def test_a_worker_that_lost_its_lease_stops_and_changes_nothing(
    any_workshop: Any, eventually: Any
) -> None:
    job_id = any_workshop.new_job()
    thread = any_workshop.in_background(any_workshop.supervisor(TUNES), job_id)
    eventually(lambda: any_workshop.job(job_id).stage == "tuning")
    pid = eventually(lambda: any_workshop.attempts(job_id)[0].pid)
    with any_workshop.transaction() as session:
        job = attempts.lock_job(session, job_id)
        job.attempt = 2
        session.execute(
            attempts.update(attempts.Attempt)
            .where(attempts.Attempt.job_id == job_id)
            .values(state="lost")
        )
    before = any_workshop.messages(job_id)
    thread.join()
    assert not alive(pid)
    assert any_workshop.messages(job_id) == before
    assert any_workshop.attempts(job_id)[0].state == "lost"
    assert any_workshop.job(job_id).status == "running"


class FullDisk(LocalFileSystem):  # type: ignore[misc]
    """A file system on which every third file finds no room, as a full disk answers."""

    opened = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.opened += 1
            if self.opened % 3 == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, mode, **options)


def test_a_full_store_keeps_nothing_half_written_and_says_so(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    root = workshop.settings.artifacts.removeprefix("file://")
    full = ArtifactStore(FullDisk(auto_mkdir=True), root)
    before = workshop.artifacts.list()
    script = f"validated(); result('passed', {rules('passed')})"
    job = workshop.run_to_the_end(workshop.supervisor(script, artifacts=full), job_id)
    assert (job.status, job.attempt, job.error["code"]) == ("failed", 3, "storage_full")
    assert "create the job again" in job.error["message"]
    assert workshop.artifacts.list() == before


def test_the_training_process_sees_no_secret(
    workshop: Any, rules: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {
        "TUNEGATE_DATABASE_URL": "postgresql://db",
        "TUNEGATE_KEY_PEPPER": "pepper",
        "OPENAI_API_KEY": "sk-tg-1",
        "MY_BROKER": "redis://user:word@host/0",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountKey=x",
        "https_proxy": "http://user:word@proxy:3128",
        "SOME_PASSWORD": "word",
    }
    for name, value in {**hidden, "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    job_id = workshop.new_job()
    script = f"""
pathlib.Path(work.parent.parent / "seen.json").write_text(json.dumps(dict(os.environ)))
validated(); result('passed', {rules("passed")})
"""
    workshop.run_to_the_end(workshop.supervisor(script), job_id)
    seen = json.loads((workshop.settings.data_dir / "seen.json").read_text())
    assert hidden.keys() & seen.keys() == set()
    assert seen["TOKENIZERS_PARALLELISM"] == "false"
    assert seen["TUNEGATE_PARENT_PID"] == str(os.getpid())


def test_a_second_delivery_finds_the_attempt_taken(workshop: Any, eventually: Any) -> None:
    job_id = workshop.new_job()
    supervisor = workshop.supervisor(TUNES)
    thread = workshop.in_background(supervisor, job_id)
    eventually(lambda: workshop.job(job_id).stage == "tuning")
    assert supervisor.run(job_id, 1) is False
    workshop.change(job_id, cancel_requested=True)
    thread.join()
    assert len(workshop.attempts(job_id)) == 1


def test_a_training_file_that_is_gone_fails_the_job_in_words(workshop: Any) -> None:
    job_id = workshop.new_job()
    workshop.artifacts.delete("files")
    job = workshop.run_to_the_end(workshop.supervisor("validated()"), job_id)
    assert (job.status, job.error["code"]) == ("failed", "invalid_training_file")
    assert job.error["param"] == "training_file"


@pytest.fixture
def stray() -> Any:
    """A process that an earlier worker of this machine left behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def test_a_sweep_ends_strays_and_only_them(workshop: Any, stray: Any) -> None:
    job_id = workshop.new_job()
    lease = Lease(job_id, 1, f"{host_name()}/1/abc")
    with workshop.transaction() as session:
        attempts.claim(session, job_id, 1, lease.worker, 3.0)
        attempts.record_process(session, lease, stray.pid, process_start(stray.pid))
    with workshop.transaction() as session:
        assert end_strays(session) == 0
    workshop.change_attempt(job_id, 1, state="lost", pid_started=1.0)
    with workshop.transaction() as session:
        assert end_strays(session) == 0
    workshop.change_attempt(job_id, 1, pid_started=process_start(stray.pid))
    sweep(workshop.settings, workshop.factory)
    assert stray.wait(timeout=10) == -signal.SIGKILL


def test_a_sweep_removes_work_folders_of_finished_jobs(workshop: Any) -> None:
    waiting, finished = workshop.new_job(), workshop.new_job(status="succeeded", stage=None)
    for job_id in (waiting, finished):
        job_folder(workshop.settings, job_id).mkdir(parents=True)
    sweep(workshop.settings, workshop.factory)
    assert [path.name for path in workshop.settings.work_dir.iterdir()] == [waiting]


class FlakyStore(LocalFileSystem):  # type: ignore[misc]
    """A store whose first write fails, with an error that is no OSError."""

    opened = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.opened += 1
            if self.opened == 1:
                raise RuntimeError("request timed out")
        return super().open(path, mode, **options)


def test_a_store_that_fails_for_a_checkpoint_ends_no_healthy_attempt(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    root = workshop.settings.artifacts.removeprefix("file://")
    flaky = ArtifactStore(FlakyStore(auto_mkdir=True), root)
    job = workshop.run_to_the_end(workshop.supervisor(passes(rules), artifacts=flaky), job_id)
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert "Checkpoint at step 3 was not stored" in workshop.messages(job_id)


def test_a_commit_whose_answer_was_lost_keeps_the_released_bundle(
    workshop: Any, rules: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = workshop.new_job()
    publish = Publisher.publish
    outcomes: list[str] = []

    def lose_the_first_answer(publisher: Publisher, ended: Any) -> str:
        outcomes.append(publish(publisher, ended))
        if len(outcomes) == 1:
            raise OperationalError("COMMIT", {}, Exception("connection lost"))
        return outcomes[-1]

    monkeypatch.setattr(Publisher, "publish", lose_the_first_answer)
    job = workshop.run_to_the_end(workshop.supervisor(passes(rules)), job_id)
    assert outcomes == ["succeeded", "succeeded"]
    assert workshop.artifacts.exists(f"{job.artifact}/adapter_model.safetensors")
    assert len([key for key in workshop.artifacts.list("files") if job.result_file_id in key]) == 1


def test_a_heartbeat_goes_on_after_any_error(
    workshop: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = workshop.new_job()
    lease = Lease(job_id, 1, "w1")
    with workshop.transaction() as session:
        attempts.claim(session, job_id, 1, "w1", 60.0)
    beats: list[int] = []
    beat = pulse.heartbeat

    def fail_once(*arguments: Any) -> Any:
        beats.append(1)
        if len(beats) == 1:
            raise ValueError("a driver's own error")
        return beat(*arguments)

    monkeypatch.setattr(pulse, "heartbeat", fail_once)
    workshop.change(job_id, pause_requested=True)
    with pulse.Pulse(workshop.factory, lease, 60.0, 0.05) as running:
        eventually(lambda: running.control.pause)


def test_a_job_that_was_paused_before_its_validation_is_validated_after_it(
    workshop: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    job = workshop.job(job_id)
    with workshop.transaction() as session:
        pause(session, job.organization_id, job_id)
        resume(session, job.organization_id, job_id)
    assert workshop.job(job_id).status == "validating_files"
    job = workshop.run_to_the_end(workshop.supervisor(passes(rules)), job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    messages = workshop.messages(job_id)
    assert f"Validating training file: {job.training_file_id}" in messages
    assert "Files validated, moving job to queued state" in messages


def test_what_a_process_counts_is_shown_until_its_stage_ends(
    workshop: Any, eventually: Any, rules: Callable[..., str]
) -> None:
    job_id = workshop.new_job()
    script = f"""
validated()
say("stage", stage="evaluating")
say("progress", stage="evaluating", done=3, total=9)
while not (work / "go").exists():
    time.sleep(0.05)
say("stage", stage="publishing")
result('passed', {rules("passed")})
"""
    thread = workshop.in_background(workshop.supervisor(script), job_id)
    shown = eventually(lambda: workshop.job(job_id).progress)
    assert shown == {"stage": "evaluating", "done": 3, "total": 9}
    (job_folder(workshop.settings, job_id) / "go").touch()
    thread.join()
    assert (workshop.job(job_id).status, workshop.job(job_id).progress) == ("succeeded", None)
