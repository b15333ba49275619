"""The measured gold standard on problems with known answers.

Golden values are of the brief on final-model attribution, 6.1, 6.4 and 6.6.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analyses.attribution.further_training import (
    Plan,
    adjusted,
    cosine,
    further_training,
    spearman,
)
from analyses.attribution.gradients import linear_blocks, row_gradients
from analyses.attribution.scores import cosines, generalised_influence

N = 24


def _linear_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    i, k = np.arange(N), np.arange(6)
    truth = np.array([0.5, -1, 2, 0.3])
    X = np.stack([np.ones(N), np.sin(i + 1), np.cos(2 * (i + 1)), np.sin(3 * (i + 1) + 0.5)], 1)
    y = X @ truth + 0.5 * np.cos(5 * (i + 1))
    y[7] += 3
    Z = np.stack([np.ones(6), np.sin(k + 0.3), np.cos(2 * k + 0.7), np.sin(3 * k + 0.1)], 1)
    return X, y, Z, Z @ truth


X, Y, Z, Z_Y = _linear_data()
H = X.T @ X / N
ETA = 0.2 / np.linalg.eigvalsh(H)[-1]
OPTIMUM = np.linalg.solve(X.T @ X, X.T @ Y)


class LinearProblem:
    """L = 0.5 r^2."""

    def __init__(self, theta: np.ndarray) -> None:
        self.theta = torch.tensor(theta)
        self.parameters: Sequence[Tensor] = [self.theta]
        self.n_rows = N

    def row_losses(self, rows: Sequence[int]) -> Tensor:
        chosen = list(rows)
        return 0.5 * (torch.tensor(X[chosen]) @ self.theta - torch.tensor(Y[chosen])) ** 2

    def target_values(self) -> np.ndarray:
        return 0.5 * (Z @ self.theta.detach().numpy() - Z_Y) ** 2


def _descend(theta: np.ndarray, steps: int, without: int | None = None) -> np.ndarray:
    """Full-batch gradient descent in closed form: theta_T = theta_inf + (I - eta H')^T (...)."""
    keep = np.arange(N) != (-1 if without is None else without)
    A, b = X[keep].T @ X[keep] / N, X[keep].T @ Y[keep] / N
    end = np.linalg.solve(A, b)
    return end + np.linalg.matrix_power(np.eye(4) - ETA * A, steps) @ (theta - end)


def _measured(theta: np.ndarray, steps: int) -> np.ndarray:
    """a[target, row], adjusted by the full run."""

    def value(at: np.ndarray) -> np.ndarray:
        return 0.5 * (Z @ at - Z_Y) ** 2

    full = value(_descend(theta, steps))
    return np.stack([value(_descend(theta, steps, i)) - full for i in range(N)], axis=1)


def _approximations(theta: np.ndarray, steps: int) -> dict[str, np.ndarray]:
    rows = (X @ theta - Y)[:, None] * X
    q = (Z @ theta - Z_Y)[:, None] * Z
    damping = 1 / (ETA * steps)
    shift = -np.linalg.solve(H + damping * np.eye(4), rows.mean(axis=0))
    moves = [
        generalised_influence(H, damping, g, np.outer(x, x), shift)
        for g, x in zip(rows, X, strict=True)
    ]
    dot = q @ rows.T
    return {
        "grad_dot": dot,
        "grad_cos": np.stack(
            [
                cosines(d, np.linalg.norm(rows, axis=1), float(np.linalg.norm(one)))
                for d, one in zip(dot, q, strict=True)
            ]
        ),
        "if": q @ np.linalg.solve(H, rows.T),
        "damped": q @ np.linalg.solve(H + damping * np.eye(4), rows.T),
        "prop1": q @ np.stack(moves, axis=1),
    }


START = _descend(np.zeros(4), 10)


def test_the_linear_problem_is_the_briefs() -> None:
    assert pytest.approx(0.19919365) == ETA
    assert pytest.approx([0.5985833, -0.7818802, 1.6946001, 0.1260035], abs=1e-6) == OPTIMUM
    assert np.linalg.norm(H @ START - X.T @ Y / N) == pytest.approx(0.3391, abs=1e-4)


@pytest.mark.parametrize(
    ("theta", "steps", "golden"),
    [
        (OPTIMUM, 1, [0.9996, 0.7871, 0.8818, 0.9975, 0.9975]),
        (OPTIMUM, 20, [0.9034, 0.7571, 0.9649, 0.9707, 0.9707]),
        (OPTIMUM, 5000, [0.8666, 0.7338, 0.9555, 0.9555, 0.9555]),
        (START, 1, [0.9999, 0.8384, 0.9149, 0.9986, 0.9975]),
        (START, 20, [0.8646, 0.7192, 0.9369, 0.9335, 0.9783]),
        (START, 5000, [0.7621, 0.6371, 0.8406, 0.8406, 0.9558]),
    ],
)
def test_each_approximation_follows_the_measured_change_as_the_brief_says(
    theta: np.ndarray, steps: int, golden: list[float]
) -> None:
    measured = _measured(theta, steps)
    found = [
        np.mean([cosine(a, s) for a, s in zip(measured, value, strict=True)])
        for value in _approximations(theta, steps).values()
    ]
    assert found == pytest.approx(golden, abs=1e-4)


def test_far_enough_training_is_exact_leave_one_out() -> None:
    residual = X @ OPTIMUM - Y
    leverage = np.einsum("ni,ij,nj->n", X, np.linalg.inv(X.T @ X), X)
    assert leverage[7] == pytest.approx(0.22380538, abs=1e-6)
    moved = _descend(OPTIMUM, 5000, without=7) - OPTIMUM
    exact = np.linalg.solve(H, X[7]) * residual[7] / (N * (1 - leverage[7]))
    assert moved == pytest.approx(exact, abs=1e-9)
    measured, influence = _measured(OPTIMUM, 5000), _approximations(OPTIMUM, 5000)["if"]
    ranks = [spearman(a, s) for a, s in zip(measured, influence, strict=True)]
    assert np.mean(ranks) == pytest.approx(0.998, abs=1e-3)


@pytest.mark.parametrize("convention", ["B", "C"])
def test_further_training_of_full_batches_equals_the_closed_form(convention: str) -> None:
    problem = LinearProblem(START)
    plan = Plan((1, 20), float(ETA), None, convention)  # type: ignore[arg-type]
    measured = further_training(problem, range(N), plan, [0])
    a = adjusted(measured, "full_run")[0]
    assert a[0] == pytest.approx(_measured(START, 1), abs=1e-12)
    assert a[1] == pytest.approx(_measured(START, 20), abs=1e-12)
    assert problem.theta.numpy() == pytest.approx(START, abs=0)


def test_leaving_out_a_row_with_a_positive_score_raises_the_targets_loss() -> None:
    plan = Plan((1,), float(ETA))
    a = adjusted(further_training(LinearProblem(START), range(N), plan, [0]), "full_run")[0, 0]
    dot = _approximations(START, 1)["grad_dot"]
    telling = np.abs(dot) > 0.1 * np.abs(dot).max()
    assert (np.sign(a) == np.sign(dot))[telling].all()
    assert np.abs(a - ETA / N * dot).max() < 0.1 * np.abs(a).max()


def test_both_adjustments_remove_the_common_movement() -> None:
    measured = further_training(LinearProblem(START), range(N), Plan((3,), float(ETA)), [0])
    one, other = adjusted(measured), adjusted(measured, "full_run")
    assert one.mean(axis=-1) == pytest.approx(0, abs=1e-12)
    assert one == pytest.approx(other - other.mean(axis=-1, keepdims=True))


def test_a_row_that_no_batch_holds_changes_nothing_under_convention_c() -> None:
    plan = Plan((1, 2), float(ETA), 4)
    measured = further_training(LinearProblem(START), range(N), plan, [0])
    a = adjusted(measured, "full_run")[0, -1]
    assert (np.abs(a).max(axis=0) > 0).sum() == 8


class NetworkProblem:
    """A small tanh network that is nearly converged."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.network = nn.Sequential(
            nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 2, bias=False)
        ).double()
        for parameter in self.network.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.x = torch.randn(160, 6, generator=generator, dtype=torch.float64)
        hidden = torch.tanh(self.x @ torch.randn(6, 2, generator=generator, dtype=torch.float64))
        noise = torch.randn(160, 2, generator=generator, dtype=torch.float64)
        self.y = hidden + 0.3 * noise
        self.z = torch.randn(20, 6, generator=generator, dtype=torch.float64)
        self.n_rows = 160
        self.parameters = list(self.network.parameters())
        optimizer = torch.optim.SGD(self.parameters, lr=0.3)
        for _ in range(150):
            optimizer.zero_grad()
            self.row_losses(range(160)).mean().backward()
            optimizer.step()

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (self.network(x) - y).pow(2).sum(1)

    def row_losses(self, rows: Sequence[int]) -> Tensor:
        return self.losses(self.x[list(rows)], self.y[list(rows)])

    def target_losses(self) -> Tensor:
        return self.losses(self.z, torch.zeros(20, 2, dtype=torch.float64))

    def target_values(self) -> np.ndarray:
        with torch.no_grad():
            return self.target_losses().numpy()

    def gradients(self, losses: object) -> Tensor:
        blocks = linear_blocks(self.network)
        parts: dict[int, Tensor] = {}
        row_gradients(blocks, losses, lambda block, G: parts.update({block: G}))  # type: ignore[arg-type]
        return torch.cat([parts[index] for index in range(len(blocks))], dim=1)


def test_row_gradients_of_a_network_equal_autograds_row_by_row() -> None:
    problem = NetworkProblem()
    found = problem.gradients(lambda: problem.row_losses(range(5)))
    for index in range(5):
        one = torch.autograd.grad(problem.row_losses([index])[0], problem.parameters)
        assert torch.allclose(found[index], torch.cat([g.flatten() for g in one]), rtol=1e-12)


@pytest.mark.parametrize(("convention", "noise"), [("B", 0.1), ("C", 0.2)])
def test_one_seed_is_enough_where_batches_stay_in_place(convention: str, noise: float) -> None:
    problem = NetworkProblem()
    plan = Plan((5,), 0.03, 32, convention)  # type: ignore[arg-type]
    candidates = range(0, 160, 8)
    a = adjusted(further_training(problem, candidates, plan, range(3)), "full_run")[:, 0]
    q = problem.gradients(problem.target_losses)
    rows = problem.gradients(lambda: problem.row_losses(range(160)))
    predicted = (q @ rows.T).detach().numpy()[:, list(candidates)]
    pull = rows.mean(dim=0).norm()
    assert 0.005 < float(pull) < 0.1
    alone = np.mean([cosine(x, s) for x, s in zip(a[0], predicted, strict=True)])
    assert alone > 0.99
    spread = np.median(a.std(axis=0, ddof=1) / np.abs(a.mean(axis=0)))
    assert spread < noise
