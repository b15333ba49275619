"""Training with and without filtering on a task: arms by seeds, each kept as soon as it is done."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from analyses.context import AnalysisContext
from analyses.online_rl import tasks
from analyses.online_rl.buffer import Samples
from analyses.online_rl.diagnostics import (
    efficiency,
    first_round,
    monte_carlo_advantages,
    roughness,
    sign_mismatch,
)
from analyses.online_rl.iif import FilteredRound, InfluenceFilter
from analyses.online_rl.influence import Scores
from analyses.online_rl.ppo import PPO
from analyses.online_rl.spec import Arm, ArmName, OnlineRLRequest, Reference, Task

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Run = Mapping[str, Any]


class Filtering(NamedTuple):
    """What an arm does to a round; None as choose: nothing; None as p: the request's."""

    choose: Literal["influence", "random"] | None
    p: float | None = None
    reference: Reference = "buffer"


FILTERING: Mapping[ArmName, Filtering] = {
    "ppo": Filtering(None),
    "iif": Filtering("influence"),
    "iif_leave_one_out": Filtering("influence", reference="leave_one_out"),
    "iif_all": Filtering("influence", 1.0),
    "random": Filtering("random"),
    "random_all": Filtering("random", 1.0),
}


def run_arms(request: OnlineRLRequest, context: AnalysisContext) -> dict[ArmName, list[Run]]:
    """Every arm's runs, one per seed from context.seed on; finished ones are read from work.

    Raises Stopped between rounds and AnalysisError where gymnasium is missing.
    """
    context.work.mkdir(parents=True, exist_ok=True)
    total = request.seeds * len(request.arms) * request.rounds
    done = 0
    runs: dict[ArmName, list[Run]] = {name: [] for name in request.arms}
    for seed in range(context.seed, context.seed + request.seeds):
        for name in request.arms:
            path = context.work / f"{_digest(request, name)}-{name}-{seed}.json"
            if not path.is_file():
                run = _train(request, name, seed, context, done, total)
                draft = path.with_suffix(".part")
                draft.write_text(json.dumps(run), "utf-8")
                draft.replace(path)
            runs[name].append(_read(path))
            done += request.rounds
    return runs


def arms_of(task: Task, runs: Mapping[ArmName, Sequence[Run]]) -> tuple[Arm, ...]:
    """Each arm's curve over its seeds, and its efficiency against PPO, seed by seed."""
    scale = tasks.TASKS[task]
    half = (scale.worst + scale.best) / 2
    standard = runs.get("ppo")
    arms = []
    for name, of_arm in runs.items():
        returns_KR = np.array([run["returns"] for run in of_arm])
        saved = (
            [efficiency(s["returns"], o["returns"]) for s, o in zip(standard, of_arm, strict=True)]
            if standard is not None and name != "ppo"
            else []
        )
        peaks = [one.at_peak for one in saved if one.at_peak is not None]
        averages = [one.average for one in saved]
        dropped = [row["dropped"] / row["n"] for run in of_arm for row in run["rounds"]]
        arms.append(
            Arm(
                name=name,
                returns=tuple(returns_KR.mean(axis=0).tolist()),
                lowest=tuple(returns_KR.min(axis=0).tolist()),
                highest=tuple(returns_KR.max(axis=0).tolist()),
                first_half=tuple(first_round(run["returns"], half) for run in of_arm),
                dropped=float(np.mean(dropped)) if dropped else 0.0,
                saved_rounds=float(np.mean(averages)) if averages else None,
                saved_rounds_spread=float(np.std(averages, ddof=1)) if len(averages) > 1 else None,
                saved_at_peak=float(np.mean(peaks)) if peaks and len(peaks) == len(saved) else None,
            )
        )
    return tuple(arms)


