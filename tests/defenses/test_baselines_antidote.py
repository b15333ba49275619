"""Golden values: computed in float64 for the brief on harmful fine-tuning (Antidote, item 8)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from defenses.baselines.antidote import antidote_delta, prune_mask, wanda_scores
from defenses.method import MethodError
from defenses.panacea.perturbation import apply_perturbation

Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
Q0_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


W = f64([[1.0, -2.0, 0.5], [3.0, 0.1, -0.2]])
X = f64([[1.0, 0.0, 4.0], [1.0, 2.0, 0.0]])
PRUNED = f64([[1.0, 0.0, 0.5], [0.0, 0.1, -0.2]])


def batch_of(rows: list[list[int]], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of equal length with 3 prompt tokens, padded on the right."""
    ids = torch.tensor([row + [9] * padding for row in rows])
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, :3] = -100
    if padding:
        mask[:, -padding:] = 0
        labels[:, -padding:] = -100
    return ids, mask, labels


def test_scores_are_the_golden_ones() -> None:
    scores = wanda_scores(W, X.norm(dim=0))
    expected = f64([[2**0.5, 4.0, 2.0], [3 * 2**0.5, 0.2, 0.8]])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_row", [False, True])
def test_the_golden_weights_are_pruned_globally_and_row_by_row(per_row: bool) -> None:
    mask = prune_mask(wanda_scores(W, X.norm(dim=0)), 1 / 3, per_row=per_row)
    assert torch.equal(torch.where(mask, 0.0, W), PRUNED)


def test_the_two_rankings_differ_where_one_row_has_all_large_scores() -> None:
    scores = f64([[9.0, 8.0], [1.0, 2.0]])
    assert prune_mask(scores, 0.5).tolist() == [[True, False], [False, True]]
    assert prune_mask(scores, 0.5, per_row=False).tolist() == [[True, True], [False, False]]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 30), st.floats(0, 1), st.integers(0, 99))
def test_each_row_loses_its_share_of_largest_scores_rounded_up(
    rows: int, width: int, share: float, seed: int
) -> None:
    scores = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))
    mask = prune_mask(scores, share)
    counts = mask.sum(dim=1)
    assert bool((counts >= share * width - 1e-6).all())
    # In float32 the smallest shares vanish beside the one weight they are rounded up to.
    assert bool((counts <= share * width + 1).all())
    for row, pruned in zip(scores, mask, strict=True):
        if pruned.any() and not pruned.all():
            assert row[pruned].min() >= row[~pruned].max()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give \[out, in\] and \[in\]"):
        wanda_scores(W, torch.ones(2))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share must lie"):
        prune_mask(W, share)


def test_pruned_entries_of_both_factors_become_exactly_zero(
    tiny: Any, harmful_rows: list[list[int]]
) -> None:
    found = antidote_delta(tiny.model, tiny.trainable, [batch_of(harmful_rows)], 0.25)
    with apply_perturbation(tiny.trainable, found.delta):
        zeros = {name: int((p == 0).sum()) for name, p in tiny.trainable.items()}
    assert zeros[Q0_A] == found.pruned[Q0_A] == 2 * 4
    assert zeros[Q0_B] == found.pruned[Q0_B] == 16 * 1
    assert set(found.delta) == set(tiny.trainable)


def test_scores_come_from_the_inputs_of_each_factor(
    tiny: Any, harmful_rows: list[list[int]]
) -> None:
    """q_proj of layer 0 reads the normed embeddings, which are computed here by hand."""
    found = antidote_delta(tiny.model, tiny.trainable, [batch_of(harmful_rows)], 0.25)
    base = tiny.model.get_base_model().model
    with torch.no_grad():
        x = base.layers[0].input_layernorm(base.embed_tokens(torch.tensor(harmful_rows)))
        z = x @ tiny.trainable[Q0_A].T
    for name, inputs in ((Q0_A, x), (Q0_B, z)):
        weight = tiny.trainable[name].detach()
        mask = prune_mask(wanda_scores(weight, inputs.flatten(0, 1).norm(dim=0)), 0.25)
        assert torch.equal(found.delta[name] != 0, mask)


def test_padding_and_the_split_into_batches_change_nothing(
    tiny: Any, harmful_rows: list[list[int]]
) -> None:
    whole = antidote_delta(tiny.model, tiny.trainable, [batch_of(harmful_rows)], 0.25)
    batches = [batch_of(harmful_rows[:1], padding=3), batch_of(harmful_rows[1:])]
    split = antidote_delta(tiny.model, tiny.trainable, batches, 0.25)
    assert all(torch.equal(split.delta[name], whole.delta[name]) for name in whole.delta)
    assert split.harmful_loss == pytest.approx(whole.harmful_loss, rel=1e-12)
    assert split.rows == whole.rows == 2


def test_the_model_is_left_as_it_was(tiny: Any, harmful_rows: list[list[int]]) -> None:
    before = {name: p.detach().clone() for name, p in tiny.model.named_parameters()}
    antidote_delta(tiny.model, tiny.trainable, [batch_of(harmful_rows)], 0.5)
    after = dict(tiny.model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert tiny.model.training
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())


def test_a_stopped_pass_gives_no_change(tiny: Any, harmful_rows: list[list[int]]) -> None:
    found = antidote_delta(tiny.model, tiny.trainable, [batch_of(harmful_rows)], 0.25, lambda: True)
    assert (found.complete, found.delta, found.rows) == (False, {}, 0)


def test_an_error_in_a_batch_leaves_no_hook_behind(
    tiny: Any, harmful_rows: list[list[int]]
) -> None:
    def failing() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        yield batch_of(harmful_rows)
        ids, mask, labels = batch_of(harmful_rows)
        yield ids, mask, torch.full_like(labels, -100)

    with pytest.raises(ValueError, match="no supervised token"):
        antidote_delta(tiny.model, tiny.trainable, failing(), 0.25)
    assert tiny.model.training
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())


def test_an_empty_harmful_set_is_an_error(tiny: Any) -> None:
    with pytest.raises(MethodError, match="harmful rows"):
        antidote_delta(tiny.model, tiny.trainable, [], 0.25)


def test_a_model_without_adapted_linear_layers_is_an_error() -> None:
    embedding = nn.Embedding(3, 2)
    with pytest.raises(MethodError, match="no linear layer"):
        antidote_delta(embedding, dict(embedding.named_parameters()), [], 0.25)
