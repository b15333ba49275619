"""Tells result files apart and reads them together."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from evaluators.gate.evidence import garak, promptfoo
from evaluators.gate.evidence.counts import Counts
from evaluators.gate.evidence.errors import EvidenceError
from evaluators.metric import Metric

MAX_BYTES = 500_000_000
MAXIMUM_OPEN = 0.02


class _Files(NamedTuple):
    """What was found in the files given, by file name."""

    reports: dict[str, tuple[dict[garak.Pair, Counts], int]]
    hit_logs: dict[str, Counter[garak.Pair]]
    summaries: dict[str, Mapping[str, Any]]


def read_evidence(
    files: Mapping[str, bytes], maximum_open: float = MAXIMUM_OPEN
) -> dict[str, Metric]:
    """Metrics of the files {name: content}; each file's kind is told from its content.

    Above `maximum_open`, the share of a metric's tests that have no verdict, it is undefined. A hit
    log of garak counts only beside exactly one report, which it must agree with. Raises
    EvidenceError, which names the file.
    """
    found = _Files({}, {}, {})
    for name, content in files.items():
        with _named(name):
            _sort(name, content, found)
    for name, hits in found.hit_logs.items():
        with _named(name):
            if len(found.reports) != 1:
                raise EvidenceError(
                    "a hit log of garak lists failures and not how many tests there were; give the "
                    "one .report.jsonl of the same run, too"
                )
            garak.check_hits(next(iter(found.reports.values()))[0], hits)
    metrics: dict[str, Metric] = {}
    for name, (counts, repeats) in found.reports.items():
        with _named(name):
            _add(metrics, garak.metrics(counts, repeats, maximum_open))
    for name, summary in found.summaries.items():
        with _named(name):
            _add(metrics, promptfoo.metrics(summary, maximum_open))
    return metrics


def _sort(name: str, content: bytes, found: _Files) -> None:
    if len(content) > MAX_BYTES:
        raise EvidenceError(f"{len(content)} bytes; a result file has at most {MAX_BYTES}")
    text = _decoded(content)
    if (summary := promptfoo.summary_of(_document(text))) is not None:
        found.summaries[name] = summary
        return
    rows = _rows(text)
    first = next(rows, {})
    if garak.is_report(first):
        found.reports[name] = garak.report_counts(chain([first], rows))
    elif garak.is_hit_log(first):
        found.hit_logs[name] = garak.hit_counts(chain([first], rows))
    else:
        raise EvidenceError(
            "neither a .report.jsonl of garak nor results of promptfoo (eval --output FILE.json)"
        )


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvidenceError(f"not UTF-8: {error}") from None


def _document(text: str) -> Any:
    """The text as one JSON document; None where it is none, such as several lines of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _rows(text: str) -> Iterator[Mapping[str, Any]]:
    # splitlines would cut at separators that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise EvidenceError(
                f"line {number}: not JSON; the file was cut off or is no result file"
            ) from None
        if not isinstance(row, dict):
            raise EvidenceError(f"line {number}: a row is a JSON object")
        yield row


def _add(metrics: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    for metric in more:
        if metric in metrics:
            raise EvidenceError(f"{metric} is in another file, too; give one of them")
    metrics.update(more)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the file's name before the message of an error."""
    try:
        yield
    except EvidenceError as error:
        raise EvidenceError(f"{name}: {error}") from None
