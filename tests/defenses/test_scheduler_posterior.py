"""The posterior over the weights that the scheduler's loss stands for (BDS, arXiv 2510.27172).

Two rows with fixed losses 0.2 and 2.0 and the prior v ~ N(0, I): the potential is
sum_i sigma_i(v) l_i + |v|^2 / 2. Golden values from independent quadrature.
"""

import pytest
import torch
from torch import Tensor

from defenses.bds.errors import SchedulerStateError
from defenses.bds.langevin import langevin_step
from defenses.bds.scheduler import (
    ScalarScheduler,
    gaussian_penalty,
    negative_entropy,
    scheduler_loss,
    scheduler_potential,
    softmax_weights,
)
from jobspec.defense import SchedulerOptions

LOSSES = torch.tensor([0.2, 2.0], dtype=torch.float64)


def potential(v_2_C: Tensor) -> Tensor:
    """[C] potentials of C points."""
    return (softmax_weights(v_2_C) * LOSSES[:, None]).sum(0) + v_2_C.square().sum(0) / 2


def share_of_first(v_2_C: Tensor) -> Tensor:
    return softmax_weights(v_2_C)[0] / 2


def test_the_potential_is_the_schedulers_loss_with_the_gaussian_prior():
    v_2 = torch.tensor([0.3, -0.7], dtype=torch.float64)
    loss = 2 * scheduler_loss(v_2, torch.tensor([0, 1]), LOSSES, gaussian_coefficient=0.5)
    constant = torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    assert float(loss) == pytest.approx(float(potential(v_2[:, None])[0] + constant), abs=1e-12)


def test_quadrature_gives_the_golden_mean_and_variance():
    grid = torch.linspace(-7, 7, 701, dtype=torch.float64)
    v_2_C = torch.cartesian_prod(grid, grid).T
    weight_C = torch.exp(-potential(v_2_C))
    weight_C = weight_C / weight_C.sum()
    pi_C = share_of_first(v_2_C)
    mean = (weight_C * pi_C).sum()
    assert float(mean) == pytest.approx(0.7130631, abs=1e-6)
    assert float((weight_C * (pi_C - mean).square()).sum()) == pytest.approx(0.0442640, abs=1e-6)


def test_the_most_likely_weights_are_the_golden_ones():
    v_2_C = torch.zeros((2, 1), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([v_2_C], max_iter=200, tolerance_grad=1e-14, history_size=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = potential(v_2_C).sum()
        torch.autograd.backward(value)
        return value

    for _ in range(10):
        optimizer.step(closure)
    # d = v_1 - v_2 solves d = 7.2 p (1 - p), p = sigmoid(d): 1.2478444. The golden value is that
    # to the resolution of a grid.
    difference = float((v_2_C[0, 0] - v_2_C[1, 0]).detach())
    assert difference == pytest.approx(1.2478444, abs=1e-6)
    assert difference == pytest.approx(1.247875, abs=5e-5)
    assert float(share_of_first(v_2_C.detach())[0]) == pytest.approx(0.7769318, abs=1e-5)


def test_langevin_steps_sample_that_posterior():
    generator = torch.Generator().manual_seed(0)
    v_2_C = torch.zeros((2, 2000), dtype=torch.float64)
    total, count = 0.0, 0
    for index in range(2500):
        point = v_2_C.requires_grad_(True)
        (gradient,) = torch.autograd.grad(-potential(point).sum(), point)
        (v_2_C,) = langevin_step([point], [gradient], 0.02, generator)
        if index >= 500:
            total += float(share_of_first(v_2_C).mean())
            count += 1
    assert total / count == pytest.approx(0.7131, abs=0.005)


def test_the_schedulers_potential_with_the_unit_prior_is_that_posterior():
    v_2 = torch.tensor([0.3, -0.7], dtype=torch.float64)
    found = scheduler_potential(v_2, torch.tensor([0, 1]), LOSSES, 2, gaussian_coefficient=1.0)
    constant = torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    assert float(found) == pytest.approx(float(potential(v_2[:, None])[0] + constant), abs=1e-12)


def test_minibatch_potentials_average_to_that_of_the_whole_set():
    v_5 = torch.tensor([0.1, -0.3, 0.4, 0.0, 0.7], dtype=torch.float64)
    losses = torch.tensor([0.2, 1.5, 3.0, 0.4, 1.1], dtype=torch.float64)
    batches = torch.combinations(torch.arange(5), 2)
    priors = {"entropy_coefficient": 0.7, "gaussian_coefficient": 0.4}
    average = torch.stack(
        [scheduler_potential(v_5, batch, losses[batch], 5, **priors) for batch in batches]
    ).mean()
    whole = scheduler_potential(v_5, torch.arange(5), losses, 5, **priors)
    torch.testing.assert_close(average, whole)
    data = (softmax_weights(v_5) * losses).sum()
    expected = data + 0.7 * negative_entropy(v_5) + 0.4 * gaussian_penalty(v_5)
    torch.testing.assert_close(whole, expected)


def test_a_langevin_step_follows_its_formula_and_leaves_its_arguments():
    x, gradient = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])
    (moved,) = langevin_step([x], [gradient], 0.25, torch.Generator().manual_seed(3))
    noise = torch.randn(2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moved, x + 0.125 * gradient + 0.5 * noise)
    assert x.tolist() == [1.0, -2.0]


