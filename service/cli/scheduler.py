"""`tunegate scheduler`: score the rows of a file with a trained scorer, without a job."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.output import JSON_HELP, answer, table
from service.cli.pipeline import Event, Pipeline

app = typer.Typer(no_args_is_help=True, help="Trained data schedulers.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="scorer, such as OUT/released/scheduler")],
    source: Annotated[
        Path, typer.Option("--input", help="rows to score: a chat or preference file, JSON Lines")
    ],
    out: Annotated[Path, typer.Option(help="new Parquet file for logits, weights and ranks")],
    model: Annotated[
        str | None,
        typer.Option(
            help="catalogue model whose tokens the scorer reads; default: the catalogue's; a "
            "scorer over sentence embeddings needs none"
        ),
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="catalogue of base models; default: the shipped one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the rows of a file by how much a trained scorer trusts them.

    A job with the neural scheduler leaves its scorer in the bundle. Nothing is tuned: the scorer
    reads each row once. Weights are relative to this file, and no verdict on a row.
    """
    arguments = ["scheduler", "score", str(folder), "--input", str(source), "--out", str(out)]
    for name, value in (("model", model), ("catalogue", catalogue)):
        if value is not None:
            arguments += [f"--{name}", str(value)]
    event: Event = Pipeline(arguments).follow().require("result")
    found = {name: value for name, value in event.items() if name != "event"}
    if as_json:
        answer(True, {"weights": str(out), **found}, "")
        return
    table(("rank", "line", "weight", "logit"), [_row(row) for row in found["least_trusted"]])
    size, rows = found["effective_sample_size"], found["examples"]
    used = "-" if size is None else f"{size:.1%}"
    print(f"effective sample size: {used} of {rows} rows, by the {found['scorer']} scorer")
    print(found["note"])
    print(f"weights: {out}")


def _row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "rank": str(row["rank"]),
        "line": str(row["line"]),
        "weight": f"{row['weight']:.4g}",
        "logit": f"{row['logit']:.4g}",
    }
