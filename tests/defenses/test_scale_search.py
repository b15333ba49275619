import pytest

from defenses.panacea.scale_search import search_scale

HARM = {0.0: 40.0, 0.1: 46.0, 0.25: 8.0, 0.5: 3.0, 1.0: 9.0}


def test_the_smallest_scale_that_meets_is_chosen() -> None:
    assert search_scale(HARM, HARM.__getitem__, lambda harm: harm <= 5).chosen == 0.5


def test_every_tried_scale_is_recorded_in_ascending_order() -> None:
    search = search_scale(reversed(HARM), HARM.__getitem__, lambda harm: harm <= 5)
    assert [(t.scale, t.outcome, t.meets) for t in search.tried] == [
        (0.0, 40.0, False),
        (0.1, 46.0, False),
        (0.25, 8.0, False),
        (0.5, 3.0, True),
    ]


def test_larger_scales_are_not_evaluated_once_one_meets() -> None:
    evaluated: list[float] = []

    def evaluate(scale: float) -> float:
        evaluated.append(scale)
        return HARM[scale]

    search_scale(HARM, evaluate, lambda harm: harm <= 50)
    assert evaluated == [0.0]


def test_nothing_is_chosen_when_no_scale_meets() -> None:
    search = search_scale(HARM, HARM.__getitem__, lambda harm: harm <= 1)
    assert search.chosen is None
    assert len(search.tried) == len(HARM)


def test_an_empty_list_of_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one scale"):
        search_scale([], HARM.__getitem__, bool)
