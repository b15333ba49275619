"""What a correlation would be if only the range of human scores were smaller.

Leaving out the best and the worst items lowers any correlation, without the scorer being worse on
what is left. So a subset is compared with random subsets whose human scores vary as little.
"""

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.calibration.correlation import (
    standardised,
    weighted_pearson,
    weighted_spearman,
)

CHANCE_DRAWS = 200
_SEARCH_DRAWS = 40
_SEARCH_STEPS = 30
_MIN_SIZE = 10

Vector = NDArray[np.float64]


class ChanceSubsets(BaseModel):
    """Correlations in random subsets of all items with the variance of one subset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=2, description="Items of a random subset.")
    draws: int = Field(ge=1, description="Random subsets drawn.")
    variance: float = Field(description="Mean variance of their human scores.")
    pearson: float = Field(description="Mean over the draws.")
    pearson_low: float = Field(description="2.5th percentile over the draws.")
    pearson_high: float = Field(description="97.5th percentile over the draws.")
    spearman: float
    spearman_low: float
    spearman_high: float


def restricted_pearson(r: float, u: float) -> float:
    """Pearson's r after human scores were restricted to u = sd_subset / sd_all:
    r u / sqrt(1 - r^2 + r^2 u^2), for a linear relation of equal spread (Thorndike 1949, case 2).
    """
    if not -1 <= r <= 1 or u < 0:
        raise ValueError(f"needs -1 <= r <= 1 and u >= 0, got r={r}, u={u}")
    below = math.sqrt(1 - r * r + r * r * u * u)
    return 0.0 if below == 0 else r * u / below


def chance_subsets(
    human_N: Vector,
    model_N: Vector,
    variance: float,
    centre: float,
    size: int,
    *,
    seed: int,
    draws: int = CHANCE_DRAWS,
) -> ChanceSubsets | None:
    """Random subsets whose human scores have the given variance on average.

    Items are drawn without replacement with weights exp(-c (s - centre)^2), c found by bisection
    (c < 0 where more variance is wanted than a plain random subset has). At most a third of all
    items is drawn, since larger subsets cannot reach a small variance. None where a draw would
    have fewer than 10 items, or the variance cannot be reached within 10 %.
    """
    size = min(size, len(human_N) // 3)
    spread = float(np.var(human_N))
    if size < _MIN_SIZE or spread == 0 or variance <= 0:
        return None
    square_N = (human_N - centre) ** 2 / spread
    generator = np.random.default_rng(seed)
    noise_R_N = generator.gumbel(size=(draws, len(human_N)))

    def drawn(c: float, rounds: int) -> NDArray[np.int64]:
        key_R_N = noise_R_N[:rounds] - c * square_N
        return np.argpartition(-key_R_N, size - 1, axis=1)[:, :size]

    def reached(c: float, rounds: int) -> float:
        return float(human_N[drawn(c, rounds)].var(axis=1).mean())

    low, high = -50.0, 50.0
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle, _SEARCH_DRAWS) > variance else (low, middle)
    c = (low + high) / 2
    found = reached(c, draws)
    if abs(found - variance) > 0.1 * variance:
        return None
    if np.ptp(model_N) == 0:
        return None
    # A subset without replacement is a resample with multiplicities 0 and 1.
    w_R_N = np.zeros((draws, len(human_N)))
    np.put_along_axis(w_R_N, drawn(c, draws), 1.0, axis=1)
    x_N, y_N = standardised(human_N), standardised(model_N)
    linear_R, ranked_R = weighted_pearson(w_R_N, x_N, y_N), weighted_spearman(w_R_N, x_N, y_N)
    defined_R = np.isfinite(linear_R) & np.isfinite(ranked_R)
    linear, ranked = linear_R[defined_R], ranked_R[defined_R]
    if not len(linear):
        return None
    ends = [0.025, 0.975]
    (low_r, high_r), (low_s, high_s) = np.quantile(linear, ends), np.quantile(ranked, ends)
    return ChanceSubsets(
        size=size,
        draws=len(linear),
        variance=found,
        pearson=float(np.mean(linear)),
        pearson_low=float(low_r),
        pearson_high=float(high_r),
        spearman=float(np.mean(ranked)),
        spearman_low=float(low_s),
        spearman_high=float(high_s),
    )
