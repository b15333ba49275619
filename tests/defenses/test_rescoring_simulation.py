"""What starting the logits anew from rescored losses does in a run of few epochs.

125 rows in batches of 4. Benign losses fall from 13 to 0.15 nats with a time constant of 10 steps
(one-word labels that the model does not know at first, the course seen on SmolLM2), harmful ones
from 3.4 to 2.7; each row's loss carries a lognormal factor of sd 0.5. Without rescoring, a logit
tells when its row was drawn.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from defenses.bds.methods import ScalarBds
from defenses.bds.ranking import effective_sample_size, separation_auc
from defenses.method import MethodContext, StepRecord
from jobspec.defense import SchedulerOptions

ROWS, BATCH = 125, 4
EMPTY_IDS, EMPTY = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)


class Outcome(NamedTuple):
    auc: float
    harmful_weight: float
    effective_size: float


def short_run(epochs: int, *, rescore: bool, share: float = 0.2) -> list[Outcome]:
    """The weights in use in the last step, and those at the end."""
    generator = torch.Generator().manual_seed(0)
    harmful = torch.rand(ROWS, generator=generator) < share
    factor = torch.exp(0.5 * torch.randn(ROWS, generator=generator))
    per_epoch = math.ceil(ROWS / BATCH)
    method = ScalarBds(
        MethodContext(ROWS, 0, epochs * per_epoch, per_epoch, {}, 0),
        SchedulerOptions(rescore=rescore),
    )

    def losses(step: int) -> Tensor:
        fading = math.exp(-step / 10)
        benign = (0.15 + 13 * fading) * factor
        return torch.where(harmful, (2.7 + 0.7 * fading) * factor.sqrt(), benign).double()

    def outcome() -> Outcome:
        weights = method.weights()
        some = bool(harmful.any())
        return Outcome(
            separation_auc(weights, harmful) if some else math.nan,
            float(weights[harmful].mean()) if some else math.nan,
            effective_sample_size(weights),
        )

    outcomes = []
    for epoch in range(epochs):
        for place, ids in enumerate(torch.randperm(ROWS, generator=generator).split(BATCH)):
            step = epoch * per_epoch + place
            method.learn(StepRecord(ids, losses(step)[ids], EMPTY_IDS, EMPTY, step, epoch))
        outcomes = [outcome()]
        if rescore:
            method.relearn(
                StepRecord(torch.arange(ROWS), losses(step), EMPTY_IDS, EMPTY, step, epoch)
            )
        outcomes.append(outcome())
    return outcomes


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_short_run_ranks_rows_only_with_rescoring(epochs: int) -> None:
    plain = short_run(epochs, rescore=False)[-1]
    in_use, at_end = short_run(epochs, rescore=True)
    assert plain.auc < 0.8
    assert in_use.auc > 0.95
    assert at_end.auc > 0.98
    assert in_use.harmful_weight < 0.25 < plain.harmful_weight
    assert at_end.harmful_weight < 0.05


def test_rescoring_keeps_the_weight_on_many_rows_in_a_long_run() -> None:
    plain, rescored = short_run(20, rescore=False)[-1], short_run(20, rescore=True)[0]
    assert plain.auc > 0.98
    assert rescored.auc > 0.98
    assert rescored.harmful_weight < 0.05
    assert rescored.effective_size > 0.6 > 0.2 > plain.effective_size


def test_rescoring_spares_the_hard_rows_of_a_set_without_poison() -> None:
    plain, rescored = (short_run(20, rescore=rescore, share=0.0)[0] for rescore in (False, True))
    assert rescored.effective_size > 0.85 > 0.3 > plain.effective_size


def test_rows_that_are_not_learned_yet_keep_most_of_their_weight() -> None:
    in_use, at_end = short_run(2, rescore=True, share=0.0)
    assert in_use.effective_size > 0.6
    assert at_end.effective_size > 0.8
