"""Cosines inside one pool of responses and between two."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BIN_EDGES = tuple(i / 10 for i in range(11))


class PairSpread(NamedTuple):
    """Order statistics of the cosines of all pairs of one pool."""

    low: float
    p95: float
    high: float


def intra_similarity(e_n_D: NDArray[np.floating]) -> float | None:
    """Mean cosine over pairs of distinct responses, self-pairs excluded.

    S = 2/(n(n-1)) sum_{i<j} e_i . e_j = (||sum_i e_i||^2 - sum_i ||e_i||^2) / (n(n-1))

    for embeddings e_1..e_n of unit norm; the right side is O(n D). Zero vectors (empty texts) are
    excluded first. None when fewer than two remain. Formula: Artificial Hivemind, arXiv
    2510.22954; the identity is derived.
    """
    e_n_D = np.asarray(e_n_D)
    # Summed in float64 without a float64 copy, whose page faults would cost more than the sums.
    square_n = np.einsum("nd,nd->n", e_n_D, e_n_D, dtype=np.float64)
    # Zero vectors change neither sum, so they need not be taken out, only not be counted.
    n = int(np.count_nonzero(square_n))
    if n < 2:
        return None
    total_D = e_n_D.sum(0, dtype=np.float64)
    return float((total_D @ total_D - square_n.sum()) / (n * (n - 1)))


def cross_similarity(e_n_D: NDArray[np.floating], f_m_D: NDArray[np.floating]) -> float | None:
    """Mean cosine between two pools: 1/(nm) sum_{i,j} e_i . f_j = mean(e) . mean(f).

    Zero vectors are excluded; None when a pool is then empty. Means are not re-normalised.
    """
    e_n_D, f_m_D = non_zero(e_n_D), non_zero(f_m_D)
    if len(e_n_D) == 0 or len(f_m_D) == 0:
        return None
    return float(e_n_D.mean(0) @ f_m_D.mean(0))


def pair_spread(e_n_D: NDArray[np.floating]) -> PairSpread | None:
    """Least, 95th percentile and greatest e_i . e_j over i < j; O(n^2 D).

    A greatest value of 1 is a verbatim copy that a mean does not show. Zero vectors are excluded;
    None when fewer than two remain.
    """
    e_n_D = non_zero(e_n_D)
    if len(e_n_D) < 2:
        return None
    cosines = (e_n_D @ e_n_D.T)[np.triu_indices(len(e_n_D), 1)]
    p95 = float(np.quantile(cosines, 0.95))
    return PairSpread(float(cosines.min()), p95, float(cosines.max()))


def unrelated_similarity(pools: Sequence[NDArray[np.floating]]) -> float | None:
    """Mean cosine of two responses to different queries: what no relation at all looks like.

    (||sum_q s_q||^2 - sum_q ||s_q||^2) / (N^2 - sum_q n_q^2) with s_q the sum of query q's n_q
    embeddings and N = sum_q n_q. Exact and O(N D). None with fewer than two queries with text.
    Derived.
    """
    kept = [pool for pool in map(non_zero, pools) if len(pool)]
    if len(kept) < 2:
        return None
    sum_Q_D = np.stack([pool.sum(0) for pool in kept])
    count_Q = np.array([len(pool) for pool in kept], dtype=np.float64)
    total_D = sum_Q_D.sum(0)
    pairs = count_Q.sum() ** 2 - (count_Q**2).sum()
    return float((total_D @ total_D - (sum_Q_D * sum_Q_D).sum()) / pairs)


def histogram(similarities: Sequence[float]) -> tuple[float, ...]:
    """Percent of queries with S in [0,.1), [.1,.2), ..., [.9,1]; all zero for no query.

    A mean cosine below 0 counts in the first bin, one that rounding put above 1 in the last.
    """
    if not similarities:
        return (0.0,) * 10
    place_Q = np.searchsorted(BIN_EDGES, np.asarray(similarities), side="right") - 1
    counts = np.bincount(place_Q.clip(0, 9), minlength=10)
    return tuple(float(count) for count in 100 * counts / len(similarities))


def non_zero(e_n_D: NDArray[np.floating]) -> NDArray[np.float64]:
    """The rows that are not all zero, float64."""
    e_n_D = np.asarray(e_n_D, dtype=np.float64)
    return np.asarray(e_n_D[e_n_D.any(axis=1)])
