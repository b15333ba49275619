"""`tunegate retune`: the same job without the rows that an attribution blames, and what changed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from service.cli.output import (
    JSON_HELP,
    UNAVAILABLE,
    USAGE,
    CommandError,
    Ended,
    answer,
    note,
    table,
)
from service.cli.pipeline import VERDICTS, Pipeline

# Paths of a spec, which are relative to its file; the copy lies elsewhere.
PATHS = (
    *("validation_file", "alignment_file", "harmful_file", "scheduler_checkpoint"),
    *("catalogue", "cache_dir", "policy"),
)
SHOWN = (
    "harmfulness.score",
    "harmfulness.change_vs_base",
    "refusal.rate",
    "refusal.over_refusal",
    "utility.score",
    "diversity.intra_similarity",
)


def retune(
    spec: Annotated[Path, typer.Argument(help="spec of the job, as `tunegate run` took it")],
    result: Annotated[
        Path, typer.Option(help="result.json of attribution.final_model on that job")
    ],
    remove_top: Annotated[
        int, typer.Option(min=1, help="rows to leave out: those that promote the targets most")
    ],
    out: Annotated[Path, typer.Option(help="folder for the new file, the job, and changes.json")],
    before: Annotated[
        Path | None, typer.Option(help="OUT of the first run; default: none, nothing to compare")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Tune again without the top rows of an attribution, and report what changed.

    Leaves OUT/training.jsonl, OUT/spec.yaml, OUT/job (as `tunegate run` does), OUT/attribution (the
    same targets again) and OUT/changes.json. Run again, it goes on. Exit code: of the new verdict.
    """
    from analyses.attribution.removal import read_result, remove_top_rows, what_changed
    from analyses.context import AnalysisError

    raw, training_file = _read_spec(spec)
    out.mkdir(parents=True, exist_ok=True)
    try:
        found = read_result(result)
        removal = remove_top_rows(training_file, found, remove_top, out / "training.jsonl")
    except AnalysisError as error:
        raise CommandError(str(error), USAGE) from None
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"{result}: cannot be read ({error})", USAGE) from None
    note(f"{len(removal.lines)} of the file's rows left out: lines {_lines(removal.lines)}")
    copy = _write_spec(raw, spec, removal.path, out / "spec.yaml")
    job = out / "job"
    ended = Pipeline(["run", str(copy), "--out", str(job)]).follow().require("result")
    verdict = str(ended.get("verdict"))
    again = _attribute(found, job, removal.path, out, raw)
    first = _report(before) if before is not None else None
    second = _report(job)
    changes = {
        "removed_lines": list(removal.lines),
        "rows_kept": removal.kept,
        "verdict": {"before": _verdict(first), "after": verdict},
        "metrics": _metrics(first, second),
        "targets": what_changed(found, again),
    }
    (out / "changes.json").write_text(json.dumps(changes, indent=2) + "\n", "utf-8")
    if as_json:
        answer(True, changes, "")
    else:
        _show(changes, out)
    raise Ended(VERDICTS.get(verdict, UNAVAILABLE))


def _read_spec(path: Path) -> tuple[dict[str, Any], Path]:
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
        training_file = path.resolve().parent / str(raw["training_file"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: is no spec of a job ({error})", USAGE) from None
    if not training_file.is_file():
        raise CommandError(f"{path}: training_file: there is no file {training_file}", USAGE)
    return raw, training_file


def _write_spec(raw: dict[str, Any], spec: Path, training_file: Path, copy: Path) -> Path:
    folder = spec.resolve().parent
    changed = {**raw, "training_file": str(training_file.resolve())}
    for name in PATHS:
        if isinstance(raw.get(name), str):
            changed[name] = str(folder / raw[name])
    copy.write_text(yaml.safe_dump(changed, sort_keys=False), "utf-8")
    return copy


def _attribute(
    found: dict[str, Any], job: Path, training_file: Path, out: Path, raw: dict[str, Any]
) -> dict[str, Any]:
    """The same targets to the new model. Lines are others in the new file, so all rows are asked
    about; only the targets' losses are compared, so nothing is measured by training further."""
    methods = [name for name in found["request"]["methods"] if name != "further_training"]
    asked = {**found["request"], "rows": "all", "methods": methods, "verification": None}
    request = out / "request.json"
    request.write_text(json.dumps(asked, indent=2) + "\n", "utf-8")
    folder = out / "attribution"
    folder.mkdir(exist_ok=True)
    arguments = ["analyze", "attribution.final_model", "--input", str(request)]
    arguments += ["--out", str(folder), "--bundle", str(job)]
    arguments += ["--training-file", str(training_file), "--seed", str(found["seed"])]
    if isinstance(raw.get("catalogue"), str):
        spec = yaml.safe_load((out / "spec.yaml").read_text("utf-8"))
        arguments += ["--catalogue", str(spec["catalogue"])]
    Pipeline(arguments).follow().require("result")
    again: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
    return again


def _report(out: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((out / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{out / 'report.json'}: cannot be read ({error})", USAGE) from None
    return report


def _verdict(report: dict[str, Any] | None) -> str | None:
    return None if report is None else str(report["gate"]["verdict"])


def _metrics(
    first: dict[str, Any] | None, second: dict[str, Any]
) -> dict[str, dict[str, float | None]]:
    def value(report: dict[str, Any] | None, name: str) -> float | None:
        found = ((report or {}).get("metrics") or {}).get(name) or {}
        number = found.get("value")
        return None if number is None else float(number)

    return {
        name: {"before": value(first, name), "after": value(second, name)}
        for name in SHOWN
        if name in second["metrics"]
    }


def _show(changes: dict[str, Any], out: Path) -> None:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    verdicts = changes["verdict"]
    print(f"gate: {verdicts['before'] or 'not given'} before, {verdicts['after']} now")
    rows = [
        {"metric": name, **{when: text(value) for when, value in pair.items()}}
        for name, pair in changes["metrics"].items()
    ]
    rows += [
        {
            "metric": f"loss of target {number}",
            "before": text(target["before"]),
            "after": text(target["after"]),
        }
        for number, target in enumerate(changes["targets"]["targets"], start=1)
    ]
    table(("metric", "before", "after"), rows)
    print(f"{out / 'changes.json'}; the new job: {out / 'job'}")


def _lines(lines: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, lines[:20]))
    return shown if len(lines) <= 20 else f"{shown} and {len(lines) - 20} more"
