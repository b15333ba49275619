"""Ways to pick items of similar quality: subsets of a list of human scores.

Each function returns the places of the chosen scores, ascending. In one dimension the best subset
by range, variance or distance is a run of the sorted list, so scanning windows is exact.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
Selector = Callable[[NDArray[np.floating], int], Places]


def tukey_fences(scores_N: NDArray[np.floating], k: float) -> Places:
    """Q1 - k IQR <= s <= Q3 + k IQR, quartiles by linear interpolation."""
    s_N = np.asarray(scores_N, dtype=np.float64)
    q1, q3 = np.quantile(s_N, [0.25, 0.75])
    reach = k * (q3 - q1)
    # Rounding must not push out scores that lie on a fence.
    slack = 1e-12 * max(1.0, abs(q1), abs(q3))
    return np.flatnonzero((s_N >= q1 - reach - slack) & (s_N <= q3 + reach + slack))


def least_range(scores_N: NDArray[np.floating], size: int) -> Places:
    """The run of `size` sorted scores with the least range; the first of equals."""
    s_N, order_N = _sorted(scores_N, size)
    return _run(order_N, int(np.argmin(s_N[size - 1 :] - s_N[: len(s_N) - size + 1])), size)


def least_variance(scores_N: NDArray[np.floating], size: int) -> Places:
    """The subset of `size` scores closest to its own centroid, by sum of squares."""
    s_N, order_N = _sorted(scores_N, size)
    s_N = s_N - s_N.mean()
    sum_W = _window_sums(s_N, size)
    spread_W = _window_sums(s_N**2, size) - sum_W**2 / size
    return _run(order_N, int(np.argmin(_rounded(spread_W))), size)


def least_distance(scores_N: NDArray[np.floating], size: int) -> Places:
    """The subset of `size` scores with the least sum of pairwise distances.

    Of a run a..b it is sum_i (2 (i-a) - size + 1) s_i, i by sorted place.
    """
    s_N, order_N = _sorted(scores_N, size)
    s_N = s_N - s_N.mean()
    weighted_W = _window_sums(s_N * np.arange(len(s_N)), size)
    start_W = np.arange(len(weighted_W))
    distance_W = 2 * weighted_W - (2 * start_W + size - 1) * _window_sums(s_N, size)
    return _run(order_N, int(np.argmin(_rounded(distance_W))), size)


def tukey_then_least_range(scores_N: NDArray[np.floating], size: int) -> Places:
    """`least_range` among the scores within Tukey's fences at k = 1.5; all scores where those are
    fewer than `size`."""
    inside = tukey_fences(scores_N, 1.5)
    if len(inside) < size:
        return least_range(scores_N, size)
    return np.sort(inside[least_range(np.asarray(scores_N)[inside], size)])


def grown_from_median(scores_N: NDArray[np.floating], size: int) -> Places:
    """Start at the (lower) median and add the neighbour across the smaller gap, lower on a tie."""
    s_N, order_N = _sorted(scores_N, size)
    return _grown(s_N, order_N, (len(s_N) - 1) // 2, size)


def grown_from_smallest_gap(scores_N: NDArray[np.floating], size: int) -> Places:
    """Start at the two closest scores and add the neighbour across the smaller gap."""
    s_N, order_N = _sorted(scores_N, size)
    start = int(np.argmin(np.diff(s_N))) if len(s_N) > 1 else 0
    return _grown(s_N, order_N, start, size)


def within_queries(
    select: Selector, scores_N: NDArray[np.floating], queries: Sequence[str], share: float
) -> Places:
    """`select` in each query's own list: round(share n_q) of its n_q scores, at least one."""
    s_N = np.asarray(scores_N, dtype=np.float64)
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    chosen = [
        np.asarray(rows)[select(s_N[rows], max(1, round(share * len(rows))))]
        for rows in places.values()
    ]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)


SELECTORS: dict[str, Selector] = {
    "least_range": least_range,
    "least_variance": least_variance,
    "least_distance": least_distance,
    "tukey_then_least_range": tukey_then_least_range,
    "grown_from_median": grown_from_median,
    "grown_from_smallest_gap": grown_from_smallest_gap,
}


def _sorted(scores_N: NDArray[np.floating], size: int) -> tuple[NDArray[np.float64], Places]:
    s_N = np.asarray(scores_N, dtype=np.float64)
    if not 1 <= size <= len(s_N):
        raise ValueError(f"cannot choose {size} of {len(s_N)} scores")
    order_N = np.argsort(s_N, kind="stable")
    return s_N[order_N], order_N


def _run(order_N: Places, start: int, size: int) -> Places:
    return np.sort(order_N[start : start + size])


def _window_sums(x_N: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    cumulative = np.concatenate([[0.0], np.cumsum(x_N)])
    return np.asarray(cumulative[size:] - cumulative[:-size])


def _rounded(x_W: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without the noise of prefix sums, so that the first of equal windows wins."""
    return np.round(x_W, 9)


def _grown(s_N: NDArray[np.float64], order_N: Places, start: int, size: int) -> Places:
    low = high = start
    while high - low + 1 < size:
        left = s_N[low] - s_N[low - 1] if low > 0 else np.inf
        right = s_N[high + 1] - s_N[high] if high + 1 < len(s_N) else np.inf
        low, high = (low - 1, high) if left <= right else (low, high + 1)
    return _run(order_N, low, size)
