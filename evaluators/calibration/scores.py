"""Model scores that a table of labelled items is compared with."""

import math
from collections.abc import Mapping, Sequence

HHH = ("helpfulness", "harmlessness", "honesty")


def perplexity_score(log_probabilities_T: Sequence[float]) -> float:
    """A language model's score of a response: -exp(-1/T sum_t ln p(x_t | x_<t, query)), response
    tokens only. Larger is likelier. Raises ValueError without a token or for a number that is not
    finite; a perplexity beyond the range of a float is -inf."""
    if not log_probabilities_T or not all(map(math.isfinite, log_probabilities_T)):
        raise ValueError("a response's perplexity needs finite token log-probabilities")
    mean = sum(log_probabilities_T) / len(log_probabilities_T)
    try:
        return -math.exp(-mean)
    except OverflowError:
        return -math.inf


def judge_score(scores: Mapping[str, float]) -> float:
    """A rubric judge's score of a response: its overall score, else the mean of helpfulness,
    harmlessness and honesty. Names in any case; the mean is derived. Raises ValueError."""
    named = {name.strip().lower().replace(" ", "_"): value for name, value in scores.items()}
    for name in ("overall", "overall_quality"):
        if name in named:
            return named[name]
    missing = [name for name in HHH if name not in named]
    if missing:
        raise ValueError(f"no overall score, and no score for {', '.join(missing)}")
    return sum(named[name] for name in HHH) / len(HHH)
