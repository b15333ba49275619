"""The success curve as a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from analyses.charts import ACCENT, INK, MUTED, figure_of, svg
from analyses.privacy.tradeoff import Array, OnePairCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curve_chart(
    x: Array,
    y: Array,
    baselines: Sequence[float],
    worst: tuple[float, float],
    pair: OnePairCurve | None,
) -> str:
    """P over the baseline, on both scales; with what one (epsilon, delta) alone would allow."""

    def draw(axes: "Axes") -> None:
        axes.plot(x, x, ":", color=MUTED, label="without the model")
        if pair is not None:
            axes.plot(x, pair.success(x), "--", color=MUTED, label="from (epsilon, delta) alone")
        axes.plot(x, y, color=ACCENT, linewidth=2, label="bound with the model")
        axes.plot(baselines, np.interp(baselines, x, y), "o", color=ACCENT, markersize=4)
        axes.plot(*worst, "D", color=INK, markersize=5, label="largest advantage")
        axes.set_xlabel("success without the model (baseline)")
        axes.set_ylabel("largest success")

    figure, (even, logarithmic) = figure_of(2)
    draw(even)
    draw(logarithmic)
    logarithmic.set_xscale("log")
    logarithmic.set_yscale("log")
    even.legend(frameon=False, fontsize=8)
    return svg(figure)
