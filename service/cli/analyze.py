"""`tunegate analyze`: an analysis here, with no service.

The work is done by the pipeline in a process of its own, so that this one loads no method.
"""

import json
import re
import signal
from pathlib import Path
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
from service.cli.pipeline import Pipeline

if TYPE_CHECKING:
    from analyses.kind import Kind

# What a failed run of the pipeline means here; every other reason: the analysis failed.
UNAVAILABLE_CODES = frozenset({"analysis_unavailable", "model_unavailable", "storage_full"})
MOST_ROWS = 10
MOST_CHARACTERS = 180
# Of every result; the rest is what the kind found.
ABOUT = frozenset({"version", "kind", "fidelity", "seed", "request", "warnings", "tables"})


def analyze(
    kind: Annotated[
        str | None, typer.Argument(help="kind of analysis, such as privacy.risk; see --list")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--input", help="the request: JSON, or YAML")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for result.json, tables (Parquet) and index.html")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="a file that the kind reads; may be repeated"),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="for a kind that reads a job: its bundle, or the OUT of `tunegate run`"),
    ] = None,
    training_file: Annotated[
        Path | None, typer.Option(help="rows that this job was tuned on")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="its base model, where the catalogue has not the report's one"),
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="catalogue of base models; default: the shipped one")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    list_kinds: Annotated[bool, typer.Option("--list", help="show the kinds and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Answer a question about a job or its data here, with no service.

    Leaves OUT/result.json, tables beside it and a page with plots. Run again with the same OUT, it
    goes on with what is missing. Exit 0 answered; 1 the analysis failed; 2 not available, or
    stopped; 3 usage or bad input.
    """
    if list_kinds:
        _list(as_json)
        return
    if kind is None or source is None or out is None:
        missing = "KIND" if kind is None else "--input" if source is None else "--out"
        raise CommandError(f"{missing} is missing (`tunegate analyze --list` shows kinds)", USAGE)
    _check_usage(kind, source, file or [])
    _make(out)
    arguments = ["analyze", kind, "--input", str(source), "--out", str(out), "--seed", str(seed)]
    for item in file or []:
        arguments += ["--file", item]
    options = {
        "--bundle": bundle,
        "--training-file": training_file,
        "--base": base,
        "--catalogue": catalogue,
    }
    for option, value in options.items():
        if value is not None:
            arguments += [option, str(value)]
    _follow(arguments, out)
    found = json.loads((out / "result.json").read_text("utf-8"))
    if as_json:
        answer(True, found, "")
        return
    _show(found, out)


def _check_usage(kind: str, source: Path, files: list[str]) -> None:
    """Raises CommandError(3) for what can be told without reading the request."""
    from analyses.registry import UnknownKindError, names

    if kind not in names():
        raise CommandError(str(UnknownKindError(kind)), USAGE)
    if not source.is_file():
        raise CommandError(f"--input: {source}: no such file", USAGE)
    for item in files:
        if re.match(r"[a-z][a-z0-9_]{0,63}=.", item) is None:
            raise CommandError(f"--file {item}: expected NAME=PATH", USAGE)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Of an earlier run: whoever looks after this one failed must not take it for new.
        (out / "result.json").unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"--out: {out}: {error.strerror or error}", UNAVAILABLE) from None


def _follow(arguments: list[str], out: Path) -> None:
    """Run the pipeline to its end. Raises CommandError, and Ended where it was stopped."""
    ended = Pipeline(arguments).follow()
    if ended.exit_code == signal.SIGTERM:
        note(f"stopped; what was finished is kept, run again with --out {out} to go on")
        raise Ended(UNAVAILABLE)
    failure = ended.failure
    if failure is None:
        ended.require("result")
        return
    code, message = str(failure.get("code")), str(failure.get("message"))
    if code == "invalid_analysis":
        # Without a field the request is sound, and has no answer.
        raise CommandError(message, FAILED if failure.get("param") is None else USAGE)
    raise CommandError(message, UNAVAILABLE if code in UNAVAILABLE_CODES else FAILED)


def _show(found: dict[str, Any], out: Path) -> None:
    for warning in found["warnings"]:
        note(f"warning: {warning}")
    for name, value in found.items():
        if name in ABOUT or value is None:
            continue
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            _show_rows(name, value)
        else:
            print(f"{name}: {_text(value)}")
    print(f"result: {out / 'result.json'}; page: {out / 'index.html'}")


def _show_rows(name: str, rows: list[dict[str, Any]]) -> None:
    columns = [
        column
        for column in rows[0]
        if any(row.get(column) is not None for row in rows)
        and not any(isinstance(row.get(column), list | dict) for row in rows)
    ]
    shown = [{column: _text(row.get(column)) for column in columns} for row in rows[:MOST_ROWS]]
    more = "" if len(rows) <= MOST_ROWS else f" (the first {MOST_ROWS} of {len(rows)})"
    print(f"{name}{more}:")
    table(columns, shown)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        text = ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    elif isinstance(value, list):
        text = ", ".join(map(_text, value))
    else:
        text = "-" if value is None else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def _list(as_json: bool) -> None:
    """The kinds with what is known of each; one that cannot be loaded is named on stderr."""
    kinds = _kinds()
    if as_json:
        answer(True, [kind.describe() for kind in kinds], "")
        return
    table(
        ("kind", "needs", "fidelity", "question"),
        [
            {
                "kind": kind.name,
                "needs": kind.needs,
                "fidelity": kind.fidelity,
                "question": kind.question,
            }
            for kind in kinds
        ],
    )


def _kinds() -> "list[Kind]":
    from analyses.registry import find, names

    found = []
    for name in names():
        try:
            found.append(find(name))
        except Exception as error:
            # A kind of another package may fail in any way.
            note(f"{name} cannot be loaded: {error}")
    return found
