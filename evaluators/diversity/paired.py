"""Change of a per-query number between two models that answered the same queries."""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from evaluators.metric import Metric, undefined
from evaluators.statistics import mcnemar_exact, mean_metric

# Below this many queries a percentile bootstrap is clearly too narrow.
FEW_QUERIES = 10


class PairedDifference(BaseModel):
    """Mean of tuned minus base over queries, its 95 % bootstrap interval, and a sign test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(ge=1, description="Queries where both are defined.")
    mean: float
    low: float = Field(description="2.5th percentile of the bootstrap over queries.")
    high: float = Field(description="97.5th percentile of it.")
    higher: int = Field(ge=0, description="Queries where the tuned model's number is higher.")
    lower: int = Field(ge=0, description="Queries where it is lower.")
    sign_p: float = Field(ge=0, le=1, description="Exact two-sided sign test, ties left out.")

    def metric(self) -> Metric:
        """The metric that the gate reads; with few queries its note tells the sign test."""
        note = None
        if self.n < FEW_QUERIES:
            note = (
                f"the bootstrap over {self.n} queries is rough: {self.higher} rose and "
                f"{self.lower} fell, sign test p = {self.sign_p:.3g}"
            )
        # All resamples of one query are that query.
        low, high = (None, None) if self.n == 1 else (self.low, self.high)
        return Metric(value=self.mean, n=self.n, low=low, high=high, note=note)


def sign_test(differences: Sequence[float]) -> float:
    """Exact two-sided p of as many positive and negative differences; zeros are left out."""
    return mcnemar_exact(sum(d > 0 for d in differences), sum(d < 0 for d in differences))


def paired_difference(
    tuned: Sequence[float | None], base: Sequence[float | None], seed: int
) -> PairedDifference | None:
    """D = mean_q (tuned_q - base_q) over queries where both are defined; None where there are
    none. Queries, not responses, are drawn, because responses to one query resemble each other."""
    differences = [
        after - before
        for after, before in zip(tuned, base, strict=True)
        if after is not None and before is not None
    ]
    if not differences:
        return None
    change = mean_metric(differences, seed)
    assert change.low is not None
    assert change.high is not None
    return PairedDifference(
        n=len(differences),
        mean=float(np.mean(differences)),
        low=change.low,
        high=change.high,
        higher=sum(d > 0 for d in differences),
        lower=sum(d < 0 for d in differences),
        sign_p=sign_test(differences),
    )


def difference_metric(difference: PairedDifference | None, why_not: str) -> Metric:
    """The difference as a metric, undefined with the reason where there is none."""
    return undefined(0, why_not) if difference is None else difference.metric()
