"""JUnit XML: one test case per rule."""

from xml.etree import ElementTree as ET

from evaluators.gate.formats.plain import fact_lines
from evaluators.gate.formats.wording import clean, rule_name, source, verdict_line
from evaluators.gate.recheck import Checked
from evaluators.gate.verdict import RuleResult

KINDS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def as_junit(checked: Checked) -> str:
    """failure: a broken rule. error: one that could not be decided. skipped: only a warning, or a
    rule that the policy lets be skipped. What the report says beside them is in system-out."""
    suite = ET.Element(
        "testsuite", name="tunegate.gate", tests=str(len(checked.decision.rules)), time="0"
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("verdict", checked.verdict),
        ("job_id", clean(checked.report.get("job_id", "-"))),
        ("policy_sha256", clean(checked.decision.policy_sha256)),
    ):
        ET.SubElement(properties, "property", name=name, value=value)
    counts = dict.fromkeys(KINDS, 0)
    for position, rule in enumerate(checked.decision.rules, 1):
        name = f"{position}. {rule_name(rule)}"
        case = ET.SubElement(suite, "testcase", classname="tunegate.gate", name=name, time="0")
        kind = _kind(checked, rule)
        if kind is not None:
            counts[kind] += 1
            ET.SubElement(case, kind, message=f"{rule.outcome}: {clean(rule.reason)}")
    for kind, attribute in KINDS.items():
        suite.set(attribute, str(counts[kind]))
    lines = [f"{verdict_line(checked)}; {source(checked)}", *fact_lines(checked)]
    ET.SubElement(suite, "system-out").text = "\n".join(lines)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _kind(checked: Checked, rule: RuleResult) -> str | None:
    if rule.outcome == "passed":
        return None
    if rule.outcome == "skipped":
        return "skipped"
    if rule.severity == "warning" and checked.min_severity == "error":
        return "skipped"
    return "failure" if rule.outcome == "failed" else "error"
