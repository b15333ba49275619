"""SARIF 2.1.0, the form that code scanning pages read."""

import json

from evaluators.gate.formats.plain import as_data, fact_lines
from evaluators.gate.formats.wording import clean, rule_name, source
from evaluators.gate.policy import KNOWN_METRICS
from evaluators.gate.recheck import Checked
from evaluators.gate.verdict import HOLDS

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# Facts of the report that a reader of the results wants beside them.
_FACTS = ("judge", "outcomes", "hosts", "conditions", "suites", "defense_conditions", "evidence")


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
            "partialFingerprints": {"tunegate/rule/v1": rule_name(rule)},
            "properties": {"outcome": rule.outcome},
        }
        for rule in rules
        if rule.outcome not in HOLDS
    ]
    driver = {
        "name": "tunegate",
        "rules": [
            {"id": name, "shortDescription": {"text": KNOWN_METRICS.get(name, name)}}
            for name in metrics
        ],
    }
    data = as_data(checked)
    run = {
        "tool": {"driver": driver},
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": line}} for line in fact_lines(checked)
                ],
            }
        ],
        "results": results,
        "properties": {
            "verdict": checked.verdict,
            "source": source(checked),
            **{name: data[name] for name in _FACTS},
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"
