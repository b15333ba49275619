import pytest
import torch
from torch import Tensor

from defenses.baselines.mix import MixMethod
from defenses.baselines.plain import Plain
from defenses.method import MethodContext, StepLosses
from jobspec.defense import MixOptions, PlainOptions


def context() -> MethodContext:
    return MethodContext(5, 0, 10, 2, {}, seed=0)


def losses(user: Tensor, alignment: Tensor, counts: tuple[int, int], processes: int) -> StepLosses:
    ids = torch.arange(len(user))
    return StepLosses(user, alignment, ids, torch.arange(counts[0]), *counts, 0, 0, processes)


def one_process() -> StepLosses:
    return losses(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.5, 1.5]), (3, 2), 1)


def test_mix_adds_the_two_means_without_weights() -> None:
    objective = MixMethod(context(), MixOptions(alignment_coefficient=2.0)).objective(one_process())
    assert float(objective) == pytest.approx(2.0 * 1.0 + 3.0)


def test_mix_reads_both_sets_in_every_step_and_weighs_no_row() -> None:
    method = MixMethod(context(), MixOptions())
    assert {method.reads(step) for step in range(20)} == {"both"}
    assert (method.uses_alignment, method.weights()) == (True, None)


def test_mix_without_alignment_loss_is_plain_tuning() -> None:
    mixed = MixMethod(context(), MixOptions(alignment_coefficient=0.0)).objective(one_process())
    assert float(mixed) == float(Plain(context(), PlainOptions()).objective(one_process()))


@pytest.mark.parametrize("make", [MixMethod, Plain])
def test_the_shares_of_two_processes_add_up_to_the_objective_of_one(make: type) -> None:
    method = make(context(), MixOptions(alignment_coefficient=3.0))
    whole = one_process()
    shares = [
        losses(whole.user_B[0::2], whole.alignment_B[0::2], (3, 2), 2),
        losses(whole.user_B[1::2], whole.alignment_B[1::2], (3, 2), 2),
    ]
    added = sum(float(method.objective(share)) for share in shares)
    assert added == pytest.approx(float(method.objective(whole)))


def test_a_process_without_rows_has_a_share_of_zero() -> None:
    share = losses(torch.empty(0), torch.empty(0), (1, 1), 2)
    assert float(MixMethod(context(), MixOptions()).objective(share)) == 0.0


def test_plain_reads_the_users_rows_only() -> None:
    method = Plain(context(), PlainOptions())
    assert (method.reads(0), method.uses_alignment) == ("user", False)
