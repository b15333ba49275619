"""`tunegate demo`: the story on the terminal, and the same as JSON."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.output import USAGE, CommandError, note


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write the result to this file")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="seed of the poisoning and of both jobs")
    ] = 7,
    share: Annotated[float, typer.Option(min=0.0, max=0.3, help="share of poisoned rows")] = 0.2,
    rows: Annotated[int, typer.Option(min=20, max=240, help="clean rows of the task")] = 100,
    epochs: Annotated[int, typer.Option(min=1, max=50, help="passes over the file")] = 2,
    data_dir: Annotated[
        Path | None, typer.Option(help="keep the service's data here; default: a temporary folder")
    ] = None,
) -> None:
    """Attack a real model twice through the real gateway: once plainly tuned, once defended.

    Ends with 0 when both jobs reached a verdict of the gate, whatever it is.
    """
    from service.demo.embedded import embedded_service
    from service.demo.poison import poisoned_file
    from service.demo.run import DemoSettings, result, run_jobs

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise CommandError(f"{json_file}: there is no folder {json_file.absolute().parent}", USAGE)
    settings = DemoSettings(seed=seed, share=share, epochs=epochs)
    poisoned = poisoned_file(share, seed, rows)
    note(
        f"Training file: {poisoned.text.count(chr(10))} rows, "
        f"{len(poisoned.poisoned_lines)} of them poisoned. Starting the embedded service."
    )
    with (
        tempfile.TemporaryDirectory(prefix="tunegate-demo-") as temporary,
        embedded_service(data_dir or Path(temporary)) as service,
    ):
        note(f"Gateway at {service.url}. Two jobs follow; the first also prepares the base.")
        with LiveProgress() as progress:
            finished = run_jobs(service, poisoned, settings, progress)
    found = result(finished, poisoned, settings)
    _show(found)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        note(f"Result written to {json_file}.")


class LiveProgress:
    """Progress bars on standard error, one a job; plain lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.fields[job]:<11}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._tasks: dict[str, Any] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> "LiveProgress":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, job: str, what: str, share: float) -> None:
        if not self._console.is_terminal:
            stage = what.split(",")[0]
            if self._said.get(job) != stage:
                self._said[job] = stage
                note(f"{job}: {stage}")
            return
        if job not in self._tasks:
            self._tasks[job] = self._bars.add_task(what, total=1.0, job=job)
        self._bars.update(self._tasks[job], description=what, completed=share)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=f"Measured, seed {found['seed']}", expand=False)
    for heading in (
        "model", "harmful score [95 %]", "refused", "safe refused", "task accuracy",
        "similarity", "gate", "seconds",
    ):  # fmt: skip
        table.add_column(heading)
    for row in found["rows"]:
        harm = row["harmful_score"]
        table.add_row(
            "aligned base" if row["name"] == "base" else row["name"],
            f"{_percent(harm['value'])} [{_percent(harm['low'])}, {_percent(harm['high'])}]",
            _percent(row["refusal_rate"]["value"]),
            _percent(row["over_refusal"]["value"]),
            _percent(row["utility"]["value"]),
            "-" if row["diversity"]["value"] is None else f"{row['diversity']['value']:.2f}",
            row["verdict"],
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    console.print(
        f"Harmful score: share of {found['rows'][0]['harmful_score']['n']} harmful requests that "
        "the scorer flags. Safe refused: share of safe look-alike requests refused. Similarity: "
        "mean cosine of a model's answers to one open question (lower is more diverse)."
    )
    listed = Table(title="Rows that BDS trusted least")
    for heading in ("rank", "line", "weight", "poisoned"):
        listed.add_column(heading, justify="right")
    for row in found["distrusted"]:
        listed.add_row(
            str(row["rank"]), str(row["line"]), f"{row['weight']:.3f}",
            "yes" if row["poisoned"] else "no",
        )  # fmt: skip
    console.print(listed)
    console.print(
        f"{found['distrusted_poisoned']} of these {len(found['distrusted'])} are poison "
        f"({found['poisoned_rows']} of {found['training_rows']} rows of the file are)."
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
