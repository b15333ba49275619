"""Golden values: computed in float64 by an independent script and checked against the released
scheduler class of the Bayesian Data Scheduler (arXiv 2510.27172)."""

import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from defenses.bds.errors import NonFiniteLossError, RowIdError, SchedulerStateError
from defenses.bds.scheduler import (
    ScalarScheduler,
    bds_objective,
    gaussian_penalty,
    negative_entropy,
    scheduler_gradient,
    scheduler_loss,
    softmax_weights,
    transform_weights,
)
from jobspec.defense import SchedulerOptions

RELEASED = SchedulerOptions(name="bds", learning_rate=5e-3)
BATCH = torch.tensor([0, 2, 4])
LOSSES = torch.tensor([0.2, 1.5, 3.0], dtype=torch.float64)
V = torch.tensor([0.1, -0.3, 0.4, 0.0, 0.7], dtype=torch.float64)


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def autograd_gradient(loss: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    v = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(v), [v])
    return gradient


def test_loss_at_uniform_logits_has_the_published_value() -> None:
    v = torch.full((5,), 0.1, dtype=torch.float64)
    loss = scheduler_loss(v, BATCH, LOSSES)
    torch.testing.assert_close(float(loss), 1.5666666666666667, rtol=0, atol=1e-14)


def test_gradient_at_uniform_logits_is_the_rational_one() -> None:
    v = torch.full((5,), 0.1, dtype=torch.float64)
    expected = f64([-0.74, -0.94, 0.56, -0.94, 2.06]) / 3
    torch.testing.assert_close(scheduler_gradient(v, BATCH, LOSSES), expected, rtol=0, atol=1e-14)


def test_weights_at_spread_logits_are_the_golden_ones() -> None:
    expected = f64(
        [
            0.869998692796835,
            0.5831775638065204,
            1.1743753980514169,
            0.7872073708849481,
            1.5852409744602798,
        ]
    )
    torch.testing.assert_close(softmax_weights(V), expected, rtol=0, atol=1e-14)


def test_loss_at_spread_logits_is_the_golden_one() -> None:
    loss = float(scheduler_loss(V, BATCH, LOSSES))
    torch.testing.assert_close(loss, 2.2304285863391105, rtol=0, atol=1e-14)


def test_gradient_at_spread_logits_is_the_golden_one() -> None:
    expected = f64(
        [
            -0.33009407804522134,
            -0.26014718184513275,
            0.06331560724425811,
            -0.35116196467972854,
            0.8780876173258246,
        ]
    )
    gradient = autograd_gradient(lambda v: scheduler_loss(v, BATCH, LOSSES), V)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


def test_a_set_of_one_batch_has_the_golden_loss_and_gradient() -> None:
    # With N = b the scalar formulas are those of the neural head, whose softmax is over the batch.
    v, rows = f64([0.2, -0.1, 0.5]), torch.arange(3)
    pi = f64([0.32355370388, 0.23969447921, 0.43675181691])
    golden = f64([-0.4964957180216444, -0.05621025143328179, 0.5527059694549259])
    by_autograd = autograd_gradient(lambda x: scheduler_loss(x, rows, LOSSES), v)
    loss = float(scheduler_loss(v, rows, LOSSES))
    torch.testing.assert_close(softmax_weights(v) / 3, pi, rtol=0, atol=1e-11)
    torch.testing.assert_close(loss, 1.7345079103178191, rtol=0, atol=1e-14)
    torch.testing.assert_close(by_autograd, golden, rtol=0, atol=1e-14)
    torch.testing.assert_close(scheduler_gradient(v, rows, LOSSES), golden, rtol=0, atol=1e-14)


def test_three_steps_follow_the_golden_trajectory() -> None:
    scheduler = ScalarScheduler(5, RELEASED)
    trajectory = []
    for rows, losses in (
        ([0, 2, 4], [0.2, 1.5, 3.0]),
        ([1, 3], [0.1, 2.0]),
        ([0, 2, 4], [0.1, 1.4, 3.0]),
    ):
        scheduler.step(torch.tensor(rows), f64(losses))
        trajectory.append(scheduler.v_N.detach().clone())
    expected = f64(
        [
            0.10499999979729731,
            0.10499999984042555,
            0.09500000026785713,
            0.10499999984042555,
            0.09500000007281553,
            0.10997515979177411,
            0.10971744574649091,
            0.09555049964000857,
            0.10279151448501637,
            0.0928599398508727,
            0.11496121179130067,
            0.11454831487821453,
            0.09427284653846547,
            0.10221922949401727,
            0.08946267523558074,
        ]
    ).reshape(3, 5)
    torch.testing.assert_close(torch.stack(trajectory), expected, rtol=0, atol=1e-14)


def test_negative_entropy_has_the_golden_value() -> None:
    entropy = float(negative_entropy(V))
    torch.testing.assert_close(entropy, -1.5504083940050126, rtol=0, atol=1e-14)


