"""What a method gets besides its request, and what it gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jobspec.catalogue import BaseModelEntry
from jobspec.frozen import Frozen

Progress = Callable[[str, int, int], None]


class AnalysisError(ValueError):
    """A request that cannot be answered; the message says where and what to do.

    param: path of the field in the request, such as `targets.0.completion`.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Stopped(Exception):
    """The caller's `stop` turned true; what was finished lies in the work folder."""


class JobFolder(NamedTuple):
    """A finished job's parts on this machine. All text in them belongs to the asking tenant."""

    job_id: str
    base: BaseModelEntry
    bundle: Path
    training_file: Path
    report: Mapping[str, Any]


class Table(NamedTuple):
    """Columns of equal length; becomes NAME.parquet."""

    name: str
    columns: Mapping[str, Sequence[Any]]


class Chart(NamedTuple):
    """One picture of the page: a title, a line that says how to read it, SVG text."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Outcome:
    """An answer: the result of the kind's class, tables, charts, and what the reader must know."""

    result: Frozen
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    warnings: tuple[str, ...] = ()


def _quiet(_what: str, _done: int, _total: int) -> None:
    return None


@dataclass(frozen=True)
class AnalysisContext:
    """The surroundings of one run.

    files: local paths by the request's field name. job: where the kind needs one. load_model:
    (entry, adapter folder) -> (model with its adapter in evaluation mode, tokenizer). work: a
    folder that outlives an interrupted run, for partial results. progress(what, done, total).
    """

    work: Path
    cache_dir: Path
    seed: int = 0
    files: Mapping[str, Path] = field(default_factory=dict)
    job: JobFolder | None = None
    load_model: Callable[[BaseModelEntry, Path | None], tuple[Any, Any]] | None = None
    progress: Progress = _quiet
    stop: Callable[[], bool] = lambda: False

    def check_stop(self) -> None:
        """Raises Stopped."""
        if self.stop():
            raise Stopped
