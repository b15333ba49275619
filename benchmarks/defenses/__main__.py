"""python -m benchmarks.defenses: run the attack bench and write its tables and plots."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.defenses.arms import ARMS
from benchmarks.defenses.attacks import ATTACKS
from benchmarks.defenses.plots import PlotsUnavailableError, write_plots
from benchmarks.defenses.run import Interrupted, finished, run_matrix
from benchmarks.defenses.settings import CellSettings, matrix
from benchmarks.defenses.tables import markdown, write_parquet
from jobspec.cache import default_cache_dir

Value = TypeVar("Value")

USAGE, FAILED, INTERRUPTED = 3, 1, 130
# Given once a matrix; everything else of CellSettings becomes an option of its own.
AXES = ("attack", "ratio", "arm", "seed")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tunegate bench defenses",
        description="Poison training sets, tune under every defense, and compare. Finished cells "
        "are kept in OUT and not run again. Exit codes: 0 done; 1 some cells failed; 3 usage; "
        "130 interrupted.",
    )
    made.add_argument(
        "--attacks", default="mixed", help=f"comma-separated, of {', '.join(ATTACKS)}; or all"
    )
    made.add_argument(
        "--ratios", default="0,0.1,0.3", help="comma-separated shares of poison; 0: the benign set"
    )
    made.add_argument(
        "--arms", default="all", help=f"comma-separated, of {', '.join(ARMS)}; or all"
    )
    made.add_argument("--seeds", default="0,1,2", help="comma-separated integers")
    made.add_argument("--out", type=Path, required=True, help="folder of results")
    made.add_argument("--jobs", type=int, default=1, help="cells at a time")
    made.add_argument("--threads", type=int, default=1, help="CPU threads of each cell")
    made.add_argument(
        "--cache", type=Path, help="folder of made models; default: the pipeline's own"
    )
    made.add_argument("--dry-run", action="store_true", help="print the cells and stop")
    made.add_argument("--no-plots", action="store_true", help="write the tables only")
    for name, field in CellSettings.model_fields.items():
        if name in AXES:
            continue
        choices = [str(item) for item in get_args(field.annotation) if isinstance(item, str)]
        shown = "" if field.default is None else f"; default: {field.default}"
        made.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            help=(field.description or "").replace("%", "%%") + shown,
            choices=choices or None,
            metavar=None if choices else "VALUE",
        )
    return made


def cells_of(options: argparse.Namespace) -> list[CellSettings]:
    """The matrix that the options name. Raises ValueError in words for the caller."""
    given = {
        name: value
        for name in CellSettings.model_fields
        if name not in AXES and (value := getattr(options, name)) is not None
    }
    attacks = _chosen(options.attacks, ATTACKS, "attack")
    return matrix(
        CellSettings.model_validate(given),
        attacks,
        _listed(options.ratios, float, "--ratios"),
        _chosen(options.arms, tuple(ARMS), "arm"),
        _listed(options.seeds, int, "--seeds"),
    )


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
    except SystemExit as ending:
        return USAGE if ending.code == 2 else 0
    console = Console(stderr=True, soft_wrap=True)
    try:
        cells = cells_of(options)
    except ValidationError as error:
        first = error.errors()[0]
        console.print(f"error: {'.'.join(map(str, first['loc']))}: {first['msg']}", markup=False)
        return USAGE
    except ValueError as error:
        console.print(f"error: {error}", markup=False)
        return USAGE
    if options.dry_run:
        for cell in cells:
            state = "finished" if finished(options.out, cell) is not None else "to run"
            print(f"{cell.key} {state:8} {cell.label}")
        return 0
    cache = options.cache or default_cache_dir()
    try:
        with _Bar(console, len(cells)) as bar:
            results = run_matrix(
                cells, options.out, cache, jobs=options.jobs, threads=options.threads, progress=bar
            )
    except Interrupted:
        console.print("interrupted; finished cells are kept, the same command goes on from there")
        return INTERRUPTED
    write_parquet(results, options.out / "results.parquet")
    (options.out / "results.md").write_text(markdown(results), "utf-8")
    if not options.no_plots:
        try:
            write_plots(results, options.out)
        except PlotsUnavailableError as error:
            console.print(str(error), markup=False)
    failed = [result for result in results if result["error"] is not None]
    print(markdown(results))
    return FAILED if failed else 0


class _Bar:
    """A progress bar on standard error; plain lines where there is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("cells", total=total)
        self._said = -1

    def __enter__(self) -> "_Bar":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, done: int, total: int, words: str) -> None:
        self._progress.update(self._task, completed=done, description=words)
        if not self._console.is_terminal and done != self._said:
            self._said = done
            self._console.print(f"{done}/{total} {words}", markup=False, highlight=False)


def _chosen(text: str, known: tuple[Value, ...], what: str) -> list[Value]:
    if text == "all":
        return list(known)
    by_name = {str(name): name for name in known}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise ValueError(f"no {what} is called {', '.join(unknown) or text!r}; known: "
                         f"{', '.join(by_name)}, or all")  # fmt: skip
    return [by_name[name] for name in names]


def _listed(text: str, convert: Callable[[str], Value], option: str) -> list[Value]:
    try:
        values = [convert(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from error
    if not values:
        raise ValueError(f"{option} is empty")
    return values


if __name__ == "__main__":
    sys.exit(main())
