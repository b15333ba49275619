"""Checks that go with the scores: wrong advantages, roughness of the scores, efficiency."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from analyses.online_rl.buffer import Floats

MOST_NODES = 512


def monte_carlo_advantages(
    states_N: ArrayLike,
    actions_N: ArrayLike,
    rewards_N: ArrayLike,
    dones_N: ArrayLike,
    gamma: float,
) -> Floats:
    """A_MC(s, a) = Qhat(s, a) - Vhat(s), means of discounted returns-to-go in the buffer.

    Discrete states and actions, in the order of collection. Records of the last, unfinished episode
    have no return: NaN where a pair occurs there alone.
    """
    states, actions = np.asarray(states_N), np.asarray(actions_N)
    rewards, dones = np.asarray(rewards_N, dtype=np.float64), np.asarray(dones_N, dtype=bool)
    returns_N = np.full(len(rewards), np.nan)
    carried = np.nan
    for t in range(len(rewards) - 1, -1, -1):
        carried = rewards[t] + (0.0 if dones[t] else gamma * carried)
        returns_N[t] = carried
    known = np.isfinite(returns_N)
    pairs = np.stack([states, actions], axis=1)

    def means(keys: Floats) -> Floats:
        _, place = np.unique(keys, axis=0, return_inverse=True)
        place = place.reshape(-1)
        count = np.bincount(place[known], minlength=place.max() + 1)
        total = np.bincount(place[known], returns_N[known], minlength=place.max() + 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            out: Floats = (total / count)[place]
        return out

    return means(pairs) - means(states[:, None])


def sign_mismatch(advantages: ArrayLike, monte_carlo: ArrayLike) -> float:
    """Share of records whose advantage has the wrong sign; those without A_MC are left out."""
    a, truth = np.asarray(advantages, dtype=np.float64), np.asarray(monte_carlo, dtype=np.float64)
    known = np.isfinite(truth) & (truth != 0) & (a != 0)
    return float(np.mean(np.sign(a[known]) != np.sign(truth[known]))) if known.any() else 0.0


def roughness(embeddings_ND: ArrayLike, scores_N: ArrayLike, neighbours: int = 20) -> float | None:
    """How much scores differ between near neighbours, over the records with a positive score.

    sum w_ij (I_i - I_j)^2 / sum w_ij over the u nearest neighbours j of each i, with I / max |I|;
    w_ij = exp(-||e_i - e_j||^2 / sigma^2), sigma the median distance of such pairs. At most 512
    records, evenly taken in the order given; None with fewer than two.
    """
    embeddings = np.asarray(embeddings_ND, dtype=np.float64)
    scores = np.asarray(scores_N, dtype=np.float64)
    nodes = np.flatnonzero(scores > 0)
    if len(nodes) < 2:
        return None
    if len(nodes) > MOST_NODES:
        nodes = nodes[np.linspace(0, len(nodes) - 1, MOST_NODES).astype(int)]
    e, values = embeddings[nodes], scores[nodes] / np.abs(scores).max()
    square = (e**2).sum(axis=1)
    distance = np.sqrt(np.maximum(square[:, None] + square[None] - 2 * e @ e.T, 0.0))
    np.fill_diagonal(distance, np.inf)
    u = min(neighbours, len(nodes) - 1)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :u]
    near = np.take_along_axis(distance, nearest, axis=1)
    sigma = float(np.median(near))
    weights = np.exp(-((near / sigma) ** 2)) if sigma > 0 else (near == 0).astype(np.float64)
    difference = values[:, None] - values[nearest]
    return float((weights * difference**2).sum() / weights.sum())


class Efficiency(NamedTuple):
    """Shares of rounds saved against a standard run; None: the level is not reached."""

    average: float
    at_peak: float | None


def first_round(returns: Sequence[float], level: float) -> int | None:
    """m(v): the first round, from 1, whose return is at least v."""
    return next((k for k, value in enumerate(returns, start=1) if value >= level), None)


def efficiency(standard: Sequence[float], other: Sequence[float]) -> Efficiency:
    """SE_ave and SE_peak of the paper. Reduction(v) = 1 - m_other(v) / m_standard(v).

    SE_ave is its mean over the strictly increasing record levels of the standard run, SE_peak its
    value at the highest one. A level that the other run does not reach counts in SE_ave as one
    round past its end [derived], the least it can be.
    """
    levels: list[float] = []
    for value in standard:
        if not levels or value > levels[-1]:
            levels.append(value)

    def reduction(level: float) -> float:
        base = first_round(standard, level)
        assert base is not None
        return 1 - (first_round(other, level) or len(other) + 1) / base

    reached = first_round(other, levels[-1]) is not None
    return Efficiency(
        float(np.mean([reduction(level) for level in levels])),
        reduction(levels[-1]) if reached else None,
    )
