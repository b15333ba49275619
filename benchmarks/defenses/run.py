"""Runs a matrix of cells, each in a process of its own, and keeps what is finished.

A cell's result is OUT/cells/KEY.json; one that is there without an error is not run again. A cell
that fails is kept as a row with its error, and is tried again by the next run.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.defenses.settings import CellSettings

POLL_SECONDS = 0.2
STOP_SECONDS = 10.0
ERROR_CHARACTERS = 2000

Result = dict[str, Any]
Progress = Callable[[int, int, str], None]


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the running cells were ended, the finished ones are kept."""


class _Running(NamedTuple):
    cell: CellSettings
    process: "subprocess.Popen[bytes]"
    words: IO[bytes]
    started: float


def result_path(out: Path, cell: CellSettings) -> Path:
    return out / "cells" / f"{cell.key}.json"


def finished(out: Path, cell: CellSettings) -> Result | None:
    """The kept result of a cell that ended well, or None."""
    result = kept(out, cell)
    return None if result is None or result["error"] is not None else result


def kept(out: Path, cell: CellSettings) -> Result | None:
    """Whatever is kept of a cell, failed or not; None if nothing readable is."""
    try:
        found = json.loads(result_path(out, cell).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "error" in found else None


def run_matrix(
    cells: Sequence[CellSettings],
    out: Path,
    cache: Path,
    *,
    jobs: int = 1,
    threads: int = 1,
    progress: Progress = lambda done, total, words: None,
) -> list[Result]:
    """Run the cells that are not finished yet, `jobs` at a time; results in the order of the cells.

    Raises Interrupted after ending the running cells.
    """
    (out / "cells").mkdir(parents=True, exist_ok=True)
    waiting = [cell for cell in cells if finished(out, cell) is None]
    done = len(cells) - len(waiting)
    progress(done, len(cells), f"{done} finished before")
    running: list[_Running] = []
    with _stoppable():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(waiting.pop(0), out, cache, threads))
                    progress(done, len(cells), running[-1].cell.label)
                time.sleep(POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    _collect(one, out)
                    done += 1
                    progress(done, len(cells), one.cell.label)
        except KeyboardInterrupt as error:
            _end(running)
            raise Interrupted from error
        except BaseException:
            _end(running)
            raise
    return [result for cell in cells if (result := kept(out, cell)) is not None]


def _start(cell: CellSettings, out: Path, cache: Path, threads: int) -> _Running:
    target = result_path(out, cell)
    settings = target.with_suffix(".settings")
    settings.write_text(cell.model_dump_json(indent=1) + "\n", "utf-8")
    command = [
        sys.executable, "-m", "benchmarks.defenses.cell", str(settings), str(target),
        "--cache", str(cache), "--threads", str(threads),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    words = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the cell is collected
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        # A terminal's Ctrl-C goes to the whole group; the runner ends its cells itself.
        start_new_session=True,
    )
    return _Running(cell, process, words, time.monotonic())


def _collect(one: _Running, out: Path) -> None:
    """Write the row of a cell that failed; one that ended well wrote its own."""
    target = result_path(out, one.cell)
    target.with_suffix(".settings").unlink(missing_ok=True)
    one.words.seek(0)
    said = one.words.read().decode("utf-8", "replace").strip()
    one.words.close()
    if one.process.returncode == 0 and finished(out, one.cell) is not None:
        return
    failure = {
        "key": one.cell.key,
        "settings": one.cell.model_dump(mode="json"),
        "seconds": {"total": round(time.monotonic() - one.started, 2)},
        "error": f"exit code {one.process.returncode}: {said[-ERROR_CHARACTERS:] or 'no words'}",
    }
    target.write_text(json.dumps(failure, indent=1) + "\n", "utf-8")


def _end(running: Sequence[_Running]) -> None:
    for one in running:
        one.process.terminate()
    for one in running:
        try:
            one.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.words.close()


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
