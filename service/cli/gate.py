"""`tunegate gate`: judge a report in any CI. No service, no model, no network."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.gate_plan import plan
from service.cli.output import (
    FAILED,
    JSON_HELP,
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

app = typer.Typer(no_args_is_help=True, help="The release gate over a stored report.")
app.command("plan")(plan)


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


@app.command()
def check(
    report: Annotated[Path, typer.Option(help="report.json of a bundle")],
    policy: Annotated[
        Path | None, typer.Option(help="policy file; without it the stored decision counts")
    ] = None,
    format: Annotated[Format, typer.Option(help="form of the result")] = Format.TEXT,
    output: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
    min_severity: Annotated[
        MinSeverity, typer.Option(help="warning: broken warning rules fail, too")
    ] = MinSeverity.ERROR,
    non_blocking: Annotated[
        bool, typer.Option("--non-blocking", help="exit 0 where it would be 1 or 2")
    ] = False,
    max_failures: Annotated[
        int, typer.Option(min=0, help="exit 0 with at most this many broken rules")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Judge a report: exit 0 passed, 1 failed, 2 inconclusive or unreadable, 3 usage."""
    if as_json and output is None and format not in (Format.TEXT, Format.JSON):
        raise CommandError(f"--json and --format {format} both want stdout: add --output", USAGE)
    rules = None if policy is None else _policy(policy)
    try:
        checked = _checked(report, rules, min_severity, max_failures)
    except CommandError as error:
        if not non_blocking or error.exit_code != UNAVAILABLE:
            raise
        note(f"error: {error}")
        note("non-blocking: exit code 0 instead of 2; nothing was judged")
        answer(as_json, {"verdict": "inconclusive", "error": str(error)}, "gate: inconclusive")
        return
    if checked.from_report:
        note("no --policy: the decision stored in the report is used")
    _write(checked, format, output, as_json)
    code = _exit_code(checked)
    if code != OK and non_blocking:
        note(f"non-blocking: exit code 0 instead of {code}")
    elif code != OK:
        raise Ended(code)


@app.command()
def schema() -> None:
    """The JSON schema of a policy, for editors."""
    from evaluators.gate.policy import Policy

    print(json.dumps(Policy.model_json_schema(), indent=2))


def _checked(
    path: Path, policy: "Policy | None", min_severity: MinSeverity, max_failures: int
) -> "Checked":
    from evaluators.gate.recheck import MAX_BYTES, ReportError, read_report, recheck

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        data = read_report(content)
        return recheck(
            data, policy, "warning" if min_severity == "warning" else "error", max_failures
        )
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", UNAVAILABLE) from None
    except ReportError as error:
        raise CommandError(f"{path}: {error}", UNAVAILABLE) from None


def _policy(path: Path) -> "Policy":
    from evaluators.gate.policy import PolicyError, parse_policy

    try:
        return parse_policy(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", USAGE) from None
    except (PolicyError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}", USAGE) from None


def _write(checked: "Checked", format: Format, output: Path | None, as_json: bool) -> None:
    from evaluators.gate.formats import FORMATS, as_markdown, as_text
    from evaluators.gate.formats.plain import as_data

    text = FORMATS[format](checked)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if output is not None:
            output.write_text(text, "utf-8")
        if summary:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(checked))
    except OSError as error:
        raise CommandError(f"cannot write the result: {error}", UNAVAILABLE) from None
    if as_json:
        answer(True, as_data(checked), "")
    else:
        print(text if output is None else as_text(checked), end="", flush=True)


def _exit_code(checked: "Checked") -> int:
    if checked.verdict == "passed" or checked.tolerated:
        return OK
    return FAILED if checked.verdict == "failed" else UNAVAILABLE
