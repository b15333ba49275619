"""The frame of a page and its style: light, dark and on paper, nothing loaded from elsewhere."""

import re
from collections.abc import Sequence
from html import escape

from evaluators.gate.formats.wording import clean

_LIGHT = (
    "--ink:#1c2126;--soft:#5b6570;--paper:#ffffff;--card:#f6f7f9;--line:#d5dae0;"
    "--tuned:#1f5fa8;--base:#8a94a0;--limit:#2f7d4f;--broken:#c2362b;"
    "--passed:#2f7d4f;--failed:#c2362b;--inconclusive:#9a6400;"
    "--answered:#7aa6d6;--refused:#3f8f6b;--empty:#b9a24c;--judge_failed:#c2603b;"
    "--unparsable:#8d5fa8;--on-part:#10151a"
)
_DARK = (
    "--ink:#e4e8ec;--soft:#9ca7b3;--paper:#14181c;--card:#1c2228;--line:#37404a;"
    "--tuned:#74b0ee;--base:#7d8894;--limit:#62bf8a;--broken:#f0786c;"
    "--passed:#62bf8a;--failed:#f0786c;--inconclusive:#e0b04c;"
    "--answered:#5b8fc9;--refused:#4fa883;--empty:#c9b35e;--judge_failed:#d97f58;"
    "--unparsable:#a983c4;--on-part:#0c1013"
)
_STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
color:var(--ink);background:var(--paper);max-width:66rem;margin:2rem auto;padding:0 1.25rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:0}}
h2{{font-size:1.12rem;margin:2.2rem 0 .6rem;padding-bottom:.25rem;
border-bottom:1px solid var(--line)}}
p,ul{{margin:.4rem 0}}
.soft{{color:var(--soft)}}
.mono{{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.86em;
overflow-wrap:anywhere}}
header{{background:var(--card);border:1px solid var(--line);border-left:.45rem solid var(--ink);
border-radius:.4rem;padding:1rem 1.2rem}}
header.passed{{border-left-color:var(--passed)}}
header.failed{{border-left-color:var(--failed)}}
header.inconclusive{{border-left-color:var(--inconclusive)}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:.92rem}}
td,th{{border-bottom:1px solid var(--line);padding:.35rem .55rem;text-align:left;
vertical-align:top}}
th{{color:var(--soft);font-weight:600;vertical-align:bottom}}
td:last-child{{min-width:11rem}}
th.number,td.number{{text-align:right;font-variant-numeric:tabular-nums;min-width:0}}
td.number{{white-space:nowrap}}
.name{{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.86em}}
.chip{{display:inline-block;border:1px solid currentColor;border-radius:1rem;
padding:0 .55rem;font-size:.82rem;white-space:nowrap;color:var(--inconclusive)}}
.chip.passed,.chip.skipped{{color:var(--passed)}}
.chip.failed{{color:var(--failed)}}
figure{{margin:.6rem 0}}
figcaption{{color:var(--soft);font-size:.86rem}}
svg{{width:100%;height:auto;display:block;overflow:visible}}
svg text{{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
fill:var(--ink)}}
svg .tick{{fill:var(--soft)}}
svg .count{{fill:var(--on-part);font-weight:600}}
svg line{{stroke-width:1}}
svg .grid{{stroke:var(--line)}}
svg .zero{{stroke:var(--soft)}}
svg .bar{{stroke-width:3;stroke-linecap:round}}
svg line.tuned{{stroke:var(--tuned)}}
svg circle.tuned{{fill:var(--tuned)}}
svg line.base{{stroke:var(--base)}}
svg circle.base{{fill:var(--paper);stroke:var(--base);stroke-width:2}}
svg .limit{{stroke:var(--limit);stroke-width:2}}
svg .limit.broken{{stroke:var(--broken);stroke-dasharray:4 2}}
svg .part{{stroke:var(--paper)}}
.key{{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin:0 .35em 0 .9em}}
.answered{{fill:var(--answered)}}.refused{{fill:var(--refused)}}.empty{{fill:var(--empty)}}
.judge_failed{{fill:var(--judge_failed)}}.unparsable{{fill:var(--unparsable)}}
.key.answered{{background:var(--answered)}}.key.refused{{background:var(--refused)}}
.key.empty{{background:var(--empty)}}.key.judge_failed{{background:var(--judge_failed)}}
.key.unparsable{{background:var(--unparsable)}}
details summary{{cursor:pointer;color:var(--soft)}}
@media print{{
:root{{color-scheme:light;{_LIGHT}}}
body{{margin:0;max-width:none;font-size:11px}}
h2{{break-after:avoid}}
tr,figure,header{{break-inside:avoid}}
.wide{{overflow:visible}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
}}
"""


def page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>'
        f"{escape(clean(title))}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading with what belongs to it; nothing at all where all parts are empty."""
    found = [part for part in parts if part]
    return f"<section><h2>{escape(title)}</h2>{''.join(found)}</section>" if found else ""


def dotted(words: str) -> str:
    """A dotted name, which may be broken after its dots and underscores."""
    text = re.sub(r"([._])(?=[A-Za-z])", r"\1<wbr>", escape(clean(words)))
    return f'<span class="name">{text}</span>'


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Cells are markup already; `numbers` are the columns set to the right."""
    if not rows:
        return ""
    head = _row("th", [escape(column) for column in columns], numbers)
    body = "\n".join(_row("td", row, numbers) for row in rows)
    return f'<div class="wide"><table>{head}\n{body}</table></div>'


def _row(tag: str, cells: Sequence[str], numbers: Sequence[int]) -> str:
    kinds = [' class="number"' if place in numbers else "" for place in range(len(cells))]
    parts = [f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)]
    return f"<tr>{''.join(parts)}</tr>"


def figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>"


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
