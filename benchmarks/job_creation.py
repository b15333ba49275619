"""What creating a job through the API costs beside writing its rows, measured in one run.

    python -m benchmarks.job_creation [--output benchmarks/results]

api: POST /v1/fine_tuning/jobs to a gateway in another process, one client. rows: the same rows
(job, attempt, wake-up, event) in one SQLAlchemy transaction each, in this process. Both on SQLite
in the same temporary folder, in turn, medians over the rounds. Then 16 clients at once.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from sqlalchemy.orm import Session

from service.cli.up import free_port, is_ready
from service.fine_tuning.repository import JobRepository, append_event
from service.kit.ids import new_id
from service.organizations.service import create_key
from service.settings import Settings
from service.store.database import create_engine, session_factory, transaction, upgrade
from service.store.models import Job

ROUNDS = 100
CLIENTS = 16
REQUESTS_A_CLIENT = 15


@contextmanager
def _gateway(settings: Settings, environment: dict[str, str]) -> Iterator[str]:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "uvicorn", "service.app:create_app", "--factory"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    server = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if server.poll() is not None:
                raise RuntimeError(f"the gateway ended with code {server.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _training_file() -> bytes:
    row = {
        "messages": [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
    }
    return "".join(json.dumps(row) + "\n" for _ in range(10)).encode()


def _insert(session: Session, template: Job) -> None:
    columns = {c.key: getattr(template, c.key) for c in Job.__table__.columns}
    del columns["sequence"]
    job = Job(**columns | {"id": new_id("ftjob")})
    JobRepository(session, job.organization_id).add(job)
    append_event(session, job.id, "info", f"Created fine-tuning job: {job.id}")


def run(output_dir: Path) -> list[dict[str, Any]]:
    """Measure, print and write output_dir/job_creation.json; returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TUNEGATE_DATA_DIR": folder}
        settings = Settings(data_dir=Path(folder))
        upgrade(settings)
        factory = session_factory(create_engine(settings))
        with transaction(factory) as session:
            key = create_key(session, settings, "benchmark", "admin")["key"]
        with _gateway(settings, environment) as url:
            client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            file = client.files.create(file=("t.jsonl", _training_file()), purpose="fine-tune")
            body = json.dumps({"model": "smollm2-135m-instruct", "training_file": file.id}).encode()

            def create() -> str:
                request = urllib.request.Request(
                    f"{url}/v1/fine_tuning/jobs",
                    data=body,
                    headers={
                        "Authorization": f"Bearer {key}",
                        "Content-Type": "application/json",
                    },
                )
                with urllib.request.urlopen(request) as response:
                    return str(json.load(response)["id"])

            with transaction(factory) as session:
                template = JobRepository(session, None).get(create())
                assert template is not None
                session.expunge(template)
            seconds: dict[str, list[float]] = {"api": [], "rows": []}
            for _ in range(ROUNDS):
                started = time.perf_counter()
                create()
                seconds["api"].append(time.perf_counter() - started)
                started = time.perf_counter()
                with transaction(factory) as session:
                    _insert(session, template)
                seconds["rows"].append(time.perf_counter() - started)
            started = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(clients.map(lambda _: create(), range(CLIENTS * REQUESTS_A_CLIENT)))
            rate = CLIENTS * REQUESTS_A_CLIENT / (time.perf_counter() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    results: list[dict[str, Any]] = [
        {
            "name": "job through the API / its rows through SQLAlchemy",
            "ratio": round(median["api"] / median["rows"], 3),
            "target": None,
            "better": "lower",
            "limit": "1.0: nothing but the rows",
            "unit": "seconds/seconds",
            "machine": machine,
        },
        {
            "name": f"jobs created by {CLIENTS} clients at once",
            "ratio": round(rate, 1),
            "target": None,
            "better": "higher",
            "limit": f"{1 / median['rows']:.0f}: rows one after another, no HTTP",
            "unit": "requests/second",
            "machine": machine,
        },
    ]
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "job_creation.json").write_text(json.dumps(results, indent=2) + "\n")
    for result in results:
        print(f"{result['name']}: {result['ratio']} {result['unit']} (limit {result['limit']})")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    run(parser.parse_args().output)


if __name__ == "__main__":
    main()
