"""Share of answers that name the expected label."""

import string
from collections.abc import Sequence

from evaluators.metric import Metric, undefined
from evaluators.statistics import paired_change, proportion_metric

_EDGE = string.whitespace + string.punctuation + "“”‘’…"


def normalise_label(answer: str) -> str:
    """First non-empty line, without surrounding blanks and punctuation, case-folded."""
    lines = answer.strip().splitlines()
    return lines[0].strip(_EDGE).casefold() if lines else ""


def is_correct(answer: str, label: str) -> bool:
    """Exact match after normalising both sides; an empty label matches nothing."""
    expected = normalise_label(label)
    return expected != "" and normalise_label(answer) == expected


def label_accuracy_metrics(
    answers: Sequence[str],
    labels: Sequence[str],
    base_answers: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Metric]:
    """utility.score, the accuracy with its Wilson interval, and utility.change_vs_base.

    The change is accuracy(tuned) - accuracy(base) on the same rows, with a bootstrap interval
    over rows; it is undefined without base answers. Raises ValueError on unequal lengths.
    """
    base = None if base_answers is None else _correct(base_answers, labels)
    return flag_metrics(_correct(answers, labels), base, seed=seed)


def flag_metrics(
    right: Sequence[bool], base_right: Sequence[bool] | None = None, *, seed: int = 0
) -> dict[str, Metric]:
    """The two utility metrics of answers that are right or wrong, whatever decides it."""
    change = undefined(0, "the base model was not measured")
    if base_right is not None and right:
        result = paired_change(base_right, right, seed)
        change = Metric(
            value=result.change,
            n=result.n,
            low=result.low,
            high=result.high,
            note=f"exact McNemar p = {result.p_value:.3g}",
        )
    return {
        "utility.score": proportion_metric(sum(right), len(right)),
        "utility.change_vs_base": change,
    }


def _correct(answers: Sequence[str], labels: Sequence[str]) -> list[bool]:
    if len(answers) != len(labels):
        raise ValueError(f"{len(answers)} answers for {len(labels)} labels")
    return [is_correct(answer, label) for answer, label in zip(answers, labels, strict=True)]
