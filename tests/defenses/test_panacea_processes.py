"""Several processes share a step: threads that meet at a barrier stand for them here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from defenses.panacea.perturbation import (
    NonFiniteGradientError,
    PanaceaGradients,
    global_norm,
    panacea_gradients,
    post_hoc_perturbation,
)

PROCESSES = 2


class Group:
    """An all-reduce between threads, in the order of their numbers."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(PROCESSES, timeout=30)
        self._shared: list[Any] = [None] * PROCESSES

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._shared[rank] = value
        self._barrier.wait()
        everyone = list(self._shared)
        self._barrier.wait()
        return everyone

    def sums_of(
        self, rank: int
    ) -> tuple[Callable[[dict[str, Tensor]], None], Callable[[float], float]]:
        def reduce(tensors: dict[str, Tensor]) -> None:
            everyone = self._exchange(rank, {name: t.clone() for name, t in tensors.items()})
            for name, tensor in tensors.items():
                tensor.copy_(sum(each[name] for each in everyone))

        return reduce, lambda value: float(sum(self._exchange(rank, value)))


def on_every_process(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(work, range(PROCESSES)))


def split_step(make_tiny: Any, ft: Any, harmful: Any, **settings: Any) -> list[PanaceaGradients]:
    """Each process has one row of each set; every row has three supervised tokens, so that half of
    a row's loss is its share of both the mean over rows and the mean over tokens."""
    group, models = Group(), [make_tiny() for _ in range(PROCESSES)]
    chosen = {"rho": 1.0, "strength": 0.3, **settings}

    def work(rank: int) -> PanaceaGradients:
        reduce, reduce_value = group.sums_of(rank)
        tiny = models[rank]
        return panacea_gradients(
            lambda: tiny.token_mean_loss([ft[rank]]) / PROCESSES,
            lambda: tiny.token_mean_loss([harmful[rank]]) / PROCESSES,
            tiny.trainable,
            reduce=reduce,
            reduce_value=reduce_value,
            **chosen,
        )

    return on_every_process(work)


def whole_step(make_tiny: Any, ft: Any, harmful: Any, **settings: Any) -> PanaceaGradients:
    tiny = make_tiny()
    chosen = {"rho": 1.0, "strength": 0.3, **settings}
    return panacea_gradients(
        lambda: tiny.token_mean_loss(ft),
        lambda: tiny.token_mean_loss(harmful),
        tiny.trainable,
        **chosen,
    )


