"""The gate taken again over a stored report: no model, no service, only numbers."""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from evaluators.gate.policy import EVIDENCE_PREFIX, Policy
from evaluators.gate.shortfall import report_shortfalls
from evaluators.gate.verdict import HOLDS, GateDecision, RuleResult, Verdict, decide
from evaluators.metric import Metric

REPORT_VERSION = 1
MAX_BYTES = 5_000_000

Severity = Literal["error", "warning"]


class ReportError(ValueError):
    """A report that cannot be judged; the message names the field and what is wrong."""


class Checked(NamedTuple):
    """A decision with how it was reached.

    verdict: the decision's, made stricter by min_severity. tolerated: failed, but within
    max_failures. from_report: the stored decision, not one under a policy that was given.
    evidence: metrics that other tools measured, judged by the policy's evidence rules.
    """

    decision: GateDecision
    verdict: Verdict
    tolerated: bool
    from_report: bool
    min_severity: Severity
    report: Mapping[str, Any]
    evidence: Mapping[str, Metric]


def read_report(content: bytes) -> dict[str, Any]:
    """The content of report.json. Raises ReportError for all that is not one of version 1."""
    if len(content) > MAX_BYTES:
        raise ReportError(f"{len(content)} bytes; a report has at most {MAX_BYTES}")
    if content.startswith(b"\xef\xbb\xbf"):
        raise ReportError("starts with a byte order mark; store it as plain UTF-8")
    try:
        data = json.loads(
            content.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique
        )
    except ReportError:
        raise
    except RecursionError:
        raise ReportError("nested too deeply for a report") from None
    except ValueError as error:
        raise ReportError(f"not valid JSON in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise ReportError("a report is a JSON object")
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise ReportError(f"version: expected {REPORT_VERSION}, got {version!r}")
    if version > REPORT_VERSION:
        raise ReportError(
            f"version: {version} is from a newer release, this one reads {REPORT_VERSION}; "
            "update tunegate"
        )
    return data


def report_metrics(report: Mapping[str, Any], field: str = "metrics") -> dict[str, Metric]:
    """The metrics of a report. Raises ReportError where one is malformed."""
    stored = report.get(field)
    if not isinstance(stored, dict) or not stored:
        raise ReportError(f"{field}: missing or empty; nothing to judge")
    return {name: _metric(f"{field}.{name}", value) for name, value in stored.items()}


def report_groups(report: Mapping[str, Any]) -> dict[str, dict[str, Metric]]:
    """Metrics by group, {metric: {group: Metric}}. Raises ReportError where one is malformed."""
    stored = report.get("group_metrics") or {}
    if not isinstance(stored, dict) or not all(isinstance(part, dict) for part in stored.values()):
        raise ReportError("group_metrics: expected metrics by name and group")
    return {
        name: {
            group: _metric(f"group_metrics.{name}.{group}", value) for group, value in part.items()
        }
        for name, part in stored.items()
    }


def recheck(
    report: Mapping[str, Any],
    policy: Policy | None,
    min_severity: Severity = "error",
    max_failures: int = 0,
    evidence: Mapping[str, Metric] | None = None,
) -> Checked:
    """Judge a report's metrics by a policy, or take its stored decision where there is none.

    evidence (evaluators.gate.evidence) is judged with the metrics, and only by a policy; metrics of
    that kind inside the report count for nothing. max_failures tolerates that many broken rules,
    and only where every rule that does not hold is broken by a measured number: a missing one is
    never tolerated. Raises ReportError.
    """
    evidence = evidence or {}
    metrics = {
        name: metric
        for name, metric in report_metrics(report).items()
        if not name.startswith(EVIDENCE_PREFIX)
    }
    if policy is None:
        decision = stored_decision(report)
    else:
        shortfalls = report_shortfalls(report, metrics)
        decision = decide(policy, {**metrics, **evidence}, report_groups(report), shortfalls)
    counted = [rule for rule in decision.rules if min_severity == "warning" or _is_error(rule)]
    unmet = [rule for rule in counted if rule.outcome not in HOLDS]
    verdict = decision.verdict
    if any(rule.outcome == "failed" for rule in unmet):
        verdict = "failed"
    elif unmet and verdict == "passed":
        verdict = "inconclusive"
    tolerated = (
        verdict == "failed"
        and 0 < len(unmet) <= max_failures
        and all(rule.outcome == "failed" for rule in unmet)
    )
    return Checked(decision, verdict, tolerated, policy is None, min_severity, report, evidence)


def stored_decision(report: Mapping[str, Any]) -> GateDecision:
    """The decision in a report. Raises ReportError where its verdict denies its own rules."""
    try:
        decision = GateDecision.model_validate_json(json.dumps(report.get("gate")), strict=True)
    except ValidationError as error:
        raise ReportError(f"gate: {_problem(error)}") from None
    if not decision.rules:
        raise ReportError("gate: no rules; a decision without rules is none")
    unmet = [rule for rule in decision.rules if _is_error(rule) and rule.outcome not in HOLDS]
    if any(rule.outcome == "failed" for rule in unmet):
        fits = decision.verdict == "failed"
    else:
        fits = (decision.verdict == "passed") == (not unmet)
    if not fits:
        raise ReportError(f"gate: the verdict {decision.verdict!r} does not follow from its rules")
    return decision


def _metric(where: str, value: Any) -> Metric:
    try:
        metric = Metric.model_validate(value, strict=True)
    except ValidationError as error:
        raise ReportError(f"{where}: {_problem(error)}") from None
    numbers = (metric.value, metric.low, metric.high)
    if any(number is not None and not math.isfinite(number) for number in numbers):
        raise ReportError(f"{where}: not a finite number")
    if metric.low is not None and metric.high is not None and metric.low > metric.high:
        raise ReportError(f"{where}: low is above high")
    return metric


def _is_error(rule: RuleResult) -> bool:
    return rule.severity == "error"


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _no_constant(name: str) -> float:
    raise ReportError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ReportError("a key is given twice in one object")
    return made
