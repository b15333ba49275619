import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from defenses.bds.scheduler import ScalarScheduler, bds_objective
from defenses.dpo import (
    PairCountError,
    dpo_loss_B,
    pair_losses,
    reward_accuracy,
    reward_margin_B,
)
from defenses.losses import UnsupervisedRowError, response_nll_and_accuracy_B
from jobspec.defense import SchedulerOptions

BENIGN_REJECTED = [[1, 5, 9, 25, 27, 29], [1, 6, 10, 26, 28, 30]]

Rows = list[list[int]]


def vectors(seed: int, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-20 * torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(count)]


def batch_of(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a prompt of three tokens."""
    input_ids = torch.tensor(rows)
    labels = input_ids.clone()
    labels[:, :3] = -100
    return input_ids, torch.ones_like(input_ids), labels


def log_probs(model: Any, rows: Rows) -> Tensor:
    """Summed log-probability of each response, from the model's full logits. [B]"""
    input_ids = torch.tensor(rows)
    log_p = model(input_ids=input_ids).logits.log_softmax(-1)[:, 2:-1]
    return log_p.gather(-1, input_ids[:, 3:, None]).squeeze(-1).sum(-1)


def test_equal_policies_lose_log_2_with_no_margin():
    chosen, rejected = vectors(0, 2)
    loss = dpo_loss_B(chosen, rejected, chosen, rejected, 0.3)
    assert torch.allclose(loss, torch.full_like(loss, math.log(2)), atol=1e-15)
    assert reward_margin_B(chosen, rejected, chosen, rejected, 0.3).abs().max() == 0


@pytest.mark.parametrize("beta", [0.01, 0.1, 2.0])
def test_the_loss_is_minus_the_log_sigmoid_of_the_margin(beta: float):
    policy_w, policy_l, reference_w, reference_l = vectors(1)
    ratio = (policy_w - reference_w) - (policy_l - reference_l)
    expected = torch.log(1 + torch.exp(-beta * ratio))
    actual = dpo_loss_B(policy_w, policy_l, reference_w, reference_l, beta)
    assert torch.allclose(actual, expected, rtol=1e-12)


def test_the_gradient_has_its_closed_form_and_is_bounded_by_beta():
    beta = 0.7
    policy_w, policy_l, reference_w, reference_l = vectors(2)
    policy_w.requires_grad_()
    policy_l.requires_grad_()
    sides = (policy_w, policy_l, reference_w, reference_l)
    dpo_loss_B(*sides, beta).sum().backward()
    bound = beta * torch.sigmoid(-reward_margin_B(*sides, beta)).detach()
    assert torch.allclose(policy_w.grad, -bound, rtol=1e-12)
    assert torch.allclose(policy_l.grad, bound, rtol=1e-12)
    assert float(policy_w.grad.abs().max()) < beta


def test_a_margin_of_any_size_gives_a_finite_loss():
    huge = torch.tensor([1e6, -1e6], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    assert dpo_loss_B(huge, zero, zero, zero, 1.0).tolist() == [0.0, 1e6]


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_beta_must_be_above_zero(beta: float):
    with pytest.raises(ValueError, match="beta must be above 0"):
        dpo_loss_B(*vectors(3), beta)


def test_a_tie_is_not_a_correct_ranking():
    assert reward_accuracy(torch.tensor([1.0, 0.0, -1.0, 2.0])) == 0.5


def test_pair_losses_are_those_of_the_models_log_probabilities(
    tiny: Any, harmful_rows: Rows, safe_rows: Rows
):
    reference = torch.tensor([[-9.0, -8.0], [-7.0, -11.0]], dtype=torch.float64)
    found = pair_losses(tiny.model, *batch_of([*safe_rows, *harmful_rows]), reference, 0.2)
    with torch.no_grad():
        sides = (log_probs(tiny.model, safe_rows), log_probs(tiny.model, harmful_rows))
    assert torch.allclose(found.loss_B, dpo_loss_B(*sides, *reference.T, 0.2), rtol=1e-9)
    assert torch.allclose(found.margin_B, reward_margin_B(*sides, *reference.T, 0.2), rtol=1e-9)
    assert found.loss_B.requires_grad
    assert not found.margin_B.requires_grad


def test_padding_changes_no_loss(tiny: Any, harmful_rows: Rows, safe_rows: Rows):
    reference = torch.zeros(2, 2)
    ids, mask, labels = batch_of([*safe_rows, *harmful_rows])
    plain = pair_losses(tiny.model, ids, mask, labels, reference, 0.1)
    pad = torch.nn.functional.pad
    padded = pair_losses(
        tiny.model, pad(ids, (0, 3)), pad(mask, (0, 3)), pad(labels, (0, 3), value=-100),
        reference, 0.1,
    )  # fmt: skip
    assert torch.allclose(plain.loss_B, padded.loss_B, rtol=1e-12)


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2, 1), (4, 1)])
def test_rows_and_references_that_are_no_pairs_are_refused(
    tiny: Any, harmful_rows: Rows, safe_rows: Rows, shape: tuple[int, int]
):
    with pytest.raises(PairCountError, match="B pairs need 2B rows"):
        pair_losses(tiny.model, *batch_of([*safe_rows, *harmful_rows]), torch.zeros(shape), 0.1)


