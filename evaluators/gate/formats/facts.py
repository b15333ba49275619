"""What a report says beside its metrics, read leniently: a part that is absent or odd is left out.

Everything here is for reading only; the decision never depends on it.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from evaluators.gate.formats.wording import clean, mapping
from evaluators.gate.recheck import ReportError, report_groups, report_metrics
from evaluators.metric import Metric

OUTCOMES = ("answered", "refused", "empty", "judge_failed", "unparsable")
FLAGS = ("truncated", "input_truncated")
SCREENING = (
    "screening only: the embedded scorer's absolute rates carry an error of several points; the "
    "paired change against the base model carries the decision"
)
_EMBEDDED = "embedded"


class HeldOut(NamedTuple):
    """Error rates of the judge on one labelled set that it was not fitted on."""

    name: str
    n: int | None
    unsafe_share: float | None
    auroc: float | None
    balanced_accuracy: float | None


class Judge(NamedTuple):
    """Who judged harmfulness, and how far that judge is known to err."""

    id: str
    version: str
    threshold: float | None
    fingerprint: str
    hosts: tuple[str, ...]
    held_out: tuple[HeldOut, ...]
    limits: tuple[str, ...]
    source: str
    rates: tuple[tuple[str, float], ...]

    @property
    def screens(self) -> bool:
        return self.id.startswith(_EMBEDDED)


class OutcomeRow(NamedTuple):
    """How the answers of one model to one kind of prompt ended."""

    who: str
    kind: str
    counts: Mapping[str, int]
    reasons: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(count for name, count in self.counts.items() if name not in FLAGS)


class Condition(NamedTuple):
    """The harmful score under one trigger condition."""

    id: str
    kind: str
    n: int
    score: float | None
    base_score: float | None


class Template(NamedTuple):
    """The harmful score where prompts were laid out in this way."""

    id: str
    style: str
    score: Metric | None
    change: Metric | None


class Suite(NamedTuple):
    """A prompt suite, and how much of it was there."""

    name: str
    format: str
    planned: int | None
    prompts: int | None


def judge_of(report: Mapping[str, Any]) -> Judge | None:
    """evaluation.judge; a report of an older release has evaluation.scorer without a card."""
    evaluation = mapping(report, "evaluation")
    found = mapping(evaluation, "judge") or mapping(evaluation, "scorer")
    if not found:
        return None
    card = mapping(found, "card")
    hosts, limits = found.get("hosts"), card.get("limits")
    return Judge(
        id=clean(found.get("id", "-")),
        version=clean(found.get("version", "-")),
        threshold=_number(found.get("threshold")),
        fingerprint=clean(found.get("fingerprint", found.get("coefficients_sha256", "-"))),
        hosts=tuple(map(clean, hosts)) if isinstance(hosts, list) else (),
        held_out=tuple(_held_out(mapping(card, "held_out"))),
        limits=tuple(map(clean, limits)) if isinstance(limits, list) else (),
        source=clean(card.get("source", "")),
        rates=tuple(_rates(mapping(found, "error_rates"))),
    )


def outcomes_of(report: Mapping[str, Any]) -> list[OutcomeRow]:
    """evaluation.outcomes: base first."""
    found = mapping(report, "evaluation", "outcomes")
    rows = []
    for who in sorted(found):
        for kind, counts in mapping(found, who).items():
            numbers = {clean(name): value for name, value in mapping(counts).items()}
            kept = {name: value for name, value in numbers.items() if _is_count(value)}
            reasons = {
                clean(reason): number
                for reason, number in mapping(counts, "reasons").items()
                if _is_count(number)
            }
            rows.append(OutcomeRow(clean(who), clean(kind), kept, reasons))
    return rows


def conditions_of(report: Mapping[str, Any]) -> list[Condition]:
    """evaluation.conditions: the trigger sweep."""
    return [
        Condition(
            clean(row.get("id", "-")),
            clean(row.get("kind", "-")),
            row["n"] if _is_count(row.get("n")) else 0,
            _number(row.get("score")),
            _number(row.get("base_score")),
        )
        for row in _rows(mapping(report, "evaluation").get("conditions"))
    ]


def templates_of(report: Mapping[str, Any]) -> list[Template]:
    """evaluation.templates: the layouts under which harmful prompts were asked."""
    return [
        Template(
            clean(row.get("id", "-")),
            clean(row.get("style", "-")),
            _metric(mapping(row, "metrics").get("harmfulness.score")),
            _metric(mapping(row, "metrics").get("harmfulness.change_vs_base")),
        )
        for row in _rows(mapping(report, "evaluation").get("templates"))
    ]


def suites_of(report: Mapping[str, Any]) -> list[Suite]:
    return [
        Suite(
            clean(row.get("name", "-")),
            clean(row.get("format", "-")),
            _count(row.get("planned")),
            _count(row.get("prompts")),
        )
        for row in _rows(mapping(report, "evaluation").get("suites"))
    ]


def warnings_of(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """defense.conditions: (severity, code, message) of what the defense met in the data."""
    keys = ("severity", "code", "message")
    return [
        (clean(row.get(keys[0], "-")), clean(row.get(keys[1], "-")), clean(row.get(keys[2], "-")))
        for row in _rows(mapping(report, "defense").get("conditions"))
    ]


def review_of(report: Mapping[str, Any]) -> str | None:
    """What reviewers made of the stored decision; None where nobody reviewed it."""
    reviewed = mapping(report, "reviewed_gate").get("verdict")
    stored = mapping(report, "gate").get("verdict")
    if reviewed is None:
        return None
    words = f"reviewed: the reviewers' verdict is {reviewed}, the stored one {stored}"
    overrides = _rows(report.get("overrides"))
    pending = sum(row.get("state") == "pending" for row in overrides)
    if pending:
        words += f"; of {len(overrides)} overrides {pending} not approved by a second person"
    return clean(words)


def privacy_of(report: Mapping[str, Any]) -> str | None:
    """The guarantee of a private job in one sentence; None for another job."""
    statement = mapping(report, "privacy").get("statement")
    return clean(statement) if isinstance(statement, str) else None


def base_metrics_of(report: Mapping[str, Any]) -> dict[str, Metric]:
    try:
        return report_metrics(report, "base_metrics")
    except ReportError:
        return {}


def groups_of(report: Mapping[str, Any]) -> dict[str, dict[str, Metric]]:
    try:
        return report_groups(report)
    except ReportError:
        return {}


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of a mapping as (dotted name, text); lists are joined where they hold plain values."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{clean(key)}"
        if isinstance(value, dict):
            rows += flat(value, f"{name}.")
        elif isinstance(value, list):
            if value and not any(isinstance(item, dict | list) for item in value):
                rows.append((name, ", ".join(map(clean, value))))
        else:
            rows.append((name, "-" if value is None else clean(value)))
    return rows


def _held_out(data: Mapping[str, Any], prefix: str = "") -> Iterable[HeldOut]:
    """Sets may be grouped, as by leave-one-source-out and others."""
    for name, value in data.items():
        found = mapping(value)
        if {"auroc", "balanced_accuracy"} & found.keys():
            yield HeldOut(
                clean(prefix + name),
                _count(found.get("n")),
                _number(found.get("unsafe_share")),
                _number(found.get("auroc")),
                _number(found.get("balanced_accuracy")),
            )
        elif found:
            yield from _held_out(found, f"{name}: ")


def _rates(data: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in data.items():
        if (number := _number(value)) is not None:
            yield clean(name), number


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _metric(value: Any) -> Metric | None:
    try:
        return Metric.model_validate(value)
    except ValidationError:
        return None


def _number(value: Any) -> float | None:
    """A finite number; None for all else, such as a whole number beyond every float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= sys.float_info.max else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None
