import pytest
import torch

from defenses.bds.ranking import (
    effective_sample_size,
    ranked_rows,
    selected_rows,
    separation_auc,
    trusted_mass_share,
)

HARMFUL = torch.tensor([False, False, True, True])


def test_equal_weights_use_the_whole_set() -> None:
    assert effective_sample_size(torch.full((7,), 0.3)) == pytest.approx(1.0, abs=1e-12)


def test_one_row_with_all_the_weight_uses_one_nth() -> None:
    assert effective_sample_size(torch.tensor([0.0, 0.0, 4.0, 0.0])) == pytest.approx(0.25)


def test_effective_sample_size_follows_its_formula() -> None:
    # (1 + 3)^2 / (2 (1 + 9)) by hand
    assert effective_sample_size(torch.tensor([1.0, 3.0])) == pytest.approx(0.8)


def test_all_zero_weights_have_no_effective_sample_size() -> None:
    with pytest.raises(ValueError, match="at least one weight"):
        effective_sample_size(torch.zeros(3))


def test_rows_are_ranked_from_least_to_most_trusted() -> None:
    ranking = ranked_rows(torch.tensor([1.5, 0.1, 1.4]))
    assert [(row.rank, row.row_id) for row in ranking] == [(1, 1), (2, 2), (3, 0)]


def test_equal_weights_are_ranked_by_row_id() -> None:
    assert [row.row_id for row in ranked_rows(torch.ones(5))] == [0, 1, 2, 3, 4]


def test_separation_is_one_when_every_harmful_row_lies_below() -> None:
    assert separation_auc(torch.tensor([1.2, 1.1, 0.2, 0.9]), HARMFUL) == 1.0


def test_separation_is_zero_when_the_order_is_inverted() -> None:
    assert separation_auc(torch.tensor([0.2, 0.1, 1.2, 0.9]), HARMFUL) == 0.0


def test_separation_of_equal_weights_is_one_half() -> None:
    assert separation_auc(torch.ones(4), HARMFUL) == 0.5


def test_separation_counts_pairs_with_ties_as_half() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.randint(0, 6, (60,), generator=generator).double()
    harmful = torch.rand(60, generator=generator) < 0.4
    benign_above = weights[~harmful][:, None] - weights[harmful][None, :]
    by_pairs = ((benign_above > 0).double() + 0.5 * (benign_above == 0).double()).mean()
    assert separation_auc(weights, harmful) == pytest.approx(float(by_pairs), abs=1e-12)


def test_separation_needs_both_kinds_of_rows() -> None:
    with pytest.raises(ValueError, match="one harmful and one benign"):
        separation_auc(torch.ones(3), torch.zeros(3, dtype=torch.bool))


def test_selection_keeps_the_most_trusted_share_in_the_files_order() -> None:
    assert selected_rows(torch.tensor([0.1, 2.0, 0.5, 1.4]), 0.5) == [1, 3]


def test_selection_breaks_ties_by_the_lower_id() -> None:
    assert selected_rows(torch.tensor([1.0, 0.2, 1.0, 1.0, 3.0]), 0.6) == [0, 2, 4]


def test_selection_keeps_at_least_one_row() -> None:
    assert selected_rows(torch.tensor([0.1, 2.0, 0.5]), 0.01) == [1]


def test_selection_of_everything_is_everything() -> None:
    assert selected_rows(torch.rand(7, generator=torch.Generator().manual_seed(1)), 1.0) == [
        *range(7)
    ]


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_selection_refuses_a_share_outside_its_range(share: float) -> None:
    with pytest.raises(ValueError, match="share in"):
        selected_rows(torch.ones(3), share)


def test_trusted_mass_is_the_weight_on_rows_of_weight_one_and_more() -> None:
    assert trusted_mass_share(torch.tensor([0.5, 0.5, 1.0, 2.0])) == pytest.approx(0.75)


@pytest.mark.parametrize("count", [3, 7, 49, 1000])
def test_equal_weights_leave_all_the_mass_trusted(count: int) -> None:
    weights = count * torch.softmax(torch.full((count,), 0.1, dtype=torch.float64), dim=0)
    assert trusted_mass_share(weights) == pytest.approx(1.0)


def test_all_zero_weights_have_no_trusted_mass() -> None:
    with pytest.raises(ValueError, match="at least one weight"):
        trusted_mass_share(torch.zeros(3))
