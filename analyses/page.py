"""A result as one self-contained HTML page: no script, no request to anywhere."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from analyses.context import Outcome
from analyses.kind import Kind

MOST_ROWS = 50
MOST_CHARACTERS = 240
STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #616e7c; --line: #d5dbe1; --card: #fff;
  --page: #f6f7f9; --warn: #8a5300; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #3b4550;
  --card: #1b2127; --page: #12161a; --warn: #f0b463; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.lead, figcaption, .muted { color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  overflow-x: auto; }
.badge { border: 1px solid var(--line); border-radius: 1rem; padding: .05rem .6rem;
  font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.number { text-align: right; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem; } figure svg { max-width: 100%; height: auto; } figcaption { color: #616e7c; }
.warning { color: var(--warn); } pre { white-space: pre-wrap; margin: 0; font-size: .85rem; }
@media print { body { background: #fff; } }
"""


def page(kind: Kind, result: Mapping[str, Any], outcome: Outcome) -> str:
    """The page of a result. Every text of it is escaped; charts are SVG of our own making."""
    parts = [
        f"<h1>{_text(kind.title)}</h1>",
        f'<p class="lead">{_text(kind.question)}</p>',
        f'<p><span class="badge">{_text(kind.fidelity)}</span> {_text(kind.paper)}</p>',
    ]
    parts += [f'<p class="warning">Warning: {_text(text)}</p>' for text in outcome.warnings]
    values = outcome.result.model_dump(mode="json")
    single = {name: value for name, value in values.items() if not isinstance(value, list | dict)}
    if single:
        parts.append(f'<h2>Result</h2><div class="card">{_pairs(single)}</div>')
    for name, value in values.items():
        if isinstance(value, dict):
            parts.append(f'<h2>{_label(name)}</h2><div class="card">{_pairs(value)}</div>')
        elif isinstance(value, list) and value:
            parts.append(f'<h2>{_label(name)}</h2><div class="card">{_rows(value)}</div>')
    for chart in outcome.charts:
        parts.append(
            f"<h2>{_text(chart.title)}</h2><figure>{_inline(chart.svg)}"
            f"<figcaption>{_text(chart.caption)}</figcaption></figure>"
        )
    if kind.limits:
        items = "".join(f"<li>{_text(limit)}</li>" for limit in kind.limits)
        parts.append(f"<h2>Limits</h2><ul>{items}</ul>")
    parts.append(
        f'<h2>Request</h2><div class="card">{_pairs(result["request"])}</div>'
        f'<p class="muted">Kind {_text(kind.name)}, seed {_text(result["seed"])}.</p>'
    )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(kind.title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{_label(name)}</th>{_cell(value)}</tr>" for name, value in values.items()
    )
    return f"<table>{rows}</table>"


def _rows(values: Sequence[Any]) -> str:
    shown = values[:MOST_ROWS]
    more = (
        f'<p class="muted">{len(shown)} of {len(values)}; the rest is in result.json.</p>'
        if len(values) > len(shown)
        else ""
    )
    if not all(isinstance(value, dict) for value in shown):
        return (
            "<table>" + "".join(f"<tr>{_cell(value)}</tr>" for value in shown) + "</table>" + more
        )
    names = list(dict.fromkeys(name for value in shown for name in value))
    head = "".join(f"<th>{_label(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(_cell(value.get(name)) for name in names) + "</tr>" for value in shown
    )
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: Any) -> str:
    if value is None:
        return '<td class="muted">–</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int):
        return f'<td class="number">{value}</td>'
    if isinstance(value, float):
        return f'<td class="number">{value:.6g}</td>'
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    text = str(value)
    cut = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"
    return f"<td>{_text(cut)}</td>"


def _label(name: str) -> str:
    return _text(name.replace("_", " "))


def _text(value: object) -> str:
    return html.escape(str(value))


def _inline(svg: str) -> str:
    """The svg element without what may precede it in a file of its own."""
    return svg[max(svg.find("<svg"), 0) :]
