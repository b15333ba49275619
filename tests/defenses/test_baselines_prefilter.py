import pytest

from defenses.baselines.prefilter import unflagged_rows
from defenses.method import MethodError


def test_only_rows_that_the_judge_let_pass_are_kept_in_their_order() -> None:
    assert unflagged_rows([False, True, False, True, False]) == [0, 2, 4]


def test_a_set_that_is_flagged_as_a_whole_is_an_error() -> None:
    with pytest.raises(MethodError, match="all 2 rows"):
        unflagged_rows([True, True])