def _train(
    request: OnlineRLRequest,
    name: ArmName,
    seed: int,
    context: AnalysisContext,
    done: int,
    total: int,
) -> Run:
    task = request.experiment
    assert task is not None
    ppo = PPO(tasks.make(task), request.ppo, seed)
    way = FILTERING[name]
    rows: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}

    def look(records: Samples, scores: Scores) -> None:
        rows.append(_diagnosis(ppo, records, scores, kept))

    chosen = None
    if way.choose is not None:
        chosen = InfluenceFilter(
            ppo,
            request.p if way.p is None else way.p,
            seed=seed,
            reference=way.reference,
            choose=way.choose,
            noise_floor=request.noise_floor,
            on_scores=look,
        )
    returns = []
    blind = 0
    for k in range(request.rounds):
        context.check_stop()
        context.progress(f"{name}, seed {seed}", done + k, total)
        ppo.collect_rollouts()
        blind += not ppo.rewards_T.any()
        ppo.train()
        returns.append(tasks.return_of(ppo.policy, task, seed))
        if chosen is not None:
            _finish(rows[-1], chosen.rounds[-1], kept)
    return {
        "returns": returns,
        "rounds": rows,
        "records": {key: value for key, value in kept.items() if not key.startswith("_")},
        "summary": None if chosen is None else _summary(chosen.rounds[-1]),
        "warnings": [] if chosen is None else [r.warning for r in chosen.rounds if r.warning],
        "blind": 0 if chosen is None else blind,
    }


def _diagnosis(ppo: PPO, records: Samples, scores: Scores, kept: dict[str, Any]) -> dict[str, Any]:
    """A row on this round's scores; `kept` becomes the records in the order of the buffer."""
    back = torch.argsort(records.position)
    score_N = scores.score_N[back].numpy()
    with torch.no_grad():
        embeddings_ND = ppo.policy.latent(records.observations[back]).double().numpy()
    scale = float(np.abs(score_N).max())
    advantages_N = records.advantages[back].double().numpy()
    kept.clear()
    kept.update(
        score=score_N.tolist(),
        self_term=scores.self_term_N[back].tolist(),
        cross_term=scores.cross_term_N[back].tolist(),
        advantage=advantages_N.tolist(),
    )
    if ppo.policy.n_states is not None:
        states, actions = records.observations[back].numpy(), records.actions[back].numpy()
        truth_N = monte_carlo_advantages(
            states, actions, ppo.rewards_T, ppo.dones_T, ppo.settings.gamma
        )
        kept.update(
            state=states.tolist(),
            action=actions.tolist(),
            monte_carlo_advantage=[float(x) if np.isfinite(x) else None for x in truth_N],
            _truth=truth_N,
        )
    return {
        "n": len(score_N),
        "score_scale": scale,
        **{f"q{round(100 * q):02d}": float(np.quantile(score_N, q)) for q in QUANTILES},
        "roughness": roughness(embeddings_ND, score_N),
    }


def _finish(row: dict[str, Any], filtered: FilteredRound, kept: Mapping[str, Any]) -> None:
    """What the filter did, into the row."""
    row.update(n_negative=filtered.n_negative, dropped=len(filtered.dropped))
    row.update(sign_mismatch_dropped=None, sign_mismatch_kept=None)
    if "_truth" in kept:
        out = np.zeros(filtered.n, dtype=bool)
        out[list(filtered.dropped)] = True
        advantages = np.asarray(kept["advantage"])
        row["sign_mismatch_dropped"] = sign_mismatch(advantages[out], kept["_truth"][out])
        row["sign_mismatch_kept"] = sign_mismatch(advantages[~out], kept["_truth"][~out])


def _summary(filtered: FilteredRound) -> dict[str, Any]:
    scores = filtered.scores
    return {
        "n": filtered.n,
        "n_negative": filtered.n_negative,
        "target_value": scores.target_value,
        "target_grad_norm": scores.target_grad_norm,
        "training_grad_norm": scores.training_grad_norm,
        "score_scale": float(scores.score_N.abs().max()),
        "drop_indices": list(filtered.dropped),
        "self_protected": scores.self_protected(),
    }


def _digest(request: OnlineRLRequest, name: ArmName) -> str:
    """Names what shapes one run, so that another request's leftovers are not taken for it."""
    values = request.model_dump(mode="json", include={"experiment", "rounds", "noise_floor", "ppo"})
    values["p"] = None if name == "ppo" else FILTERING[name].p or request.p
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _read(path: Path) -> Run:
    run: Run = json.loads(path.read_text("utf-8"))
    return run
