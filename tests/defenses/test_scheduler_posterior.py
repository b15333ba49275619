"""The posterior over the weights that the scheduler's loss stands for (BDS, arXiv 2510.27172).

Two rows with fixed losses 0.2 and 2.0 and the prior v ~ N(0, I): the potential is
sum_i sigma_i(v) l_i + |v|^2 / 2. Golden values from independent quadrature.
"""

import pytest
import torch
from torch import Tensor

from defenses.bds.scheduler import scheduler_loss, softmax_weights

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


def test_langevin_steps_along_this_gradient_sample_that_posterior():
    generator = torch.Generator().manual_seed(0)
    v_2_C = torch.zeros((2, 2000), dtype=torch.float64)
    step, total, count = 0.02, 0.0, 0
    for index in range(2500):
        v_2_C.requires_grad_(True)
        (gradient,) = torch.autograd.grad(potential(v_2_C).sum(), v_2_C)
        noise = torch.randn(v_2_C.shape, generator=generator, dtype=torch.float64)
        v_2_C = v_2_C.detach() - step / 2 * gradient + step**0.5 * noise
        if index >= 500:
            total += float(share_of_first(v_2_C).mean())
            count += 1
    assert total / count == pytest.approx(0.7131, abs=0.005)
