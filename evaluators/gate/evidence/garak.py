"""Result files of garak (NVIDIA): the report, and the hit log beside it.

A report (`garak.ID.report.jsonl`) has one JSON object a line, told apart by `entry_type`:
`start_run setup` (every setting, among them `run.generations`), `init`, `attempt` (one a prompt,
left unread here), `eval` (one a probe and detector, with its counts) and at the end `completion`.
Older releases name the counts `passed` and `total`, newer ones `passed`, `fails`, `nones` and
`total_evaluated`. Read in garak/evaluators/base.py and garak/command.py of the public repository.

A hit log (`garak.ID.hitlog.jsonl`) lists the failures alone. Without the number of tests it gives
no rate, so it only serves to check the report that it belongs to.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from evaluators.gate.evidence.counts import Counts, failure_rate
from evaluators.gate.evidence.errors import EvidenceError
from evaluators.metric import Metric

PREFIX = "evidence.garak."

Pair = tuple[str, str]


def is_report(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("entry_type"), str)


def is_hit_log(row: Mapping[str, Any]) -> bool:
    return {"probe", "detector", "attempt_id", "score"} <= row.keys()


def report_counts(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[Pair, Counts], int]:
    """Counts by (probe, detector), and the answers asked for each prompt.

    Raises EvidenceError for a report without its last line or without a single `eval` row.
    """
    counts: dict[Pair, Counts] = {}
    repeats, complete = 1, False
    for row in rows:
        kind = row.get("entry_type")
        if kind == "start_run setup":
            asked = row.get("run.generations")
            repeats = asked if _is_count(asked) and asked else 1
        elif kind == "completion":
            complete = True
        elif kind == "eval":
            pair, found = _eval_counts(row)
            counts[pair] = counts.get(pair, Counts()) + found
    if not complete:
        raise EvidenceError(
            "no completion row: the run was cut off or still goes on; what is missing cannot count "
            "as passed"
        )
    if not counts:
        raise EvidenceError("no eval row: the run tested nothing")
    return counts, repeats


def hit_counts(rows: Iterable[Mapping[str, Any]]) -> Counter[Pair]:
    """Hits by (probe, detector)."""
    return Counter((_name(row.get("probe")), _name(row.get("detector"))) for row in rows)


def check_hits(counts: Mapping[Pair, Counts], hits: Mapping[Pair, int]) -> None:
    """Raises EvidenceError where the hit log does not tell the report's failures."""
    for pair in sorted({*counts, *hits}):
        failed, logged = counts.get(pair, Counts()).failed, hits.get(pair, 0)
        if failed != logged:
            raise EvidenceError(
                f"{'.'.join(pair)}: {logged} hits, but the report counts {failed} failures; the "
                "two files are not of one run, or one of them was cut off"
            )


def metrics(counts: Mapping[Pair, Counts], repeats: int, maximum_open: float) -> dict[str, Metric]:
    """evidence.garak.<probe>.<detector>: share of answers in which the probe succeeded."""
    return {
        PREFIX + ".".join(pair): failure_rate(found, maximum_open, repeats)
        for pair, found in counts.items()
    }


def _eval_counts(row: Mapping[str, Any]) -> tuple[Pair, Counts]:
    pair = _name(row.get("probe")), _name(row.get("detector"))
    passed, open_tests = row.get("passed"), row.get("nones", 0)
    judged = row.get("total_evaluated", row.get("total"))
    if not (_is_count(passed) and _is_count(judged) and _is_count(open_tests)):
        raise EvidenceError(f"eval row of {'.'.join(pair)}: no counts of passed and all tests")
    failed = row.get("fails", judged - passed)
    if not _is_count(failed) or failed + passed != judged:
        raise EvidenceError(f"eval row of {'.'.join(pair)}: its counts do not add up")
    return pair, Counts(passed, failed, open_tests)


def _name(value: Any) -> str:
    """Old releases write probes.dan.X and detector.dan.X for dan.X."""
    if not isinstance(value, str) or not value:
        raise EvidenceError("a row names no probe or no detector")
    first, _, rest = value.partition(".")
    return rest if rest and first in ("probes", "detector", "detectors") else value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
