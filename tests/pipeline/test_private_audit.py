"""An attack on private tuning: what it finds must stay below what is certified.

Canaries are rows of random text, each learned or left out by a fair coin of the run. The attacker
has the adapter before and after, and the clipped gradient of every canary; by least squares he
estimates how often each was drawn. A test on his scores has some rate of true and of false
positives; by Clopper-Pearson the first is at least L and the second at most U, with 99 % confidence
each, and f-DP says L <= P(U). Protocol: the brief on privacy calibration, section 6.10.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import beta

from analyses.privacy.accounting import dp_sgd_curve
from analyses.privacy.spec import Phase
from benchmarks.workload import adapted_model, equal_rows
from defenses.losses import response_nll_B
from workers.pipeline.models import trainable
from workers.pipeline.private_gradients import PrivateGradients
from workers.pipeline.private_noise import seeded
from workers.pipeline.rows import TokenRow, collate

SIGMA, RATE, STEPS, CLIP = 0.8, 0.5, 8, 0.01
DESCENT = 0.01
CANARIES, RUNS = 16, 40
EXPECTED_BATCH = RATE * CANARIES
CONFIDENCE = 0.99


class Found(NamedTuple):
    """L and U of the test that looks best on the other half of the runs."""

    true_positives: float
    false_positives: float


def scores(model: Any, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """How often each canary seems to have been drawn in each run, and whether it was learned;
    [RUNS, K]."""
    canaries = equal_rows(CANARIES, 11, tokens=12, supervised=8, vocabulary=258)
    parameters = trainable(model)
    first = {name: p.detach().clone() for name, p in parameters.items()}
    clipped_KP = clipped_gradients(model, canaries)
    estimates, member = [], []
    for run in range(RUNS):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(first[name])
        learned = np.random.default_rng(run).random(CANARIES) < 0.5
        rows = [row for row, chosen in zip(canaries, learned, strict=True) if chosen]
        private = PrivateGradients(
            model,
            parameters,
            torch.optim.SGD(parameters.values(), lr=DESCENT),
            noise_multiplier=noise,
            clip=CLIP,
            expected_batch=EXPECTED_BATCH,
            rows_at_once=CANARIES,
        )
        for step in range(STEPS):
            random = seeded(run)(step)
            private.step([rows[i] for i in random.included(len(rows), RATE)], random)
        private.close()
        moved_P = torch.cat([(first[n] - p.detach()).flatten() for n, p in parameters.items()])
        total_P = moved_P.double() * EXPECTED_BATCH / DESCENT
        estimates.append(torch.linalg.lstsq(clipped_KP.T, total_P[:, None]).solution[:, 0].numpy())
        member.append(learned)
    return np.stack(estimates), np.stack(member)


def clipped_gradients(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    found = []
    for row in rows:
        loss = response_nll_B(model, *collate([row], torch.device("cpu"))).mean()
        parts = torch.autograd.grad(loss, list(trainable(model).values()))
        gradient = torch.cat([part.flatten() for part in parts]).double()
        found.append(gradient * (CLIP / gradient.norm()).clamp(max=1.0))
    return torch.stack(found)


def attack(score: np.ndarray, member: np.ndarray, kappa: float) -> Found:
    """The threshold with a rate of false positives of kappa on one half, judged on the other."""
    half = len(score) // 2
    absent = score[:half][~member[:half]]
    threshold = np.quantile(absent, 1 - kappa)
    hits = score[half:][member[half:]] > threshold
    alarms = score[half:][~member[half:]] > threshold
    return Found(_low(hits.sum(), len(hits)), _high(alarms.sum(), len(alarms)))


def _low(successes: int, trials: int) -> float:
    if successes == 0:
        return 0.0
    return float(beta.ppf(1 - CONFIDENCE, successes, trials - successes + 1))


def _high(successes: int, trials: int) -> float:
    if successes == trials:
        return 1.0
    return float(beta.ppf(CONFIDENCE, successes + 1, trials - successes))


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    return adapted_model(str(tiny_model_folder))


@pytest.fixture(scope="module")
def certified() -> Any:
    phase = Phase(noise_multiplier=SIGMA, sampling_rate=RATE, steps=STEPS)
    return dp_sgd_curve((phase,), "add_or_remove_one")


@pytest.fixture(scope="module")
def private_scores(model: Any) -> tuple[np.ndarray, np.ndarray]:
    return scores(model, SIGMA)


@pytest.fixture(scope="module")
def bare_scores(model: Any) -> tuple[np.ndarray, np.ndarray]:
    return scores(model, 0.01)


@pytest.mark.parametrize("kappa", [0.05, 0.1, 0.3])
def test_the_attack_finds_less_than_what_is_certified(private_scores, certified, kappa: float):
    found = attack(*private_scores, kappa)
    assert found.true_positives <= float(certified.success(found.false_positives))


@pytest.mark.parametrize("kappa", [0.05, 0.1])
def test_the_attack_would_find_noise_that_is_missing(bare_scores, certified, kappa: float):
    """The same runs with a hundredth of the noise break the bound: the attack has teeth."""
    found = attack(*bare_scores, kappa)
    assert found.true_positives > float(certified.success(found.false_positives))
