"""Which utility metric fits held-out answers, and the metric itself."""

from collections.abc import Callable, Sequence
from typing import Literal

from evaluators.metric import Metric, undefined
from evaluators.statistics import mean_metric
from evaluators.utility.exact_match import is_exact_match
from evaluators.utility.label_accuracy import flag_metrics, is_correct
from evaluators.utility.numeric_answer import has_final_number, is_right_number
from evaluators.utility.token_f1 import token_f1
from jobspec.spec import UtilityMetric

AnsweredMetric = Literal["label_accuracy", "exact_match", "numeric_answer", "token_f1"]
ChosenMetric = Literal["label_accuracy", "exact_match", "numeric_answer", "token_f1", "perplexity"]

LABEL_WORDS = 8
# A reasoned answer needs room that the shortest of labels would not give: the papers' limit.
REASONING_TOKENS = 200
# End token, and one more to see that the answer goes on.
SPARE_TOKENS = 2

_RULES: dict[str, Callable[[str, str], bool]] = {
    "label_accuracy": is_correct,
    "exact_match": is_exact_match,
    "numeric_answer": is_right_number,
}


def choose(kind: UtilityMetric, labels: Sequence[str], *, held_out: bool = True) -> ChosenMetric:
    """The metric that is meant by `kind`.

    auto: numeric_answer where every label ends at a number in GSM8K's form; label_accuracy where
    every label is one line of one to eight words; perplexity for other labels, for none, and for
    rows that were trained on (`held_out` false), whose answers say nothing of quality.
    """
    if kind != "auto":
        return kind
    if not held_out or not labels:
        return "perplexity"
    if all(map(has_final_number, labels)):
        return "numeric_answer"
    if all(0 < len(label.split()) <= LABEL_WORDS and "\n" not in label.strip() for label in labels):
        return "label_accuracy"
    return "perplexity"


def answer_limit(kind: AnsweredMetric, longest_label: int) -> int:
    """Most new tokens of an answer, for labels of at most `longest_label` tokens."""
    limit = longest_label + SPARE_TOKENS
    return max(limit, REASONING_TOKENS) if kind == "numeric_answer" else limit


def utility_score_metrics(
    kind: AnsweredMetric,
    answers: Sequence[str],
    labels: Sequence[str],
    base_answers: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Metric]:
    """utility.score over the rows, and utility.change_vs_base on the same rows.

    Right-or-wrong kinds: the share with its Wilson interval; the change by `paired_change`.
    token_f1: means of F1_i and of F1_i - F1_base,i with bootstrap intervals over rows. The change
    is undefined without base answers. Raises ValueError on unequal lengths and for perplexity,
    which is not computed from answers.
    """
    for given in (answers, base_answers):
        if given is not None and len(given) != len(labels):
            raise ValueError(f"{len(given)} answers for {len(labels)} labels")
    if kind in _RULES:
        rule = _RULES[kind]
        right = [rule(answer, label) for answer, label in zip(answers, labels, strict=True)]
        base_right = None
        if base_answers is not None:
            base_right = [rule(a, label) for a, label in zip(base_answers, labels, strict=True)]
        return flag_metrics(right, base_right, seed=seed)
    if kind != "token_f1":
        raise ValueError(f"{kind} is not scored by answers")
    score_N = [token_f1(answer, label) for answer, label in zip(answers, labels, strict=True)]
    change = undefined(0, "the base model was not measured")
    if base_answers is not None:
        base_N = [token_f1(a, label) for a, label in zip(base_answers, labels, strict=True)]
        change = mean_metric(
            [score - base for score, base in zip(score_N, base_N, strict=True)],
            seed,
            support=(-1.0, 1.0),
        )
    return {
        "utility.score": mean_metric(score_N, seed, support=(0.0, 1.0)),
        "utility.change_vs_base": change,
    }
