"""A recorded round: its files checked and read, and the scores of its records."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyses.context import AnalysisContext, AnalysisError
from analyses.online_rl.buffer import Samples, gae, standardize_by_minibatch
from analyses.online_rl.files import Columns, read_columns, read_tensors
from analyses.online_rl.influence import (
    ActionTarget,
    ReturnTarget,
    RoundInfluence,
    Scores,
    evaluate,
)
from analyses.online_rl.policy import ActorCritic, policy_of
from analyses.online_rl.ppo import replay
from analyses.online_rl.spec import OnlineRLRequest, PPOSettings, Target

SNAPSHOT_TOLERANCE = 1e-3
SATURATED = 0.999


class Round(NamedTuple):
    """What was scored: records, their scores, and what the reader must know."""

    samples: Samples
    scores: Scores
    columns: Columns
    warnings: tuple[str, ...]


def score_recorded(request: OnlineRLRequest, context: AnalysisContext) -> Round:
    """Scores of the request's round. Raises AnalysisError for what the files lack."""
    columns = read_columns(_file(context, "buffer"), "buffer")
    tensors = read_tensors(_file(context, "policy"))
    numbered = _numbered(columns, tensors)
    policy = policy_of(tensors, request.ppo.activation, numbered_states=numbered)
    samples = samples_of(columns, policy, request.ppo, "buffer")
    target: ActionTarget | ReturnTarget
    if request.target.kind == "sequence":
        raise AnalysisError(
            "a sequence target is for answers of a language model; use return", "target.kind"
        )
    if request.target.kind == "action":
        target = action_target(request.target, policy)
    elif request.holdout is None:
        target = ReturnTarget()
    else:
        other = read_columns(_file(context, "holdout"), "holdout")
        target = ReturnTarget(samples_of(other, policy, request.ppo, "holdout"))
    minibatch_N = _minibatches(request, columns, len(samples.advantages))
    warnings = _snapshot_warnings(policy, samples)
    context.check_stop()
    influence = RoundInfluence(
        copy.deepcopy(policy) if request.checkpoints == "start" else policy,
        samples,
        target,
        reference=request.reference,
        clip_range=request.ppo.clip_range,
        ent_coef=request.ppo.ent_coef,
    )
    if request.checkpoints == "start":
        weights_N = samples.advantages
        if request.normalize_advantage:
            weights_N = standardize_by_minibatch(weights_N, minibatch_N)
        influence.step(samples.position, weights_N)
    else:
        _all_steps(request, context, policy, samples, minibatch_N, influence)
        warnings.append(
            "The update was replayed with the request's settings; later epochs' minibatches are "
            "drawn, so scores are those of a like update, not of the very one."
        )
    scores = influence.scores()
    return Round(samples, scores, columns, (*warnings, *score_warnings(request, scores)))


def score_warnings(request: OnlineRLRequest, scores: Scores) -> list[str]:
    """What to mind in the scores themselves."""
    warnings = []
    if protected := scores.self_protected():
        warnings.append(
            f"{protected} record(s) have a positive score through their own term alone; with "
            "reference 'leave_one_out' they count as harmful."
        )
    if scores.clipped:
        warnings.append(
            f"{scores.clipped} time(s) a record lay on the clipped side of the loss, where its "
            "gradient and so its share of the score is 0."
        )
    if request.ppo.optimizer == "adam":
        warnings.append("The update used Adam; scores assume plain SGD, so order is approximate.")
    return warnings


def samples_of(columns: Columns, policy: ActorCritic, settings: PPOSettings, param: str) -> Samples:
    """The records of a buffer file for this policy. Raises AnalysisError.

    Without `advantage` it is computed from reward, value and done (and last_value, 0 if absent).
    """
    _require(columns, ("obs", "action", "logp_old"), param)
    n = len(columns["obs"])
    if n == 0:
        raise AnalysisError(f"the {param} has no records", param)
    for name, column in columns.items():
        if name != "last_value" and len(column) != n:
            raise AnalysisError(f"{param}: {name} has {len(column)} values, obs has {n}", param)
    if "advantage" in columns:
        advantage_N = _numbers(columns, "advantage", param)
        value_N = _numbers(columns, "value", param) if "value" in columns else 0 * advantage_N
        returns_N = advantage_N + value_N
    else:
        _require(columns, ("reward", "value", "done"), param, instead_of="advantage")
        value_N = _numbers(columns, "value", param)
        advantage_N, returns_N = gae(
            _numbers(columns, "reward", param),
            value_N,
            _numbers(columns, "done", param),
            float(np.ravel(columns.get("last_value", np.zeros(1)))[-1]),
            settings.gamma,
            settings.gae_lambda,
        )
    dtype = policy.action_net.weight.dtype
    logp_N = _numbers(columns, "logp_old", param)
    return Samples(
        _observations(columns["obs"], policy, param),
        _actions(columns["action"], policy, param),
        torch.as_tensor(value_N, dtype=dtype),
        torch.as_tensor(logp_N, dtype=dtype),
        torch.as_tensor(advantage_N, dtype=dtype),
        torch.as_tensor(returns_N, dtype=dtype),
        torch.arange(n),
    )


def action_target(target: Target, policy: ActorCritic) -> ActionTarget:
    """The state and action of the request, checked against the policy. Raises AnalysisError."""
    if target.state is None or target.action is None:
        raise AnalysisError(
            "a target of prompt and completion is for a language model; give state and action",
            "target",
        )
    state, action = np.asarray([target.state]), np.asarray([target.action])
    return ActionTarget(
        _observations(state, policy, "target.state"), _actions(action, policy, "target.action")
    )


