"""`tunegate gate`: judge a report in any CI. `check`, `plan` and `schema` need no service, no model
and no network."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.gate_plan import plan
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
    conclude,
    judged,
    parsed_report,
    read_evidence_files,
    read_policy,
)
from service.cli.gate_run import run
from service.cli.gate_wait import wait
from service.cli.output import JSON_HELP, UNAVAILABLE, CommandError

if TYPE_CHECKING:
    from evaluators.gate.recheck import Checked

app = typer.Typer(
    no_args_is_help=True, help="The release gate: over a report, a model, or a remote job."
)
app.command("plan")(plan)
app.command("run")(run)
app.command("wait")(wait)


@app.command()
def check(
    report: Annotated[Path, typer.Option(help="report.json of a bundle")],
    policy: PolicyFile = None,
    evidence: EvidenceFiles = None,
    format: FormatName = Format.TEXT,
    output: OutputFile = None,
    min_severity: MinSeverityName = MinSeverity.ERROR,
    non_blocking: NonBlocking = False,
    max_failures: MaxFailures = 0,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Judge a report: exit 0 passed, 1 failed, 2 inconclusive or unreadable, 3 usage."""
    wanted = Wanted(format, output, min_severity, non_blocking, max_failures, as_json)
    rules = read_policy(policy)

    def judge() -> "Checked":
        content = _content(report)
        metrics = read_evidence_files(evidence, rules)
        name = str(report)
        return judged(name, parsed_report(name, content), rules, metrics, wanted)

    conclude(judge, wanted)


@app.command()
def schema() -> None:
    """The JSON schema of a policy, for editors."""
    from evaluators.gate.policy import Policy

    print(json.dumps(Policy.model_json_schema(), indent=2))


def _content(path: Path) -> bytes:
    from evaluators.gate.recheck import MAX_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", UNAVAILABLE) from None
