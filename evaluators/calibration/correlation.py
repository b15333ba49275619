"""Pearson, Spearman and Kendall correlations with bootstrap intervals."""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

CORRELATION_ROUNDS = 1000
KENDALL_INTERVAL_ITEMS = 1000
FEW_CLUSTERS = 10
_BLOCK = 2_000_000
_PAIR_BLOCK = 512

Vector = NDArray[np.float64]


class Estimate(BaseModel):
    """A correlation and its 95 % percentile bootstrap interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float | None = Field(description="None: a side is constant or there are too few items.")
    low: float | None = None
    high: float | None = None


class Correlations(NamedTuple):
    """The three coefficients of one set of items."""

    pearson: Estimate
    spearman: Estimate
    kendall: Estimate


def pearson(x_N: Sequence[float] | Vector, y_N: Sequence[float] | Vector) -> float | None:
    """Linear correlation; None for fewer than two items or a constant side."""
    x_N, y_N = _pair(x_N, y_N)
    if len(x_N) < 2 or np.ptp(x_N) == 0 or np.ptp(y_N) == 0:
        return None
    a_N, b_N = x_N - x_N.mean(), y_N - y_N.mean()
    # Scaled first, so that squares of very large or small numbers stay in range.
    a_N, b_N = a_N / np.abs(a_N).max(), b_N / np.abs(b_N).max()
    return _clipped(float(a_N @ b_N / math.sqrt((a_N @ a_N) * (b_N @ b_N))))


def spearman(x_N: Sequence[float] | Vector, y_N: Sequence[float] | Vector) -> float | None:
    """Pearson's correlation of the ranks, equal values sharing the mean of their ranks."""
    x_N, y_N = _pair(x_N, y_N)
    return pearson(midranks(x_N), midranks(y_N))


def kendall(x_N: Sequence[float] | Vector, y_N: Sequence[float] | Vector) -> float | None:
    """tau-b = (C - D) / sqrt((P - T_x)(P - T_y)) over P pairs, T those tied on a side."""
    x_N, y_N = _pair(x_N, y_N)
    total, untied_x, untied_y = 0.0, 0.0, 0.0
    for start in range(0, len(x_N), _PAIR_BLOCK):
        rows = slice(start, start + _PAIR_BLOCK)
        a = np.sign(x_N[rows, None] - x_N[None, :]).astype(np.float32)
        b = np.sign(y_N[rows, None] - y_N[None, :]).astype(np.float32)
        total += float((a * b).sum(dtype=np.float64))
        untied_x += float(np.abs(a).sum(dtype=np.float64))
        untied_y += float(np.abs(b).sum(dtype=np.float64))
    if untied_x == 0 or untied_y == 0:
        return None
    return _clipped(total / math.sqrt(untied_x * untied_y))


def midranks(x_N: Vector) -> Vector:
    """Ranks 1..N, equal values sharing the mean of theirs."""
    _, inverse_N, counts_G = np.unique(x_N, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts_G) - (counts_G - 1) / 2)[inverse_N])


