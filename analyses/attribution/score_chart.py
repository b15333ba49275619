"""Scores as a picture."""

from collections.abc import Sequence

import numpy as np

from analyses.attribution.report import Array
from analyses.charts import ACCENT, MUTED, SECOND, figure_of, svg


def score_chart(score_N: Array, control_N: Array, method: str) -> str:
    """Sorted scores, and scores for the targets over those for the benign controls."""
    figure, (left, right) = figure_of(2)
    ordered = np.sort(score_N)[::-1]
    left.plot(np.arange(1, len(ordered) + 1), ordered, ".", color=ACCENT, markersize=4)
    left.axhline(0, color=MUTED, linewidth=0.8)
    left.set_xlabel("rank")
    left.set_ylabel(f"{method}, mean over targets")
    right.plot(control_N, score_N, ".", color=ACCENT, markersize=4)
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.axvline(0, color=MUTED, linewidth=0.8)
    right.set_xlabel("benign controls")
    right.set_ylabel("targets")
    return svg(figure)


def check_chart(measured: Sequence[float], predicted: Sequence[float], method: str) -> str:
    """Measured change over predicted score, row by row."""
    figure, axes = figure_of(1)
    axes[0].plot(predicted, measured, "o", color=SECOND, markersize=4)
    axes[0].axhline(0, color=MUTED, linewidth=0.8)
    axes[0].axvline(0, color=MUTED, linewidth=0.8)
    axes[0].set_xlabel(f"{method}")
    axes[0].set_ylabel("measured change of the target's loss, nats")
    return svg(figure)
