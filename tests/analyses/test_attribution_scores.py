"""Golden values are of the brief on final-model attribution, section 6, unless said otherwise."""

import numpy as np
import pytest
import torch

from analyses.attribution.curvature import conjugate_gradient, lissa, lissa_best_scale
from analyses.attribution.further_training import agreement, cosine, spearman
from analyses.attribution.projection import factored, rademacher
from analyses.attribution.scores import (
    adam_scale,
    datainf,
    fisher_if,
    generalised_influence,
    grad_cos,
    grad_dot,
    trak,
    trak_from_gram,
)

G = np.array([[1.0, 0, 2], [0, -1, 1], [2, 1, 0]])
Q = np.array([1.0, 1, 1])
DATAINF_LAMBDA = 0.1 * np.mean(G**2)
PHI = np.array([[1.0, 0], [1, 1], [0, 2], [1, -1]])


def test_grad_dot_and_grad_cos_have_the_golden_values() -> None:
    assert grad_dot(G, Q).tolist() == [3, 0, 3]
    assert grad_cos(G, Q) == pytest.approx([0.774597, 0, 0.774597], abs=1e-6)


def test_a_zero_gradient_scores_zero() -> None:
    assert grad_cos(np.array([[0.0, 0], [1, 1]]), [1.0, 0]).tolist() == [
        0.0,
        pytest.approx(0.5**0.5),
    ]


def test_datainf_has_the_golden_values_and_is_the_average_of_inverses() -> None:
    assert pytest.approx(0.1333333) == DATAINF_LAMBDA
    found = datainf(G @ G.T, G @ Q, DATAINF_LAMBDA)
    assert found == pytest.approx([12.27272727, -1.46103896, 12.27272727], abs=1e-7)
    inverses = [np.linalg.inv(DATAINF_LAMBDA * np.eye(3) + np.outer(g, g)) for g in G]
    assert found == pytest.approx(G @ np.mean(inverses, axis=0) @ Q)


def test_fisher_influence_has_the_golden_values_and_equals_the_direct_solution() -> None:
    found = fisher_if(G @ G.T, G @ Q, DATAINF_LAMBDA)
    assert found == pytest.approx([1.8294989, -1.20548377, 0.76583675], abs=1e-7)
    direct = G @ np.linalg.solve(DATAINF_LAMBDA * np.eye(3) + G.T @ G / 3, Q)
    assert found == pytest.approx(direct)


def test_trak_has_the_golden_values() -> None:
    found = trak(PHI, [1.0, 0.5], [0.9, 0.6, 0.7, 0.8])
    assert found == pytest.approx([0.0333333, 0.1666667, 0.05, 0.05], abs=1e-6)


def test_trak_from_inner_products_of_loss_gradients_equals_trak_of_margins() -> None:
    p, p_q = np.array([0.9, 0.6, 0.7, 0.8]), 0.5
    losses = -(1 - p)[:, None] * PHI
    q = -(1 - p_q) * np.array([1.0, 0.5])
    found = trak_from_gram(losses @ losses.T, (losses @ q)[:, None], -np.log(p), [-np.log(p_q)])
    assert found[:, 0] == pytest.approx([0.0333333, 0.1666667, 0.05, 0.05], abs=1e-6)


def test_lissa_has_the_golden_values() -> None:
    H, q = torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64)), torch.ones(2).double()
    found = lissa(lambda v: H @ v, q, 0.1, scale=10.0, depth=200)
    assert found is not None
    assert found.tolist() == pytest.approx([0.476190, 1.666660], abs=1e-6)


def test_lissa_takes_a_larger_scale_where_a_small_one_diverges() -> None:
    H, q = torch.diag(torch.tensor([45.0, 0.5], dtype=torch.float64)), torch.ones(2).double()
    assert lissa(lambda v: H @ v, q, 1.0, scale=10.0, depth=200) is None
    solution, scale = lissa_best_scale(lambda v: H @ v, lambda v: H @ v, q, 1.0, depth=500)
    assert scale == 50.0
    assert solution.x.tolist() == pytest.approx([1 / 46, 1 / 1.5], rel=1e-4)


