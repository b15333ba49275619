import math

import pytest

from evaluators.utility.label_accuracy import is_correct, label_accuracy_metrics
from evaluators.utility.perplexity import NonFiniteLossError, perplexity_metrics

ROWS = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3


@pytest.mark.parametrize(
    ("answer", "label", "correct"),
    [
        ("positive", "positive", True),
        (" Positive. ", "positive", True),
        ("\n**Sci/Tech**\nbecause", "sci/tech", True),
        ("positive, I think", "positive", False),
        ("negative\npositive", "positive", False),
        ("", "positive", False),
        ("", "", False),
    ],
)
def test_a_label_must_be_the_whole_first_line(answer, label, correct):
    assert is_correct(answer, label) is correct


def test_accuracy_and_its_paired_change():
    metrics = label_accuracy_metrics(["a", "b", "c", "x"], list("abcd"), ["a", "x", "x", "x"])
    assert (metrics["utility.score"].value, metrics["utility.score"].n) == (0.75, 4)
    assert metrics["utility.change_vs_base"].value == pytest.approx(0.5)


def test_accuracy_without_rows_or_base_is_undefined():
    metrics = label_accuracy_metrics([], [], [])
    assert metrics["utility.score"].value is None
    assert label_accuracy_metrics(["a"], ["a"])["utility.change_vs_base"].value is None


def test_unequal_numbers_of_answers_and_labels_are_refused():
    with pytest.raises(ValueError, match="1 answers for 2 labels"):
        label_accuracy_metrics(["a"], ["a", "b"])


def test_perplexity_is_the_exponent_of_the_mean_loss():
    result = perplexity_metrics(ROWS, lambda rows: [1.0, 2.0, 3.0])
    perplexity = result.metrics["utility.perplexity"]
    assert perplexity.value == pytest.approx(math.exp(2))
    assert perplexity.low <= perplexity.value <= perplexity.high
    score = result.metrics["utility.score"].value
    assert score == pytest.approx((math.exp(-1) + math.exp(-2) + math.exp(-3)) / 3)


def test_the_change_against_the_base_is_paired_by_row():
    base = perplexity_metrics(ROWS, lambda rows: [1.0, 2.0, 3.0])
    tuned = perplexity_metrics(ROWS, lambda rows: [0.0, 2.0, 3.0], base.nll)
    expected = (1 - math.exp(-1)) / 3
    assert tuned.metrics["utility.change_vs_base"].value == pytest.approx(expected)
    assert base.metrics["utility.change_vs_base"].value is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0])
def test_a_loss_that_is_no_loss_is_refused(loss):
    with pytest.raises(NonFiniteLossError, match="row 1"):
        perplexity_metrics(ROWS, lambda rows: [1.0, loss, 1.0])


def test_losses_must_match_rows():
    with pytest.raises(ValueError, match="2 losses of the base model for 3 rows"):
        perplexity_metrics(ROWS, lambda rows: [1.0, 1.0, 1.0], [1.0, 1.0])


def test_no_rows_give_undefined_metrics():
    result = perplexity_metrics([], lambda rows: [])
    assert all(metric.value is None for metric in result.metrics.values())
