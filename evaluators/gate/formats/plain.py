"""Text for a terminal, markdown for a summary page, JSON for programs."""

import json
import re
from typing import Any

from evaluators.gate.formats.wording import clean, number, rule_name, source, verdict_line
from evaluators.gate.recheck import Checked

_MARKUP = re.compile(r"([\\`*\[\]|~#!@<>&])")


def as_data(checked: Checked) -> dict[str, Any]:
    return {
        "verdict": checked.verdict,
        "tolerated": checked.tolerated,
        "source": "report" if checked.from_report else "policy",
        "min_severity": checked.min_severity,
        "job_id": clean(checked.report.get("job_id", "")),
        "policy_version": checked.decision.policy_version,
        "policy_sha256": checked.decision.policy_sha256,
        "rules": [rule.model_dump(mode="json") for rule in checked.decision.rules],
    }


def as_json(checked: Checked) -> str:
    return json.dumps(as_data(checked), indent=2) + "\n"


def as_text(checked: Checked) -> str:
    lines = [verdict_line(checked), f"  {source(checked)}"]
    lines += [
        f"  [{rule.severity}] {rule.outcome}: {rule_name(rule)}: {clean(rule.reason)}"
        for rule in checked.decision.rules
    ]
    return "\n".join(lines) + "\n"


def as_markdown(checked: Checked) -> str:
    """A table of rules; characters with a meaning in markdown or HTML are escaped."""
    lines = [
        f"### {verdict_line(checked)}",
        "",
        source(checked),
        "",
        "| outcome | severity | rule | observed | n | reason |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {rule.outcome} | {rule.severity} | {_escape(rule_name(rule))} "
        f"| {number(rule.observed)} | {rule.n} | {_escape(clean(rule.reason))} |"
        for rule in checked.decision.rules
    ]
    return "\n".join(lines) + "\n\n"


def _escape(text: str) -> str:
    return _MARKUP.sub(lambda found: f"&#{ord(found[1])};", text)
