"""One joint step of model and scheduler on the deterministic Llama.

Golden values: derived independently in float64 from the released BDS update (arXiv 2510.27172).
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from defenses.bds.scheduler import ScalarScheduler, bds_objective, scheduler_gradient
from jobspec.defense import SchedulerOptions

BATCH = torch.tensor([0, 2])


class Step(NamedTuple):
    tiny: Any
    scheduler: ScalarScheduler
    alignment_loss: Tensor
    losses: Tensor
    weights: Tensor
    objective: Tensor
    gradient_norm: float
    scheduler_loss: float
    scheduler_gradient_norm: float


@pytest.fixture
def taken(tiny: Any, ft_rows: Any, harmful_rows: Any, safe_rows: Any) -> Step:
    """Both optimisers stepped once from the same forward passes."""
    scheduler = ScalarScheduler(4, SchedulerOptions(name="bds", learning_rate=5e-3))
    with torch.no_grad():
        scheduler.v_N.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64))
    alignment = tiny.row_losses(safe_rows)
    losses = tiny.row_losses([ft_rows[0], harmful_rows[0]])
    weights = scheduler.weights(BATCH)
    objective = bds_objective(alignment, losses, weights)
    parameters = list(tiny.trainable.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    objective.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    optimizer.step()
    step = scheduler.step(BATCH, losses)
    return Step(
        tiny,
        scheduler,
        alignment.mean().detach(),
        losses.detach(),
        weights,
        objective.detach(),
        norm,
        step.loss,
        step.gradient_norm,
    )


def assert_golden(actual: Tensor | float, expected: Any, atol: float = 1e-9) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_alignment_loss_is_the_golden_one(taken: Step) -> None:
    assert_golden(taken.alignment_loss, 3.6278186983539165)


def test_row_losses_are_the_golden_ones(taken: Step) -> None:
    assert_golden(taken.losses, [2.9552063473457797, 3.6421406691640468])


def test_batch_weights_are_the_golden_ones(taken: Step) -> None:
    assert_golden(taken.weights, [1.034377966267457, 1.263392100979179])


def test_model_objective_is_the_golden_one(taken: Step) -> None:
    assert_golden(taken.objective, 7.45694474012646)


def test_adapter_gradient_norm_is_the_golden_one(taken: Step) -> None:
    assert_golden(taken.gradient_norm, 8.198618655748657, atol=1e-8)


def test_scheduler_loss_is_the_golden_one(taken: Step) -> None:
    assert_golden(taken.scheduler_loss, 3.8291260417725432)


def test_scheduler_gradient_is_the_golden_one(taken: Step) -> None:
    v = torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64)
    gradient = scheduler_gradient(v, BATCH, taken.losses)
    golden = [0.5382092638164937, -0.7335514620938294, 1.091303977331164, -0.8959617790538286]
    assert_golden(gradient, golden)
    assert_golden(taken.scheduler_gradient_norm, float(gradient.norm()), atol=1e-14)


def test_logits_after_the_step_are_the_golden_ones(taken: Step) -> None:
    golden = [0.0950000001, -0.1950000001, 0.2950000000, 0.0049999999]
    assert_golden(taken.scheduler.v_N.detach(), golden, atol=2e-10)


def test_safe_loss_after_the_step_is_the_golden_one(taken: Step, safe_rows: Any) -> None:
    assert_golden(taken.tiny.row_losses(safe_rows).mean().detach(), 3.627129416643)


def test_user_losses_after_the_step_are_the_golden_ones(
    taken: Step, ft_rows: Any, harmful_rows: Any
) -> None:
    losses = taken.tiny.row_losses([ft_rows[0], harmful_rows[0]]).detach()
    assert_golden(losses, [2.955159458567, 3.641648351941])


def test_one_concatenated_forward_gives_the_losses_of_two(
    tiny: Any, ft_rows: Any, safe_rows: Any
) -> None:
    together = tiny.row_losses(safe_rows + ft_rows)
    apart = torch.cat([tiny.row_losses(safe_rows), tiny.row_losses(ft_rows)])
    torch.testing.assert_close(together, apart)


def test_adapter_gradient_is_the_weighted_sum_of_the_rows_gradients(
    tiny: Any, ft_rows: Any, safe_rows: Any
) -> None:
    parameters = list(tiny.trainable.values())
    weights = torch.tensor([0.3, 1.9], dtype=torch.float64)

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    joint = gradient(bds_objective(tiny.row_losses(safe_rows), tiny.row_losses(ft_rows), weights))
    by_row = gradient(tiny.row_losses(safe_rows).mean())
    for weight, row in zip(weights, ft_rows, strict=True):
        by_row = by_row + weight * gradient(tiny.row_losses([row])[0]) / 2
    # The model's RMS norm and softmax compute in float32 whatever its own dtype.
    torch.testing.assert_close(joint, by_row, rtol=1e-4, atol=1e-6)
