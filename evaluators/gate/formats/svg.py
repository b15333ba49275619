"""Small charts as SVG text: intervals against limits, and stacked bars.

Colours are classes of the page's style, so that one drawing serves light, dark and print.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple

from evaluators.metric import Metric

WIDTH = 760
_LABEL = 250
_LABEL_CHARACTERS = 36
_RIGHT = 16
_ROW = 34
_HEAD = 26
_BAR = 22


class Limit(NamedTuple):
    """One bound of the policy: where it lies and on which side numbers hold."""

    at: float
    comparison: Literal["<=", ">="]
    holds: bool


class IntervalRow(NamedTuple):
    """One line of a chart of intervals. `tuned` is drawn above `base`."""

    label: str
    tuned: Metric | None
    base: Metric | None = None
    limits: Sequence[Limit] = ()


class BarRow(NamedTuple):
    """One bar: parts by name, in the order of the legend."""

    label: str
    parts: Mapping[str, int]


def intervals(title: str, rows: Sequence[IntervalRow], low: float, high: float) -> str:
    """Points with their 95 % intervals on one axis from `low` to `high`; limits as lines.

    What lies outside the axis ends at its edge. A row without any number shows its label alone.
    """
    span = (high - low) or 1.0

    def at(value: float) -> float:
        share = min(1.0, max(0.0, (value - low) / span))
        return _LABEL + share * (WIDTH - _LABEL - _RIGHT)

    height = _HEAD + _ROW * len(rows) + 6
    parts = []
    for tick in ticks(low, high):
        x = at(tick)
        parts.append(_line(x, _HEAD - 6, x, height - 6, "zero" if tick == 0 else "grid"))
        parts.append(_text(x, 12, f"{tick:g}", "tick", "middle"))
    for place, row in enumerate(rows):
        middle = _HEAD + _ROW * place + _ROW / 2
        parts.append(_label(middle + 4, row.label))
        for limit in row.limits:
            x, top, bottom = at(limit.at), middle - 13, middle + 13
            kind = "limit" if limit.holds else "limit broken"
            # The foot points to the side on which numbers hold.
            foot = x - 7 if limit.comparison == "<=" else x + 7
            parts.append(_line(x, top, x, bottom, kind) + _line(x, bottom, foot, bottom, kind))
        above = middle if row.base is None else middle - 6
        for metric, y, kind in ((row.tuned, above, "tuned"), (row.base, middle + 6, "base")):
            if metric is None:
                continue
            if metric.low is not None and metric.high is not None:
                parts.append(_line(at(metric.low), y, at(metric.high), y, f"bar {kind}"))
            if metric.value is not None:
                parts.append(
                    f'<circle cx="{at(metric.value):.1f}" cy="{y:.1f}" r="4" class="{kind}"/>'
                )
    return _svg(title, height, parts)


def stacked(title: str, rows: Sequence[BarRow], names: Sequence[str]) -> str:
    """Bars of equal length, divided by the shares of their parts; counts inside where they fit."""
    height = _ROW * len(rows) + 6
    length = WIDTH - _LABEL - _RIGHT
    parts = []
    for place, row in enumerate(rows):
        top = _ROW * place + (_ROW - _BAR) / 2
        total = sum(row.parts.get(name, 0) for name in names)
        parts.append(_label(top + 16, f"{row.label} ({total})"))
        x = float(_LABEL)
        for name in names:
            count = row.parts.get(name, 0)
            if not count:
                continue
            width = length * count / total
            words = escape(f"{row.label}: {name} {count}")
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_BAR}" '
                f'class="part {escape(name)}"><title>{words}</title></rect>'
            )
            if width > 26:
                parts.append(_text(x + width / 2, top + 16, str(count), "count", "middle"))
            x += width
    return _svg(title, height, parts)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about as many as wanted."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted + 1)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    words = escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{words}">'
        f"<title>{words}</title>{''.join(parts)}</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _label(y: float, words: str) -> str:
    """The words before a row; what does not fit gives way in the middle, and shows on hovering."""
    if len(words) <= _LABEL_CHARACTERS:
        return _text(0, y, words, "label")
    half = _LABEL_CHARACTERS // 2
    shown = f"{words[:half]}\u2026{words[1 - half :]}"
    title = f"<title>{escape(words)}</title>"
    return _text(0, y, shown, "label").replace("</text>", f"{title}</text>")


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