def test_a_langevin_step_takes_its_noise_from_the_passed_generator_alone():
    before = torch.get_rng_state()
    langevin_step([torch.zeros(3)], [torch.zeros(3)], 0.1, torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("eta", "gradient"),
    [(0.0, torch.zeros(3)), (float("nan"), torch.zeros(3)), (0.1, torch.zeros(1))],
)
def test_a_langevin_step_refuses_what_does_not_fit(eta: float, gradient: Tensor):
    with pytest.raises(ValueError, match=r"eta above 0|does not fit"):
        langevin_step([torch.zeros(3)], [gradient], eta, torch.Generator())


SGLD = SchedulerOptions(sampler="sgld", sgld_step=0.02, gaussian_coefficient=1.0)


def test_the_schedulers_langevin_step_descends_its_potential():
    v_2 = torch.tensor([0.1, 0.1], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(potential(v_2[:, None]).sum(), v_2)
    generator = torch.Generator().manual_seed(11)
    (expected,) = langevin_step([v_2], [-gradient], 0.02, generator)
    scheduler = ScalarScheduler(2, SGLD, seed=11)
    step = scheduler.step(torch.tensor([0, 1]), LOSSES)
    torch.testing.assert_close(scheduler.v_N.detach(), expected, rtol=0, atol=1e-14)
    assert step.gradient_norm == pytest.approx(float(gradient.norm()), abs=1e-12)


def test_the_schedulers_own_chain_favours_the_row_of_lower_loss():
    scheduler = ScalarScheduler(2, SGLD.model_copy(update={"sgld_step": 0.1}), seed=0)
    shares = []
    for _ in range(3000):
        scheduler.step(torch.tensor([0, 1]), LOSSES)
        shares.append(float(scheduler.all_weights()[0]) / 2)
    # One chain of about 3000 / 20 independent draws of standard deviation 0.21.
    assert sum(shares) / len(shares) == pytest.approx(0.713, abs=0.06)


def test_a_resumed_chain_continues_bit_for_bit():
    straight, first = ScalarScheduler(2, SGLD, seed=4), ScalarScheduler(2, SGLD, seed=4)
    both = torch.tensor([0, 1])
    for _ in range(3):
        straight.step(both, LOSSES)
        first.step(both, LOSSES)
    resumed = ScalarScheduler(2, SGLD, seed=99)
    resumed.load_state_dict(first.state_dict())
    for _ in range(3):
        straight.step(both, LOSSES)
        resumed.step(both, LOSSES)
    assert torch.equal(resumed.v_N, straight.v_N)


def test_a_chain_is_not_resumed_from_a_state_of_adam():
    adam = ScalarScheduler(2, SchedulerOptions())
    adam.step(torch.tensor([0, 1]), LOSSES)
    with pytest.raises(SchedulerStateError, match="not of this sgld sampler"):
        ScalarScheduler(2, SGLD).load_state_dict(adam.state_dict())
