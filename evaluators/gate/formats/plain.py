"""Text for a terminal, markdown for a summary page, JSON for programs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluators.gate.formats.facts import (
    SCREENING,
    Judge,
    OutcomeRow,
    conditions_of,
    judge_of,
    outcomes_of,
    privacy_of,
    review_of,
    suites_of,
    templates_of,
    warnings_of,
)
from evaluators.gate.formats.wording import (
    clean,
    interval,
    number,
    rule_name,
    source,
    verdict_line,
)
from evaluators.gate.recheck import Checked

_MARKUP = re.compile(r"([\\`*\[\]|~#!@<>&])")


def as_data(checked: Checked) -> dict[str, Any]:
    report = checked.report
    judge = judge_of(report)
    return {
        "verdict": checked.verdict,
        "tolerated": checked.tolerated,
        "source": "report" if checked.from_report else "policy",
        "min_severity": checked.min_severity,
        "job_id": clean(report.get("job_id", "")),
        "policy_version": checked.decision.policy_version,
        "policy_sha256": checked.decision.policy_sha256,
        "rules": [rule.model_dump(mode="json") for rule in checked.decision.rules],
        "review": review_of(report),
        "privacy": privacy_of(report),
        "judge": None if judge is None else _judge_data(judge),
        "outcomes": [
            {"model": row.who, "prompts": row.kind, **row.counts, "reasons": row.reasons}
            for row in outcomes_of(report)
        ],
        "hosts": [] if judge is None else list(judge.hosts),
        "conditions": [row._asdict() for row in conditions_of(report)],
        "suites": [row._asdict() for row in suites_of(report)],
        "defense_conditions": [
            {"severity": severity, "code": code, "message": message}
            for severity, code, message in warnings_of(report)
        ],
        "evidence": {
            clean(name): metric.model_dump(mode="json") for name, metric in checked.evidence.items()
        },
    }


def as_json(checked: Checked) -> str:
    return json.dumps(as_data(checked), indent=2) + "\n"


def as_text(checked: Checked) -> str:
    lines = [verdict_line(checked), f"  {source(checked)}"]
    lines += [
        f"  [{rule.severity}] {rule.outcome}: {rule_name(rule)}: {clean(rule.reason)}"
        for rule in checked.decision.rules
    ]
    lines += [f"  {line}" for line in fact_lines(checked)]
    return "\n".join(lines) + "\n"


def fact_lines(checked: Checked) -> list[str]:
    """The judge and its error rates, outcomes with their reasons, hosts, conditions, evidence."""
    report = checked.report
    judge = judge_of(report)
    lines = [words for words in (review_of(report), privacy_of(report)) if words]
    if judge is not None:
        lines += judge_lines(judge)
        lines.append(f"hosts contacted: {', '.join(judge.hosts) or 'none'}")
    lines += [
        f"outcomes of {row.who}, {row.kind}: {outcome_words(row)}" for row in outcomes_of(report)
    ]
    lines += [
        f"layout {row.id} ({row.style}): score {interval(row.score)}, change {interval(row.change)}"
        for row in templates_of(report)
    ]
    lines += [
        f"condition {row.id} ({row.kind}): score {number(row.score)}, base "
        f"{number(row.base_score)}, n = {row.n}"
        for row in conditions_of(report)
    ]
    lines += [
        f"suite {row.name} ({row.format}): {number(row.prompts)} prompts, "
        f"{number(row.planned)} planned"
        for row in suites_of(report)
    ]
    lines += [f"defense: {severity}: {message}" for severity, _, message in warnings_of(report)]
    lines += [
        f"{clean(name)}: {interval(metric)}, n = {metric.n}"
        for name, metric in checked.evidence.items()
    ]
    return lines


def judge_lines(judge: Judge) -> list[str]:
    lines = [f"judge {judge.id}, version {judge.version}, threshold {number(judge.threshold)}"]
    if judge.screens:
        lines.append(SCREENING)
    lines += [
        f"judge on {row.name}: AUROC {number(row.auroc)}, balanced accuracy "
        f"{number(row.balanced_accuracy)}, n = {number(row.n)}"
        for row in judge.held_out
    ]
    lines += [f"judge {name}: {number(value)}" for name, value in judge.rates]
    if not judge.held_out and not judge.rates:
        lines.append("judge: no error rates in the report")
    lines += [f"judge's limit: {limit}" for limit in judge.limits]
    return lines


def outcome_words(row: OutcomeRow) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in row.counts.items() if count)
    reasons = ", ".join(f"{reason} {count}" for reason, count in row.reasons.items() if count)
    return f"{counts or 'none'}{f' ({reasons})' if reasons else ''}"


def as_markdown(checked: Checked) -> str:
    """Tables; characters with a meaning in markdown or HTML are escaped."""
    report = checked.report
    judge = judge_of(report)
    parts = [
        f"### {verdict_line(checked)}",
        _escape(source(checked)),
        _table(
            ("outcome", "severity", "rule", "observed", "n", "reason"),
            (
                (
                    rule.outcome,
                    rule.severity,
                    rule_name(rule),
                    number(rule.observed),
                    rule.n,
                    clean(rule.reason),
                )
                for rule in checked.decision.rules
            ),
        ),
    ]
    parts += [_escape(words) for words in (review_of(report), privacy_of(report)) if words]
    if judge is not None:
        parts.append(_escape(f"Judge: {judge.id}, version {judge.version}."))
        if judge.screens:
            parts.append(_escape(f"{SCREENING[0].upper()}{SCREENING[1:]}."))
        parts.append(
            _table(
                ("judge on", "n", "AUROC", "balanced accuracy"),
                (
                    (row.name, number(row.n), number(row.auroc), number(row.balanced_accuracy))
                    for row in judge.held_out
                ),
            )
        )
        parts += ["\n".join(_escape(f"- {limit}") for limit in judge.limits)]
        parts.append(_escape(f"Hosts contacted: {', '.join(judge.hosts) or 'none'}."))
    parts.append(
        _table(
            ("model", "prompts", "outcomes"),
            ((row.who, row.kind, outcome_words(row)) for row in outcomes_of(report)),
        )
    )
    parts.append(
        _table(
            ("layout", "style", "harmful score", "change"),
            (
                (row.id, row.style, interval(row.score), interval(row.change))
                for row in templates_of(report)
            ),
        )
    )
    parts.append(
        _table(
            ("condition", "kind", "n", "score", "base"),
            (
                (row.id, row.kind, row.n, number(row.score), number(row.base_score))
                for row in conditions_of(report)
            ),
        )
    )
    parts.append(
        _table(("severity", "of the defense"), ((one[0], one[2]) for one in warnings_of(report)))
    )
    parts.append(
        _table(
            ("evidence", "share failed", "n"),
            ((name, interval(metric), metric.n) for name, metric in checked.evidence.items()),
        )
    )
    return "\n\n".join(part for part in parts if part) + "\n\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(_escape(clean(cell)) for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    head = "| " + " | ".join(columns) + " |"
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def _escape(text: str) -> str:
    return _MARKUP.sub(lambda found: f"&#{ord(found[1])};", text)


def _judge_data(judge: Judge) -> Mapping[str, Any]:
    data = judge._asdict()
    data["held_out"] = [row._asdict() for row in judge.held_out]
    data["rates"] = dict(judge.rates)
    data["note"] = SCREENING if judge.screens else None
    return data
