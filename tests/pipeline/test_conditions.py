"""Every circumstance under which a defense cannot keep its promise is told, with what to do."""

from typing import Any

import pytest

from evaluators.metric import Metric, undefined
from workers.pipeline.conditions import Condition, ConditionFacts, conditions

GOOD = Metric(value=0.95, n=40, low=0.85, high=0.99)


def found(**changes: Any) -> dict[str, Condition]:
    facts: dict[str, Any] = {
        "rows": 4,
        "canary": GOOD,
        "weights": [0.5, 0.7, 1.3, 1.5],
        "effective_sample_size": 0.8,
        "weighs_rows": True,
        "alignment_wanted": 10,
        "alignment_found": 10,
        "scored_rows": 4,
    }
    return {item.code: item for item in conditions(ConditionFacts(**facts | changes))}


def test_a_healthy_run_has_nothing_to_tell():
    assert found() == {}


def test_an_undefended_run_has_nothing_to_tell():
    assert conditions(ConditionFacts(rows=4, canary=undefined(0, "no scheduler"))) == ()


def test_a_ranking_that_did_not_hold_is_told_in_these_words():
    condition = found(canary=Metric(value=0.41, n=40, low=0.25, high=0.6))["not_effective"]
    assert condition.severity == "warn"
    assert "defense not effective on this data" in condition.message
    assert "0.41 (40 planted rows, 95 % interval 0.25 to 0.60)" in condition.message
    assert "remove harmful rows" in condition.message


def test_the_limit_itself_is_effective():
    assert found(canary=Metric(value=0.8, n=40)) == {}


def test_a_check_that_could_not_be_made_gives_its_reason():
    condition = found(canary=undefined(0, "it is switched off"))["canaries_unavailable"]
    assert "it is switched off" in condition.message
    assert "Do not read the weights as a verdict" in condition.message


def test_training_rows_as_the_harmless_side_flatter_the_check():
    condition = found(flattered=True)["canaries_flattered"]
    assert condition.severity == "info"
    assert "Send a validation file" in condition.message


def test_a_method_that_weighs_no_rows_has_no_canary_conditions():
    assert found(weighs_rows=False, canary=undefined(0, "none"), weights=None) == {}


@pytest.mark.parametrize(("size", "told"), [(0.019, True), (0.02, False), (None, False)])
def test_a_handful_of_rows_that_carries_the_weight_is_told(size: float | None, told: bool):
    codes = found(effective_sample_size=size)
    assert ("few_rows_carry_the_weight" in codes) is told
    if told:
        message = codes["few_rows_carry_the_weight"].message
        assert "1.90%" in message
        assert "entropy_coefficient" in message


@pytest.mark.parametrize(
    ("weights", "told"),
    [([1.0, 1.0, 1.0005, 0.9995], True), ([1.0, 1.0, 1.001, 0.999], False), (None, False)],
)
def test_weights_that_are_all_alike_protect_nothing(weights: list[float] | None, told: bool):
    codes = found(weights=weights)
    assert ("uniform_weights" in codes) is told
    if told:
        assert "duplicates" in codes["uniform_weights"].message


def test_a_single_row_has_nothing_to_be_weighed_against():
    codes = found(rows=1, weights=[1.0], effective_sample_size=1.0)
    assert list(codes) == ["single_row"]
    assert "Send more rows" in codes["single_row"].message


def test_overlap_with_the_alignment_set_names_count_and_lines():
    condition = found(overlap_left_out=3, overlap_lines=(4, 9))["alignment_overlap"]
    assert "3 rows" in condition.message
    assert "line 4, 9." in condition.message
    assert "Look at these lines" in condition.message


def test_of_many_overlapping_lines_the_first_are_listed():
    message = found(overlap_left_out=30, overlap_lines=range(1, 31))["alignment_overlap"].message
    assert "19, 20 and 10 more" in message
    assert "21," not in message


def test_a_used_up_alignment_set_is_told():
    condition = found(alignment_found=7)["alignment_exhausted"]
    assert condition.severity == "info"
    assert "7 usable rows, 10 were wanted" in condition.message
    assert "lower alignment_rows" in condition.message


def test_sets_that_open_differently_are_told():
    assert "Shorten the system turns" in found(template_differs=True)["template_differs"].message


def test_left_out_steps_are_told():
    message = found(skipped_steps=2)["skipped_steps"].message
    assert "2 steps" in message
    assert "learning_rate_multiplier" in message


@pytest.mark.parametrize(("flagged", "told"), [(2, False), (3, True)])
def test_mostly_flagged_rows_are_told_because_weights_are_relative(flagged: int, told: bool):
    codes = found(flagged_rows=flagged)
    assert ("all_rows_flagged" in codes) is told
    if told:
        assert "3 of 4" in codes["all_rows_flagged"].message
        assert "Weights are relative" in codes["all_rows_flagged"].message
