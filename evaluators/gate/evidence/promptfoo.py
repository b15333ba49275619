"""Result files of promptfoo: what `promptfoo eval --output results.json` writes.

`{evalId, results: {version: 3, timestamp, results: [...], prompts, stats}, config}`, where `stats`
counts successes, failures and errors, and each entry of `results.results` is one cell of the table:
`success`, `failureReason` (0 none, 1 an assertion failed, 2 an error), `gradingResult` with
`componentResults` (`pass`, `assertion: {type, metric}`, `metadata`), `testCase` and `metadata`
(`pluginId`, `strategyId` for red teams). Read in src/types/index.ts and the documentation of the
public repository promptfoo/promptfoo. Version 2 has no failureReason: there an error cannot be told
from a failure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.gate.evidence.counts import Counts, failure_rate
from evaluators.gate.evidence.errors import EvidenceError
from evaluators.metric import Metric

PREFIX = "evidence.promptfoo."
VERSION = 3
_ERROR = 2
_NAME_CHARACTERS = 150


def summary_of(data: Any) -> Mapping[str, Any] | None:
    """The summary inside an output file, or the summary itself; None for any other document."""
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("results"), dict) and "version" in data["results"]:
        return dict(data["results"])
    return data if {"version", "results", "stats"} <= data.keys() else None


def metrics(summary: Mapping[str, Any], maximum_open: float) -> dict[str, Metric]:
    """Shares of failed tests:

    evidence.promptfoo.all                 every test
    evidence.promptfoo.suite:<description> tests with this description
    evidence.promptfoo.plugin:<id>         tests of this red-team plug-in; likewise strategy:<id>
    evidence.promptfoo.assert:<type>       single assertions of this type
    evidence.promptfoo.metric:<name>       single assertions with this `metric` label

    White space in a name becomes an underscore. Raises EvidenceError for another version, for a
    file without tests, and for one that holds fewer results than its own statistics count.
    """
    version = summary.get("version")
    if version != VERSION or isinstance(version, bool):
        advice = "update tunegate" if _is_newer(version) else "export it again with a newer one"
        raise EvidenceError(f"results version {version!r} of promptfoo; this reads 3: {advice}")
    rows = summary.get("results")
    if not isinstance(rows, list) or not rows:
        raise EvidenceError("no results: the run tested nothing")
    counts: dict[str, Counts] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("success"), bool):
            raise EvidenceError(f"results.{place}: no verdict in `success`")
        for name, found in _counted(row):
            counts[name] = counts.get(name, Counts()) + found
    _check_stats(summary.get("stats"), counts["all"])
    return {PREFIX + name: failure_rate(found, maximum_open) for name, found in counts.items()}


def _counted(row: Mapping[str, Any]) -> Iterator[tuple[str, Counts]]:
    """One test by every name that it counts under. A name repeats for equal assertions."""
    whole = _verdict(row["success"], row.get("failureReason") == _ERROR)
    yield "all", whole
    test, metadata = _mapping(row.get("testCase")), _mapping(row.get("metadata"))
    labels = {
        "suite": row.get("description") or test.get("description"),
        "plugin": metadata.get("pluginId") or _mapping(test.get("metadata")).get("pluginId"),
        "strategy": metadata.get("strategyId") or _mapping(test.get("metadata")).get("strategyId"),
    }
    for kind, label in labels.items():
        if isinstance(label, str) and label.strip():
            yield _name(kind, label), whole
    components = _mapping(row.get("gradingResult")).get("componentResults")
    for component in components if isinstance(components, list) else []:
        part = _mapping(component)
        assertion = _mapping(part.get("assertion"))
        # What the grader could not judge is reported as not passed.
        broken = _mapping(part.get("metadata")).get("graderError") is True
        found = _verdict(part.get("pass") is True, broken)
        for kind, key in (("assert", "type"), ("metric", "metric")):
            label = assertion.get(key)
            if isinstance(label, str) and label.strip():
                yield _name(kind, label), found


def _verdict(passed: bool, error: bool) -> Counts:
    if error:
        return Counts(open=1)
    return Counts(passed=1) if passed else Counts(failed=1)


def _check_stats(stats: Any, counted: Counts) -> None:
    """The statistics are written with the results, so a difference means a cut or edited file."""
    data = _mapping(stats)
    told = Counts(data.get("successes", -1), data.get("failures", -1), data.get("errors", 0))
    if told != counted:
        raise EvidenceError(
            f"stats count {told.passed} successes, {told.failed} failures and {told.open} errors, "
            f"but the results are {counted.passed}, {counted.failed} and {counted.open}"
        )


def _is_newer(version: Any) -> bool:
    return isinstance(version, int) and version > VERSION


def _name(kind: str, label: str) -> str:
    return f"{kind}:{'_'.join(label.split())[:_NAME_CHARACTERS]}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
