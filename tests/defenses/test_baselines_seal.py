import pytest
import torch

from defenses.baselines.seal import selection_options
from defenses.bds.ranking import selected_rows
from defenses.bds.scheduler import ScalarScheduler
from defenses.method import MethodContext, StepLosses, StepRecord
from defenses.registry import build_method
from jobspec.defense import SealOptions


def test_the_first_stage_is_the_scalar_scheduler_under_falling_coefficients() -> None:
    made = selection_options(
        SealOptions(learning_rate=0.02, alignment_coefficient=3.0, alignment_rows=77)
    )
    assert (made.form, made.coefficients, made.rescore) == ("scalar", "seal", False)
    assert (made.learning_rate, made.alignment_rows) == (0.02, 77)


def test_the_first_stage_moves_v_as_bds_does_and_the_model_by_falling_coefficients() -> None:
    """Two epochs of one step: u is 1, then 1/2; v moves by sigma_i l_i in both."""
    options = SealOptions(learning_rate=0.05)
    context = MethodContext(3, 0, 2, 1, {}, seed=0)
    method = build_method(options, context)
    scheduler = ScalarScheduler(3, selection_options(options))
    ids, rows = torch.arange(3), torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    alignment = torch.tensor([1.0, 3.0], dtype=torch.float64)
    none = torch.empty(0, dtype=torch.int64)
    for epoch, u in enumerate((1.0, 0.5)):
        losses = StepLosses(rows, alignment, ids, ids, 3, 2, epoch, epoch, 1)
        weighted = (scheduler.all_weights() * rows).mean()
        expected = u * float(alignment.mean()) + (1 - u) * float(weighted)
        assert float(method.objective(losses)) == pytest.approx(expected, rel=1e-12)
        method.learn(StepRecord(ids, rows, none, none.double(), epoch, epoch))
        scheduler.step(ids, rows)
    assert torch.equal(method.logits(), scheduler.v_N.detach())
    assert selected_rows(method.weights(), 2 / 3) == [0, 1]
