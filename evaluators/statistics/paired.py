"""Change of a flag's rate between two models that answered the same prompts."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from pydantic import BaseModel, ConfigDict, Field

from evaluators.statistics.binomial import root
from evaluators.statistics.bootstrap import BOOTSTRAP_ROUNDS, bootstrap_mean_interval


class PairedChange(BaseModel):
    """Change of a flag's rate between two models on the same prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(ge=1, description="Number of prompts seen by both models.")
    change: float = Field(description="(c - b) / n, tuned minus base.")
    low: float = Field(description="Lower end of the 95 % interval, see paired_change.")
    high: float = Field(description="Upper end of the 95 % interval, see paired_change.")
    only_base: int = Field(ge=0, description="b, prompts flagged for the base model only.")
    only_tuned: int = Field(ge=0, description="c, prompts flagged for the tuned model only.")
    p_value: float = Field(ge=0, le=1, description="Exact two-sided McNemar p.")


def mcnemar_exact(b: int, c: int) -> float:
    """Exact two-sided McNemar p of b and c discordant pairs.

    p = min(1, 2 sum_{i <= min(b,c)} C(b+c, i) / 2^(b+c)); 1 when there is no discordant pair.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts of discordant pairs must not be negative, got {b} and {c}")
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    # Integers of any size divide exactly; converting them to float first would overflow.
    return float(min(1.0, (2 * tail) / 2 ** (b + c)))


def paired_score_interval(b: int, c: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of the change (c - b)/n of n pairs, b and c of them discordant.

    All d with |T(d)| <= z, where T(d) = (c - b - n d) / sqrt(n (2 q + d (1 - d))) and q is the
    likeliest probability of "base only" if the change is d: the larger root of
    2n q^2 + ((2n - c + b) d - b - c) q - b d (1 - d) = 0. Without a discordant pair it is
    +- z^2/(n + z^2). Tango, Statistics in Medicine 17 (1998). Raises ValueError unless b, c >= 0
    and 1 <= n >= b + c.
    """
    if n < 1 or b < 0 or c < 0 or b + c > n:
        raise ValueError(f"needs b, c >= 0 and n >= max(1, b + c), got b={b}, c={c}, n={n}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def statistic(d: float) -> float:
        linear = (2 * n - c + b) * d - b - c
        inner = max(0.0, linear * linear + 8 * n * b * d * (1 - d))
        q = (math.sqrt(inner) - linear) / (4 * n)
        distance = c - b - n * d
        variance = n * (2 * q + d * (1 - d))
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    change = (c - b) / n
    low = -1.0 if b == n else root(lambda d: statistic(d) - z, -1.0, change)
    high = 1.0 if c == n else root(lambda d: statistic(d) + z, change, 1.0)
    return low, high


def paired_change(
    base: Sequence[bool], tuned: Sequence[bool], seed: int, rounds: int = BOOTSTRAP_ROUNDS
) -> PairedChange:
    """Change of a flag from base to tuned on the same prompts, in the same order.

    change = (c - b)/n with b flagged by base only and c by tuned only; p by the exact McNemar test.
    The 95 % interval is the bootstrap over prompts of tuned_i - base_i. Where no pair moved in one
    of the two directions (b = 0 or c = 0), no resample can move there either, and without any
    discordant pair the bootstrap would claim [0, 0]: there each end is the outer one of the
    bootstrap's and of `paired_score_interval`'s.
    """
    if len(base) != len(tuned) or not base:
        raise ValueError(
            f"paired flags need two equal, non-empty lists, got {len(base)} and {len(tuned)}"
        )
    b = sum(old and not new for old, new in zip(base, tuned, strict=True))
    c = sum(new and not old for old, new in zip(base, tuned, strict=True))
    difference = [float(new) - float(old) for old, new in zip(base, tuned, strict=True)]
    low, high = bootstrap_mean_interval(difference, seed, rounds)
    if b == 0 or c == 0:
        score_low, score_high = paired_score_interval(b, c, len(base))
        low, high = min(low, score_low), max(high, score_high)
    return PairedChange(
        n=len(base),
        change=(c - b) / len(base),
        low=low,
        high=high,
        only_base=b,
        only_tuned=c,
        p_value=mcnemar_exact(b, c),
    )
