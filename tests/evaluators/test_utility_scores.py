import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.utility.exact_match import is_exact_match
from evaluators.utility.numeric_answer import final_number, has_final_number, is_right_number
from evaluators.utility.scores import answer_limit, choose, utility_score_metrics
from evaluators.utility.token_f1 import token_f1

KINDS = ("label_accuracy", "exact_match", "numeric_answer", "token_f1")


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("Two  words\n", "Two words", True),
        ("cafe\u0301", "caf\u00e9", True),
        ("two words", "Two words", False),
        ("Two words.", "Two words", False),
        ("", "", False),
    ],
)
def test_an_exact_match_is_the_whole_text(answer, label, right):
    assert is_exact_match(answer, label) is right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # Origin: harmfulness-evaluation brief 2.1: first number after the phrase, else the last
        # number, commas removed.
        ("9 * 2 = 18. The final answer is: 18", 18.0),
        ("The final answer is: 18 dollars, not 20", 18.0),
        ("First 3, then 7 apples.", 7.0),
        ("She makes 9 * 2 = $18.\n#### 18", 18.0),
        ("The final answer is: 1,234.5", 1234.5),
        ("The final answer is: -2", -2.0),
        ("The final answer is: none of the 5", 5.0),
        ("Six. The final answer is: unknown", None),
        ("4 The final answer is: unknown", 4.0),
        ("It is 3.", 3.0),
        ("", None),
        ("9" * 400, None),
    ],
)
def test_the_final_number_follows_the_phrase_or_is_the_last(text, number):
    assert final_number(text) == number


@given(st.text(max_size=80))
def test_no_text_breaks_the_number_rule(text):
    found = final_number(text)
    assert found is None or isinstance(found, float)


def test_numbers_are_compared_as_floats():
    assert is_right_number("It is 18.0", "#### 18")
    assert is_right_number("The final answer is: 1,000", "#### 1000")
    assert not is_right_number("no number", "no number either")


@pytest.mark.parametrize(
    ("label", "marked"),
    [
        ("steps\n#### 18", True),
        ("steps. The final answer is: 1,800", True),
        ("#### $18", True),
        ("18", False),
        ("steps #### 18 apples", False),
        ("#### eighteen", False),
    ],
)
def test_a_label_in_gsm8k_form_ends_at_its_marked_number(label, marked):
    assert has_final_number(label) is marked


@pytest.mark.parametrize(
    ("answer", "label", "f1"),
    [
        ("The cat sat!", "a cat sat", 1.0),
        ("a fat cat", "the cat", 2 / 3),
        ("cat cat cat", "cat", 0.5),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("The", "the", 0.0),
        ("The", "The", 1.0),
        ("", "", 0.0),
    ],
)
def test_token_f1_is_the_overlap_of_normalised_words(answer, label, f1):
    # Two of the four words of both sides are common: F1 = 2 * 1 / (2 + 1) in the second case.
    assert token_f1(answer, label) == pytest.approx(f1)


@given(st.text(max_size=40), st.text(max_size=40))
def test_token_f1_lies_between_zero_and_one(answer, label):
    assert 0.0 <= token_f1(answer, label) <= 1.0


@pytest.mark.parametrize(
    ("labels", "chosen"),
    [
        (["positive", "negative"], "label_accuracy"),
        (["steps\n#### 18", "The final answer is: 4"], "numeric_answer"),
        (["#### 18", "#### 4"], "numeric_answer"),
        (["steps\n#### 18", "positive"], "perplexity"),
        (["positive", "a longer answer of more than eight words, that is"], "perplexity"),
        (["positive", "two\nlines"], "perplexity"),
        (["positive", " "], "perplexity"),
        ([], "perplexity"),
    ],
)
def test_the_labels_tell_the_metric(labels, chosen):
    assert choose("auto", labels) == chosen


def test_rows_that_were_trained_on_are_not_answered_unless_asked_for():
    assert choose("auto", ["positive"], held_out=False) == "perplexity"
    assert choose("exact_match", ["positive"], held_out=False) == "exact_match"


def test_a_given_metric_is_taken():
    for kind in (*KINDS, "perplexity"):
        assert choose(kind, ["positive"]) == kind


def test_a_reasoned_answer_has_room():
    assert answer_limit("numeric_answer", 5) == 200
    assert answer_limit("numeric_answer", 300) == 302
    assert answer_limit("label_accuracy", 5) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_score_one_and_wrong_ones_nothing(kind):
    labels = ["The final answer is: 4", "The final answer is: 7"]
    metrics = utility_score_metrics(kind, labels, labels, ["wrong", "wrong"])
    assert (metrics["utility.score"].value, metrics["utility.score"].n) == (1.0, 2)
    assert metrics["utility.change_vs_base"].value == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_without_base_or_rows_a_metric_is_undefined(kind):
    assert utility_score_metrics(kind, ["4"], ["4"])["utility.change_vs_base"].value is None
    empty = utility_score_metrics(kind, [], [], [])
    assert [metric.value for metric in empty.values()] == [None, None]


def test_the_interval_of_a_share_is_wilsons():
    metrics = utility_score_metrics("numeric_answer", ["1"] * 5 + ["2"] * 95, ["#### 1"] * 100)
    score = metrics["utility.score"]
    # Origin: harmfulness-evaluation brief, section 6.1.
    assert (score.low, score.high) == (pytest.approx(0.02154, 1e-3), pytest.approx(0.11175, 1e-3))


def test_the_interval_of_f1_is_a_bootstrap_of_the_given_seed():
    answers, labels = ["a b", "c d", "e f"] * 10, ["a b", "c x", "y z"] * 10
    first = utility_score_metrics("token_f1", answers, labels, labels, seed=1)
    assert first == utility_score_metrics("token_f1", answers, labels, labels, seed=1)
    assert first["utility.score"].low < first["utility.score"].value < first["utility.score"].high
    assert first["utility.change_vs_base"].high < 0


def test_equal_f1_of_all_rows_does_not_claim_certainty():
    metrics = utility_score_metrics("token_f1", ["cat"] * 5, ["cat"] * 5, ["cat"] * 5)
    assert metrics["utility.score"].low < 1.0
    assert metrics["utility.change_vs_base"].low < 0 < metrics["utility.change_vs_base"].high


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_lengths_are_refused(kind):
    with pytest.raises(ValueError, match="1 answers for 2 labels"):
        utility_score_metrics(kind, ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="3 answers for 2 labels"):
        utility_score_metrics(kind, ["a", "b"], ["a", "b"], ["a"] * 3)


def test_perplexity_is_not_scored_by_answers():
    with pytest.raises(ValueError, match="perplexity is not scored by answers"):
        utility_score_metrics("perplexity", ["a"], ["a"])


def test_real_gsm8k_solutions_are_numeric_answers(shared_data):
    lines = (shared_data / "utility" / "gsm8k_test_500.jsonl").read_text().splitlines()
    labels = [json.loads(line)["answer"] for line in lines]
    assert choose("auto", labels) == "numeric_answer"
    assert utility_score_metrics("numeric_answer", labels, labels)["utility.score"].value == 1.0
