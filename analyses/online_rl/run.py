"""attribution.online_rl: an experiment, a recorded round of a policy, or of a language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyses.context import AnalysisContext, AnalysisError, Chart, Outcome, Table
from analyses.online_rl.buffer import Floats
from analyses.online_rl.charts import (
    diagnosis_chart,
    learning_chart,
    returns_chart,
    round_chart,
    temporal_chart,
)
from analyses.online_rl.diagnostics import monte_carlo_advantages
from analyses.online_rl.experiment import arms_of, run_arms
from analyses.online_rl.files import Columns
from analyses.online_rl.iif import ALL_NEGATIVE, drop_indices
from analyses.online_rl.influence import Scores
from analyses.online_rl.recorded import score_recorded
from analyses.online_rl.recorded_answers import score_recorded_answers
from analyses.online_rl.spec import OnlineRLRequest, OnlineRLResult, Record, Summary

RECORD_COLUMNS = ("score", "self_term", "cross_term", "advantage")


def run(request: OnlineRLRequest, context: AnalysisContext) -> Outcome:
    """The result of attribution.online_rl. Raises AnalysisError and Stopped."""
    if request.experiment is not None:
        return _experiment(request, context)
    if "buffer" not in context.files:
        raise AnalysisError("a recorded round needs the file of buffer; give it", "buffer")
    if request.policy is not None:
        samples, scores, columns, warnings = score_recorded(request, context)
        advantage_N = samples.advantages.double().numpy()
        truth_N = _monte_carlo(columns, request)
        extra = {} if truth_N is None else {"monte_carlo_advantage": _optional(truth_N)}
    else:
        scores, listed, warnings = score_recorded_answers(request, context)
        advantage_N, truth_N, extra = np.array(listed), None, {}
    score_N = scores.score_N.numpy()
    summary = _summary(scores, request.p)
    if summary.n_negative == summary.n and request.p == 1:
        warnings = (*warnings, ALL_NEGATIVE)
    table = {
        "score": score_N.tolist(),
        "self_term": scores.self_term_N.tolist(),
        "cross_term": scores.cross_term_N.tolist(),
        "advantage": advantage_N.tolist(),
        **extra,
    }
    known = None if truth_N is None or not np.isfinite(truth_N).any() else truth_N
    return Outcome(
        OnlineRLResult(summary=summary, records=_records(table, request.listed)),
        tables=(_record_table(table),),
        charts=(
            Chart(
                "Scores in time",
                "Left: each record; below 0 it works against the target. Right: where the sum "
                "rises, the rollout helped.",
                round_chart(score_N),
            ),
            Chart(
                "Learning diagnosis",
                "Points at a strong advantage with a score below 0 are the ones to look at; right "
                "of 0 in the second picture the advantage has the sign of the returns.",
                diagnosis_chart(score_N, advantage_N, known),
            ),
        ),
        warnings=tuple(warnings),
    )


def _experiment(request: OnlineRLRequest, context: AnalysisContext) -> Outcome:
    assert request.experiment is not None
    runs = run_arms(request, context)
    arms = arms_of(request.experiment, runs)
    charts = [
        Chart(
            "Return by round",
            "Lines are means over seeds, bands go from the worst to the best seed.",
            returns_chart(arms),
        )
    ]
    warnings = _experiment_warnings(request, runs)
    table = _round_table(runs)
    scored = next((name for name in runs if name.startswith("iif")), None)
    if scored is None:
        result = OnlineRLResult(summary=None, records=(), arms=arms)
        return Outcome(result, tables=(table,), charts=tuple(charts), warnings=tuple(warnings))
    shown = runs[scored][0]
    about = f"Arm {scored.replace('_', ' ')}, first seed. "
    charts.append(
        Chart(
            "Scores over the rounds",
            about + "Scores shrink as the policy settles; then their order is noise.",
            temporal_chart(shown["rounds"]),
        )
    )
    charts.append(
        Chart(
            "Learning diagnosis",
            about + "Roughness: high early, drops as helpful records cluster. Right: advantages "
            "whose sign the returns of the buffer contradict, if filtering finds them the dark "
            "line is the higher one.",
            learning_chart(shown["rounds"]),
        )
    )
    values = {name: value for name, value in shown["summary"].items() if name != "self_protected"}
    result = OnlineRLResult(
        summary=Summary(**{**values, "drop_indices": tuple(values["drop_indices"])}),
        records=_records(shown["records"], request.listed),
        arms=arms,
    )
    tables = (table, _record_table(shown["records"]))
    return Outcome(result, tables=tables, charts=tuple(charts), warnings=tuple(warnings))


def _experiment_warnings(
    request: OnlineRLRequest, runs: Mapping[Any, Sequence[Mapping[str, Any]]]
) -> list[str]:
    warnings = []
    for name, of_arm in runs.items():
        notes = [text for run in of_arm for text in run["warnings"]]
        if notes:
            warnings.append(f"{name}: {len(notes)} round(s) were not filtered, first: {notes[0]}")
        if blind := sum(run["blind"] for run in of_arm):
            warnings.append(
                f"{name}: {blind} round(s) had no reward at all; scores then rest on the critic "
                "alone, and filtering by them can lead away from the goal."
            )
    if request.ppo.optimizer == "adam":
        warnings.append("The update uses Adam; scores assume plain SGD, so order is approximate.")
    if request.seeds < 3:
        warnings.append(
            f"{request.seeds} seed(s): differences between arms may be luck; use 3 or more."
        )
    return warnings


def _summary(scores: Scores, p: float) -> Summary:
    score_N = scores.score_N.numpy()
    return Summary(
        n=len(score_N),
        n_negative=int((score_N < 0).sum()),
        target_value=scores.target_value,
        target_grad_norm=scores.target_grad_norm,
        training_grad_norm=scores.training_grad_norm,
        score_scale=float(np.abs(score_N).max()),
        drop_indices=tuple(drop_indices(score_N, p)),
    )


def _ranks(score_N: Floats) -> NDArray[np.int64]:
    """1 for the largest score; ties by index."""
    ranks = np.zeros(len(score_N), dtype=np.int64)
    ranks[np.argsort(-score_N, kind="stable")] = np.arange(1, len(score_N) + 1)
    return ranks


def _records(table: Mapping[str, Sequence[Any]], listed: int) -> tuple[Record, ...]:
    ranks = _ranks(np.array(table["score"]))
    n = len(ranks)
    half = listed // 2
    return tuple(
        Record(
            index=index,
            rank=int(ranks[index]),
            **{name: float(table[name][index]) for name in RECORD_COLUMNS},
        )
        for index in range(n)
        if n <= listed or ranks[index] <= listed - half or ranks[index] > n - half
    )


def _record_table(table: Mapping[str, Sequence[Any]]) -> Table:
    ranks = _ranks(np.array(table["score"]))
    return Table("records", {"index": list(range(len(ranks))), **table, "rank": ranks.tolist()})


def _round_table(runs: Mapping[Any, Sequence[Mapping[str, Any]]]) -> Table:
    """A line per arm, seed and round; what only filtered arms have is empty elsewhere."""
    lines = [
        {"arm": name, "run": k, "round": r + 1, "return": value, **row}
        for name, of_arm in runs.items()
        for k, run in enumerate(of_arm)
        for r, (value, row) in enumerate(
            zip(run["returns"], run["rounds"] or [{}] * len(run["returns"]), strict=True)
        )
    ]
    names = list(dict.fromkeys(name for line in lines for name in line))
    return Table("rounds", {name: [line.get(name) for line in lines] for name in names})


def _monte_carlo(columns: Columns, request: OnlineRLRequest) -> Floats | None:
    """Monte-Carlo advantages, for numbered states with their rewards and ends in the file."""
    if not {"reward", "done"} <= columns.keys():
        return None
    states, actions = columns["obs"], columns["action"]
    if states.ndim > 1 and states.shape[1:] != (1,):
        return None
    if states.dtype.kind not in "iu" or actions.dtype.kind not in "iu":
        return None
    if any(columns[name].dtype.kind not in "iufb" for name in ("reward", "done")):
        return None
    return monte_carlo_advantages(
        states.ravel(), actions.ravel(), columns["reward"], columns["done"], request.ppo.gamma
    )


def _optional(values_N: Floats) -> list[float | None]:
    return [float(x) if np.isfinite(x) else None for x in values_N]
