"""SARIF 2.1.0, the form that code scanning pages read."""

import json

from evaluators.gate.formats.wording import clean, rule_name, source
from evaluators.gate.recheck import Checked

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(checked: Checked) -> str:
    """One result per rule that does not hold; the verdict is a property of the run."""
    rules = checked.decision.rules
    metrics = sorted({clean(rule.metric) for rule in rules})
    results = [
        {
            "ruleId": clean(rule.metric),
            "ruleIndex": metrics.index(clean(rule.metric)),
            "kind": "fail",
            "level": "error" if checked.min_severity == "warning" else rule.severity,
            "message": {"text": f"{rule.outcome}: {rule_name(rule)}: {clean(rule.reason)}"},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": "report.json"}}}],
            "properties": {"outcome": rule.outcome},
        }
        for rule in rules
        if rule.outcome != "passed"
    ]
    driver = {
        "name": "tunegate",
        "rules": [{"id": name, "shortDescription": {"text": name}} for name in metrics],
    }
    run = {
        "tool": {"driver": driver},
        "results": results,
        "properties": {"verdict": checked.verdict, "source": source(checked)},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"
