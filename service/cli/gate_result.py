"""What `tunegate gate check`, `run` and `wait` share: options, reading, writing, exit code."""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from service.cli.output import (
    FAILED,
    OK,
    UNAVAILABLE,
    USAGE,
    CommandError,
    Ended,
    answer,
    note,
)

if TYPE_CHECKING:
    from evaluators.gate.policy import Policy
    from evaluators.gate.recheck import Checked
    from evaluators.metric import Metric


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    SARIF = "sarif"
    MARKDOWN = "markdown"
    HTML = "html"


class MinSeverity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


PolicyFile = Annotated[
    Path | None, typer.Option(help="policy file; without it the stored decision counts")
]
EvidenceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--evidence",
        help="result file of garak or promptfoo, for rules on evidence.*; may be repeated",
    ),
]
FormatName = Annotated[Format, typer.Option(help="form of the result")]
OutputFile = Annotated[Path | None, typer.Option(help="write the result to this file")]
MinSeverityName = Annotated[
    MinSeverity, typer.Option(help="warning: broken warning rules fail, too")
]
NonBlocking = Annotated[
    bool, typer.Option("--non-blocking", help="exit 0 where it would be 1 or 2")
]
MaxFailures = Annotated[int, typer.Option(min=0, help="exit 0 with at most this many broken rules")]


class Wanted(NamedTuple):
    """How the result is judged and where it goes."""

    format: Format = Format.TEXT
    output: Path | None = None
    min_severity: MinSeverity = MinSeverity.ERROR
    non_blocking: bool = False
    max_failures: int = 0
    as_json: bool = False


def conclude(judge: Callable[[], "Checked"], wanted: Wanted) -> None:
    """Judge, write the result and end with its exit code (Ended).

    Raises CommandError: 2 for what cannot be judged or written (only the latter under
    `non_blocking`), 3 for usage.
    """
    if wanted.as_json and wanted.output is None and wanted.format not in (Format.TEXT, Format.JSON):
        raise CommandError(
            f"--json and --format {wanted.format} both want stdout: add --output", USAGE
        )
    try:
        checked = judge()
    except CommandError as error:
        if not wanted.non_blocking or error.exit_code != UNAVAILABLE:
            raise
        note(f"error: {error}")
        note("non-blocking: exit code 0 instead of 2; nothing was judged")
        found = {"verdict": "inconclusive", "error": str(error)}
        answer(wanted.as_json, found, "gate: inconclusive")
        return
    if checked.from_report:
        note("no --policy: the decision stored in the report is used")
    _write(checked, wanted)
    code = exit_code(checked)
    if code != OK and wanted.non_blocking:
        note(f"non-blocking: exit code 0 instead of {code}")
    elif code != OK:
        raise Ended(code)


def judged(
    name: str,
    report: Mapping[str, Any],
    policy: "Policy | None",
    evidence: Mapping[str, "Metric"],
    wanted: Wanted,
) -> "Checked":
    """The decision over a report; `name` says in errors where it comes from."""
    from evaluators.gate.formats.wording import clean
    from evaluators.gate.recheck import ReportError, recheck

    try:
        return recheck(
            report,
            policy,
            "warning" if wanted.min_severity == "warning" else "error",
            wanted.max_failures,
            evidence,
        )
    except ReportError as error:
        # It may quote the report, and a line of its own could be a command to a CI system.
        raise CommandError(clean(f"{name}: {error}"), UNAVAILABLE) from None


def parsed_report(name: str, content: bytes) -> dict[str, Any]:
    from evaluators.gate.formats.wording import clean
    from evaluators.gate.recheck import ReportError, read_report

    try:
        return read_report(content)
    except ReportError as error:
        raise CommandError(clean(f"{name}: {error}"), UNAVAILABLE) from None


def read_policy(path: Path | None) -> "Policy | None":
    from evaluators.gate.policy import PolicyError, parse_policy

    if path is None:
        return None
    try:
        return parse_policy(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", USAGE) from None
    except (PolicyError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}", USAGE) from None


def check_evidence(paths: Sequence[Path] | None, policy: "Policy | None") -> None:
    """Raises CommandError(3) for evidence without a policy that could speak of it."""
    if paths and policy is None:
        raise CommandError(
            "--evidence counts for rules on evidence.* of a policy: give --policy, too", USAGE
        )


def read_evidence_files(
    paths: Sequence[Path] | None, policy: "Policy | None"
) -> dict[str, "Metric"]:
    """Evidence for the policy's rules. Raises CommandError: 3 without a policy, 2 for a file that
    cannot count."""
    check_evidence(paths, policy)
    if not paths or policy is None:
        return {}
    from evaluators.gate.evidence import MAX_BYTES, EvidenceError, read_evidence
    from evaluators.gate.formats.wording import clean

    files: dict[str, bytes] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                files[str(path)] = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror or error}", UNAVAILABLE) from None
    try:
        metrics = read_evidence(files, policy.maximum_unresolved)
    except EvidenceError as error:
        raise CommandError(clean(error), UNAVAILABLE) from None
    if not any(rule.metric in metrics for rule in policy.rules):
        names = ", ".join(sorted(metrics)[:10])
        note(clean(f"no rule of the policy is about this evidence: {names}"))
    return metrics


def exit_code(checked: "Checked") -> int:
    if checked.verdict == "passed" or checked.tolerated:
        return OK
    return FAILED if checked.verdict == "failed" else UNAVAILABLE


def _write(checked: "Checked", wanted: Wanted) -> None:
    from evaluators.gate.formats import FORMATS, as_markdown, as_text
    from evaluators.gate.formats.plain import as_data

    text = FORMATS[wanted.format](checked)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if wanted.output is not None:
            wanted.output.write_text(text, "utf-8")
        if summary:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(checked))
    except OSError as error:
        raise CommandError(f"cannot write the result: {error}", UNAVAILABLE) from None
    if wanted.as_json:
        answer(True, as_data(checked), "")
    else:
        print(text if wanted.output is None else as_text(checked), end="", flush=True)
