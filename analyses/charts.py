"""One look for all charts, and SVG text that is the same for the same numbers."""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, ACCENT, SECOND = "#1f2933", "#616e7c", "#3b6ea5", "#d9822b"
STYLE: Any = {
    "svg.hashsalt": "tunegate",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def figure_of(columns: int, *, height: float = 3.4) -> "tuple[Figure, list[Axes]]":
    """A figure with so many charts side by side, and its axes; sizes in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def svg(figure: "Figure") -> str:
    """SVG text without a date."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
