"""What a job survives: every process may die, every message may come twice or never."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def undisturbed(service: Any) -> Callable[[str], list[str]]:
    """The result file of the same job when nothing happens to it."""
    return lambda training_file: service.result_csv(service.finish(service.create(training_file)))


def test_a_trainer_killed_by_sigkill_resumes_to_the_losses_of_an_undisturbed_run(
    service: Any, undisturbed: Callable[[str], list[str]]
) -> None:
    file = service.upload()
    job = service.create(file)
    service.wait_for_steps(job, 15)
    service.trainer().kill()
    finished = service.finish(job)
    assert finished.status == "succeeded", finished.error
    assert finished.tunegate["attempt"] == 2
    assert any("Resumed from the checkpoint" in message for message in service.messages(job))
    assert service.result_csv(finished) == undisturbed(file)


def test_a_killed_worker_is_replaced_and_its_job_requeued_by_the_reaper(
    service: Any, undisturbed: Callable[[str], list[str]]
) -> None:
    file = service.upload()
    job = service.create(file)
    service.wait_for_steps(job, 15)
    trainer = service.trainer()
    [worker] = service.processes("-m", "workers")
    worker.kill()
    trainer.wait(60)
    finished = service.finish(job)
    assert finished.status == "succeeded", finished.error
    assert finished.tunegate["attempt"] == 2
    assert service.result_csv(finished) == undisturbed(file)


def test_everything_killed_in_the_middle_of_a_job_goes_on_after_the_restart(
    service: Any, undisturbed: Callable[[str], list[str]]
) -> None:
    file = service.upload()
    job = service.create(file)
    service.wait_for_steps(job, 15)
    service.kill()
    service.start()
    finished = service.finish(job)
    assert finished.status == "succeeded", finished.error
    assert service.result_csv(finished) == undisturbed(file)


def test_a_job_delivered_many_times_trains_once(service: Any) -> None:
    file = service.upload()
    job = service.create(file)
    script = (
        "import sys\n"
        "from service.kit.broker import create_celery\n"
        "from service.settings import Settings\n"
        "app = create_celery(Settings.load())\n"
        "for _ in range(10):\n"
        "    app.send_task('tunegate.run_attempt', args=[sys.argv[1], 1])\n"
    )
    command = [sys.executable, "-c", script, job]
    subprocess.run(command, env=service.environment, check=True, timeout=60)
    finished = service.finish(job)
    assert finished.status == "succeeded", finished.error
    assert finished.tunegate["attempt"] == 1
    assert sum("job started" in message for message in service.messages(job)) == 1
    assert len(service.client.models.list().data) == 2


def test_a_cancelled_job_stops_while_it_tunes_and_releases_nothing(service: Any) -> None:
    job = service.create(service.upload(), epochs=50)
    service.wait_for_steps(job, 5)
    service.client.fine_tuning.jobs.cancel(job)
    finished = service.finish(job)
    assert finished.status == "cancelled"
    assert finished.fine_tuned_model is None
    service.eventually(lambda: service.trainer() is None)
    assert [model.id for model in service.client.models.list()] == ["tiny"]


def test_a_paused_job_resumes_to_the_losses_of_an_undisturbed_run(
    service: Any, undisturbed: Callable[[str], list[str]]
) -> None:
    file = service.upload()
    job = service.create(file)
    service.wait_for_steps(job, 12)
    service.client.fine_tuning.jobs.pause(job)
    service.eventually(lambda: service.job(job).status == "paused")
    service.client.fine_tuning.jobs.resume(job)
    finished = service.finish(job)
    assert finished.status == "succeeded", finished.error
    assert service.result_csv(finished) == undisturbed(file)


def test_a_full_artifact_store_releases_nothing_and_leaves_nothing_half_written(
    make_service: Callable[..., Any], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    # The adapter's bundle does not fit; the training file does.
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a file system of limited size needs the right to mount one")
    try:
        service = make_service(TUNEGATE_ARTIFACTS_URL=small.as_uri(), TUNEGATE_MAX_ATTEMPTS="2")
        job = service.finish(service.create(service.upload(), epochs=1))
        assert job.status == "failed"
        assert job.error.code == "storage_full"
        assert [model.id for model in service.client.models.list()] == ["tiny"]

        def only_files_are_left() -> bool:
            left = [path for path in small.rglob("*") if path.is_file()]
            return all(path.parts[len(small.parts)] == "files" for path in left)

        # The worker removes checkpoints after it has said how the job ended.
        service.eventually(only_files_are_left)
        service.stop()
    finally:
        subprocess.run(["umount", str(small)], check=False)