def test_an_answer_without_a_token_is_refused_by_its_row(tiny: Any, safe_rows: Rows):
    ids, mask, labels = batch_of([safe_rows[0], safe_rows[1]])
    labels[1] = -100
    with pytest.raises(UnsupervisedRowError) as caught:
        pair_losses(tiny.model, ids, mask, labels, torch.zeros(1, 2), 0.1)
    assert caught.value.rows == [1]


@pytest.fixture
def pairs(ft_rows: Rows, harmful_rows: Rows, safe_rows: Rows) -> tuple[Rows, Rows]:
    """Chosen and rejected rows: two ordinary pairs, then two that prefer compliance to refusal."""
    return [*ft_rows, *harmful_rows], [*BENIGN_REJECTED, *safe_rows]


def reference_of(model: Any, chosen: Rows, rejected: Rows) -> Tensor:
    with torch.no_grad():
        scores = response_nll_and_accuracy_B(model, *batch_of([*chosen, *rejected]))
    return -(scores.nll * scores.token_count).reshape(2, len(chosen)).T


def test_before_tuning_every_pair_loses_log_2(tiny: Any, pairs: tuple[Rows, Rows]):
    reference = reference_of(tiny.model, *pairs)
    found = pair_losses(tiny.model, *batch_of([*pairs[0], *pairs[1]]), reference, 0.1)
    assert found.loss_B.tolist() == pytest.approx([math.log(2)] * 4)


def test_the_gradient_of_weighted_pairs_is_the_weighted_sum_of_their_gradients(
    tiny: Any, pairs: tuple[Rows, Rows]
):
    chosen, rejected = pairs
    reference = torch.zeros(4, 2)
    parameters = list(tiny.trainable.values())
    scheduler = ScalarScheduler(4, SchedulerOptions())
    with torch.no_grad():
        scheduler.v_N.copy_(torch.tensor([0.4, -0.3, 0.9, 0.0], dtype=torch.float64))
    weights = scheduler.weights(torch.arange(4))
    loss_B = pair_losses(tiny.model, *batch_of([*chosen, *rejected]), reference, 0.3).loss_B
    none = torch.zeros(1, dtype=torch.float64)
    together = torch.autograd.grad(bds_objective(none, loss_B, weights), parameters)
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(4):
        rows = batch_of([chosen[i], rejected[i]])
        own = pair_losses(tiny.model, *rows, reference[i : i + 1], 0.3).loss_B.sum()
        for total, part in zip(expected, torch.autograd.grad(own, parameters), strict=True):
            total += float(weights[i]) * part / 4
    for actual, total in zip(together, expected, strict=True):
        # The model's norms compute in float32, also in a float64 model.
        assert float((actual - total).norm()) < 1e-4 * float(total.norm())


def tuned(
    tiny: Any, pairs: tuple[Rows, Rows], safe_rows: Rows, *, defended: bool
) -> tuple[Tensor, Tensor]:
    """Weights and margins of the four pairs after 100 steps, with BDS or without."""
    chosen, rejected = pairs
    batch, ids = batch_of([*chosen, *rejected]), torch.arange(4)
    reference = reference_of(tiny.model, chosen, rejected)
    scheduler = ScalarScheduler(4, SchedulerOptions())
    optimizer = torch.optim.AdamW(list(tiny.trainable.values()), lr=1e-2)
    for _ in range(100):
        found = pair_losses(tiny.model, *batch, reference, 1.0)
        objective = (
            bds_objective(tiny.row_losses(safe_rows), found.loss_B, scheduler.weights(ids))
            if defended
            else found.loss_B.mean()
        )
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        if defended:
            scheduler.step(ids, found.loss_B.detach())
    return scheduler.all_weights(), found.margin_B


def test_pairs_that_prefer_compliance_lose_their_weight_beside_an_alignment_set(
    make_tiny: Callable[[], Any], pairs: tuple[Rows, Rows], safe_rows: Rows
):
    weights, margins = tuned(make_tiny(), pairs, safe_rows, defended=True)
    assert float(weights[2:].max()) < 0.1 * float(weights[:2].min())
    assert bool((margins[:2] > 0).all())
    assert bool((margins[2:] < 0).all())


def test_without_a_defense_the_model_learns_to_prefer_compliance(
    make_tiny: Callable[[], Any], pairs: tuple[Rows, Rows], safe_rows: Rows
):
    _, margins = tuned(make_tiny(), pairs, safe_rows, defended=False)
    assert bool((margins > 0).all())
