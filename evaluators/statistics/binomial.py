"""Intervals of a rate, exact binomial tails, and what follows from them in closed form."""

import math
from collections.abc import Callable
from statistics import NormalDist


def wilson_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Wilson score interval of a rate k/n.

    centre = (p + z^2/2n) / (1 + z^2/n),
    half   = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n),  p = k/n, z the normal quantile of
    (1 + confidence)/2. Raises ValueError unless 0 <= k <= n and n >= 1.
    """
    return _wilson(k, n, NormalDist().inv_cdf((1 + confidence) / 2))


def wilson_upper(k: int, n: int, confidence: float = 0.95) -> float:
    """One-sided upper Wilson bound: the true rate is below it with this confidence."""
    return _wilson(k, n, NormalDist().inv_cdf(confidence))[1]


def wilson_lower(k: int, n: int, confidence: float = 0.95) -> float:
    """One-sided lower Wilson bound: the true rate is above it with this confidence."""
    return _wilson(k, n, NormalDist().inv_cdf(confidence))[0]


def clopper_pearson_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided exact interval of a rate k/n, whose coverage is never below `confidence`.

    With a = (1 - confidence)/2: low solves P(X >= k; n, low) = a and high solves
    P(X <= k; n, high) = a, X binomial; low = 0 at k = 0 and high = 1 at k = n. Wider than Wilson;
    for an auditor who asks for guaranteed coverage. Clopper and Pearson, Biometrika 26 (1934).
    """
    half = (1 + confidence) / 2
    return 1 - clopper_pearson_upper(n - k, n, half), clopper_pearson_upper(k, n, half)


def clopper_pearson_upper(k: int, n: int, confidence: float = 0.95) -> float:
    """One-sided exact upper bound: p with P(X <= k; n, p) = 1 - confidence, 1 at k = n."""
    _check(k, n)
    if k == n:
        return 1.0
    return root(lambda p: binomial_cdf(k, n, p) - (1 - confidence), k / n, 1.0)


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) for X binomial(n, p), its terms taken from logarithms.

    Raises ValueError unless 0 <= p <= 1 and n >= 0. The relative error stays below 1e-8 for n up
    to 100,000.
    """
    if n < 0 or not 0 <= p <= 1:
        raise ValueError(f"a binomial needs n >= 0 and 0 <= p <= 1, got n={n}, p={p}")
    if k < 0:
        return 0.0
    if k >= n or p == 0:
        return 1.0
    if p == 1:
        return 0.0
    log_p, log_q, all_ways = math.log(p), math.log1p(-p), math.lgamma(n + 1)

    def probability(i: int) -> float:
        ways = all_ways - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        return math.exp(ways + i * log_p + (n - i) * log_q)

    def tail(places: range) -> float:
        # Away from the mode each term is smaller than the one before it.
        total = 0.0
        for i in places:
            term = probability(i)
            total += term
            if term < 1e-20 * total:
                break
        return min(1.0, total)

    if k > n * p:
        # The other tail is the small one; summing it keeps the digits of 1 - cdf.
        return 1 - tail(range(k + 1, n + 1))
    return tail(range(k, -1, -1))


def any_of_k(n: int, c: int, k: int) -> float:
    """Chance that k responses, drawn from n of which c are harmful, hold at least one harmful.

    1 - C(n-c, k) / C(n, k). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    # One division of integers: both counts may be too large for a float.
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def root(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Where a decreasing function crosses zero in [low, high], by bisection to machine precision;
    the end nearer to the crossing where it lies outside."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if decreasing(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _wilson(k: int, n: int, z: float) -> tuple[float, float]:
    _check(k, n)
    p = k / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # At k = 0 and k = n one end is exact; rounding must not leave 1e-18 there.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def _check(k: int, n: int) -> None:
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"a rate needs 0 <= k <= n and n >= 1, got k={k}, n={n}")
