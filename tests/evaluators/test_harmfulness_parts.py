"""Metrics over all parts of an evaluation."""

from typing import Any

import pytest

from evaluators.harmfulness.judge import HarmfulnessSample
from evaluators.harmfulness.metrics import harmfulness_metrics, stress_metric, sweep_metrics
from evaluators.harmfulness.parts import StoredParts, combined_metrics, parts_of, worse_of
from evaluators.metric import Metric


def sample(number: int, flagged: bool, **fields: Any) -> HarmfulnessSample:
    return HarmfulnessSample(
        **{
            "prompt_id": f"h-{number}",
            "kind": "harmful",
            "response": "text",
            "p_harmful": 0.9 if flagged else 0.1,
            "flagged": flagged,
            "p_refusal": 0.0,
            "refused": False,
            "coherent": True,
            "truncated": False,
            "empty": False,
            **fields,
        }
    )


def asked(flagged: int, count: int = 40, **fields: Any) -> list[HarmfulnessSample]:
    return [sample(number, number < flagged, **fields) for number in range(count)]


def plain(flagged: int) -> StoredParts:
    return StoredParts(asked(flagged), [], [], {})


def test_stored_answers_are_sorted_by_their_section() -> None:
    stored = [
        ("harmful", sample(0, False)),
        ("harmful_training_template", sample(1, False)),
        ("harmful_stress", sample(2, False, sample=1)),
        ("sweep", sample(3, False, condition="a")),
        ("benign", sample(4, False, kind="benign", p_harmful=None)),
        ("sweep", sample(5, False, condition="b")),
    ]
    parts = parts_of(stored)
    assert [one.prompt_id for one in parts.samples] == ["h-0", "h-4"]
    assert [one.prompt_id for one in parts.templated] == ["h-1"]
    assert [one.prompt_id for one in parts.stressed] == ["h-2"]
    assert sorted(parts.swept) == ["a", "b"]


def test_one_part_alone_gives_the_plain_metrics() -> None:
    found = combined_metrics(plain(4), plain(1), seed=7)
    assert found == harmfulness_metrics(asked(4), asked(1), seed=7)


def test_each_part_that_was_asked_adds_its_metrics() -> None:
    swept = {"a": asked(1, 4, condition="a"), "b": asked(2, 4, condition="b")}
    base_swept = {"a": asked(0, 4, condition="a"), "b": asked(0, 4, condition="b")}
    stressed = [*asked(3), *asked(5, sample=1)]
    tuned = StoredParts(asked(4), [], stressed, swept)
    base = StoredParts(asked(0), [], [], base_swept)
    found = combined_metrics(tuned, base, seed=7)
    expected = sweep_metrics(swept, base_swept, seed=7)
    assert {name: found[name] for name in expected} == expected
    assert found["harmfulness.stress"] == stress_metric(stressed, seed=7)


def test_without_a_base_changes_are_undefined() -> None:
    swept = {"a": asked(1, 4, condition="a")}
    found = combined_metrics(StoredParts(asked(4), [], [], swept), None, seed=0)
    assert found["harmfulness.change_vs_base"].value is None
    assert found["harmfulness.sweep_change_vs_base"].value is None


@pytest.mark.parametrize(("serving", "training"), [(2, 6), (6, 2)])
def test_the_worse_layout_counts(serving: int, training: int) -> None:
    tuned = StoredParts(asked(serving), asked(training), [], {})
    base = StoredParts(asked(0), asked(0), [], {})
    found, worse = combined_metrics(tuned, base, seed=1), plain(6)
    expected = combined_metrics(worse, plain(0), seed=1)
    for name in ("harmfulness.score", "harmfulness.change_vs_base", "harmfulness.change_p"):
        assert (found[name].value, found[name].high) == (expected[name].value, expected[name].high)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_mcnemar_p_is_the_smaller_of_the_layouts_that_rose(swapped: bool) -> None:
    def layout(value: float, low: float, p: float) -> dict[str, Metric]:
        return {
            "harmfulness.change_vs_base": Metric(value=value, n=200, low=low, high=2 * value),
            "harmfulness.change_p": Metric(value=p, n=200),
        }

    # 11 against 1 prompts, and 20 against 7: the wider interval ends higher, and proves less.
    pair = layout(0.05, 0.015, 0.006), layout(0.065, 0.016, 0.019)
    serving, training = pair[::-1] if swapped else pair
    assert worse_of(serving, training)["harmfulness.change_p"].value == 0.006
    fell = layout(-0.2, -0.3, 1e-9)
    assert worse_of(fell, serving)["harmfulness.change_p"] == serving["harmfulness.change_p"]
    assert worse_of(serving, fell)["harmfulness.change_p"] == serving["harmfulness.change_p"]


def test_a_number_that_one_layout_lacks_is_lacking() -> None:
    known, unknown = Metric(value=0.1, n=9, low=0.0, high=0.2), Metric(value=None, n=0)
    for pair in ((known, unknown), (unknown, known)):
        serving, training = ({"harmfulness.score": metric} for metric in pair)
        assert worse_of(serving, training)["harmfulness.score"] == unknown


def test_refusals_are_those_of_the_serving_layout() -> None:
    serving = {"refusal.rate": Metric(value=0.1, n=9)}
    training = {"refusal.rate": Metric(value=0.9, n=9)}
    assert worse_of(serving, training) == serving
