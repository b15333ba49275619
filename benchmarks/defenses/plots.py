"""Plots: harmful score and task accuracy by arm and ratio, and against each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.defenses.arms import ARMS
from benchmarks.defenses.tables import Line, Result, lines

FORMATS = ("svg", "png")


class PlotsUnavailableError(RuntimeError):
    """matplotlib is not installed."""


def write_plots(results: Sequence[Result], out: Path) -> list[Path]:
    """For every rung and attack: hs_*, fa_* and scatter_*, as SVG and PNG. A ratio of 0 (the
    benign set) joins every attack of its rung. Raises PlotsUnavailableError."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlotsUnavailableError(
            "plots need matplotlib: pip install matplotlib; the tables are written without it"
        ) from error
    mpl.use("agg")
    # Equal results give equal files.
    mpl.rcParams["svg.hashsalt"] = "tunegate"
    found = [line for line in lines(results) if line.results]
    written: list[Path] = []
    for rung in sorted({line.rung for line in found}):
        own = [line for line in found if line.rung == rung]
        attacks = sorted({line.attack for line in own} - {"benign_only"}) or ["benign_only"]
        for attack in attacks:
            chosen = [line for line in own if line.attack in (attack, "benign_only")]
            title = f"{rung}, {attack.replace('_', ' ')}"
            name = f"{rung.replace('/', '-')}_{attack}"
            written += _save(_by_ratio(chosen, "harmful_score", "harmful score, %", title),
                             out, f"hs_{name}")  # fmt: skip
            written += _save(_by_ratio(chosen, "accuracy", "task accuracy, %", title),
                             out, f"fa_{name}")  # fmt: skip
            written += _save(_scatter(chosen, title), out, f"scatter_{name}")
    return written


def _by_ratio(chosen: Sequence[Line], metric: str, label: str, title: str) -> Any:
    """Grouped bars: one group an arm, one bar a ratio, whiskers from low to high."""
    figure, axes = _figure()
    ratios = sorted({line.ratio for line in chosen})
    arms = [name for name in ARMS if any(line.arm == name for line in chosen)]
    width = 0.8 / max(len(ratios), 1)
    for place, ratio in enumerate(ratios):
        xs, means, lows, highs = [], [], [], []
        for line in (line for line in chosen if line.ratio == ratio):
            found = line.metric(metric)
            if found is None:
                continue
            xs.append(arms.index(line.arm) + (place - (len(ratios) - 1) / 2) * width)
            means.append(100 * found.mean)
            lows.append(100 * (found.mean - (found.mean if found.low is None else found.low)))
            highs.append(100 * ((found.mean if found.high is None else found.high) - found.mean))
        spread = [[max(0.0, low) for low in lows], [max(0.0, high) for high in highs]]
        axes.bar(xs, means, width, yerr=spread, capsize=2, label=f"p = {ratio:g}",
                 error_kw={"linewidth": 0.8})  # fmt: skip
    axes.set_xticks(range(len(arms)), arms, rotation=35, ha="right")
    axes.set_ylabel(label)
    axes.set_ylim(0, 105)
    axes.set_title(title)
    axes.legend(fontsize="small")
    return figure


def _scatter(chosen: Sequence[Line], title: str) -> Any:
    """Harmful score against task accuracy; the best corner is at the bottom right."""
    from matplotlib import colormaps

    figure, axes = _figure()
    colours = colormaps["tab20"]
    markers = "osv^Dp*hX"
    ratios = sorted({line.ratio for line in chosen})
    for line in chosen:
        harm, accuracy = line.metric("harmful_score"), line.metric("accuracy")
        if harm is None or accuracy is None:
            continue
        axes.scatter(
            100 * accuracy.mean,
            100 * harm.mean,
            color=colours(list(ARMS).index(line.arm) % 20) if line.arm in ARMS else "black",
            marker=markers[ratios.index(line.ratio) % len(markers)],
            label=f"{line.arm}, p = {line.ratio:g}",
        )
    axes.set_xlabel("task accuracy, %")
    axes.set_ylabel("harmful score, %")
    axes.set_title(title)
    axes.legend(fontsize="xx-small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def _figure() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, out: Path, name: str) -> list[Path]:
    paths = []
    for kind in FORMATS:
        path = out / f"{name}.{kind}"
        figure.savefig(path, metadata={"Date": None} if kind == "svg" else None, dpi=120)
        paths.append(path)
    return paths
