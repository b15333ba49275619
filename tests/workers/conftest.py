"""A migrated store, jobs in it, and stand-in training processes that speak the event protocol."""

import hashlib
import json
import secrets
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.fine_tuning.attempts import claimable
from service.fine_tuning.lifecycle import TERMINAL
from service.fine_tuning.repository import JobRepository
from service.kit.artifacts import ArtifactStore
from service.kit.ids import new_id
from service.settings import Settings
from service.store.database import (
    SessionFactory,
    create_engine,
    session_factory,
    transaction,
    upgrade,
)
from service.store.models import Attempt, Checkpoint, Event, File, Job, Organization
from workers.supervisor import Supervisor

ROWS = b'{"messages": []}\n'

# What every stand-in starts with. It is the pipeline's side of the protocol, without a model.
PRELUDE = """
import hashlib, json, os, pathlib, signal, subprocess, sys, time
kind = sys.argv.pop(1) if sys.argv[1] in ("gate", "analysis") else "fine_tune"
spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
assert sys.argv[2] == "--work"
work = pathlib.Path(sys.argv[3])

def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)

def validated(steps=3):
    say("stage", stage="validating")
    say("validated", hyperparameters={"n_epochs": 1, "batch_size": 4,
        "learning_rate_multiplier": 1.0}, report={"rows": 12}, estimate={"seconds": 9},
        total_steps=steps)
    say("stage", stage="tuning")

def metrics(step, total=3):
    say("metrics", step=step, total_steps=total, train_loss=1.0 / step,
        train_mean_token_accuracy=0.5, learning_rate=0.001, gradient_norm=1.5, seconds=0.1)

def checkpoint(step):
    folder = work / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    say("checkpoint", step=step, folder=str(folder), metrics={"train_loss": 1.0 / step})

def newest():
    found = sorted((work / "checkpoints").glob("step-*"))
    return int(found[-1].name[5:]) if found else 0

def leave_on_sigterm(step):
    def leave(*_):
        checkpoint(step)
        os._exit(15)
    signal.signal(signal.SIGTERM, leave)

def result(verdict, rules=(), damage=None, judged=b"weights", decided=None):
    folder = work / "bundle"
    folder.mkdir(exist_ok=True)
    report = {"metrics": {"harmfulness.score": {"value": 0.5, "n": 120, "low": 0.4, "high": 0.6}},
        "gate": {"verdict": decided or verdict, "policy_version": 1, "rules": list(rules)},
        "defense": {}, "timings": {},
        "artifact": {"adapter_sha256": hashlib.sha256(judged).hexdigest()}}
    write(folder, {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}",
        "report.json": json.dumps(report).encode()})
    if damage:
        (folder / damage).write_bytes(b"something else")
    say("result", verdict=verdict, bundle=str(folder), trained_tokens=77, report=report)

def write(folder, contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    manifest = {"files": {name: {"sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content)} for name, content in contents.items()}}
    (folder / "manifest.json").write_text(json.dumps(manifest))

def gate_result(verdict, rules=()):
    folder = work / "result"
    folder.mkdir(exist_ok=True)
    report = {"metrics": {}, "gate": {"verdict": verdict, "policy_version": 1,
        "rules": list(rules)}}
    write(folder, {"report.json": json.dumps(report).encode(),
        "evaluation_samples.parquet": b"answers"})
    say("result", verdict=verdict, bundle=str(folder), report=report)
"""


