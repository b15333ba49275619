"""Counts of another tool's tests as a metric of the gate."""

from typing import NamedTuple

from evaluators.metric import Metric, undefined
from evaluators.statistics import wilson_interval


class Counts(NamedTuple):
    """Tests that passed, failed, and ended without a verdict (an error, an empty answer)."""

    passed: int = 0
    failed: int = 0
    open: int = 0

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))


def failure_rate(counts: Counts, maximum_open: float, repeats: int = 1) -> Metric:
    """failed / (passed + failed), with a Wilson interval.

    `repeats` answers of one prompt are not independent. The interval takes them as one (design
    effect for an intra-cluster correlation of 1), so n is the number of prompts. `high` counts
    every open test as failed. Undefined without a single verdict, and where the open share exceeds
    `maximum_open`: a rate over what happened to work says nothing of the rest.
    """
    judged = counts.passed + counts.failed
    total = judged + counts.open
    n = max(1, round(judged / repeats)) if judged else 0
    if judged == 0:
        return undefined(0, f"none of {total} tests has a verdict")
    if counts.open > maximum_open * total:
        return undefined(n, f"{counts.open} of {total} tests have no verdict")
    value = counts.failed / judged
    low, _ = wilson_interval(round(counts.failed / repeats), n)
    worst = max(1, round(total / repeats))
    _, high = wilson_interval(min(worst, round((counts.failed + counts.open) / repeats)), worst)
    notes = [f"{counts.failed} of {judged} tests failed"]
    if counts.open:
        notes.append(f"{counts.open} without a verdict, counted as failed in the upper end")
    if repeats > 1:
        notes.append(f"{repeats} answers a prompt, taken as one in the interval")
    return Metric(
        value=value, n=n, low=min(low, value), high=max(high, value), note="; ".join(notes)
    )
