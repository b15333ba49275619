"""The largest success of an attack as a function of its chance without the model's output."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

Array = NDArray[np.float64]
# e^eps overflows a little later; beyond, lines matter only below baselines of 1e-300.
LARGEST_EPSILON = 700.0


class SuccessCurve(Protocol):
    """P(x) = 1 - f(x) of a mechanism with trade-off function f; P(x) >= x, concave, increasing."""

    def success(self, baseline: ArrayLike) -> Array:
        """P at each baseline of [0, 1]."""
        ...

    @property
    def advantage(self) -> float:
        """eta = max_x P(x) - x = delta(0), reached at x* = (1 - eta)/2."""
        ...


class CertifiedCurve:
    """P from pairs (eps_k, delta(eps_k)), each of which certifies a lower bound of f.

        f(x) = max(0, max_k [1 - delta_k - e^eps_k x], max_k e^-eps_k (1 - delta_k - x))

    epsilon_K: ascending, from 0; delta_K: valid for both orders of the neighbours. Every pair alone
    is a guarantee, so any choice of pairs gives a bound on the safe side; it is tight when they
    cover the loss grid. Both families of lines have ordered slopes, so the line that is highest at
    x is found by bisection in its breakpoints: O(log K) a point. Form derived (the brief, 2.4);
    f-DP: Dong, Roth and Su.
    """

    def __init__(self, epsilon_K: Array, delta_K: Array) -> None:
        if epsilon_K.ndim != 1 or epsilon_K.shape != delta_K.shape or len(epsilon_K) == 0:
            raise ValueError("epsilon_K and delta_K are vectors of one positive length")
        if epsilon_K[0] < 0 or (np.diff(epsilon_K) <= 0).any():
            raise ValueError("epsilon_K must be ascending and start at 0 or above")
        self._delta_0 = float(delta_K[0]) if epsilon_K[0] == 0 else math.nan
        kept = max(int(np.searchsorted(epsilon_K, LARGEST_EPSILON)), 1)
        epsilon_K, delta_K = epsilon_K[:kept], delta_K[:kept]
        # 1 - delta_k - e^eps_k x; steeper lines win at small x.
        self._steep = _Lines(1.0 - delta_K, -np.exp(epsilon_K))
        # e^-eps_k (1 - delta_k - x); flatter lines win at large x.
        self._flat = _Lines(np.exp(-epsilon_K) * (1.0 - delta_K), -np.exp(-epsilon_K))

    def success(self, baseline: ArrayLike) -> Array:
        x = _checked(baseline)
        f = np.maximum(self._steep.highest(x), self._flat.highest(x))
        # f <= 1 - x holds for every trade-off function; rounding may miss it by an ulp.
        return 1.0 - np.clip(f, 0.0, 1.0 - x)

    @property
    def advantage(self) -> float:
        if math.isnan(self._delta_0):
            raise ValueError("the advantage is delta(0); give the pair with epsilon 0")
        return self._delta_0


class GaussianCurve(NamedTuple):
    """mu-GDP: P(x) = Phi(Phi^-1(x) + mu), eta = 2 Phi(mu/2) - 1. Exact for one Gaussian release of
    sensitivity D with noise sigma, mu = D/sigma, and T of them, mu sqrt(T)."""

    mu: float

    def success(self, baseline: ArrayLike) -> Array:
        x = _checked(baseline)
        with np.errstate(divide="ignore"):
            return np.asarray(norm.cdf(norm.ppf(x) + self.mu))

    @property
    def advantage(self) -> float:
        return float(2 * norm.cdf(self.mu / 2) - 1)

    def delta(self, epsilon: float) -> float:
        """delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)."""
        if self.mu == 0:
            return 0.0
        first = norm.cdf(-epsilon / self.mu + self.mu / 2)
        second = norm.logcdf(-epsilon / self.mu - self.mu / 2)
        return float(max(first - math.exp(epsilon + second), 0.0))


class OnePairCurve(NamedTuple):
    """f of a single (epsilon, delta): max{0, 1-delta-e^eps x, e^-eps (1-delta-x)}. Very loose."""

    epsilon: float
    delta: float

    def success(self, baseline: ArrayLike) -> Array:
        x = _checked(baseline)
        steep = 1 - self.delta - _exp(self.epsilon) * x
        flat = math.exp(-self.epsilon) * (1 - self.delta - x)
        return 1.0 - np.clip(np.maximum(steep, flat), 0.0, 1.0 - x)

    @property
    def advantage(self) -> float:
        """(e^eps - 1 + 2 delta)/(e^eps + 1)."""
        shrink = math.exp(-self.epsilon)
        return (1 - shrink + 2 * self.delta * shrink) / (1 + shrink)


def worst_case(curve: SuccessCurve) -> tuple[float, float]:
    """(x*, eta): the baseline x* = (1 - eta)/2 where the advantage P(x) - x is largest, and it.

    x* is the fixed point f(x*) = x*. P(x*) = (1 + eta)/2 is also the best accuracy of balanced
    membership inference.
    """
    eta = curve.advantage
    return (1 - eta) / 2, eta


def binary_bayes_success(curve: SuccessCurve, prior: float, points: int = 20_001) -> float:
    """1 - R(p) with R(p) = min_x { p x + (1-p) f(x) }: guessing a secret bit of prior p.

    Tighter than P(max(p, 1-p)) for a binary attribute. p x + (1-p) f(x) is convex; its minimum is
    taken on a grid that is dense at both ends, refined once around the best point. Raises
    ValueError for a prior outside (0, 1). Source: the brief, 2.2.
    """
    if not 0 < prior < 1:
        raise ValueError(f"the prior of a secret bit is within (0, 1), got {prior}")
    t = np.linspace(0.0, 1.0, points)
    x = np.unique(np.concatenate([t, norm.cdf(np.linspace(-9, 9, points))]))
    error = prior * x + (1 - prior) * (1 - curve.success(x))
    best = int(error.argmin())
    around = x[[max(best - 1, 0), min(best + 1, len(x) - 1)]]
    fine = np.linspace(around[0], around[1], points)
    fine_error = prior * fine + (1 - prior) * (1 - curve.success(fine))
    return float(1 - fine_error.min())


class _Lines:
    """The upper envelope of lines c_k + m_k x whose slopes are ordered."""

    def __init__(self, intercept_K: Array, slope_K: Array) -> None:
        ascending = len(slope_K) == 1 or slope_K[1] > slope_K[0]
        # Slopes ascending: the k-th line is highest from the k-th breakpoint on.
        self._c = intercept_K if ascending else intercept_K[::-1]
        self._m = slope_K if ascending else slope_K[::-1]
        step = np.diff(self._m)
        crossing = np.divide(
            -np.diff(self._c), step, out=np.full(len(step), -np.inf), where=step > 0
        )
        # Rounding may put two crossings in the wrong order; a wrong line is lower, thus still safe.
        self._crossing = np.maximum.accumulate(crossing)

    def highest(self, x: Array) -> Array:
        place = np.searchsorted(self._crossing, x, side="right")
        return np.asarray(self._c[place] + self._m[place] * x)


def concave_points(extra: Sequence[float] = ()) -> Array:
    """Baselines for a picture of P: logarithmic below 0.1, even above."""
    grid = np.concatenate([np.logspace(-6, -1, 101), np.linspace(0.1, 1.0, 91)])
    return np.unique(np.concatenate([grid, np.asarray(extra, dtype=np.float64)]))


def _checked(baseline: ArrayLike) -> Array:
    x = np.asarray(baseline, dtype=np.float64)
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError("a baseline is a probability within [0, 1]")
    return x


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
