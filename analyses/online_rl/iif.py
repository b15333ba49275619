"""Influence-based filtering (IIF): drop a round's most harmful records, then update as usual."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from analyses.context import AnalysisError
from analyses.online_rl.buffer import Samples, minibatches, standardize_by_minibatch
from analyses.online_rl.ghost import scored_layers, unscored_parameters
from analyses.online_rl.influence import ReturnTarget, Scores, score_start
from analyses.online_rl.spec import Reference

ALL_NEGATIVE = "every record has a negative score; none was dropped, else nothing were left"
NONE_POSITIVE = "no answer has a positive score; all were kept, else nothing were left"


def drop_indices(scores_N: Any, p: float) -> list[int]:
    """Indices of the d = floor(N p) smallest scores, N the number below 0; ascending.

    Ties go to the lower index. Where that would be every record the list is empty (the caller
    warns). Raises AnalysisError for p outside (0, 1].
    """
    if not 0 < p <= 1:
        raise AnalysisError(f"p lies within (0, 1], got {p}", "p")
    scores = np.asarray(scores_N, dtype=np.float64)
    negative = int((scores < 0).sum())
    count = math.floor(negative * p)
    if count == len(scores):
        return []
    order = np.argsort(scores, kind="stable")
    return sorted(int(index) for index in order[:count])


def keep_positive(scores_N: Any) -> list[int]:
    """Indices with a score above 0: the rule for language models. All, where there is none."""
    scores = np.asarray(scores_N, dtype=np.float64)
    kept = np.flatnonzero(scores > 0)
    return [int(index) for index in (kept if len(kept) else np.arange(len(scores)))]


@dataclass(frozen=True)
class FilteredRound:
    """What one round's filtering saw and did; scores and dropped by the buffer's index."""

    scores: Scores
    dropped: tuple[int, ...]
    n: int
    n_negative: int
    warning: str | None


class FilteredBuffer:
    """A rollout buffer without some records; everything but get() is the buffer's own."""

    def __init__(self, buffer: Any, records: Any, kept: Tensor, generator: torch.Generator) -> None:
        self._buffer, self._records, self._kept = buffer, records, kept
        self._generator = generator

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Minibatches of the kept records in a fresh order; a ragged last one is dropped."""
        for rows in minibatches(len(self._kept), batch_size or len(self._kept), self._generator):
            chosen = self._kept[rows]
            yield type(self._records)(*(field[chosen] for field in self._records))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class InfluenceFilter:
    """Makes a PPO trainer filter each round before its update.

    Wraps the trainer's train(): any object with policy.evaluate_actions, rollout_buffer.get,
    batch_size and train() of stable-baselines3's PPO, and ours. Scores are those of the return
    target at theta_k. choose="random" drops as many records, but random ones: the control.
    noise_floor: rounds whose largest |score| is below this share of the first round's are not
    filtered. on_scores(records, scores) is called before the update; both have the order of
    records.position. unscored: trainable parameters that carry no score, such as log_std of
    stable-baselines3's Gaussian policies.
    """

    def __init__(
        self,
        trainer: Any,
        p: float = 0.125,
        *,
        seed: int,
        reference: Reference = "buffer",
        choose: Literal["influence", "random"] = "influence",
        noise_floor: float = 1e-3,
        on_scores: Callable[[Samples, Scores], None] | None = None,
    ) -> None:
        drop_indices([1.0], p)
        if reference == "holdout":
            raise AnalysisError("a filter has no second rollout; use buffer or leave_one_out")
        self.p, self.reference, self.choose, self.noise_floor = p, reference, choose, noise_floor
        self.rounds: list[FilteredRound] = []
        self.unscored = unscored_parameters(trainer.policy, scored_layers(trainer.policy))
        self._trainer, self._on_scores = trainer, on_scores
        self._generator = torch.Generator().manual_seed(seed)
        self._scale: float | None = None
        self._train: Callable[[], None] = trainer.train
        trainer.train = self.train

    def detach(self) -> None:
        """Give the trainer its own train() back."""
        self._trainer.train = self._train

    def train(self) -> None:
        """Score, drop, and update on what is left."""
        trainer = self._trainer
        buffer = trainer.rollout_buffer
        # One pass in random order is the first epoch; its blocks give the standardisation.
        drawn = next(iter(buffer.get(None)))
        records = _samples(drawn, trainer.action_space)
        scores = self._score(records)
        outcome, dropped = self._decide(scores)
        if self._on_scores is not None:
            self._on_scores(records, scores)
        self.rounds.append(_by_index(outcome, records.position))
        mask = torch.ones(outcome.n, dtype=torch.bool)
        mask[dropped] = False
        kept = mask.nonzero().flatten()
        trainer.rollout_buffer = FilteredBuffer(buffer, drawn, kept, self._generator)
        try:
            self._train()
        finally:
            trainer.rollout_buffer = buffer

    def _score(self, records: Samples) -> Scores:
        trainer = self._trainer
        weights_N = records.advantages
        if getattr(trainer, "normalize_advantage", True):
            blocks_N = torch.arange(len(weights_N)) // trainer.batch_size
            weights_N = standardize_by_minibatch(weights_N, blocks_N)
        clip = trainer.clip_range
        return score_start(
            trainer.policy,
            records,
            weights_N,
            ReturnTarget(),
            reference=self.reference,
            clip_range=float(clip(1.0) if callable(clip) else clip),
            ent_coef=float(trainer.ent_coef),
        )

    def _decide(self, scores: Scores) -> tuple[FilteredRound, list[int]]:
        n = len(scores.score_N)
        negative = int((scores.score_N < 0).sum())
        scale = float(scores.score_N.abs().max())
        self._scale = scale if self._scale is None else self._scale
        warning = None
        dropped: list[int] = []
        if scale < self.noise_floor * self._scale:
            warning = f"largest |score| {scale:.2g} is below the noise floor; nothing was dropped"
        else:
            dropped = drop_indices(scores.score_N, self.p)
            if negative == n and self.p == 1:
                warning = ALL_NEGATIVE
        if self.choose == "random":
            dropped = torch.randperm(n, generator=self._generator)[: len(dropped)].tolist()
        return FilteredRound(scores, tuple(dropped), n, negative, warning), dropped


def _samples(drawn: Any, action_space: Any) -> Samples:
    """Records of either library; a foreign one's index is the order in which they were drawn."""
    if isinstance(drawn, Samples):
        return drawn
    if not isinstance(drawn.observations, Tensor):
        raise AnalysisError("observations that are dictionaries cannot be scored")
    actions = drawn.actions
    if hasattr(action_space, "n"):
        actions = actions.long().flatten()
    return Samples(
        drawn.observations,
        actions,
        drawn.old_values.flatten(),
        drawn.old_log_prob.flatten(),
        drawn.advantages.flatten(),
        drawn.returns.flatten(),
        torch.arange(len(drawn.advantages)),
    )


def _by_index(outcome: FilteredRound, index: Tensor) -> FilteredRound:
    """The same, in the order of the buffer instead of the drawn one."""
    back = torch.argsort(index)
    scores = outcome.scores
    ordered = Scores(
        scores.score_N[back],
        scores.self_term_N[back],
        scores.cross_term_N[back],
        scores.target_value,
        scores.target_grad_norm,
        scores.training_grad_norm,
        scores.clipped,
    )
    dropped = tuple(sorted(int(index[row]) for row in outcome.dropped))
    return FilteredRound(ordered, dropped, outcome.n, outcome.n_negative, outcome.warning)