def test_gaussian_penalty_has_the_golden_value() -> None:
    penalty = float(gaussian_penalty(V))
    torch.testing.assert_close(penalty, 4.969692666023363, rtol=0, atol=1e-14)


def test_entropy_prior_leads_to_the_closed_form_softmax_of_the_losses() -> None:
    losses = f64([0.2, 1.5, 3.0, 0.7])
    # The larger eps lets Adam come to rest; at 1e-8 its normalised steps circle the optimum.
    options = SchedulerOptions(name="bds", learning_rate=2e-2, eps=1e-3, entropy_coefficient=0.5)
    scheduler = ScalarScheduler(4, options)
    for _ in range(1500):
        scheduler.step(torch.arange(4), losses)
    pi = scheduler.all_weights() / 4
    expected = f64([0.691634256, 0.051370150, 0.002557569, 0.254438024])
    torch.testing.assert_close(pi, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(expected, torch.softmax(-losses / 0.5, 0), rtol=0, atol=1e-8)


@given(
    v=st.lists(st.floats(-4, 4), min_size=2, max_size=12),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_closed_form_gradient_equals_autograd_and_sums_to_zero(
    v: list[float], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(v) - 1), min_size=1, max_size=8))
    losses = data.draw(st.lists(st.floats(0, 10), min_size=len(ids), max_size=len(ids)))
    v_N, ids_B, losses_B = f64(v), torch.tensor(ids), f64(losses)
    gradient = scheduler_gradient(v_N, ids_B, losses_B)
    by_autograd = autograd_gradient(lambda x: scheduler_loss(x, ids_B, losses_B), v_N)
    torch.testing.assert_close(gradient, by_autograd, rtol=1e-9, atol=1e-11)
    assert abs(float(gradient.sum())) < 1e-10


@given(v=st.lists(st.floats(-30, 30), min_size=1, max_size=20), shift=st.floats(-50, 50))
@settings(deadline=None, max_examples=60)
def test_softmax_weights_have_mean_one_and_ignore_a_common_shift(
    v: list[float], shift: float
) -> None:
    weights = softmax_weights(f64(v))
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(softmax_weights(f64(v) + shift), weights, rtol=1e-9, atol=1e-12)


def test_a_common_shift_leaves_the_gradient_unchanged() -> None:
    shifted = scheduler_gradient(V + 3.0, BATCH, LOSSES)
    torch.testing.assert_close(shifted, scheduler_gradient(V, BATCH, LOSSES))


def test_permuting_the_rows_permutes_the_gradient() -> None:
    permutation = torch.tensor([3, 0, 4, 1, 2])
    place = torch.argsort(permutation)
    permuted = scheduler_gradient(V[permutation], place[BATCH], LOSSES)
    torch.testing.assert_close(permuted, scheduler_gradient(V, BATCH, LOSSES)[permutation])


def test_renaming_the_rows_renames_the_trajectory() -> None:
    place = torch.tensor([3, 0, 4, 1, 2])
    named, renamed = ScalarScheduler(5, RELEASED), ScalarScheduler(5, RELEASED)
    for ids, losses in ((BATCH, LOSSES), (torch.tensor([1, 3]), f64([0.1, 2.0])), (BATCH, LOSSES)):
        named.step(ids, losses)
        renamed.step(place[ids], losses)
    torch.testing.assert_close(renamed.v_N.detach()[place], named.v_N.detach())


def test_a_set_of_one_row_keeps_weight_one() -> None:
    scheduler = ScalarScheduler(1, RELEASED)
    scheduler.step(torch.tensor([0]), f64([2.0]))
    assert scheduler.all_weights().tolist() == [1.0]


