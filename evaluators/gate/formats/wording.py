"""Words that all formats share."""

import re
from typing import Any

from evaluators.gate.recheck import Checked
from evaluators.gate.verdict import RuleResult
from evaluators.metric import Metric

# All that XML 1.0 forbids, and the C1 controls that terminals obey.
_CONTROL = re.compile("[^\t\n\r -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Bidirectional controls could show a name or a reason in another order than it was written.
_ORDER = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(value: Any) -> str:
    """The value as text on one line, without control characters."""
    return " ".join(_ORDER.sub("", _CONTROL.sub("", str(value))).split())


def number(value: Any) -> str:
    try:
        return f"{value:.4g}" if isinstance(value, int | float) else "-"
    except OverflowError:
        # A report may hold whole numbers beyond every float.
        return "-"


def interval(metric: Metric | None) -> str:
    """value [low, high], as far as they are known."""
    if metric is None:
        return "-"
    if metric.low is None or metric.high is None:
        return number(metric.value)
    return f"{number(metric.value)} [{number(metric.low)}, {number(metric.high)}]"


def rule_name(rule: RuleResult) -> str:
    where = rule.metric if rule.group is None else f"{rule.metric} in {rule.group}"
    return clean(f"{where} {rule.bound} {rule.comparison} {rule.limit:.6g}")


def source(checked: Checked) -> str:
    origin = "decision stored in the report" if checked.from_report else "policy given"
    return f"{origin}, policy sha256 {clean(checked.decision.policy_sha256)}"


def verdict_line(checked: Checked) -> str:
    tolerated = " (tolerated by max-failures)" if checked.tolerated else ""
    return f"gate: {checked.verdict}{tolerated}"


def mapping(value: Any, *path: str) -> dict[str, Any]:
    """The mapping at a path of the report, empty where there is none."""
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
