"""How many prompts a gate needs before its verdict means something."""

import math
from statistics import NormalDist

from pydantic import BaseModel, ConfigDict, Field

from evaluators.statistics.binomial import binomial_cdf, wilson_upper

MAXIMUM_PROMPTS = 20_000


class SamplePlan(BaseModel):
    """A sample size, and what a rule "upper bound <= limit" does with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: int = Field(ge=1, description="Number of distinct prompts, n.")
    largest_passing: int = Field(ge=-1, description="Most flagged prompts that pass; -1: none.")
    pass_probability: float = Field(ge=0, le=1, description="At the assumed true rate.")


def largest_passing_count(n: int, limit: float, confidence: float = 0.95) -> int:
    """Largest k whose one-sided upper Wilson bound of k/n is <= limit; -1 where even 0 fails.

    The bound is at most the limit exactly where k <= n limit - z sqrt(n limit (1 - limit)).
    """
    _check_rates(limit=limit)
    z = NormalDist().inv_cdf(confidence)
    k = min(n, math.floor(n * limit - z * math.sqrt(n * limit * (1 - limit))))
    # The closed form and the bound round differently where they meet.
    while k < n and wilson_upper(k + 1, n, confidence) <= limit:
        k += 1
    while k >= 0 and wilson_upper(k, n, confidence) > limit:
        k -= 1
    return max(k, -1)


def pass_plan(n: int, limit: float, assumed: float, confidence: float = 0.95) -> SamplePlan:
    """What n prompts achieve: P(X <= largest passing count), X binomial(n, assumed)."""
    k = largest_passing_count(n, limit, confidence)
    return SamplePlan(prompts=n, largest_passing=k, pass_probability=binomial_cdf(k, n, assumed))


def prompts_for_limit(
    limit: float, assumed: float, power: float = 0.8, confidence: float = 0.95
) -> SamplePlan:
    """Smallest n at which a model of true rate `assumed` passes with probability >= power.

    The probability falls while the passing count stays the same and jumps when it grows by one, so
    the n returned is the smallest from which it stays >= power up to 2n. Raises ValueError unless
    0 <= assumed < limit < 1 and 0 < power < 1, or where more than 20,000 prompts were needed.
    """
    _check_rates(limit=limit, power=power)
    if not 0 <= assumed < limit:
        raise ValueError(
            f"the assumed rate must be at least 0 and below the limit {limit:g}, got {assumed:g}: "
            "a model at its limit passes by luck alone"
        )
    found: int | None = None
    k, first = 0, _first_size(0, limit, confidence)
    while found is None or first <= 2 * found:
        if first > MAXIMUM_PROMPTS:
            raise ValueError(
                f"telling {assumed:g} from the limit {limit:g} needs more than {MAXIMUM_PROMPTS} "
                "prompts; assume a lower rate or raise the limit"
            )
        following = _first_size(k + 1, limit, confidence)
        if binomial_cdf(k, following - 1, assumed) < power:
            found = None
        elif found is None:
            found = first
        k, first = k + 1, following
    return pass_plan(found, limit, assumed, confidence)


def paired_sample_size(
    discordant: float, change: float, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Prompts that a one-sided McNemar test at level alpha needs to see a change of the rate.

    n = ceil((z_{1-alpha} sqrt(s) + z_power sqrt(s - d^2))^2 / d^2), s the share of prompts whose
    flag differs between the models and d the change. Connor, Biometrics 43 (1987). Raises
    ValueError unless 0 < |d| <= s <= 1.
    """
    _check_rates(alpha=alpha, power=power)
    if not 0 < abs(change) <= discordant <= 1:
        raise ValueError(
            f"needs 0 < |change| <= discordant <= 1, got change={change}, discordant={discordant}"
        )
    normal = NormalDist()
    under_no_change = normal.inv_cdf(1 - alpha) * math.sqrt(discordant)
    under_change = normal.inv_cdf(power) * math.sqrt(discordant - change**2)
    return math.ceil((under_no_change + under_change) ** 2 / change**2)


def _first_size(k: int, limit: float, confidence: float) -> int:
    """Smallest n at which k flagged prompts pass."""
    z = NormalDist().inv_cdf(confidence)
    spread = z * math.sqrt(limit * (1 - limit))
    n = max(k, 1, math.ceil(((spread + math.sqrt(spread**2 + 4 * limit * k)) / (2 * limit)) ** 2))
    while wilson_upper(k, n, confidence) > limit:
        n += 1
    while n > max(k, 1) and wilson_upper(k, n - 1, confidence) <= limit:
        n -= 1
    return n


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 < rate < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {rate:g}")
