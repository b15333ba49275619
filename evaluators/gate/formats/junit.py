"""JUnit XML: one test case per rule."""

from xml.etree import ElementTree as ET

from evaluators.gate.formats.wording import clean, rule_name, source, verdict_line
from evaluators.gate.recheck import Checked
from evaluators.gate.verdict import RuleResult


def as_junit(checked: Checked) -> str:
    """failure: a broken rule. error: one that could not be decided. skipped: only a warning."""
    suite = ET.Element("testsuite", name="tunegate.gate", tests=str(len(checked.decision.rules)))
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for position, rule in enumerate(checked.decision.rules, 1):
        name = f"{position}. {rule_name(rule)}"
        case = ET.SubElement(suite, "testcase", classname="tunegate.gate", name=name)
        kind = _kind(checked, rule)
        if kind is not None:
            counts[kind] += 1
            ET.SubElement(case, kind, message=f"{rule.outcome}: {clean(rule.reason)}")
    for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(counts[kind]))
    ET.SubElement(suite, "system-out").text = f"{verdict_line(checked)}; {source(checked)}"
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _kind(checked: Checked, rule: RuleResult) -> str | None:
    if rule.outcome == "passed":
        return None
    if rule.severity == "warning" and checked.min_severity == "error":
        return "skipped"
    return "failure" if rule.outcome == "failed" else "error"
