"""The labelled items that a scorer is compared with, from JSON rows."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluators.calibration.disagreement import PAIRWISE_OPTIONS, PAIRWISE_VALUES
from evaluators.calibration.subsets import Kind
from jobspec.findings import Findings, shown
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES, json_objects

MIN_ITEMS = 4
MAX_ITEMS = 20_000
MAX_RATERS = 10_000
MAX_LEVELS = 20
DEFAULT_LEVELS = 5
_FIELDS = {
    "absolute": {"query", "response", "labels", "label_counts", "score"},
    "pairwise": {
        "query", "response", "response_2", "labels", "label_counts", "score", "score_1", "score_2",
    },
}  # fmt: skip


class TableError(ValueError):
    """A table of labelled items that cannot be used; the message names line and field, which are
    those of the first fault (None: the table as a whole)."""

    def __init__(self, message: str, line: int | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.field = field


class CalibrationTable(NamedTuple):
    """N items: their queries, label counts and model scores, and the rows they came from."""

    kind: Kind
    queries: tuple[str, ...]
    counts_N_L: NDArray[np.int64]
    score_N: NDArray[np.float64]
    lines: tuple[int, ...]


class _Row(NamedTuple):
    query: str
    counts: list[int]
    score: float
    line: int


def read_table(
    source: Path | BinaryIO, kind: Kind, *, levels: int = DEFAULT_LEVELS
) -> CalibrationTable:
    """Read a JSON Lines file of items. Raises TableError with line and field, OSError.

    absolute: {"query", "response" (not read), "labels", "score"}: labels is a list of one rating
    1..levels a rater, or an object {rating: count}; label_counts instead is the list of the
    counts in the order of the ratings. pairwise: also "response_2"; the options are strongly_1,
    slightly_1, similar, slightly_2, strongly_2 (or 2, 1, 0, -1, -2), the score is of response 1
    minus that of response 2, or comes as score_1 and score_2.
    """
    findings = Findings()
    rows = []
    for line in json_objects(source, findings, DEFAULT_MAX_LINE_BYTES):
        if line.sound and line.value is not None:
            row = _row(line.value, line.number, kind, levels, findings)
            if row is not None:
                rows.append(row)
        if len(rows) > MAX_ITEMS:
            raise TableError(f"more than {MAX_ITEMS:,} items: split the file")
    return _table(rows, kind, findings)


def table_of(
    rows: Iterable[Mapping[str, Any]], kind: Kind, *, levels: int = DEFAULT_LEVELS
) -> CalibrationTable:
    """The same from rows in memory; the line in a TableError is then the item's number from 1."""
    findings = Findings()
    found = [
        row
        for number, value in enumerate(rows, start=1)
        if (row := _row(dict(value), number, kind, levels, findings)) is not None
    ]
    if len(found) > MAX_ITEMS:
        raise TableError(f"more than {MAX_ITEMS:,} items: send fewer")
    return _table(found, kind, findings)


def _table(rows: list[_Row], kind: Kind, findings: Findings) -> CalibrationTable:
    findings.check_count(len(rows), MIN_ITEMS, "query, labels and score")
    if findings.errors:
        report = findings.report(len(rows))
        first = report.errors[0]
        raise TableError(report.summary(), first.line, first.path)
    return CalibrationTable(
        kind=kind,
        queries=tuple(row.query for row in rows),
        counts_N_L=np.array([row.counts for row in rows], dtype=np.int64),
        score_N=np.array([row.score for row in rows], dtype=np.float64),
        lines=tuple(row.line for row in rows),
    )


def _row(
    value: dict[str, Any], line: int, kind: Kind, levels: int, findings: Findings
) -> _Row | None:
    if not 2 <= levels <= MAX_LEVELS:
        raise ValueError(f"levels must be within 2..{MAX_LEVELS}, got {levels}")

    def fault(path: str | None, message: str) -> None:
        findings.add("error", "invalid_item", line, path, message)

    before = findings.errors
    for name in value.keys() - _FIELDS[kind]:
        fault(shown(name), f"Unknown field; an item of this kind has {', '.join(_FIELDS[kind])}.")
    query = value.get("query")
    if not isinstance(query, str) or not query.strip():
        fault("query", "Give the question as a text.")
    score = _score(value, kind)
    if score is None:
        wanted = "score, or score_1 and score_2," if kind == "pairwise" else "score"
        fault("score", f"Give {wanted} as a finite number.")
    counts: list[int] | str = "Give either labels or label_counts."
    if ("labels" in value) != ("label_counts" in value):
        if "labels" in value:
            counts = _counts(value["labels"], kind, levels)
        else:
            counts = _vector(value["label_counts"], 5 if kind == "pairwise" else levels)
    if isinstance(counts, str):
        fault("label_counts" if "label_counts" in value else "labels", counts)
    elif not 2 <= sum(counts) <= MAX_RATERS:
        fault("labels", f"An item needs 2 to {MAX_RATERS:,} ratings, this one has {sum(counts)}.")
    if findings.errors > before or isinstance(counts, str) or score is None:
        return None
    return _Row(str(query), counts, score, line)


def _score(value: Mapping[str, Any], kind: Kind) -> float | None:
    if kind == "pairwise" and "score" not in value:
        first, second = _number(value.get("score_1")), _number(value.get("score_2"))
        return None if first is None or second is None else _number(first - second)
    return _number(value.get("score"))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _places(kind: Kind, levels: int) -> dict[str, int]:
    """What a label may be called, and its place in the counts."""
    if kind == "absolute":
        return {str(rating): rating - 1 for rating in range(1, levels + 1)}
    named = {name: place for place, name in enumerate(PAIRWISE_OPTIONS)}
    return named | {str(int(value)): place for place, value in enumerate(PAIRWISE_VALUES)}


def _counts(labels: Any, kind: Kind, levels: int) -> list[int] | str:
    places = _places(kind, levels)
    counts = [0] * (5 if kind == "pairwise" else levels)
    known = "1 to " + str(levels) if kind == "absolute" else ", ".join(PAIRWISE_OPTIONS)
    if isinstance(labels, dict):
        for name, count in labels.items():
            if name not in places:
                return f"Unknown label {shown(str(name))}; labels are {known}."
            if not _is_count(count):
                return "A count of a label is a whole number from 0."
            counts[places[name]] += count
        return counts
    if not isinstance(labels, list):
        return "Give a list of one label a rater, or an object of counts by label."
    for label in labels[: MAX_RATERS + 1]:
        name = str(label) if isinstance(label, int | str) and not isinstance(label, bool) else ""
        if name not in places:
            return f"Unknown label {shown(str(label))}; labels are {known}."
        counts[places[name]] += 1
    return counts


def _vector(counts: Any, length: int) -> list[int] | str:
    if not isinstance(counts, list) or len(counts) != length or not all(map(_is_count, counts)):
        return f"Give {length} whole numbers from 0, one for each label in order."
    return list(counts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_RATERS
