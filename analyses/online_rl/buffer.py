"""What PPO collects in a round: advantages, their standardisation, and the buffer itself."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Floats = NDArray[np.float64]
EPSILON = 1e-8


class Samples(NamedTuple):
    """Records, one per row; the first six fields are those of stable-baselines3.

    observations (n, ...), actions (n,) or (n, D), all others (n,). position: index in the
    whole buffer.
    """

    observations: Tensor
    actions: Tensor
    old_values: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    returns: Tensor
    position: Tensor

    def at(self, rows: Tensor) -> "Samples":
        """These rows of every field."""
        return Samples(*(field[rows] for field in self))


def gae(
    rewards_T: ArrayLike,
    values_T: ArrayLike,
    dones_T: ArrayLike,
    last_value: float,
    gamma: float,
    gae_lambda: float,
) -> tuple[Floats, Floats]:
    """Advantages and returns of consecutive steps, float64.

    d_t = r_t + gamma V(s_t+1) (1 - done_t) - V(s_t); A_t = d_t + gamma lambda (1 - done_t) A_t+1;
    returns A + V. last_value: V of the state after the last step. (Schulman et al. 2016.)
    """
    rewards, values, dones = (
        np.asarray(x, dtype=np.float64) for x in (rewards_T, values_T, dones_T)
    )
    advantages_T = np.zeros_like(rewards)
    following, carried = float(last_value), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        going_on = 1.0 - dones[t]
        delta = rewards[t] + gamma * following * going_on - values[t]
        carried = delta + gamma * gae_lambda * going_on * carried
        advantages_T[t] = carried
        following = values[t]
    return advantages_T, advantages_T + values


def standardize(advantages_N: Tensor) -> Tensor:
    """(A - mean) / (unbiased standard deviation + 1e-8); a single record stays as it is."""
    if len(advantages_N) < 2:
        return advantages_N
    return (advantages_N - advantages_N.mean()) / (advantages_N.std() + EPSILON)


def standardize_by_minibatch(advantages_N: Tensor, minibatch_N: Tensor) -> Tensor:
    """standardize() inside each minibatch; minibatch_N names each record's, by any integer."""
    out_N = advantages_N.clone()
    for value in torch.unique(minibatch_N):
        rows = minibatch_N == value
        out_N[rows] = standardize(advantages_N[rows])
    return out_N


def minibatches(n: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """A fresh permutation of 0..n-1 in blocks; a ragged last block is dropped, as the code does.

    Fewer records than one block are one block [derived]: else the round would train on nothing.
    """
    order_N = torch.randperm(n, generator=generator)
    if n < batch_size:
        yield order_N
        return
    for start in range(0, n - batch_size + 1, batch_size):
        yield order_N[start : start + batch_size]


class RolloutBuffer:
    """A finished round. get() is what stable-baselines3's buffer calls so."""

    def __init__(self, samples: Samples, generator: torch.Generator) -> None:
        self.samples = samples
        self._generator = generator

    def __len__(self) -> int:
        return len(self.samples.advantages)

    def get(self, batch_size: int | None = None) -> Iterator[Samples]:
        """Minibatches of one epoch in a fresh order; None: all records in that order, at once."""
        n = len(self)
        for rows in minibatches(n, batch_size or n, self._generator):
            yield self.samples.at(rows)
