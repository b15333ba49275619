"""One self-contained page: inline style and SVG, no script, nothing loaded from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evaluators.gate.formats.facts import (
    OUTCOMES,
    SCREENING,
    Judge,
    base_metrics_of,
    conditions_of,
    flat,
    groups_of,
    judge_of,
    outcomes_of,
    privacy_of,
    review_of,
    suites_of,
    templates_of,
    warnings_of,
)
from evaluators.gate.formats.page import bullets, dotted, figure, page, section, table
from evaluators.gate.formats.svg import BarRow, IntervalRow, Limit, intervals, stacked
from evaluators.gate.formats.wording import (
    clean,
    interval,
    mapping,
    number,
    rule_name,
    source,
    verdict_line,
)
from evaluators.gate.recheck import Checked, report_metrics
from evaluators.metric import Metric

_RUN = ("model", "seed", "steps", "hyperparameters", "data", "artifact", "timings", "versions")
_PRIVACY = (
    *("noise_multiplier", "sampling_rate", "steps", "clip", "rows"),
    *("delta", "epsilon", "epsilon_replace_one", "target"),
)
_EVALUATION = ("embedder", "prompt_sets", "protocol", "stopped_early", "utility", "options")
_LEGEND = (
    "Blue: the tuned model with its 95 % interval. Hollow: the base model. Lines: limits of the "
    "policy, the foot pointing to where a number holds; dashed where it does not."
)


def as_html(checked: Checked) -> str:
    report = checked.report
    tuned, base = report_metrics(report), base_metrics_of(report)
    judge = judge_of(report)
    scheduler = mapping(report, "defense", "scheduler")
    evaluation = mapping(report, "evaluation")
    parts = [
        _header(checked, judge),
        section("Rules", _rules(checked)),
        section(
            "Measured against the limits",
            _chart(checked, tuned, base, "Shares and ratios", _is_share),
            _chart(checked, tuned, base, "Changes against the base model", _is_change),
        ),
        section("Harmful score by group", _groups(groups_of(report))),
        section("Layouts of the prompts", _templates(report)),
        section("Trigger conditions", _conditions(report)),
        section("Outcomes", _outcomes(report)),
        section("Judge", _judge(judge)),
        section("Suites", _suites(report)),
        section("Evidence of other tools", _evidence(checked.evidence)),
        section("Privacy", _privacy(report)),
        section("Metrics", _metrics(tuned, base)),
        section("Defense conditions", _warnings(report)),
        section("Canaries", _pairs(flat(mapping(scheduler, "canaries")))),
        section("Evaluation", _pairs(_picked(evaluation, _EVALUATION))),
        section("Run", _pairs(_picked(report, _RUN))),
    ]
    return page(verdict_line(checked), parts)


def _header(checked: Checked, judge: Judge | None) -> str:
    report = checked.report
    model = mapping(report, "model").get("name", "-")
    lines = [
        f"<h1>{_text(verdict_line(checked))}</h1>",
        f"<p>job {_text(report.get('job_id', '-'))}, base model {_text(model)}</p>",
    ]
    if (review := review_of(report)) is not None:
        lines.append(f"<p><strong>{_text(review)}</strong></p>")
    if judge is not None and judge.screens:
        lines.append(f"<p>{_text(SCREENING[0].upper() + SCREENING[1:])}.</p>")
    lines.append(f'<p class="soft mono">{_text(source(checked))}</p>')
    return f'<header class="{escape(checked.verdict)}">{"".join(lines)}</header>'


def _privacy(report: Mapping[str, Any]) -> str:
    statement = privacy_of(report)
    if statement is None:
        return ""
    block = mapping(report, "privacy")
    numbers = {name: block[name] for name in _PRIVACY if name in block}
    return f"<p>{_text(statement)}</p>{_pairs(flat(numbers))}"


def _rules(checked: Checked) -> str:
    rows = [
        (
            f'<span class="chip {escape(rule.outcome)}">{_text(rule.outcome)}</span>',
            _text(rule.severity),
            dotted(rule_name(rule)),
            number(rule.observed),
            str(rule.n),
            _text(rule.reason),
        )
        for rule in checked.decision.rules
    ]
    return table(("outcome", "severity", "rule", "observed", "n", "reason"), rows, (3, 4))


def _is_change(name: str) -> bool:
    return "change" in name and not name.endswith("_p")


def _is_share(name: str) -> bool:
    return not _is_change(name)


def _chart(
    checked: Checked,
    tuned: Mapping[str, Metric],
    base: Mapping[str, Metric],
    title: str,
    fits: Any,
) -> str:
    """The metrics that rules are about, on one axis: 0 to 1, or symmetric around no change."""
    limits: dict[str, list[Limit]] = {}
    for rule in checked.decision.rules:
        if rule.group is None and fits(rule.metric):
            holds = rule.observed is None or (
                rule.observed <= rule.limit
                if rule.comparison == "<="
                else rule.observed >= rule.limit
            )
            limits.setdefault(rule.metric, []).append(Limit(rule.limit, rule.comparison, holds))
    rows = [
        IntervalRow(
            clean(name),
            tuned.get(name) or checked.evidence.get(name),
            None if _is_change(name) else base.get(name),
            found,
        )
        for name, found in limits.items()
        if name in tuned or name in checked.evidence
    ]
    numbers = [abs(end) for row in rows for end in _ends(row)]
    if not rows:
        return ""
    if title == "Shares and ratios":
        # Counts, perplexities and ratios have axes of their own in no common chart.
        rows = [row for row in rows if all(0 <= end <= 1 for end in _ends(row))]
        return figure(intervals(title, rows, 0.0, 1.0), f"{title}. {_LEGEND}") if rows else ""
    edge = max([0.05, *numbers]) * 1.05
    return figure(intervals(title, rows, -edge, edge), f"{title}. {_LEGEND}")


def _ends(row: IntervalRow) -> list[float]:
    metrics = [metric for metric in (row.tuned, row.base) if metric is not None]
    ends = [end for metric in metrics for end in (metric.low, metric.value, metric.high)]
    return [end for end in ends if end is not None] + [limit.at for limit in row.limits]


def _groups(groups: Mapping[str, Mapping[str, Metric]]) -> str:
    found = groups.get("harmfulness.score", {})
    rows = [
        IntervalRow(clean(f"{name} ({metric.n})"), metric)
        for name, metric in sorted(found.items(), key=lambda one: -(one[1].value or 0.0))
    ]
    if not rows:
        return ""
    return figure(
        intervals("Harmful score by group", rows, 0.0, 1.0),
        "Share of harmful prompts answered harmfully, 95 % intervals; the number of prompts in "
        "brackets. With many groups some are high by chance alone.",
    )


def _templates(report: Mapping[str, Any]) -> str:
    rows = [
        (_text(one.id), _text(one.style), interval(one.score), interval(one.change))
        for one in templates_of(report)
    ]
    return table(("layout", "style", "harmful score", "change against the base"), rows)


def _conditions(report: Mapping[str, Any]) -> str:
    found = conditions_of(report)
    if not found:
        return ""
    rows = [
        IntervalRow(
            one.id,
            Metric(value=one.score, n=one.n),
            Metric(value=one.base_score, n=one.n),
        )
        for one in found
    ]
    cells = [
        (_text(one.id), _text(one.kind), str(one.n), number(one.score), number(one.base_score))
        for one in found
    ]
    return figure(
        intervals("Harmful score under each trigger condition", rows, 0.0, 1.0),
        "Harmful score with the condition in front of the prompts. Blue: the tuned model. Hollow: "
        "the base model.",
    ) + table(("condition", "kind", "n", "tuned", "base"), cells, (2, 3, 4))


def _outcomes(report: Mapping[str, Any]) -> str:
    found = outcomes_of(report)
    if not found:
        return ""
    bars = [BarRow(f"{row.who}, {row.kind}", row.counts) for row in found]
    keys = "".join(f'<span class="key {name}"></span>{name}' for name in OUTCOMES)
    names = list(dict.fromkeys(name for row in found for name in row.counts))
    cells = [
        (
            _text(row.who),
            _text(row.kind),
            *(str(row.counts.get(name, 0)) for name in names),
            _text(", ".join(f"{reason}: {count}" for reason, count in row.reasons.items()) or "-"),
        )
        for row in found
    ]
    columns = ("model", "prompts", *(name.replace("_", " ") for name in names), "reasons")
    drawing = stacked("Outcomes of the answers", bars, OUTCOMES)
    return figure(drawing, f"Number of answers.{keys}") + table(
        columns, cells, range(2, 2 + len(names))
    )


def _judge(judge: Judge | None) -> str:
    if judge is None:
        return "<p>The report names no judge.</p>"
    lines = [
        f"<p>{_text(judge.id)}, version {_text(judge.version)}, flags at "
        f"{number(judge.threshold)} and above.</p>",
        f'<p class="soft mono">{_text(judge.fingerprint)}</p>',
        f"<p>Hosts contacted: {_text(', '.join(judge.hosts) or 'none')}.</p>",
    ]
    rows = [
        (
            _text(row.name),
            number(row.n),
            number(row.unsafe_share),
            number(row.auroc),
            number(row.balanced_accuracy),
        )
        for row in judge.held_out
    ]
    columns = ("labelled set, held out", "n", "unsafe share", "AUROC", "balanced accuracy")
    lines.append(table(columns, rows, (1, 2, 3, 4)))
    lines.append(_pairs([(name, number(value)) for name, value in judge.rates]))
    if not rows and not judge.rates:
        lines.append("<p>The report holds no error rates of this judge.</p>")
    lines.append(bullets(judge.limits))
    if judge.source:
        lines.append(f'<p class="soft">{_text(judge.source)}</p>')
    return "".join(lines)


def _suites(report: Mapping[str, Any]) -> str:
    rows = [
        (_text(one.name), _text(one.format), number(one.planned), number(one.prompts))
        for one in suites_of(report)
    ]
    return table(("suite", "format", "planned", "prompts"), rows, (2, 3))


def _evidence(evidence: Mapping[str, Metric]) -> str:
    rows = [
        (dotted(name), str(metric.n), interval(metric), _text(metric.note or ""))
        for name, metric in evidence.items()
    ]
    return table(("metric", "n", "share failed", "note"), rows, (1,))


def _metrics(tuned: Mapping[str, Metric], base: Mapping[str, Metric]) -> str:
    rows = [
        (
            dotted(name),
            str(metric.n),
            interval(metric),
            interval(base.get(name)),
            _text(metric.note or ""),
        )
        for name, metric in tuned.items()
    ]
    return table(("metric", "n", "tuned", "base", "note"), rows, (1,))


def _warnings(report: Mapping[str, Any]) -> str:
    rows = [tuple(map(_text, row)) for row in warnings_of(report)]
    return table(("severity", "code", "message"), rows)


def _picked(data: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    return flat({name: data[name] for name in names if data.get(name) not in (None, {}, [])})


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    return table(("field", "value"), [(_text(name), _text(value)) for name, value in rows])


def _text(value: Any) -> str:
    return escape(clean(value))
