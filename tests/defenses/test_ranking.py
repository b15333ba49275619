import pytest
import torch

from defenses.bds.ranking import effective_sample_size, ranked_rows, separation_auc

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
