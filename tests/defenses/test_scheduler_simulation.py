"""The scheduler alone, over rows whose losses follow a given course.

20 epochs over 1000 rows in batches of 10, released settings. Benign losses fall from 4 to 0.001
with a time constant of 60 steps, harmful ones from 1.8 to 1.2; each row's loss carries a lognormal
factor of sd 0.15. Expected numbers: an independent simulation of the same course, with its own
random factors and order, hence the tolerances.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from defenses.bds.ranking import effective_sample_size, separation_auc
from defenses.bds.scheduler import ScalarScheduler, scheduler_gradient, softmax_weights
from jobspec.defense import SchedulerOptions

ROWS = 1000
RATE = 5e-3


class Simulated(NamedTuple):
    v: Tensor
    weights: Tensor
    harmful: Tensor
    difficulty: Tensor


def course(harmful_share: float) -> tuple[Tensor, Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """Harmful flags, difficulty factors, and the row ids and losses of every step."""
    generator = torch.Generator().manual_seed(0)
    harmful = torch.arange(ROWS) >= round(ROWS * (1 - harmful_share))
    difficulty = torch.exp(0.15 * torch.randn(ROWS, generator=generator, dtype=torch.float64))

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(20):
            for place, ids in enumerate(torch.randperm(ROWS, generator=generator).split(10)):
                fading = math.exp(-(100 * epoch + place) / 60)
                losses = torch.where(harmful[ids], 1.2 + 0.6 * fading, 0.001 + 3.999 * fading)
                yield ids, losses * difficulty[ids]

    return harmful, difficulty, steps()


@functools.cache
def simulated(harmful_share: float) -> Simulated:
    harmful, difficulty, steps = course(harmful_share)
    scheduler = ScalarScheduler(ROWS, SchedulerOptions(name="bds", learning_rate=RATE))
    for ids, losses in steps:
        scheduler.step(ids, losses)
    return Simulated(scheduler.v_N.detach(), scheduler.all_weights(), harmful, difficulty)


@pytest.mark.parametrize(
    ("harmful_share", "benign_v", "harmful_v"),
    [(0.1, 4.89, -0.10), (0.3, 6.24, 0.03), (0.8, 8.02, 0.44), (0.9, 8.56, 0.64)],
)
def test_learned_rows_rise_and_persistent_losses_stay_near_the_start(
    harmful_share: float, benign_v: float, harmful_v: float
) -> None:
    v, _, harmful, _ = simulated(harmful_share)
    assert float(v[~harmful].median()) == pytest.approx(benign_v, abs=0.3)
    assert float(v[harmful].median()) == pytest.approx(harmful_v, abs=0.3)


@pytest.mark.parametrize(
    ("harmful_share", "benign_weight", "harmful_weight"),
    [(0.1, 1.110, 0.0074), (0.3, 1.427, 0.0028), (0.8, 4.990, 0.0025), (0.9, 9.967, 0.0036)],
)
def test_the_weight_moves_to_the_benign_rows(
    harmful_share: float, benign_weight: float, harmful_weight: float
) -> None:
    _, weights, harmful, _ = simulated(harmful_share)
    assert float(weights[~harmful].mean()) == pytest.approx(benign_weight, rel=2e-3)
    assert float(weights[harmful].mean()) == pytest.approx(harmful_weight, abs=6e-4)


@pytest.mark.parametrize("harmful_share", [0.1, 0.3, 0.8, 0.9])
def test_harmful_rows_rank_last(harmful_share: float) -> None:
    v, _, harmful, _ = simulated(harmful_share)
    assert separation_auc(v, harmful) >= 0.99


def test_without_harmful_rows_the_weights_spread_but_most_rows_still_count() -> None:
    weights = simulated(0.0).weights
    assert float(weights.min()) == pytest.approx(0.40, abs=0.15)
    assert float(weights.max()) == pytest.approx(2.86, abs=0.5)
    assert effective_sample_size(weights) == pytest.approx(0.91, abs=0.03)


def test_without_harmful_rows_the_hard_ones_lose_weight() -> None:
    v, _, _, difficulty = simulated(0.0)
    correlation = torch.corrcoef(torch.stack([v, difficulty.log()]))[0, 1]
    assert float(correlation) == pytest.approx(-0.78, abs=0.05)


def test_plain_gradient_descent_at_the_same_rate_leaves_every_weight_near_one() -> None:
    _, _, steps = course(0.3)
    v = torch.full((ROWS,), 0.1, dtype=torch.float64)
    for ids, losses in steps:
        v -= RATE * scheduler_gradient(v, ids, losses)
    weights = softmax_weights(v)
    assert float(weights.min()) > 0.98
    assert float(weights.max()) < 1.01


def test_one_langevin_sample_ranks_the_rows_far_worse_than_adamw() -> None:
    areas = {}
    for sampler in ("adam", "sgld"):
        options = SchedulerOptions(sampler=sampler, gaussian_coefficient=float(sampler == "sgld"))
        scheduler = ScalarScheduler(150, options, seed=1)
        generator = torch.Generator().manual_seed(0)
        harmful = torch.arange(150) >= 105
        for epoch in range(10):
            for place, ids in enumerate(torch.randperm(150, generator=generator).split(8)):
                fading = math.exp(-(19 * epoch + place) / 15)
                losses = torch.where(harmful[ids], 1.2 + 0.6 * fading, 0.1 + 3.0 * fading)
                scheduler.step(ids, losses)
        areas[sampler] = separation_auc(scheduler.v_N, harmful)
    assert areas["adam"] > 0.95
    assert areas["sgld"] < 0.8
