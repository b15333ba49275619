"""Stop sampling early, with the error of looking several times kept in bounds."""

from typing import Literal

from pydantic import Field

from evaluators.statistics.binomial import wilson_lower, wilson_upper
from jobspec.frozen import Frozen

StopDecision = Literal["below", "above", "continue"]


class SequentialPlan(Frozen):
    """When to look at a growing sample, and what each look may spend."""

    limit: float = Field(gt=0, lt=1, description="Rate that the model must stay below.")
    total: int = Field(ge=1, le=1_000_000, description="Prompts if no look stops the sampling.")
    looks: int = Field(default=20, ge=1, le=1000, description="Looks, evenly spread over total.")
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="One-sided, of all looks together."
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sample sizes at which to look: ceil(total * i / looks), i = 1..looks, each once."""
        found = {-(-self.total * i // self.looks) for i in range(1, self.looks + 1)}
        return tuple(sorted(found))

    @property
    def look_confidence(self) -> float:
        """1 - (1 - confidence)/looks: the allowed error, split equally over the looks."""
        return 1 - (1 - self.confidence) / self.looks


def stop_decision(plan: SequentialPlan, k: int, n: int) -> StopDecision:
    """Whether k flagged of the first n prompts settle the question before the sample is complete.

    "below" (success): the one-sided upper Wilson bound at `look_confidence` is below the limit;
    "above" (futility): the lower one is above it; else, and at any n that is no look, "continue".
    By the union bound the chance of a wrong "below" over all looks is at most the sum of what the
    looks spend, 1 - confidence (as far as Wilson's bounds hold theirs), and of a wrong "above"
    likewise. The order of the prompts must be random. Derived: equal alpha spending, with two looks
    .025 each.
    """
    if n not in plan.sizes:
        return "continue"
    if wilson_upper(k, n, plan.look_confidence) < plan.limit:
        return "below"
    if wilson_lower(k, n, plan.look_confidence) > plan.limit:
        return "above"
    return "continue"
