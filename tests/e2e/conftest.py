"""The whole service as a user starts it, on a tiny model, in a data folder of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 240.0
EVALUATION = {
    "harmful_prompts": 4, "safe_lookalikes": 2, "benign_prompts": 1, "open_ended_prompts": 1,
    "open_ended_samples": 2, "search_prompts": 2, "max_new_tokens": 2,
    "sweep_prompts": 2, "sweep_conditions": 2,
}  # fmt: skip
POLICY = """
version: 1
minimum_prompts: 1
# A model made of random numbers often says nothing, or one word.
maximum_unresolved: 1.0
maximum_one_word: 1.0
rules:
  - {metric: harmfulness.score_plus, bound: value, max: 1.0}
  # A model made of random numbers ranks nothing.
  - {metric: defense.canary_auc, bound: value, min: 0.0, severity: warning}
"""


def eventually(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of `condition`, asked again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("waited in vain")


class Service:
    """`tunegate up` and a client of it; can be killed and started again."""

    def __init__(self, folder: Path, catalogue: Path, **environment: str) -> None:
        policy = folder / "policy.yaml"
        policy.write_text(POLICY)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TUNEGATE_", "OPENAI_"))
        }
        self.data_dir = folder / "data"
        self.environment = kept | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TUNEGATE_DATA_DIR": str(self.data_dir),
            "TUNEGATE_CACHE_DIR": str(folder / "cache"),
            "TUNEGATE_CATALOGUE": str(catalogue),
            "TUNEGATE_GATE_POLICY": str(policy),
            "TUNEGATE_EVALUATION": json.dumps(EVALUATION),
            "TUNEGATE_CHECKPOINTS": json.dumps({"every_steps": 10}),
            "TUNEGATE_LEASE_SECONDS": "6",
            "TUNEGATE_HEARTBEAT_SECONDS": "0.5",
            "TUNEGATE_WORKER_THREADS": "1",
            **environment,
        }
        # An empty value means: without this setting.
        self.environment = {name: value for name, value in self.environment.items() if value}
        self.key = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "up", "--port", "0", "--json"],
            cwd=REPOSITORY, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.key = ready.get("key", self.key)
        self.client = OpenAI(base_url=f"{ready['url']}/v1", api_key=self.key)

    def kill(self) -> None:
        """SIGKILL, as a power cut would; the children die with their parent."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(children, timeout=60)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this service whose command line has all the words."""
        assert self.process is not None
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if all(word in process.cmdline() for word in words):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def trainer(self) -> psutil.Process | None:
        """The child process that trains, when there is one."""
        return next(iter(self.processes("workers.pipeline")), None)

    def upload(self, name: str = "rows.jsonl", rows: int = 16) -> str:
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"{name} {index}"},
                    {"role": "assistant", "content": ("yes", "no")[index % 2]},
                ]
            }
            for index in range(rows)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return self.client.files.create(file=(name, content), purpose="fine-tune").id

    def create(self, training_file: str, epochs: int = 12, **extra: Any) -> str:
        """A job of 4 steps an epoch on 16 rows."""
        defense = {
            "scheduler": {"name": "bds", "alignment_rows": 32},
            "perturbation": "none",
        }
        return self.client.fine_tuning.jobs.create(
            model="tiny",
            training_file=training_file,
            seed=5,
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": epochs}}},
            extra_body={"defense": defense} | extra,
        ).id

    def job(self, job_id: str) -> Any:
        return self.client.fine_tuning.jobs.retrieve(job_id)

    def finish(self, job_id: str) -> Any:
        """The job when it is finished."""
        done = ("succeeded", "failed", "cancelled")
        return eventually(lambda: j if (j := self.job(job_id)).status in done else None)

    def steps(self, job_id: str) -> int:
        """Training steps that the service knows of."""
        events = self.client.fine_tuning.jobs.list_events(job_id, limit=1).data
        newest: Any = events[0].data if events else None
        return int(newest["step"]) if newest and "step" in newest else 0

    def wait_for_steps(self, job_id: str, steps: int) -> None:
        eventually(lambda: self.steps(job_id) >= steps)

    eventually = staticmethod(eventually)

    def result_csv(self, job: Any) -> list[str]:
        """The result file without its column of seconds."""
        lines = self.client.files.content(job.result_files[0]).text.splitlines()
        columns = lines[0].split(",")
        kept = [index for index, name in enumerate(columns) if name != "seconds"]
        return [",".join(line.split(",")[index] for index in kept) for line in lines]

    def messages(self, job_id: str) -> list[str]:
        """Messages of the job's events, oldest first."""
        events = list(self.client.fine_tuning.jobs.list_events(job_id, limit=100))
        return [event.message for event in reversed(events)]


@pytest.fixture
def make_service(tmp_path: Path, tiny_catalogue: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def make(**environment: str) -> Service:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        service = Service(folder, tiny_catalogue, **environment)
        started.append(service)
        service.start()
        return service

    yield make
    for service in started:
        service.stop()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()
