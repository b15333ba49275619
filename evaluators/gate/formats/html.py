"""One self-contained page: inline style and SVG, no script, nothing loaded from elsewhere."""

from html import escape
from typing import Any

from evaluators.gate.formats.wording import clean, mapping, number, rule_name, source, verdict_line
from evaluators.gate.recheck import Checked, ReportError, report_metrics
from evaluators.metric import Metric

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--paper:#fff;--line:#ccc;--mark:#2563a8}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--paper:#161616;--line:#444;--mark:#7db4ec}}
body{font:15px/1.5 sans-serif;color:var(--ink);background:var(--paper);max-width:70rem;
margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid var(--line);padding:.3rem .5rem;text-align:left;vertical-align:top}
"""
_WIDTH = 160


def as_html(checked: Checked) -> str:
    report = dict(checked.report)
    scheduler = mapping(report, "defense", "scheduler")
    parts = [
        f"<h1>{_text(verdict_line(checked))}</h1><p>{_text(source(checked))}</p>",
        f"<p>job {_text(report.get('job_id', '-'))}</p>",
        _table("Rules", ("outcome", "severity", "rule", "reason"), _rules(checked)),
        _metrics(report),
        _pairs("Scorer", _flat(mapping(report, "evaluation", "scorer"))),
        _table("Defense conditions", ("severity", "code", "message"), _conditions(report)),
        _pairs("Canaries", _flat(mapping(scheduler, "canaries"))),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{_text(verdict_line(checked))}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _rules(checked: Checked) -> list[tuple[str, ...]]:
    return [
        (_text(rule.outcome), _text(rule.severity), _text(rule_name(rule)), _text(rule.reason))
        for rule in checked.decision.rules
    ]


def _metrics(report: dict[str, Any]) -> str:
    tuned = report_metrics(report)
    try:
        base = report_metrics(report, "base_metrics")
    except ReportError:
        base = {}
    rows: list[tuple[str, ...]] = [
        (_text(name), str(metric.n), _value(metric), _interval(metric, base.get(name)),
         _value(base.get(name)))
        for name, metric in tuned.items()
    ]  # fmt: skip
    return _table("Metrics", ("metric", "n", "tuned", "tuned above, base below", "base"), rows)


def _value(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    if metric.low is None or metric.high is None:
        return number(metric.value)
    return f"{number(metric.value)} [{number(metric.low)}, {number(metric.high)}]"


def _interval(tuned: Metric, base: Metric | None) -> str:
    """Both intervals on one axis of their own, which always holds zero."""
    drawn = [(metric, y) for metric, y in ((tuned, 8), (base, 20)) if metric is not None]
    ends = [end for metric, _ in drawn for end in (metric.low, metric.value, metric.high)]
    known = [0.0, *(end for end in ends if end is not None)]
    least, span = min(known), (max(known) - min(known)) or 1.0

    def at(value: float) -> str:
        return f"{4 + (value - least) / span * (_WIDTH - 8):.1f}"

    marks = [f'<line x1="{at(0)}" x2="{at(0)}" y1="0" y2="28" stroke="var(--line)"/>']
    for metric, y in drawn:
        if metric.low is not None and metric.high is not None:
            marks.append(
                f'<line x1="{at(metric.low)}" x2="{at(metric.high)}" y1="{y}" y2="{y}" '
                'stroke="var(--mark)" stroke-width="2"/>'
            )
        if metric.value is not None:
            marks.append(f'<circle cx="{at(metric.value)}" cy="{y}" r="3" fill="var(--mark)"/>')
    return f'<svg width="{_WIDTH}" height="28" role="img">{"".join(marks)}</svg>'


def _conditions(report: dict[str, Any]) -> list[tuple[str, ...]]:
    found = mapping(report, "defense").get("conditions")
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    keys = ("severity", "code", "message")
    return [tuple(_text(item.get(key, "-")) for key in keys) for item in items]


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in data.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((_text(prefix + key), _text("-" if value is None else value)))
    return rows


def _pairs(title: str, rows: list[tuple[str, ...]]) -> str:
    return _table(title, ("field", "value"), rows)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>none in the report</p>"
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<h2>{title}</h2><table><tr>{head}</tr>\n{body}</table>"


def _text(value: Any) -> str:
    return escape(clean(value))
