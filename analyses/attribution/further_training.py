"""The gold standard: training goes on a little, with and without each row.

  a_i = E_xi[ g(theta_f + dtheta(D without i, xi)) - g(theta_f + dtheta(D, xi)) ]
a_i > 0: leaving row i out raises the target's loss, so the row promotes the target. Source: the
brief, 2.1 and 2.2; conventions B and C keep all batches where they are, whichever row is out.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = NDArray[np.float64]
NEAR_ZERO = 1e-10


class Problem(Protocol):
    """What is trained further, and what is watched."""

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    @property
    def n_rows(self) -> int: ...

    def row_losses(self, rows: Sequence[int]) -> Tensor:
        """[len(rows)], with a graph; in evaluation mode."""
        ...

    def target_values(self) -> ArrayLike:
        """g of each target, [Q], without a graph."""
        ...


class Plan(NamedTuple):
    """How training goes on. batch_size None: all rows each step. make_optimizer None: plain SGD."""

    checkpoints: tuple[int, ...]
    learning_rate: float
    batch_size: int | None = None
    convention: Literal["B", "C"] = "C"
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] | None = None


class Measured(NamedTuple):
    """Targets' values after training without each candidate, and with all rows.

    u_STQI: by seed, checkpoint, target, candidate; full_STQ.
    """

    u_STQI: Array
    full_STQ: Array


def further_training(
    problem: Problem,
    candidates: Sequence[int],
    plan: Plan,
    seeds: Sequence[int],
    *,
    each: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Run the training once a seed with all rows and once without each candidate.

    A seed fixes the order of the rows, the same for all runs of it. With convention C a run is the
    full run until its row's first batch, and starts from there. The parameters are as before at
    the end. each(done, total): after a run; it may raise to stop.
    """
    start = [parameter.detach().clone() for parameter in problem.parameters]
    asked = [parameter.requires_grad for parameter in problem.parameters]
    for parameter in problem.parameters:
        parameter.requires_grad_(True)
    u, full = [], []
    total, done = len(seeds) * (len(candidates) + 1), 0

    def count() -> None:
        nonlocal done
        done += 1
        each(done, total)

    try:
        for seed in seeds:
            _restore(problem.parameters, start)
            values, without = _one_seed(problem, candidates, plan, seed, count)
            full.append(values)
            u.append(without)
    finally:
        _restore(problem.parameters, start)
        for parameter, before in zip(problem.parameters, asked, strict=True):
            parameter.requires_grad_(before)
            parameter.grad = None
    return Measured(np.stack(u), np.stack(full))


def _one_seed(
    problem: Problem, candidates: Sequence[int], plan: Plan, seed: int, count: Callable[[], None]
) -> tuple[Array, Array]:
    steps = max(plan.checkpoints)
    order = _batches(problem.n_rows, plan.batch_size or problem.n_rows, steps, seed)
    first = {
        row: 0
        if plan.convention == "B"
        else next((t for t, batch in enumerate(order) if row in batch), steps)
        for row in candidates
    }
    found: dict[int, list[Array]] = {}
    values: list[Array] = []
    optimizer = _optimizer(problem, plan)
    for t, batch in enumerate(order):
        for row in [row for row in candidates if first[row] == t]:
            kept = [parameter.detach().clone() for parameter in problem.parameters]
            own = _optimizer(problem, plan)
            own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found[row] = values + _run(problem, order[t:], plan, own, t, row)
            _restore(problem.parameters, kept)
            count()
        values = values + _run(problem, [batch], plan, optimizer, t, None)
    for row in candidates:
        if first[row] == steps:
            found[row] = values
            count()
    count()
    return np.stack(values), np.stack([np.stack(found[row]) for row in candidates], axis=-1)


def _run(
    problem: Problem,
    order: Sequence[Sequence[int]],
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    begin: int,
    left_out: int | None,
) -> list[Array]:
    values = []
    for t, batch in enumerate(order, start=begin + 1):
        optimizer.zero_grad(set_to_none=True)
        kept = list(batch)
        if left_out is not None and plan.convention == "C" and left_out in kept:
            kept.remove(left_out)
        extra = left_out is not None and plan.convention == "B"
        # One forward pass serves the batch and the row whose loss leaves it.
        rows = [*kept, left_out] if extra and left_out is not None else kept
        if rows:
            losses = problem.row_losses(rows)
            loss = losses[: len(kept)].sum() / len(batch)
            if extra:
                loss = loss - losses[-1] / problem.n_rows
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if t in plan.checkpoints:
            values.append(np.asarray(problem.target_values(), dtype=np.float64))
    return values


def _batches(n: int, size: int, steps: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    order: list[list[int]] = []
    while len(order) < steps:
        shuffled = generator.permutation(n).tolist()
        order += [sorted(shuffled[i : i + size]) for i in range(0, n - n % size or n, size)]
    return order[:steps]


def _optimizer(problem: Problem, plan: Plan) -> torch.optim.Optimizer:
    if plan.make_optimizer is not None:
        return plan.make_optimizer(problem.parameters)
    return torch.optim.SGD(list(problem.parameters), lr=plan.learning_rate)


@torch.no_grad()
def _restore(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def adjusted(
    measured: Measured, adjustment: Literal["left_out_mean", "full_run"] = "left_out_mean"
) -> Array:
    """a_STQI. left_out_mean, equation 13: u_i - mean_j u_j; full_run, equation 17: u_i - full."""
    u = measured.u_STQI
    if adjustment == "left_out_mean":
        return np.asarray(u - u.mean(axis=-1, keepdims=True))
    return np.asarray(u - measured.full_STQ[..., None])


def cosine(s: ArrayLike, t: ArrayLike) -> float:
    """s . t / (|s| |t|); 0 where one is 0."""
    s, t = np.asarray(s, float), np.asarray(t, float)
    size = float(np.linalg.norm(s) * np.linalg.norm(t))
    return float(s @ t) / size if size > 0 else 0.0


def spearman(s: ArrayLike, t: ArrayLike) -> float:
    """Correlation of ranks; ties share their mean rank; 0 where all are equal."""
    from scipy.stats import rankdata

    ranks = [rankdata(values) - (len(np.asarray(values)) + 1) / 2 for values in (s, t)]
    return cosine(ranks[0], ranks[1])


class Agreement(NamedTuple):
    """Means over the targets that were kept, with std / sqrt(their number); None: none was."""

    cosine: float | None
    cosine_sem: float | None
    spearman: float | None
    spearman_sem: float | None
    skipped: int


def agreement(a_QI: Array, predicted_QI: Array, near_zero: float = NEAR_ZERO) -> Agreement:
    """Cosine and Spearman of measured and predicted, target by target.

    Targets with max |a| < near_zero are skipped and counted. Source: the brief, 2.2.
    """
    pairs = [
        (cosine(a, s), spearman(a, s))
        for a, s in zip(a_QI, predicted_QI, strict=True)
        if np.abs(a).max() >= near_zero
    ]
    skipped = len(a_QI) - len(pairs)
    if not pairs:
        return Agreement(None, None, None, None, skipped)
    values = np.array(pairs)
    sem = values.std(axis=0, ddof=1 if len(values) > 1 else 0) / np.sqrt(len(values))
    mean: Any = values.mean(axis=0)
    return Agreement(float(mean[0]), float(sem[0]), float(mean[1]), float(sem[1]), skipped)
