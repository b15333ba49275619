"""Intervals and paired tests for rates and means."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.metric import Metric, undefined

BOOTSTRAP_ROUNDS = 2000
# Rounds times sample size is bounded per block, so that memory stays small for large samples.
_BOOTSTRAP_BLOCK = 4_000_000


class PairedChange(BaseModel):
    """Change of a flag's rate between two models on the same prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(ge=1, description="Number of prompts seen by both models.")
    change: float = Field(description="(c - b) / n, tuned minus base.")
    low: float = Field(description="Lower end of the bootstrap interval over prompts.")
    high: float = Field(description="Upper end of the bootstrap interval over prompts.")
    only_base: int = Field(ge=0, description="b, prompts flagged for the base model only.")
    only_tuned: int = Field(ge=0, description="c, prompts flagged for the tuned model only.")
    p_value: float = Field(ge=0, le=1, description="Exact two-sided McNemar p.")


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


def mcnemar_exact(b: int, c: int) -> float:
    """Exact two-sided McNemar p of b and c discordant pairs.

    p = min(1, 2 sum_{i <= min(b,c)} C(b+c, i) / 2^(b+c)); 1 when there is no discordant pair.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts of discordant pairs must not be negative, got {b} and {c}")
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    # Integers of any size divide exactly; converting them to float first would overflow.
    return float(min(1.0, (2 * tail) / 2 ** (b + c)))


def bootstrap_mean_interval(
    values: Sequence[float] | NDArray[np.float64],
    seed: int,
    rounds: int = BOOTSTRAP_ROUNDS,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of independent values (B = `rounds` resamples).

    Raises ValueError for no value or a value that is not finite.
    """
    x_N = np.asarray(values, dtype=np.float64)
    if x_N.ndim != 1 or x_N.size == 0:
        raise ValueError("the bootstrap needs a non-empty one-dimensional sample")
    if not np.isfinite(x_N).all():
        raise ValueError("the bootstrap needs finite values")
    generator = np.random.default_rng(seed)
    means_B = np.empty(rounds)
    block = max(1, _BOOTSTRAP_BLOCK // x_N.size)
    for start in range(0, rounds, block):
        count = min(block, rounds - start)
        index_B_N = generator.integers(0, x_N.size, size=(count, x_N.size))
        means_B[start : start + count] = x_N[index_B_N].mean(axis=1)
    low, high = np.quantile(means_B, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_change(
    base: Sequence[bool], tuned: Sequence[bool], seed: int, rounds: int = BOOTSTRAP_ROUNDS
) -> PairedChange:
    """Change of a flag from base to tuned on the same prompts, in the same order.

    change = (c - b)/n with b flagged by base only and c by tuned only; interval by bootstrap over
    prompts of tuned_i - base_i; p by the exact McNemar test.
    """
    if len(base) != len(tuned) or not base:
        raise ValueError(
            f"paired flags need two equal, non-empty lists, got {len(base)} and {len(tuned)}"
        )
    b = sum(old and not new for old, new in zip(base, tuned, strict=True))
    c = sum(new and not old for old, new in zip(base, tuned, strict=True))
    difference = [float(new) - float(old) for old, new in zip(base, tuned, strict=True)]
    low, high = bootstrap_mean_interval(difference, seed, rounds)
    return PairedChange(
        n=len(base),
        change=(c - b) / len(base),
        low=low,
        high=high,
        only_base=b,
        only_tuned=c,
        p_value=mcnemar_exact(b, c),
    )


def proportion_metric(k: int, n: int, note: str | None = None) -> Metric:
    """A rate with its two-sided 95 % Wilson interval; undefined for n = 0."""
    if n == 0:
        return undefined(0, note or "no observations")
    low, high = wilson_interval(k, n)
    return Metric(value=k / n, n=n, low=low, high=high, note=note)


def mean_metric(values: Sequence[float], seed: int, note: str | None = None) -> Metric:
    """A mean with its 95 % bootstrap interval; undefined for no values."""
    if not values:
        return undefined(0, note or "no observations")
    low, high = bootstrap_mean_interval(values, seed)
    return Metric(value=float(np.mean(values)), n=len(values), low=low, high=high, note=note)


def _wilson(k: int, n: int, z: float) -> tuple[float, float]:
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"a rate needs 0 <= k <= n and n >= 1, got k={k}, n={n}")
    p = k / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # At k = 0 and k = n one end is exact; rounding must not leave 1e-18 there.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)
