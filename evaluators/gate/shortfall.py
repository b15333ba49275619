"""What was planned or demanded and is not all there: found, it keeps a verdict from `passed`."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from evaluators.gate.policy import CANARY_METRIC, CONDITION_METRICS, UNRESOLVED_METRIC
from evaluators.metric import Metric

SUITE_METRIC = "evaluation.suites"


class Shortfall(NamedTuple):
    """what: the name that the gate's result carries. found None: it is not there at all."""

    what: str
    planned: int
    found: int | None
    reason: str


def suite_shortfalls(suites: Iterable[Mapping[str, Any]]) -> tuple[Shortfall, ...]:
    """The suites {name, planned, prompts} that hold fewer prompts than were planned.

    Without a plan (`planned` None) a suite falls short only when it is empty.
    """
    short = []
    for suite in suites:
        planned = suite.get("planned")
        wanted = planned if isinstance(planned, int) else 1
        found = suite.get("prompts")
        count = found if isinstance(found, int) else 0
        if count < wanted:
            reason = f"the suite {suite.get('name')} has {count} prompts of {wanted} planned"
            short.append(Shortfall(SUITE_METRIC, wanted, count, reason))
    return tuple(short)


def report_shortfalls(
    report: Mapping[str, Any], metrics: Mapping[str, Metric]
) -> tuple[Shortfall, ...]:
    """What a report says was measured, while its metrics do not hold it.

    Suites shorter than planned; canaries that were planted, without their metric; outcomes that
    were counted, without the share of unresolved answers; triggers that were tried, without the
    sweep's metrics. Whoever strips a metric from a report
    must not thereby lift the demand on it. Blocks that are absent or malformed demand nothing.
    """
    evaluation = _mapping(report.get("evaluation"))
    suites = evaluation.get("suites")
    rows = [row for row in suites if isinstance(row, dict)] if isinstance(suites, list) else []
    scheduler = _mapping(_mapping(report.get("defense")).get("scheduler"))
    short = list(suite_shortfalls(rows))
    if (canary := _canary_shortfall(scheduler, metrics.get(CANARY_METRIC))) is not None:
        short.append(canary)
    harmful = _mapping(_mapping(evaluation.get("outcomes")).get("tuned")).get("harmful")
    if harmful and UNRESOLVED_METRIC not in metrics:
        reason = f"the report counts outcomes of harmful prompts, but {UNRESOLVED_METRIC} is absent"
        short.append(Shortfall(UNRESOLVED_METRIC, 1, None, reason))
    conditions = evaluation.get("conditions")
    if any(_mapping(row).get("n") for row in (conditions if isinstance(conditions, list) else [])):
        short += [
            Shortfall(name, 1, None, f"the report lists trigger conditions, but {name} is absent")
            for name in CONDITION_METRICS
            if name not in metrics
        ]
    return tuple(short)


def _canary_shortfall(scheduler: Mapping[str, Any], metric: Metric | None) -> Shortfall | None:
    canaries = _mapping(scheduler.get("canaries"))
    planted, auc = canaries.get("harmful"), canaries.get("auc")
    planted = planted if isinstance(planted, int) and planted > 0 else 0
    # Every scheduler that weighs rows reports on its canaries, also where it planted none.
    demanded = planted > 0 or auc is not None or ("trusted_mass" in scheduler and not canaries)
    if not demanded or (metric is not None and metric.value == auc):
        return None
    return Shortfall(
        CANARY_METRIC,
        max(planted, 1),
        None,
        f"the report's scheduler weighs rows ({planted} planted harmful ones), but "
        f"{CANARY_METRIC} is not the result of that check",
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
