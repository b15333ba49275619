"""Charts of a bundle, as SVG text: the same numbers give the same bytes."""

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from defenses.panacea.layers import LayerCoefficients

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, BAR, MARK = "#1f2933", "#616e7c", "#3b6ea5", "#d9822b"
MOST_LABELS = 16
STYLE: Any = {
    "svg.hashsalt": "tunegate",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def layer_chart(
    coefficients: LayerCoefficients, average: Mapping[int, float] | None, title: str
) -> str:
    """Bars of c_k by decoder layer, with the average over the last joint steps as marks where there
    is one, and the shares by module and by factor. SVG without a date."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = layer_figure(coefficients, average, title)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def layer_figure(
    coefficients: LayerCoefficients, average: Mapping[int, float] | None, title: str
) -> "Figure":
    """The figure behind layer_chart, 8 x 4 inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.6, 1.0), height_ratios=_heights(coefficients))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _by_layer(figure.add_subplot(grid[:, 0]), coefficients.by_layer, average)
    _shares(figure.add_subplot(grid[0, 1]), dict(sorted(coefficients.by_module.items())), "module")
    _shares(figure.add_subplot(grid[1, 1]), dict(sorted(coefficients.by_factor.items())), "factor")
    return figure


def _by_layer(
    axes: "Axes", by_layer: Mapping[int, float], average: Mapping[int, float] | None
) -> None:
    layers = list(by_layer)
    places = range(len(layers))
    axes.bar(places, list(by_layer.values()), color=BAR, width=0.8, label="eps of this bundle")
    if average is not None:
        marks = [average.get(layer, 0.0) for layer in layers]
        axes.plot(
            places,
            marks,
            "o",
            color=MARK,
            markersize=4,
            label="mean of the last tenth of the steps",
        )
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2,
                    borderaxespad=0.1, handletextpad=0.4, columnspacing=1.2)  # fmt: skip
    every = math.ceil(len(layers) / MOST_LABELS)
    shown = [place for place in places if layers[place] < 0 or layers[place] % every == 0]
    axes.set_xticks(shown, ["none" if layers[place] < 0 else str(layers[place]) for place in shown])
    axes.set_xlabel("decoder layer k")
    axes.set_ylabel("coefficient c(k), share of ‖eps‖²")
    axes.set_ylim(bottom=0.0)
    axes.margins(x=0.01, y=0.08)
    _plain(axes)


def _shares(axes: "Axes", shares: Mapping[str, float], kind: str) -> None:
    places = range(len(shares))
    bars = axes.barh(places, list(shares.values()), color=BAR, height=0.65)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares.values()], padding=3, color=INK)
    axes.set_yticks(places, list(shares))
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.2 * max(*shares.values(), 1e-9))
    axes.set_xticks([])
    axes.set_title(f"share by {kind}", loc="left", fontsize=9)
    _plain(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _heights(coefficients: LayerCoefficients) -> tuple[float, float]:
    return len(coefficients.by_module) + 1.5, len(coefficients.by_factor) + 1.5
