"""Percentile bootstrap of a mean, over independent values or over clusters of them."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from evaluators.statistics.binomial import wilson_upper

BOOTSTRAP_ROUNDS = 5000
# Rounds times sample size is bounded per block, so that memory stays small for large samples.
_BOOTSTRAP_BLOCK = 4_000_000


def bootstrap_mean_interval(
    values: Sequence[float] | NDArray[np.float64],
    seed: int,
    rounds: int = BOOTSTRAP_ROUNDS,
    confidence: float = 0.95,
    support: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of independent values (B = `rounds` resamples).

    `support` is the range that a value can have at all, such as (0, 1) for a share. It matters
    where all N values are equal, of which every resample is a copy: with a known range the interval
    is that of `constant_interval`, without one it has no width.
    Raises ValueError for no value or a value that is not finite.
    """
    x_N = np.asarray(values, dtype=np.float64)
    if x_N.ndim != 1 or x_N.size == 0:
        raise ValueError("the bootstrap needs a non-empty one-dimensional sample")
    if not np.isfinite(x_N).all():
        raise ValueError("the bootstrap needs finite values")
    return _interval(x_N, np.ones_like(x_N), seed, rounds, confidence, support)


def cluster_bootstrap_interval(
    values: Sequence[float] | NDArray[np.float64],
    clusters: Sequence[Hashable],
    seed: int,
    rounds: int = BOOTSTRAP_ROUNDS,
    confidence: float = 0.95,
    support: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean whose values come in clusters: m responses a prompt.

    Whole clusters are drawn with replacement, C of C, and the statistic is
    sum of their values / number of their values. `clusters` names the cluster of each value;
    `support` as in `bootstrap_mean_interval`, with C in the place of N. Needed because responses to
    one prompt resemble each other: the variance is `design_effect` times that of independent
    values. Raises ValueError for fewer than two clusters, unequal lengths or values that are not
    finite.
    """
    x_N = np.asarray(values, dtype=np.float64)
    if x_N.ndim != 1 or x_N.size != len(clusters):
        raise ValueError(f"{x_N.size} values for {len(clusters)} cluster names")
    if not np.isfinite(x_N).all():
        raise ValueError("the bootstrap needs finite values")
    place: dict[Hashable, int] = {}
    cluster_N = np.array([place.setdefault(name, len(place)) for name in clusters], dtype=np.int64)
    if len(place) < 2:
        raise ValueError(f"the cluster bootstrap needs at least two clusters, got {len(place)}")
    count_C = np.bincount(cluster_N).astype(np.float64)
    sum_C = np.bincount(cluster_N, weights=x_N).astype(np.float64)
    return _interval(sum_C, count_C, seed, rounds, confidence, support)


def design_effect(m: float, icc: float) -> float:
    """Variance of a mean over clusters of m values against that of as many independent values.

    1 + (m - 1) icc, icc the correlation of two values of one cluster (Kish 1965).
    """
    if m < 1 or not -1 <= icc <= 1:
        raise ValueError(f"needs m >= 1 and -1 <= icc <= 1, got m={m}, icc={icc}")
    return 1 + (m - 1) * icc


def constant_interval(
    value: float, n: int, support: tuple[float, float], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a mean of which n units all showed the same value.

    At most a share u = Wilson upper end of 0/n of the population differs from `value`, and what
    differs lies within support = (l, h), so the mean lies within
    [(1-u) value + u l, (1-u) value + u h]. For flags without an event this is Wilson's [0, u], for
    paired flags without a discordant pair the score interval [-u, u]. Derived.
    """
    low, high = support
    if not low <= value <= high:
        raise ValueError(f"the value {value} lies outside its support [{low}, {high}]")
    u = wilson_upper(0, n, (1 + confidence) / 2)
    return (1 - u) * value + u * low, (1 - u) * value + u * high


def _interval(
    sum_C: NDArray[np.float64],
    count_C: NDArray[np.float64],
    seed: int,
    rounds: int,
    confidence: float,
    support: tuple[float, float] | None,
) -> tuple[float, float]:
    mean_C = sum_C / count_C
    if support is not None and mean_C.min() == mean_C.max():
        return constant_interval(float(mean_C[0]), mean_C.size, support, confidence)
    generator = np.random.default_rng(seed)
    means_B = np.empty(rounds)
    block = max(1, _BOOTSTRAP_BLOCK // sum_C.size)
    for start in range(0, rounds, block):
        count = min(block, rounds - start)
        index_B_C = generator.integers(0, sum_C.size, size=(count, sum_C.size))
        drawn_B = sum_C[index_B_C].sum(axis=1) / count_C[index_B_C].sum(axis=1)
        means_B[start : start + count] = drawn_B
    low, high = np.quantile(means_B, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
