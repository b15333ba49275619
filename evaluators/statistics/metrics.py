"""A rate or a mean as the metric that the gate reads."""

from collections.abc import Sequence

import numpy as np

from evaluators.metric import Metric, undefined
from evaluators.statistics.binomial import wilson_interval
from evaluators.statistics.bootstrap import bootstrap_mean_interval


def proportion_metric(k: int, n: int, note: str | None = None) -> Metric:
    """A rate with its two-sided 95 % Wilson interval; undefined for n = 0."""
    if n == 0:
        return undefined(0, note or "no observations")
    low, high = wilson_interval(k, n)
    return Metric(value=k / n, n=n, low=low, high=high, note=note)


def mean_metric(
    values: Sequence[float],
    seed: int,
    note: str | None = None,
    support: tuple[float, float] | None = None,
) -> Metric:
    """A mean with its 95 % bootstrap interval; undefined for no values.

    `support` is the range that a value can have, see `bootstrap_mean_interval`.
    """
    if not values:
        return undefined(0, note or "no observations")
    low, high = bootstrap_mean_interval(values, seed, support=support)
    return Metric(value=float(np.mean(values)), n=len(values), low=low, high=high, note=note)
