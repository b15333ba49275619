"""How many models share the nearest neighbours of a response."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = (5, 10, 20, 50)
_BLOCK_ROWS = 256
# Cosines are compared to nine decimals, so that copies tie whatever the order of a sum was.
_STEPS = 10**9
_MOST_ROWS = 1 << 20


def top_n_mixing(
    e_P_D: NDArray[np.floating],
    model_P: Sequence[int] | NDArray[np.integer],
    neighbours: Sequence[int] = NEIGHBOURS,
) -> dict[int, float | None]:
    """{N: mean over anchors of the number of different models among the N nearest responses}.

    e_P_D holds all models' responses to one query, unit norm, and model_P the model of each. The N
    nearest of an anchor are itself and the N - 1 of highest cosine, ties by index. 1: no sharing;
    models that all answer alike: M (1 - (1 - 1/M)^N). None for an N above P, where all responses
    are neighbours. O(P^2 D) in blocks of rows, so memory is O(P). Idea: figure 8 of Artificial
    Hivemind, arXiv 2510.22954; the selection rule is derived.

    Raises ValueError for zero vectors (leave empty texts out), N < 1 or unequal lengths.
    """
    e_P_D = np.asarray(e_P_D, dtype=np.float64)
    models_P = np.asarray(model_P, dtype=np.int64)
    pool = len(e_P_D)
    if len(models_P) != pool or pool > _MOST_ROWS:
        raise ValueError(f"{len(models_P)} models for {pool} responses (at most {_MOST_ROWS})")
    if any(n < 1 for n in neighbours):
        raise ValueError(f"the number of neighbours must be at least 1, got {list(neighbours)}")
    if pool and not (e_P_D != 0).any(axis=1).all():
        raise ValueError("a zero vector has no neighbours: leave empty texts out")
    usable = [n for n in neighbours if n <= pool]
    if not usable:
        return dict.fromkeys(neighbours)
    widest = max(usable)
    totals = dict.fromkeys(usable, 0)
    index_P = np.arange(pool)
    for start in range(0, pool, _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, pool))
        cosine_B_P = e_P_D[rows] @ e_P_D.T
        # One integer a pair orders by cosine, then by index; no two are equal.
        key_B_P = np.rint(cosine_B_P * _STEPS).astype(np.int64) * _MOST_ROWS - index_P
        own = index_P[rows]
        key_B_P[own - start, own] = np.iinfo(np.int64).max
        near_B_N = np.argpartition(-key_B_P, widest - 1, axis=1)[:, :widest]
        order_B_N = np.argsort(-np.take_along_axis(key_B_P, near_B_N, axis=1), axis=1)
        model_B_N = models_P[np.take_along_axis(near_B_N, order_B_N, axis=1)]
        for n in usable:
            sorted_B_n = np.sort(model_B_N[:, :n], axis=1)
            changes = int((np.diff(sorted_B_n, axis=1) != 0).sum())
            totals[n] += changes + len(sorted_B_n)
    return {n: totals[n] / pool if n in totals else None for n in neighbours}