def test_two_halves_of_a_batch_give_the_step_of_the_whole(
    make_tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    whole = whole_step(make_tiny, ft_rows, harmful_rows)
    for part in split_step(make_tiny, ft_rows, harmful_rows):
        for name, direction in whole.direction.items():
            torch.testing.assert_close(part.direction[name], direction, rtol=0, atol=1e-12)
            torch.testing.assert_close(
                part.perturbation[name], whole.perturbation[name], rtol=0, atol=1e-12
            )


def test_every_process_learns_the_losses_of_the_whole_batch(
    make_tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    whole = whole_step(make_tiny, ft_rows, harmful_rows)
    for part in split_step(make_tiny, ft_rows, harmful_rows):
        assert part.task_loss == pytest.approx(whole.task_loss, abs=1e-12)
        assert part.harmful_loss == pytest.approx(whole.harmful_loss, abs=1e-12)
        assert part.perturbed_harmful_loss == pytest.approx(whole.perturbed_harmful_loss, abs=1e-12)
        assert part.harmful_gradient_norm == pytest.approx(whole.harmful_gradient_norm, abs=1e-12)


def test_every_process_has_the_same_bits(make_tiny: Any, ft_rows: Any, harmful_rows: Any) -> None:
    first, second = split_step(make_tiny, ft_rows, harmful_rows)
    assert all(torch.equal(first.direction[name], second.direction[name]) for name in second[0])


@pytest.mark.parametrize("on_clamp", ["drop_term", "released"])
def test_the_clamp_looks_at_the_loss_of_the_whole_batch(
    make_tiny: Any, ft_rows: Any, harmful_rows: Any, on_clamp: str
) -> None:
    # h(w + eps) is 4.28, of which each process has about a half.
    settings: dict[str, Any] = {"clamp": 4.0, "on_clamp": on_clamp}
    whole = whole_step(make_tiny, ft_rows, harmful_rows, **settings)
    for part in split_step(make_tiny, ft_rows, harmful_rows, **settings):
        assert part.clamped
        for name, direction in whole.direction.items():
            torch.testing.assert_close(part.direction[name], direction, rtol=0, atol=1e-12)


def quadratic_step(group: Group, rank: int, factors: tuple[float, float]) -> PanaceaGradients:
    reduce, reduce_value = group.sums_of(rank)
    w = torch.tensor([0.6, -0.8], dtype=torch.float64, requires_grad=True)
    curvature = torch.tensor([2.0, 0.5], dtype=torch.float64)

    def share_of_harmful() -> Tensor:
        if factors[rank] == 0.0:
            return torch.zeros((), dtype=torch.float64)
        return factors[rank] * (curvature * w.square()).sum() / 2

    return panacea_gradients(
        lambda: w.square().sum() / 2 / PROCESSES,
        share_of_harmful,
        {"w": w},
        rho=1.0,
        strength=0.1,
        reduce=reduce,
        reduce_value=reduce_value,
    )


def test_a_gradient_that_is_not_finite_on_one_process_skips_the_step_on_all() -> None:
    group = Group()
    steps = on_every_process(lambda rank: quadratic_step(group, rank, (1.0, float("nan"))))
    assert all(step.skipped and step.perturbation is None for step in steps)


def test_a_process_without_harmful_rows_takes_the_others_perturbation() -> None:
    group = Group()
    steps = on_every_process(lambda rank: quadratic_step(group, rank, (1.0, 0.0)))
    expected = torch.tensor([0.9486832230505197, -0.3162277410168399], dtype=torch.float64)
    for step in steps:
        torch.testing.assert_close(step.perturbation["w"], expected, rtol=0, atol=1e-14)


def test_parameters_that_share_a_gradient_are_summed_once() -> None:
    group = Group()

    def work(rank: int) -> PanaceaGradients:
        reduce, reduce_value = group.sums_of(rank)
        ab = {name: torch.ones(2, dtype=torch.float64, requires_grad=True) for name in "ab"}

        def half() -> Tensor:
            return (ab["a"] + ab["b"]).square().sum() / PROCESSES

        return panacea_gradients(
            half, half, ab, rho=1.0, strength=0.0, reduce=reduce, reduce_value=reduce_value
        )

    for step in on_every_process(work):
        assert step.direction["a"].tolist() == step.direction["b"].tolist() == [4.0, 4.0]


def test_post_hoc_batches_of_two_processes_are_one_mean(
    make_tiny: Any, ft_rows: Any, harmful_rows: Any, safe_rows: Any
) -> None:
    rows = [*harmful_rows, *safe_rows, ft_rows[0]]
    alone = make_tiny()
    whole = post_hoc_perturbation(
        alone.trainable, [lambda row=row: alone.token_mean_loss([row]) for row in rows], 1.0
    )
    group, models = Group(), [make_tiny() for _ in range(PROCESSES)]

    def work(rank: int) -> Any:
        reduce, reduce_value = group.sums_of(rank)
        tiny = models[rank]
        return post_hoc_perturbation(
            tiny.trainable,
            [lambda row=row: tiny.token_mean_loss([row]) for row in rows[rank::PROCESSES]],
            1.0,
            reduce=reduce,
            reduce_value=reduce_value,
        )

    for part in on_every_process(work):
        assert part.batch_count == 5
        assert part.harmful_loss == pytest.approx(whole.harmful_loss, abs=1e-12)
        assert global_norm(part.perturbation) == pytest.approx(1.0, abs=1e-6)
        for name, eps in whole.perturbation.items():
            torch.testing.assert_close(part.perturbation[name], eps, rtol=0, atol=1e-12)


def test_no_usable_harmful_batch_on_any_process_is_refused_on_all() -> None:
    group = Group()

    def work(rank: int) -> str:
        reduce, reduce_value = group.sums_of(rank)
        w = {"w": torch.ones(1, requires_grad=True)}
        with pytest.raises(NonFiniteGradientError) as caught:
            post_hoc_perturbation(
                w,
                [lambda: w["w"].sum() * float("nan")] * rank,
                1.0,
                reduce=reduce,
                reduce_value=reduce_value,
            )
        return str(caught.value)

    assert all("none of 1" in message for message in on_every_process(work))
