"""Pictures of a round and of an experiment."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analyses.charts import ACCENT, INK, MUTED, SECOND, figure_of, svg
from analyses.online_rl.buffer import Floats
from analyses.online_rl.spec import Arm, ArmName

COLOURS: Mapping[ArmName, str] = {
    "ppo": MUTED,
    "iif": ACCENT,
    "iif_leave_one_out": "#2a9d8f",
    "iif_all": "#7b5ea7",
    "random": SECOND,
    "random_all": "#b5651d",
}


def returns_chart(arms: Sequence[Arm]) -> str:
    """Mean return of each arm by round, with the range over seeds."""
    figure, (axes,) = figure_of(1)
    for arm in arms:
        rounds = np.arange(1, len(arm.returns) + 1)
        label = arm.name.replace("_", " ")
        axes.plot(rounds, arm.returns, color=COLOURS[arm.name], linewidth=2, label=label)
        axes.fill_between(
            rounds, arm.lowest, arm.highest, color=COLOURS[arm.name], alpha=0.15, linewidth=0
        )
    axes.set_xlabel("round")
    axes.set_ylabel("return")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def temporal_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Scores over the rounds: their spread, and how many are negative and dropped."""
    figure, (spread, shares) = figure_of(2)
    rounds = np.arange(1, len(rows) + 1)
    column = {
        name: np.array([row[name] for row in rows], dtype=float)
        for name in rows[0]
        if name.startswith("q") or name in ("n", "n_negative", "dropped")
    }
    spread.axhline(0, color=MUTED, linewidth=0.8)
    spread.fill_between(rounds, column["q05"], column["q95"], color=ACCENT, alpha=0.2, linewidth=0)
    spread.fill_between(rounds, column["q25"], column["q75"], color=ACCENT, alpha=0.35, linewidth=0)
    spread.plot(rounds, column["q50"], color=ACCENT, linewidth=2)
    spread.set_xlabel("round")
    spread.set_ylabel("score (median, 50%, 90%)")
    shares.plot(rounds, column["n_negative"] / column["n"], color=SECOND, label="negative")
    shares.plot(rounds, column["dropped"] / column["n"], color=INK, label="dropped")
    shares.set_ylim(0, 1)
    shares.set_xlabel("round")
    shares.set_ylabel("share of records")
    shares.legend(frameon=False, fontsize=8)
    return svg(figure)


def learning_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Roughness of the scores by round, and wrong signs among dropped and kept records."""
    figure, (rough, wrong) = figure_of(2)
    rounds = np.arange(1, len(rows) + 1)
    rough.plot(rounds, _values(rows, "roughness"), color=ACCENT, linewidth=2)
    rough.set_ylim(bottom=0)
    rough.set_xlabel("round")
    rough.set_ylabel("roughness")
    wrong.plot(rounds, _values(rows, "sign_mismatch_dropped"), color=INK, label="dropped")
    wrong.plot(rounds, _values(rows, "sign_mismatch_kept"), color=ACCENT, label="kept")
    wrong.set_ylim(0, 1)
    wrong.set_xlabel("round")
    wrong.set_ylabel("advantage of wrong sign")
    wrong.legend(frameon=False, fontsize=8)
    return svg(figure)


def round_chart(score_N: Floats) -> str:
    """A recorded round in time: each record's score, and the running sum."""
    figure, (each, total) = figure_of(2)
    index = np.arange(len(score_N))
    colours = np.where(score_N < 0, SECOND, ACCENT)
    each.axhline(0, color=MUTED, linewidth=0.8)
    each.scatter(index, score_N, s=6, c=colours.tolist(), linewidths=0)
    each.set_xlabel("record")
    each.set_ylabel("score")
    total.axhline(0, color=MUTED, linewidth=0.8)
    total.plot(index, np.cumsum(score_N), color=ACCENT, linewidth=1.5)
    total.set_xlabel("record")
    total.set_ylabel("sum of scores so far")
    return svg(figure)


def diagnosis_chart(score_N: Floats, advantage_N: Floats, truth_N: Floats | None) -> str:
    """Scores against advantages; where known, against advantage times the Monte-Carlo one."""
    figure, axes = figure_of(1 if truth_N is None else 2)
    axes[0].set_xlabel("advantage")
    parts = [(axes[0], advantage_N)]
    if truth_N is not None:
        axes[1].set_xlabel("advantage × Monte-Carlo advantage")
        parts.append((axes[1], advantage_N * truth_N))
    for one, x in parts:
        one.axhline(0, color=MUTED, linewidth=0.8)
        one.axvline(0, color=MUTED, linewidth=0.8)
        one.scatter(x, score_N, s=6, color=ACCENT, linewidths=0)
        one.set_ylabel("score")
    return svg(figure)


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)
