"""`tunegate jobs`: fine-tuning jobs of a running service, through its public API (`log`: directly
in the database)."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.output import (
    FAILED,
    JSON_HELP,
    UNAVAILABLE,
    USAGE,
    CommandError,
    Ended,
    answer,
    note,
    table,
)

if TYPE_CHECKING:
    from openai import OpenAI

app = typer.Typer(
    no_args_is_help=True,
    help="Fine-tuning jobs of a running service (TUNEGATE_URL, and TUNEGATE_API_KEY or "
    "OPENAI_API_KEY).",
)

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
JobId = Annotated[str, typer.Argument(help="id of the job, ftjob-...")]

DEFAULT_URL = "http://127.0.0.1:8000"
POLL_SECONDS = 1.0
FINISHED = frozenset({"succeeded", "failed", "cancelled"})
COLUMNS = ["id", "status", "stage", "model", "fine_tuned_model"]


@contextmanager
def connected() -> Iterator["OpenAI"]:
    """The official client, with its errors in words. Raises CommandError."""
    import openai

    url = os.environ.get("TUNEGATE_URL", DEFAULT_URL).rstrip("/")
    key = os.environ.get("TUNEGATE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    if not key:
        raise CommandError(
            "no API key: set TUNEGATE_API_KEY (`tunegate keys create` makes one)", USAGE
        )
    try:
        base_url = url if url.endswith("/v1") else f"{url}/v1"
        with openai.OpenAI(base_url=base_url, api_key=key) as client:
            yield client
    except openai.APIConnectionError:
        raise CommandError(
            f"no answer from {url}; is `tunegate up` running, and is TUNEGATE_URL right?",
            UNAVAILABLE,
        ) from None
    except openai.APIStatusError as error:
        code = UNAVAILABLE if error.status_code >= 500 or error.status_code == 429 else USAGE
        raise CommandError(_words(error), code) from None


def _words(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20, as_json: AsJson = False
) -> None:
    """The newest jobs."""
    with connected() as client:
        page = client.fine_tuning.jobs.list(limit=limit)
        jobs = [job.to_dict(mode="json") for job in page.data]
    if as_json:
        answer(True, jobs, "")
    else:
        table(COLUMNS, jobs)


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """One job, with its gate and its report."""
    import json

    with connected() as client:
        job = client.fine_tuning.jobs.retrieve(job_id).to_dict(mode="json")
    answer(as_json, job, json.dumps(job, indent=2, ensure_ascii=False))


@app.command()
def watch(job_id: JobId, as_json: AsJson = False) -> None:
    """Follow a job's events until it has finished. Exit code 0 if it succeeded, else 1."""
    with connected() as client:
        seen: str | None = None
        told: str | None = None
        while True:
            job = client.fine_tuning.jobs.retrieve(job_id)
            seen = _tell_new_events(client, job_id, seen)
            told = _tell_progress(job.to_dict(mode="json"), told)
            if job.status in FINISHED:
                break
            time.sleep(POLL_SECONDS)
    finished = job.to_dict(mode="json")
    error: dict[str, Any] = finished.get("error") or {}  # type: ignore[assignment]
    words = job.fine_tuned_model or error.get("message") or ""
    answer(as_json, finished, f"{job.id} {job.status} {words}".rstrip())
    if job.status != "succeeded":
        raise Ended(FAILED)


def _tell_new_events(client: "OpenAI", job_id: str, seen: str | None) -> str | None:
    """Print events after `seen`, oldest first; returns the id of the newest."""
    fresh = []
    for event in client.fine_tuning.jobs.list_events(job_id, limit=100):
        if event.id == seen:
            break
        fresh.append(event)
    for event in reversed(fresh):
        note(f"{time.strftime('%H:%M:%S', time.localtime(event.created_at))} {event.message}")
    return fresh[0].id if fresh else seen


def _tell_progress(job: dict[str, Any], told: str | None) -> str | None:
    """Print what the job is counting when that differs from `told`; returns it."""
    progress = (job.get("tunegate") or {}).get("progress")
    if not progress:
        return None
    words = f"{progress['stage']} {progress['done']}/{progress['total']}"
    if words != told:
        note(f"{time.strftime('%H:%M:%S')} {words}")
    return words


@app.command()
def log(job_id: JobId, as_json: AsJson = False) -> None:
    """The last lines that a job's training processes wrote. For operators: read directly from the
    database, since these lines may quote a tenant's data."""
    from service.cli.store import load_settings, open_session
    from service.fine_tuning.attempts import find_job, of_job

    with open_session(load_settings()) as session:
        if find_job(session, job_id) is None:
            raise CommandError(f"no job {job_id}", USAGE)
        attempts = [
            {
                "attempt": row.number,
                "state": row.state,
                "outcome": row.outcome,
                "exit_code": row.exit_code,
                "log": row.log_tail,
            }
            for row in of_job(session, job_id)
        ]
    text = "\n".join(
        f"attempt {row['attempt']}: {row['outcome'] or row['state']}\n{row['log'] or ''}".rstrip()
        for row in attempts
    )
    answer(as_json, attempts, text)


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Stop a job; a running one lets go within seconds."""
    with connected() as client:
        job = client.fine_tuning.jobs.cancel(job_id).to_dict(mode="json")
    answer(as_json, job, f"{job_id} {job['status']} {job.get('stage') or ''}".rstrip())
