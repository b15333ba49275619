"""Scores of a round's records: how much each one's PPO gradient goes with the target's.

I_i = sum over steps j whose minibatch holds i of <grad f(theta_j), -grad l_i(theta_j)>, with l_i
the PPO loss of record i with the standardised advantage of its minibatch; the learning rate is
left out. At theta_k alone ("start") all ratios are 1 and I_i = Abar_i <grad f, grad log pi_i>.
(Hu, Wu et al., arXiv 2505.19281; leave-one-out: Jia, Yang et al.)
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from analyses.context import AnalysisError
from analyses.online_rl.buffer import Samples
from analyses.online_rl.ghost import add, capture, chunks, inner, norm, products, scored_layers
from analyses.online_rl.spec import Reference
from analyses.online_rl.targets import on_clipped_side, policy_loss, return_target

CHUNK = 4096
Gradient = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class ActionTarget:
    """f = log pi(a|s) of one state and action: observation (1, ...), action (1,) or (1, D)."""

    observation: Tensor
    action: Tensor


@dataclass(frozen=True)
class ReturnTarget:
    """f = mean of log pi(a_j|s_j) A_j over the reference records; None: the round's own."""

    holdout: Samples | None = None


@dataclass(frozen=True)
class Scores:
    """Per record, float64 (N,): score, own and others' part of the buffer's target.

    score = self_term + cross_term with the buffer as reference; leave_one_out: n / (n - 1) times
    the cross term. self_term is 0 for targets that the records are no part of.
    """

    score_N: Tensor
    self_term_N: Tensor
    cross_term_N: Tensor
    target_value: float
    target_grad_norm: float
    training_grad_norm: float
    clipped: int

    def self_protected(self) -> int:
        """Records above 0 by their own term alone: the others would have them below."""
        return int(((self.score_N > 0) & (self.cross_term_N < 0)).sum())


def evaluate(
    policy: nn.Module, observations: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies, (n,) each, by a policy of stable-baselines3's interface."""
    _, log_prob_N, entropy_N = cast(Any, policy).evaluate_actions(observations, actions)
    return log_prob_N, entropy_N


class RoundInfluence:
    """Adds up scores over the optimiser steps of one round.

    Call step() at theta_k with all records ("start"), or before every optimiser step with the rows
    of its minibatch ("all"); then scores(). Layers whose name contains `value_net` are left out.
    """

    def __init__(
        self,
        policy: nn.Module,
        records: Samples,
        target: ActionTarget | ReturnTarget,
        *,
        reference: Reference = "buffer",
        clip_range: float = 0.2,
        ent_coef: float = 0.0,
        chunk: int = CHUNK,
    ) -> None:
        n = len(records.advantages)
        if n == 0:
            raise AnalysisError("the buffer has no records", "buffer")
        if not bool(torch.isfinite(records.advantages).all()):
            bad = int((~torch.isfinite(records.advantages)).nonzero()[0])
            raise AnalysisError(f"record {bad}: the advantage is not a finite number", "buffer")
        if reference == "leave_one_out" and n < 2:
            raise AnalysisError("leave_one_out needs at least two records", "reference")
        if isinstance(target, ReturnTarget) and (reference == "holdout") != (
            target.holdout is not None
        ):
            raise AnalysisError("the reference 'holdout' needs a second rollout", "holdout")
        self._policy, self._records, self._target = policy, records, target
        self._reference, self._clip, self._entropy, self._chunk = (
            reference,
            clip_range,
            ent_coef,
            chunk,
        )
        self._own = isinstance(target, ReturnTarget) and target.holdout is None
        self._layers = scored_layers(policy)
        self._total_N = torch.zeros(n, dtype=torch.float64)
        self._self_N = torch.zeros(n, dtype=torch.float64)
        self._first: tuple[float, float, float] | None = None
        self._clipped = 0

    def step(self, rows: Tensor, weights: Tensor) -> None:
        """One checkpoint. rows: indices of the minibatch; weights: their standardised advantages.

        Two forward and backward passes, one over the target's data and one over these rows.
        """
        training = self._policy.training
        self._policy.eval()
        try:
            value, target = self._target_gradient()
            total: Gradient = {}
            for part in chunks(len(rows), self._chunk):
                self._score(rows[part], weights[part], target, total)
        finally:
            self._policy.train(training)
        if self._first is None:
            self._first = (value, norm(target), norm(total))

    def scores(self) -> Scores:
        """The sums so far. Raises AnalysisError where no step was taken."""
        if self._first is None:
            raise AnalysisError("the update took no step, so no record has a score")
        n = len(self._total_N)
        cross_N = self._total_N - self._self_N
        score_N = cross_N * n / (n - 1) if self._reference == "leave_one_out" else self._total_N
        return Scores(score_N, self._self_N, cross_N, *self._first, self._clipped)

    def _target_gradient(self) -> tuple[float, Gradient]:
        if isinstance(self._target, ActionTarget):
            observations, actions = self._target.observation, self._target.action
            advantages = torch.ones(len(observations), dtype=self._records.advantages.dtype)
        else:
            data = self._target.holdout or self._records
            observations, actions, advantages = data.observations, data.actions, data.advantages
        n = len(observations)
        gradient: Gradient = {}
        value = 0.0

        for part in chunks(n, self._chunk):

            def forward(part: slice = part) -> list[Tensor]:
                nonlocal value
                log_prob_N, _ = evaluate(self._policy, observations[part], actions[part])
                mean = return_target(log_prob_N, advantages[part]).sum() / n
                value += float(mean.detach())
                return [mean]

            _, totals = capture(self._layers, forward)
            add(gradient, totals[0])
        return value, gradient

    def _score(self, rows: Tensor, weights: Tensor, target: Gradient, total: Gradient) -> None:
        data = self._records
        observations, actions = data.observations[rows], data.actions[rows]
        old_log_prob, advantages = data.old_log_prob[rows], data.advantages[rows]

        def forward() -> list[Tensor]:
            log_prob, entropy = evaluate(self._policy, observations, actions)
            loss = policy_loss(log_prob, old_log_prob, weights, self._clip)
            if self._entropy > 0:
                loss = loss - self._entropy * (-log_prob if entropy is None else entropy)
            with torch.no_grad():
                clipped = on_clipped_side(log_prob, old_log_prob, weights, self._clip)
                self._clipped += int(clipped.sum())
            own = [return_target(log_prob, advantages).sum()] if self._own else []
            return [loss.sum(), *own]

        captured, totals = capture(self._layers, forward)
        self._total_N[rows] -= products(captured[0], target).double()
        if self._own:
            products_of_own = inner(captured[0], captured[1], self._layers).double()
            self._self_N[rows] -= products_of_own / len(self._total_N)
        add(total, totals[0])


def score_start(
    policy: nn.Module,
    records: Samples,
    weights_N: Tensor,
    target: ActionTarget | ReturnTarget | None = None,
    *,
    reference: Reference = "buffer",
    clip_range: float = 0.2,
    ent_coef: float = 0.0,
    chunk: int = CHUNK,
) -> Scores:
    """Scores at theta_k. weights_N: the advantages as the update uses them (standardised)."""
    influence = RoundInfluence(
        policy,
        records,
        target or ReturnTarget(),
        reference=reference,
        clip_range=clip_range,
        ent_coef=ent_coef,
        chunk=chunk,
    )
    influence.step(torch.arange(len(records.advantages)), weights_N)
    return influence.scores()