def test_equal_losses_leave_the_full_batch_gradient_at_zero() -> None:
    gradient = scheduler_gradient(V, torch.arange(5), torch.full((5,), 1.7, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


def test_objective_holds_the_weights_constant() -> None:
    theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    alignment = torch.stack([theta.square(), 3 * theta])
    user = torch.stack([theta.exp(), theta.sin(), 2 * theta])
    weights = (theta * f64([0.5, 1.0, 2.0])).requires_grad_()
    (gradient,) = torch.autograd.grad(bds_objective(alignment, user, weights, 1.5), [theta])
    t, w = theta.detach(), weights.detach()
    by_hand = 1.5 * (2 * t + 3) / 2 + (w[0] * t.exp() + w[1] * t.cos() + w[2] * 2) / 3
    torch.testing.assert_close(gradient, by_hand)


def test_step_reports_the_loss_and_the_gradient_norm_before_clipping() -> None:
    scheduler = ScalarScheduler(5, RELEASED.model_copy(update={"clip": 1e-3}))
    step = scheduler.step(BATCH, LOSSES)
    gradient = scheduler_gradient(torch.full((5,), 0.1, dtype=torch.float64), BATCH, LOSSES)
    assert step.loss == pytest.approx(1.5666666666666667, abs=1e-14)
    assert step.gradient_norm == pytest.approx(float(gradient.norm()), abs=1e-14)


def test_clipping_bounds_the_gradient_that_the_optimiser_sees() -> None:
    # Adam's first step forgets the size of the gradient unless it is down at eps.
    options = RELEASED.model_copy(update={"clip": 1e-8})
    scheduler = ScalarScheduler(5, options)
    scheduler.step(BATCH, LOSSES)
    moved = (scheduler.v_N.detach() - 0.1).abs().max()
    assert float(moved) < 0.5 * options.learning_rate


def test_losses_are_held_constant_by_the_step() -> None:
    theta = torch.tensor(1.0, requires_grad=True)
    ScalarScheduler(3, RELEASED).step(torch.tensor([0, 1]), torch.stack([theta, 2 * theta]))
    assert theta.grad is None


def test_sigmoid_weights_start_at_one_and_only_fall() -> None:
    options = SchedulerOptions(name="bds", transform="sigmoid", learning_rate=5e-3)
    scheduler = ScalarScheduler(3, options)
    before = scheduler.all_weights()
    scheduler.step(torch.tensor([0, 2]), f64([1.0, 2.0]))
    after = scheduler.all_weights()
    torch.testing.assert_close(before, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-4)
    assert bool((after <= before).all())


def test_sigmoid_entropy_is_that_of_the_normalised_weights() -> None:
    pi = transform_weights(V, "sigmoid") / transform_weights(V, "sigmoid").sum()
    entropy = negative_entropy(V, "sigmoid")
    torch.testing.assert_close(entropy, (pi * pi.log()).sum())


def test_gaussian_prior_pulls_the_logits_of_untouched_rows_to_zero() -> None:
    options = SchedulerOptions(name="bds", learning_rate=5e-3, gaussian_coefficient=100.0)
    scheduler = ScalarScheduler(3, options)
    for _ in range(100):
        scheduler.step(torch.tensor([0]), f64([0.5]))
    assert float(scheduler.v_N.detach().abs().max()) < 0.02


def test_resuming_from_a_file_continues_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    steps = [
        (torch.randperm(9, generator=generator)[:4], torch.rand(4, generator=generator))
        for _ in range(12)
    ]
    straight = ScalarScheduler(9, RELEASED)
    first = ScalarScheduler(9, RELEASED)
    for ids, losses in steps[:5]:
        straight.step(ids, losses)
        first.step(ids, losses)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = ScalarScheduler(9, RELEASED)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for ids, losses in steps[5:]:
        straight.step(ids, losses)
        resumed.step(ids, losses)
    assert torch.equal(resumed.v_N, straight.v_N)


def test_a_state_taken_before_the_first_step_can_be_resumed() -> None:
    resumed = ScalarScheduler(5, RELEASED)
    resumed.load_state_dict(ScalarScheduler(5, RELEASED).state_dict())
    straight = ScalarScheduler(5, RELEASED)
    resumed.step(BATCH, LOSSES)
    straight.step(BATCH, LOSSES)
    assert torch.equal(resumed.v_N, straight.v_N)


def test_a_saved_state_is_a_copy() -> None:
    scheduler = ScalarScheduler(5, RELEASED)
    scheduler.step(BATCH, LOSSES)
    state = scheduler.state_dict()
    kept = state["v"].clone(), state["optimizer"]["exp_avg"].clone()
    scheduler.step(BATCH, LOSSES)
    assert torch.equal(state["v"], kept[0])
    assert torch.equal(state["optimizer"]["exp_avg"], kept[1])


def test_state_of_another_set_is_refused() -> None:
    with pytest.raises(SchedulerStateError, match="4 rows, this training set has 5"):
        ScalarScheduler(5, RELEASED).load_state_dict(ScalarScheduler(4, RELEASED).state_dict())


def test_state_of_another_transform_is_refused() -> None:
    sigmoid = ScalarScheduler(5, RELEASED.model_copy(update={"transform": "sigmoid"}))
    with pytest.raises(SchedulerStateError, match="sigmoid transform"):
        ScalarScheduler(5, RELEASED).load_state_dict(sigmoid.state_dict())


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(RowIdError, match=r"known rows are 0\.\.4"):
        ScalarScheduler(5, RELEASED).step(torch.tensor([1, 5]), f64([1.0, 1.0]))


def test_a_loss_count_that_differs_from_the_rows_is_refused() -> None:
    with pytest.raises(RowIdError, match="3 row ids for 2 losses"):
        ScalarScheduler(5, RELEASED).step(BATCH, f64([1.0, 1.0]))


def test_a_loss_that_is_not_finite_names_its_rows_and_moves_nothing() -> None:
    scheduler = ScalarScheduler(5, RELEASED)
    with pytest.raises(NonFiniteLossError) as caught:
        scheduler.step(BATCH, f64([1.0, float("nan"), float("inf")]))
    assert caught.value.row_ids == [2, 4]
    assert torch.equal(scheduler.v_N.detach(), torch.full((5,), 0.1, dtype=torch.float64))