def fisher_interval(r: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """tanh(atanh r +- z / sqrt(n - 3)): the interval that n normal items give. n > 3."""
    if n <= 3 or not -1 < r < 1:
        raise ValueError(f"needs n > 3 and -1 < r < 1, got n={n}, r={r}")
    half = NormalDist().inv_cdf((1 + confidence) / 2) / math.sqrt(n - 3)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def correlations(
    x_N: Sequence[float] | Vector,
    y_N: Sequence[float] | Vector,
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    rounds: int = CORRELATION_ROUNDS,
) -> Correlations:
    """All three with percentile bootstrap intervals.

    Whole clusters (the items of one query) are drawn where there are at least 10, else items. Each
    resample is a vector of multiplicities w, which gives all of them at once: weighted moments for
    Pearson, ranks among the drawn items for Spearman, and w'Sw / sqrt((w'|A|w)(w'|B|w)) for
    Kendall, with A, B the sign matrices of the pairs and S = A*B. Kendall's interval is left out
    above 1,000 items, where it would take minutes. An interval is None where more than
    1 in 20 resamples leave a side constant.
    """
    x_N, y_N = _pair(x_N, y_N)
    points = (pearson(x_N, y_N), spearman(x_N, y_N), kendall(x_N, y_N))
    if points[0] is None or len(x_N) < 4:
        return Correlations(*(Estimate(value=point) for point in points))
    place_N = _clusters(clusters, len(x_N))
    drawn: list[list[Vector]] = [[], [], []]
    signs = pair_signs(x_N, y_N) if len(x_N) <= KENDALL_INTERVAL_ITEMS else None
    x_N, y_N = standardised(x_N), standardised(y_N)
    generator = np.random.default_rng(seed)
    count = int(place_N.max()) + 1
    block = max(1, _BLOCK // len(x_N))
    for start in range(0, rounds, block):
        size = min(block, rounds - start)
        w_B_C = generator.multinomial(count, np.full(count, 1 / count), size).astype(np.float64)
        w_B_N = w_B_C[:, place_N]
        drawn[0].append(weighted_pearson(w_B_N, x_N, y_N))
        drawn[1].append(weighted_spearman(w_B_N, x_N, y_N))
        if signs is not None:
            drawn[2].append(weighted_kendall(w_B_N, *signs))
    return Correlations(
        *(_estimate(point, found) for point, found in zip(points, drawn, strict=True))
    )


def _pair(x_N: Sequence[float] | Vector, y_N: Sequence[float] | Vector) -> tuple[Vector, Vector]:
    x, y = np.asarray(x_N, dtype=np.float64), np.asarray(y_N, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"a correlation needs two equal lists, got shapes {x.shape}, {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a correlation needs finite values")
    return x, y


def _clipped(r: float) -> float:
    return min(1.0, max(-1.0, r))


def standardised(x_N: Vector) -> Vector:
    """Centred, with a largest absolute value of 1. x must not be constant."""
    centred_N = x_N - x_N.mean()
    return np.asarray(centred_N / np.abs(centred_N).max())


def _clusters(clusters: Sequence[Hashable] | None, n: int) -> NDArray[np.int64]:
    if clusters is None or len(set(clusters)) < FEW_CLUSTERS:
        return np.arange(n)
    if len(clusters) != n:
        raise ValueError(f"{len(clusters)} cluster names for {n} items")
    place: dict[Hashable, int] = {}
    return np.array([place.setdefault(name, len(place)) for name in clusters], dtype=np.int64)


def weighted_pearson(w_B_N: Vector, x_N: Vector, y_N: Vector) -> Vector:
    """Pearson's correlation for each row of multiplicities; NaN where a side is constant.

    x and y as of `standardised`, so that moments lose no digits.
    """
    total_B = w_B_N.sum(1)
    x_B, y_B = w_B_N @ x_N / total_B, w_B_N @ y_N / total_B
    return _ratio(
        w_B_N @ (x_N * y_N) / total_B - x_B * y_B,
        w_B_N @ (x_N * x_N) / total_B - x_B**2,
        w_B_N @ (y_N * y_N) / total_B - y_B**2,
    )


def weighted_spearman(w_B_N: Vector, x_N: Vector, y_N: Vector) -> Vector:
    """Spearman's correlation of the drawn copies, for each row of multiplicities."""
    middle_B_1 = (w_B_N.sum(1, keepdims=True) + 1) / 2
    a_B_N = _weighted_ranks(w_B_N, x_N) - middle_B_1
    b_B_N = _weighted_ranks(w_B_N, y_N) - middle_B_1
    return _ratio(
        (w_B_N * a_B_N * b_B_N).sum(1), (w_B_N * a_B_N**2).sum(1), (w_B_N * b_B_N**2).sum(1)
    )


def _weighted_ranks(w_B_N: Vector, x_N: Vector) -> Vector:
    """Mean rank of each item's value among the drawn copies."""
    order_N = np.argsort(x_N, kind="stable")
    _, first_G, inverse_N = np.unique(x_N[order_N], return_index=True, return_inverse=True)
    copies_B_G = np.add.reduceat(w_B_N[:, order_N], first_G, axis=1)
    rank_B_G = np.cumsum(copies_B_G, axis=1) - (copies_B_G - 1) / 2
    rank_B_N = np.empty_like(w_B_N)
    rank_B_N[:, order_N] = rank_B_G[:, inverse_N]
    return rank_B_N


def pair_signs(x_N: Vector, y_N: Vector) -> tuple[NDArray[np.float32], ...]:
    """N x N matrices: A*B, |A| and |B| for the signs A, B of x_i - x_j and y_i - y_j."""
    a = np.sign(x_N[:, None] - x_N[None, :]).astype(np.float32)
    b = np.sign(y_N[:, None] - y_N[None, :]).astype(np.float32)
    return a * b, np.abs(a), np.abs(b)


def weighted_kendall(w_B_N: Vector, *signs: NDArray[np.float32]) -> Vector:
    """tau-b of the drawn copies, for each row of multiplicities; `signs` as of `pair_signs`."""
    # Whole numbers below 2^24 are exact in float32.
    w = w_B_N.astype(np.float32)
    sums = [((w @ matrix).astype(np.float64) * w_B_N).sum(1) for matrix in signs]
    return _ratio(*sums)


def _ratio(top_B: Vector, left_B: Vector, right_B: Vector) -> Vector:
    """top / sqrt(left right); NaN where a side is constant up to rounding."""
    defined_B = (left_B > 1e-12) & (right_B > 1e-12)
    below_B = np.sqrt(np.where(defined_B, left_B * right_B, 1.0))
    return np.where(defined_B, np.clip(top_B / below_B, -1, 1), np.nan)


def _estimate(point: float | None, draws: Sequence[Vector]) -> Estimate:
    if point is None or not draws:
        return Estimate(value=point)
    found = np.concatenate(draws)
    defined = found[np.isfinite(found)]
    if len(defined) < 0.95 * len(found):
        return Estimate(value=point)
    low, high = np.quantile(defined, [0.025, 0.975])
    return Estimate(value=point, low=float(low), high=float(high))