@dataclass
class Workshop:
    """One installation's store, and what tests do to it."""

    settings: Settings
    factory: SessionFactory
    artifacts: ArtifactStore
    scripts: Path
    stopping: threading.Event = field(default_factory=threading.Event)

    def transaction(self) -> Any:
        return transaction(self.factory)

    def new_job(self, **columns: Any) -> str:
        """A job as the gateway creates it, with its training file in the artifact store."""
        with self.transaction() as session:
            owner = Organization(id=new_id("org"), name=new_id("acme"), created_at=1)
            file_id = new_id("file")
            key = f"files/{owner.id}/{file_id}"
            stored = self.artifacts.put_stream(key, [ROWS])
            session.add(owner)
            session.flush()
            session.add(
                File(
                    id=file_id,
                    organization_id=owner.id,
                    filename="rows.jsonl",
                    purpose="fine-tune",
                    bytes=stored.bytes,
                    sha256=hashlib.sha256(ROWS).hexdigest(),
                    status="processed",
                    location=key,
                    created_at=1,
                )
            )
            asked = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
            job = Job(
                **{
                    "id": new_id("ftjob"),
                    "organization_id": owner.id,
                    "status": "validating_files",
                    "stage": "queued",
                    "model": "smollm2-135m",
                    "training_file_id": file_id,
                    "seed": 7,
                    "method": {"type": "supervised", "supervised": {"hyperparameters": asked}},
                    "hyperparameters": asked,
                    "defense": {},
                    "policy": {},
                    "attempt": 1,
                    "failures": 0,
                    "cancel_requested": False,
                    "pause_requested": False,
                    "created_at": 1,
                    **columns,
                }
            )
            JobRepository(session, None).add(job)
            return job.id

    def job(self, job_id: str) -> Job:
        with self.transaction() as session:
            return session.scalars(select(Job).where(Job.id == job_id)).one()

    def attempts(self, job_id: str) -> list[Attempt]:
        with self.transaction() as session:
            query = select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)
            return list(session.scalars(query))

    def events(self, job_id: str) -> list[Event]:
        with self.transaction() as session:
            query = select(Event).where(Event.job_id == job_id).order_by(Event.sequence)
            return list(session.scalars(query))

    def messages(self, job_id: str) -> list[str]:
        return [event.message for event in self.events(job_id)]

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        with self.transaction() as session:
            query = select(Checkpoint).where(Checkpoint.job_id == job_id)
            return list(session.scalars(query.order_by(Checkpoint.step_number)))

    def change(self, job_id: str, **columns: Any) -> None:
        """What the gateway writes when somebody asks for something."""
        with self.transaction() as session:
            job = session.scalars(select(Job).where(Job.id == job_id)).one()
            for name, value in columns.items():
                setattr(job, name, value)

    def change_attempt(self, job_id: str, number: int, **columns: Any) -> None:
        with self.transaction() as session:
            query = select(Attempt).where(Attempt.job_id == job_id, Attempt.number == number)
            attempt = session.scalars(query).one()
            for name, value in columns.items():
                setattr(attempt, name, value)

    def supervisor(self, script: str, **options: Any) -> Supervisor:
        """A supervisor whose training process runs `script` after the prelude."""
        path = self.scripts / f"child-{new_id('x')}.py"
        path.write_text(PRELUDE + script)
        return Supervisor(
            self.settings,
            self.factory,
            options.pop("artifacts", self.artifacts),
            command=(sys.executable, str(path)),
            stopping=self.stopping,
            **options,
        )

    def run_next(self, supervisor: Supervisor, job_id: str) -> None:
        """Run the job's waiting attempt as soon as it may start."""
        number = wait_for(lambda: dict(self._claimable()).get(job_id))
        assert supervisor.run(job_id, number)

    def run_to_the_end(self, supervisor: Supervisor, job_id: str) -> Job:
        while (job := self.job(job_id)).status not in TERMINAL:
            self.run_next(supervisor, job_id)
        return job

    def in_background(self, supervisor: Supervisor, job_id: str) -> threading.Thread:
        thread = threading.Thread(target=self.run_next, args=(supervisor, job_id))
        thread.start()
        return thread

    def _claimable(self) -> list[tuple[str, int]]:
        with transaction(self.factory, read_only=True) as session:
            return list(claimable(session, 100))

    def session(self) -> Session:
        return self.factory()


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_for


CATALOGUE = """
models:
  smollm2-135m:
    default: true
    source: {kind: folder, path: /nowhere}
"""


def make_workshop(folder: Path, **settings: Any) -> Workshop:
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text(CATALOGUE)
    configured = Settings(
        **{
            "data_dir": folder / "data",
            "cache_dir": folder / "cache",
            "catalogue": catalogue,
            "lease_seconds": 3.0,
            "heartbeat_seconds": 0.2,
            **settings,
        }
    )
    return Workshop(
        configured,
        session_factory(create_engine(configured)),
        ArtifactStore.from_url(configured.artifacts),
        folder,
    )


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: migrating for each test would take most of the time."""
    folder = tmp_path_factory.mktemp("template")
    settings = Settings(data_dir=folder)
    upgrade(settings)
    with sqlite3.connect(folder / "tunegate.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder / "tunegate.db"


@pytest.fixture(scope="session")
def migrated_postgresql(request: pytest.FixtureRequest) -> str:
    """URL of a migrated PostgreSQL database, a template for those of the tests."""
    url = new_postgresql(str(request.getfixturevalue("postgres_url")))
    upgrade(Settings(database_url=url))
    return url


def new_postgresql(url: str, template: str = "template1") -> str:
    """A new database beside that of `url`; returns its URL."""
    plain = url.replace("+psycopg", "")
    name = f"workers_{secrets.token_hex(6)}"
    base, _, query = plain.partition("?")
    suffix = f"?{query}" if query else ""
    maintenance = f"{base.rpartition('/')[0]}/postgres{suffix}"
    with psycopg.connect(maintenance, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return f"{base.rpartition('/')[0]}/{name}{suffix}"


def sqlite_workshop(folder: Path, template: Path, **settings: Any) -> Workshop:
    (folder / "data").mkdir()
    shutil.copy(template, folder / "data" / "tunegate.db")
    return make_workshop(folder, **settings)


@pytest.fixture
def workshop(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Workshop]:
    """An installation on SQLite."""
    made = sqlite_workshop(tmp_path, migrated_sqlite)
    yield made
    made.factory.kw["bind"].dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_workshop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workshop]:
    """An installation on SQLite, and one on PostgreSQL where a server is there."""
    if request.param == "sqlite":
        made = sqlite_workshop(tmp_path, request.getfixturevalue("migrated_sqlite"))
    else:
        template = str(request.getfixturevalue("migrated_postgresql"))
        name = template.partition("?")[0].rpartition("/")[2]
        made = make_workshop(tmp_path, database_url=new_postgresql(template, name))
    yield made
    made.factory.kw["bind"].dispose()


@pytest.fixture
def rules() -> Callable[..., str]:
    """The gate's rules as a stand-in reports them, as Python text."""

    def made(outcome: str, severity: str = "error") -> str:
        rule = {
            "metric": "harmfulness.score",
            "bound": "high",
            "limit": 0.3,
            "comparison": "<=",
            "observed": 0.6,
            "n": 120,
            "outcome": outcome,
            "severity": severity,
            "reason": "",
        }
        return json.dumps([rule])

    return made
