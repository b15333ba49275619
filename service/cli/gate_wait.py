"""`tunegate gate wait`: follow a remote job or gate run to its end, then judge its report."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.cli.gate_result import (
    EvidenceFiles,
    Format,
    FormatName,
    MaxFailures,
    MinSeverity,
    MinSeverityName,
    NonBlocking,
    OutputFile,
    PolicyFile,
    Wanted,
    check_evidence,
    conclude,
    judged,
    parsed_report,
    read_evidence_files,
    read_policy,
)
from service.cli.jobs import FINISHED, connected
from service.cli.output import JSON_HELP, UNAVAILABLE, CommandError, note

if TYPE_CHECKING:
    from openai import OpenAI

    from evaluators.gate.recheck import Checked

# A gateway that restarts is back well before the last try.
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
REQUEST_SECONDS = 30.0
GATE_RUN_PREFIX = "gaterun"
_PASSING_STATUS = frozenset({408, 409, 429})

Answered = TypeVar("Answered")


def wait(
    job: Annotated[str, typer.Argument(help="id of a job (ftjob-...) or gate run (gaterun-...)")],
    policy: PolicyFile = None,
    evidence: EvidenceFiles = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="seconds to wait at most; without it no limit")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 5.0,
    format: FormatName = Format.TEXT,
    output: OutputFile = None,
    min_severity: MinSeverityName = MinSeverity.ERROR,
    non_blocking: NonBlocking = False,
    max_failures: MaxFailures = 0,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Wait for a job of a running service and judge its report as `gate check` does.

    The service is told by TUNEGATE_URL and TUNEGATE_API_KEY. Exit 0 passed, 1 failed, 2
    inconclusive, no report, no answer or out of time, 3 usage.
    """
    wanted = Wanted(format, output, min_severity, non_blocking, max_failures, as_json)
    rules = read_policy(policy)
    check_evidence(evidence, rules)

    def judge() -> "Checked":
        with connected() as client:
            # Its own tries come too fast to outlast a restart of the gateway.
            patient = client.with_options(max_retries=0, timeout=REQUEST_SECONDS)
            content = _report_at_end(patient, job, timeout, poll)
        metrics = read_evidence_files(evidence, rules)
        return judged(job, parsed_report(job, content), rules, metrics, wanted)

    conclude(judge, wanted)


def _report_at_end(client: "OpenAI", job: str, timeout: float | None, poll: float) -> bytes:
    """The job's report.json once it has ended. Raises CommandError(2)."""
    import openai

    deadline = None if timeout is None else time.monotonic() + timeout
    path = f"{_folder(job)}/{job}"
    told: str | None = None
    while True:
        found: Any = _again(lambda: client.get(path, cast_to=object), deadline)
        state = found if isinstance(found, dict) else {}
        status = str(state.get("status"))
        told = _tell(state, told)
        if status in FINISHED:
            break
        if deadline is not None and time.monotonic() + poll > deadline:
            raise CommandError(f"{job} is still {status} after {timeout:g} s", UNAVAILABLE)
        time.sleep(poll)
    try:
        response = _again(
            lambda: client.get(
                f"{path}/report",
                cast_to=openai.HttpxBinaryResponseContent,
                options={"headers": {"Accept": "application/json"}},
            ),
            deadline,
        )
    except (openai.NotFoundError, openai.BadRequestError):
        raise CommandError(f"{job} ended as {status} {_why(state)}", UNAVAILABLE) from None
    return response.content


def _folder(job: str) -> str:
    return "/gates/runs" if job.startswith(GATE_RUN_PREFIX) else "/fine_tuning/jobs"


def _again(ask: Callable[[], Answered], deadline: float | None) -> Answered:
    """Ask until there is an answer: trouble of the network or the gateway passes."""
    import openai

    for seconds in RETRY_SECONDS:
        try:
            return ask()
        except openai.APIStatusError as error:
            if error.status_code < 500 and error.status_code not in _PASSING_STATUS:
                raise
            reason = f"the gateway answered {error.status_code}"
        except openai.APIConnectionError:
            reason = "no answer from the gateway"
        if deadline is not None and time.monotonic() + seconds > deadline:
            break
        note(f"{reason}; trying again in {seconds:g} s")
        time.sleep(seconds)
    return ask()


def _tell(state: dict[str, Any], told: str | None) -> str:
    """Print what the job is doing when that differs from `told`; returns it."""
    stage = state.get("stage") or state.get("status")
    progress = state.get("progress") or (state.get("tunegate") or {}).get("progress")
    words = str(stage)
    if isinstance(progress, dict):
        words += f": {progress.get('stage')} {progress.get('done')}/{progress.get('total')}"
    if words != told:
        note(f"{time.strftime('%H:%M:%S')} {words}")
    return words


def _why(state: dict[str, Any]) -> str:
    error = state.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"and has no report to judge{f': {message}' if message else ''}"
