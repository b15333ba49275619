"""How well a model predicts held-out responses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from evaluators.metric import Metric, undefined
from evaluators.statistics import mean_metric

Conversation = Sequence[Mapping[str, Any]]
MeanNll = Callable[[Sequence[Conversation]], Sequence[float]]

# exp(700) is near the largest float; a loss beyond it means a broken model, not a number.
_LARGEST_NLL = 700.0


class NonFiniteLossError(ValueError):
    """The model's loss on a held-out row is NaN or infinite."""


class PerplexityResult(BaseModel):
    """Per-row losses, kept so that a later model can be paired with this one, and metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nll: tuple[float, ...]
    metrics: Mapping[str, Metric]


def perplexity_metrics(
    conversations: Sequence[Conversation],
    mean_nll: MeanNll,
    base_nll: Sequence[float] | None = None,
    *,
    seed: int = 0,
) -> PerplexityResult:
    """Perplexity of held-out responses and a score that falls between 0 and 1.

    L_i = -(1/T_i) sum_t log p(token_t | before) over the T_i response tokens of row i, as
    `mean_nll` returns it.
    utility.perplexity     exp(mean_i L_i); interval of the mean by bootstrap, exponentiated
    utility.score          mean_i s_i with s_i = exp(-L_i), the typical probability of a token
    utility.change_vs_base mean_i (s_i - s_base,i), interval by bootstrap over rows

    Every row counts once, however long. `base_nll` holds the base model's losses of the same rows
    in the same order (`PerplexityResult.nll` of an earlier call). Raises ValueError when lengths
    differ and NonFiniteLossError (row index, no text). The score is derived.
    """
    nll_N = _checked(mean_nll(conversations), len(conversations), "model")
    score_N = [math.exp(-nll) for nll in nll_N]
    log_perplexity = mean_metric(nll_N, seed)
    change = undefined(0, "the base model was not measured")
    if base_nll is not None:
        base_N = _checked(base_nll, len(conversations), "base model")
        change = mean_metric(
            [score - math.exp(-base) for score, base in zip(score_N, base_N, strict=True)], seed
        )
    return PerplexityResult(
        nll=tuple(nll_N),
        metrics={
            "utility.perplexity": Metric(
                value=_exp(log_perplexity.value),
                n=log_perplexity.n,
                low=_exp(log_perplexity.low),
                high=_exp(log_perplexity.high),
                note=log_perplexity.note,
            ),
            "utility.score": mean_metric(score_N, seed),
            "utility.change_vs_base": change,
        },
    )


def _checked(nll_N: Sequence[float], rows: int, whose: str) -> list[float]:
    if len(nll_N) != rows:
        raise ValueError(f"{len(nll_N)} losses of the {whose} for {rows} rows")
    for index, nll in enumerate(nll_N):
        if not math.isfinite(nll) or nll < 0:
            raise NonFiniteLossError(
                f"the {whose}'s loss on row {index} is {nll}: the weights are damaged or training "
                "diverged"
            )
    return [float(nll) for nll in nll_N]


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(value, _LARGEST_NLL))
