"""`tunegate evaluators calibrate`: does a judge or reward model agree with people?"""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.output import JSON_HELP, UNAVAILABLE, USAGE, CommandError, answer, note, table

if TYPE_CHECKING:
    from evaluators.calibration.report import CalibrationReport
    from evaluators.calibration.table import CalibrationTable

REPORT, ITEMS, SUMMARY = "calibration.json", "items.jsonl", "summary.md"


class Kind(StrEnum):
    ABSOLUTE = "absolute"
    PAIRWISE = "pairwise"


def calibrate(
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            help="JSON Lines: query, labels (a list of one label a rater, or counts by label), "
            "score; pairwise: score of response 1 minus that of response 2",
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder for the report")],
    kind: Annotated[
        Kind, typer.Option(help="absolute: ratings of one response; pairwise: preferences of two")
    ] = Kind.ABSOLUTE,
    levels: Annotated[
        int, typer.Option(min=2, max=20, help="highest rating; ratings are 1 to this")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of the resampling")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Compare a scorer with several raters an item: on all items, on items of similar quality, and
    on those that raters disagree about.

    Leaves calibration.json, items.jsonl (disagreement of each item) and summary.md in OUT.
    """
    from evaluators.calibration.report import calibrate as compare
    from evaluators.calibration.summary import COLUMNS, subset_cells

    items = _read(source, kind, levels)
    note(f"{len(items.queries):,} items")
    report = compare(items, seed=seed)
    _write(out, items, report)
    for subset in report.subsets:
        for warning in subset.warnings:
            note(f"warning: {subset_cells(subset)[0]}: {warning}")
    if as_json:
        answer(True, {"out": str(out), **report.model_dump(mode="json")}, "")
        return
    table(COLUMNS, [dict(zip(COLUMNS, subset_cells(one), strict=True)) for one in report.subsets])
    print(f"report: {out / REPORT}")


def _read(source: Path, kind: Kind, levels: int) -> "CalibrationTable":
    from evaluators.calibration.table import TableError, read_table

    try:
        return read_table(source, kind.value, levels=levels)
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror or error}", USAGE) from None
    except TableError as error:
        raise CommandError(f"{source}: {error}", USAGE) from None


def _write(out: Path, items: "CalibrationTable", report: "CalibrationReport") -> None:
    from evaluators.calibration.report import item_rows
    from evaluators.calibration.summary import as_markdown

    rows = [json.dumps(row.model_dump(), ensure_ascii=False) for row in item_rows(items)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / REPORT).write_text(report.model_dump_json(indent=2) + "\n", "utf-8")
        (out / ITEMS).write_text("\n".join(rows) + "\n", "utf-8")
        (out / SUMMARY).write_text(as_markdown(report), "utf-8")
    except OSError as error:
        raise CommandError(f"cannot write the report: {error}", UNAVAILABLE) from None
