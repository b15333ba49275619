"""Words that all formats share."""

import re
from typing import Any

from evaluators.gate.recheck import Checked
from evaluators.gate.verdict import RuleResult

# All that XML 1.0 forbids, and the C1 controls that terminals obey.
_CONTROL = re.compile("[^\t\n\r -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(value: Any) -> str:
    """The value as text on one line, without control characters."""
    return " ".join(_CONTROL.sub("", str(value)).split())


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def rule_name(rule: RuleResult) -> str:
    return clean(f"{rule.metric} {rule.bound} {rule.comparison} {rule.limit:.6g}")


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
