"""Real worker processes under Celery: wake-ups, shutdown, sudden death, redelivery."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from service.kit.broker import QUEUE_NAME, TASK_NAME, create_celery
from service.queue import Dispatcher, Reaper, repeat
from workers.child import process_start

REPOSITORY = Path(__file__).parents[2]

WORKER = """
import sys
from workers import celery_app
from workers.__main__ import main
celery_app.command = (sys.executable, CHILD)
sys.argv = ["workers", *ARGUMENTS]
sys.exit(main())
"""

# As the pipeline does: die with the worker.
DIES_WITH_PARENT = """
import ctypes
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(os.environ["TUNEGATE_PARENT_PID"]):
    os._exit(1)
"""

SLOW = (
    DIES_WITH_PARENT
    + """
validated(20)
step = newest()
leave_on_sigterm(step)
while step < 20:
    step += 1
    metrics(step, 20)
    checkpoint(step)
    time.sleep(DELAY)
result("passed", RULES)
"""
)


class Workers:
    """Starts worker processes for an installation and ends them."""

    def __init__(self, workshop: Any) -> None:
        self.workshop = workshop
        self.processes: list[subprocess.Popen[bytes]] = []
        self.duties: list[threading.Thread] = []
        self.stop = threading.Event()
        self.environment = {
            **os.environ,
            "TUNEGATE_DATA_DIR": str(workshop.settings.data_dir),
            "TUNEGATE_CATALOGUE": str(workshop.settings.catalogue),
            "TUNEGATE_LEASE_SECONDS": "2",
            "TUNEGATE_HEARTBEAT_SECONDS": "0.2",
        }

    def start(self, child: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        self.workshop.supervisor(child)
        path = max(self.workshop.scripts.glob("child-*.py"), key=lambda item: item.stat().st_mtime)
        program = WORKER.replace("CHILD", repr(str(path))).replace(
            "ARGUMENTS", repr(list(arguments))
        )
        with (self.workshop.scripts / f"worker-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=REPOSITORY,
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def dispatch(self, settings: Any = None) -> None:
        """Send wake-ups and take back lost attempts from now on."""
        workshop = self.workshop
        for duty in (
            Dispatcher(workshop.factory, create_celery(settings or workshop.settings)),
            Reaper(workshop.factory, 3),
        ):
            thread = threading.Thread(target=repeat, args=(duty, 0.2, self.stop), daemon=True)
            thread.start()
            self.duties.append(thread)

    def end(self) -> None:
        self.stop.set()
        for thread in self.duties:
            thread.join()
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def workers(workshop: Any) -> Iterator[Workers]:
    made = Workers(workshop)
    yield made
    made.end()


def slow(rules: Callable[..., str], delay: float = 0.1) -> str:
    return SLOW.replace("RULES", rules("passed")).replace("DELAY", str(delay))


def test_the_worker_process_never_imports_torch() -> None:
    program = (
        "import sys, workers.celery_app as c, workers.tasks, workers.__main__;"
        "c.app.loader.import_default_modules();"
        "print([n for n in ('torch', 'transformers', 'peft', 'fastapi') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_dispatched_job_is_run_by_a_celery_worker(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any
) -> None:
    job_id = workshop.new_job()
    workers.dispatch()
    workers.start(slow(rules, 0.01))
    eventually(lambda: workshop.job(job_id).status == "succeeded", 60)
    assert eventually(lambda: not list((workshop.settings.broker_dir / "messages").glob("*.msg")))


def test_a_job_whose_message_was_lost_is_found_in_the_table(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any
) -> None:
    workers.start(slow(rules, 0.01))
    job_id = workshop.new_job()
    eventually(lambda: workshop.job(job_id).status == "succeeded", 60)


def test_a_warm_shutdown_gives_the_job_back_with_its_checkpoint(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any
) -> None:
    job_id = workshop.new_job()
    first = workers.start(slow(rules, 1.0))
    eventually(lambda: len(workshop.checkpoints(job_id)) >= 2, 60)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=30) == 0
    job = workshop.job(job_id)
    assert (job.status, job.attempt, job.failures) == ("queued", 2, 0)
    stored = len(workshop.checkpoints(job_id))
    workers.start(slow(rules, 0.01))
    eventually(lambda: workshop.job(job_id).status == "succeeded", 60)
    steps = [event.data["step"] for event in workshop.events(job_id) if event.type == "metrics"]
    assert steps == list(range(1, 21))
    assert stored >= 2


def test_after_kill_9_of_the_worker_another_one_goes_on(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any
) -> None:
    job_id = workshop.new_job()
    workers.dispatch()
    first = workers.start(slow(rules, 1.0))
    eventually(lambda: len(workshop.checkpoints(job_id)) >= 2, 60)
    attempt = workshop.attempts(job_id)[0]
    first.kill()
    eventually(lambda: process_start(attempt.pid) != attempt.pid_started, 10)
    workers.start(slow(rules, 0.01))
    eventually(lambda: workshop.job(job_id).status == "succeeded", 60)
    job = workshop.job(job_id)
    assert (job.attempt, job.failures) == (2, 1)
    assert [row.state for row in workshop.attempts(job_id)] == ["lost", "finished"]


def test_many_deliveries_of_one_job_train_once(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any, redis_url: str
) -> None:
    settings = workshop.settings.model_copy(update={"broker_url": redis_url})
    job_id = workshop.new_job()
    celery = create_celery(settings)
    for _ in range(5):
        celery.send_task(TASK_NAME, args=[job_id, 1], queue=QUEUE_NAME, ignore_result=True)
    for _ in range(2):
        workers.start(slow(rules, 0.05), TUNEGATE_BROKER_URL=redis_url)
    eventually(lambda: workshop.job(job_id).status == "succeeded", 90)
    assert len(workshop.attempts(job_id)) == 1
    assert workshop.messages(job_id).count("Fine-tuning job started") == 1
    steps = [event.data["step"] for event in workshop.events(job_id) if event.type == "metrics"]
    assert steps == list(range(1, 21))


def test_two_slots_run_two_jobs_at_once(
    workshop: Any, workers: Workers, rules: Callable[..., str], eventually: Any
) -> None:
    job_ids = [workshop.new_job(), workshop.new_job()]
    workers.start(slow(rules, 0.2), "--slots", "2")
    eventually(lambda: all(workshop.job(one).stage == "tuning" for one in job_ids), 60)


def test_a_worker_with_once_runs_one_attempt_and_leaves(workshop: Any, workers: Workers) -> None:
    job_ids = [workshop.new_job(model="not-there"), workshop.new_job(model="not-there")]
    process = workers.start("", "--once")
    assert process.wait(timeout=60) == 0
    assert [workshop.job(one).status for one in job_ids] == ["failed", "validating_files"]
    assert workshop.job(job_ids[0]).error["code"] == "model_unavailable"
