"""The one number shape that every evaluator returns and that the gate reads."""

from pydantic import BaseModel, ConfigDict, Field


class Metric(BaseModel):
    """A measured value with its sample size and two-sided 95 % interval.

    `value` None means undefined (nothing to measure), which is different from zero. A value
    without an interval leaves `low` and `high` None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float | None = Field(description="Point estimate; None when the metric is undefined.")
    n: int = Field(ge=0, description="Number of independent units: prompts, queries or rows.")
    low: float | None = Field(default=None, description="Lower end of the 95 % interval.")
    high: float | None = Field(default=None, description="Upper end of the 95 % interval.")
    note: str | None = Field(
        default=None, max_length=500, description="How to read the number; never model output."
    )


def undefined(n: int, note: str) -> Metric:
    """A metric that could not be computed from `n` units, with the reason."""
    return Metric(value=None, n=n, note=note)