def test_conjugate_gradients_solve_the_damped_system() -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    H, q = A @ A.T, torch.randn(8, generator=generator, dtype=torch.float64)
    found = conjugate_gradient(lambda v: H @ v, q, 0.5, iterations=30, tolerance=1e-10)
    exact = torch.linalg.solve(H + 0.5 * torch.eye(8).double(), q)
    assert torch.allclose(found.x, exact, rtol=1e-7)


def test_the_generalised_influence_is_the_derivative_of_the_quadratic_minimiser() -> None:
    generator = np.random.default_rng(3)
    A, B = generator.normal(size=(2, 4, 4))
    H, H_i = A @ A.T, B + B.T  # the row's own Hessian is indefinite
    gradient, g_i = generator.normal(size=(2, 4))
    damping, eps = 0.3, 1e-6

    def minimiser(e: float) -> np.ndarray:
        return -np.linalg.solve(H - e * H_i + damping * np.eye(4), gradient - e * g_i)

    numeric = (minimiser(eps) - minimiser(-eps)) / (2 * eps)
    found = generalised_influence(H, damping, g_i, H_i, minimiser(0.0))
    assert found == pytest.approx(numeric, abs=1e-6)


def test_adams_scale_corrects_the_bias_of_the_second_moment() -> None:
    after_one_step = 0.001 * np.array([4.0, 9.0])
    assert adam_scale(after_one_step, 1) == pytest.approx([1 / 2, 1 / 3], rel=1e-6)


def test_cosine_has_the_golden_values_before_and_after_centring() -> None:
    s, t = np.array([1.0, -2, 3, 0]), np.array([2.0, -1, 2, 1])
    assert cosine(s, t) == pytest.approx(0.845154, abs=1e-6)
    assert cosine(s - s.mean(), t) == pytest.approx(0.701646, abs=1e-6)


def test_spearman_shares_ranks_of_ties() -> None:
    assert spearman([1, 2, 2, 4], [10, 30, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_targets_that_hardly_change_are_skipped_and_counted() -> None:
    a = np.array([[1.0, 2, 3], [1e-12, 0, -1e-12]])
    found = agreement(a, np.array([[2.0, 4, 6], [1, 2, 3]]))
    assert (found.cosine, found.skipped) == (pytest.approx(1.0), 1)
    assert agreement(a[1:], a[1:]).cosine is None


def _cosine_error(project: object) -> float:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(40, 32 * 64, generator=generator)
    values[1:] += values[0]
    exact = torch.corrcoef(values)[0, 1:]
    exact = torch.nn.functional.cosine_similarity(values[:1], values[1:])
    mapped = project(values)  # type: ignore[operator]
    return float(
        (torch.nn.functional.cosine_similarity(mapped[:1], mapped[1:]) - exact).pow(2).mean().sqrt()
    )


@pytest.mark.parametrize("dimension", [256, 1024])
def test_the_error_of_a_rademacher_projection_falls_with_the_root_of_its_dimension(
    dimension: int,
) -> None:
    error = _cosine_error(lambda values: rademacher(values, dimension, seed=1, block=0))
    assert 0.3 / dimension**0.5 < error < 1.6 / dimension**0.5


def test_the_error_of_a_factored_projection_falls_with_its_width() -> None:
    errors = [
        _cosine_error(lambda values, w=width: factored(values, 4, 512, w, seed=1, block=0))
        for width in (16, 256)
    ]
    assert errors[1] < errors[0] / 2
    assert errors[1] < 0.06


def test_a_projection_is_the_same_for_the_same_seed_alone() -> None:
    values = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    one = rademacher(values, 8, seed=1, block=0)
    assert torch.equal(one, rademacher(values, 8, seed=1, block=0))
    assert not torch.equal(one, rademacher(values, 8, seed=2, block=0))