def _all_steps(
    request: OnlineRLRequest,
    context: AnalysisContext,
    policy: ActorCritic,
    samples: Samples,
    minibatch_N: Tensor,
    influence: RoundInfluence,
) -> None:
    n, settings = len(samples.advantages), request.ppo
    total = settings.n_epochs * max(n // settings.batch_size, 1)
    steps = 0

    def on_step(batch: Samples, weights: Tensor) -> None:
        nonlocal steps
        context.check_stop()
        context.progress("optimiser steps", steps, total)
        influence.step(batch.position, weights)
        steps += 1

    replay(
        policy,
        samples,
        settings,
        torch.Generator().manual_seed(context.seed),
        first_epoch=minibatch_N,
        normalize_advantage=request.normalize_advantage,
        on_step=on_step,
    )


def _minibatches(request: OnlineRLRequest, columns: Columns, n: int) -> Tensor:
    if request.minibatch_ids is not None:
        if len(request.minibatch_ids) != n:
            raise AnalysisError(
                f"minibatch_ids has {len(request.minibatch_ids)} values for {n} records",
                "minibatch_ids",
            )
        return torch.tensor(request.minibatch_ids)
    if "minibatch_id" in columns:
        return torch.as_tensor(_numbers(columns, "minibatch_id", "buffer").astype(np.int64))
    return torch.arange(n) // request.ppo.batch_size


def _snapshot_warnings(policy: ActorCritic, samples: Samples) -> list[str]:
    with torch.no_grad():
        log_prob_N, _ = evaluate(policy, samples.observations, samples.actions)
    warnings = []
    off = float((log_prob_N - samples.old_log_prob).abs().max())
    if off > SNAPSHOT_TOLERANCE:
        warnings.append(
            f"logp_old differs from the policy file's by up to {off:.3g}: it may not be the policy "
            "from before the update, and the scores are then of another round."
        )
    if not policy.continuous and float((log_prob_N.exp() > SATURATED).double().mean()) > 0.9:
        warnings.append(
            "The policy is saturated: most actions have probability above 0.999, so gradients and "
            "scores are near 0 and their order is noise."
        )
    return warnings


def _numbered(columns: Columns, tensors: Mapping[str, Tensor]) -> bool:
    obs = columns.get("obs")
    first = tensors.get("mlp_extractor.policy_net.0.weight", tensors.get("action_net.weight"))
    if obs is None or first is None or first.ndim != 2:
        return False
    single = obs.ndim == 1 or (obs.ndim == 2 and obs.shape[1] == 1)
    return single and first.shape[1] > 1


def _observations(obs: NDArray[Any], policy: ActorCritic, param: str) -> Tensor:
    if obs.dtype == object or obs.dtype.kind not in "iufb":
        raise AnalysisError(f"{param}: observations are numbers of one shape", param)
    if not np.isfinite(obs).all():
        raise AnalysisError(f"{param}: an observation is not a finite number", param)
    flat = obs.reshape(len(obs), -1)
    if policy.n_states is None:
        if flat.shape[1] != policy.inputs:
            raise AnalysisError(
                f"{param}: an observation has {flat.shape[1]} numbers, the policy reads "
                f"{policy.inputs}",
                param,
            )
        return torch.as_tensor(flat, dtype=policy.action_net.weight.dtype)
    return _whole(flat, policy.n_states, "state", param)


def _actions(actions: NDArray[Any], policy: ActorCritic, param: str) -> Tensor:
    flat = actions.reshape(len(actions), -1)
    if policy.continuous:
        if flat.shape[1] != policy.actions or not np.isfinite(flat.astype(float)).all():
            raise AnalysisError(
                f"{param}: an action is {policy.actions} finite number(s) for this policy", param
            )
        return torch.as_tensor(flat, dtype=policy.action_net.weight.dtype)
    return _whole(flat, policy.actions, "action", param)


def _whole(flat: NDArray[Any], count: int, what: str, param: str) -> Tensor:
    values = flat[:, 0] if flat.shape[1] == 1 else np.full(len(flat), -1)
    numeric = values.dtype.kind in "iufb"
    bad = np.flatnonzero((values < 0) | (values >= count) | (values % 1 != 0)) if numeric else [0]
    if len(bad):
        raise AnalysisError(
            f"{param}: unknown {what} {flat[bad[0]].tolist()} (record {bad[0]}); the policy knows "
            f"0 to {count - 1}",
            param,
        )
    return torch.as_tensor(values.astype(np.int64))


def _numbers(columns: Columns, name: str, param: str) -> NDArray[np.float64]:
    try:
        values = np.asarray(columns[name], dtype=np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"{param}: {name} is not numeric: {error}", param) from error
    if len(values) != len(columns[name]) and name != "last_value":
        raise AnalysisError(f"{param}: {name} is one number a record", param)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise AnalysisError(f"{param}: {name} of record {bad[0]} is not a finite number", param)
    return values


def _require(
    columns: Columns, names: tuple[str, ...], param: str, instead_of: str | None = None
) -> None:
    if not columns:
        raise AnalysisError(f"the {param} has no records", param)
    missing = [name for name in names if name not in columns]
    if missing:
        also = f" (needed as {instead_of} is absent)" if instead_of else ""
        raise AnalysisError(f"the {param} lacks {', '.join(missing)}{also}", param)


def _file(context: AnalysisContext, param: str) -> Any:
    path = context.files.get(param)
    if path is None:
        hint = " or ask about a language model's job" if param == "policy" else ""
        raise AnalysisError(f"a recorded round needs the file of {param};{hint} give it", param)
    return path
