"""BDS as a tuning method, scalar and neural: objective, learning, state, several processes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from defenses.bds.errors import NonFiniteLossError, RowIdError, SchedulerStateError
from defenses.bds.methods import NeuralBds, ScalarBds, coefficients
from defenses.bds.ranking import effective_sample_size
from defenses.bds.scheduler import ScalarScheduler, bds_objective, scheduler_rate
from defenses.bds.scorers import TokenScorer
from defenses.method import MethodContext, MethodError, RowFeatures, StepLosses, StepRecord
from jobspec.defense import SchedulerOptions

ROWS, CANARIES = 10, 4
V = [0.1, -0.2, 0.3, 0.0, 0.9, -1.0, 0.4, 0.2, -0.5, 0.6]
CANARY_V = [2.0, -3.0, 0.5, 0.1]
SCALAR = SchedulerOptions()
NEURAL = SchedulerOptions(form="neural", scorer="tokens", scorer_learning_rate=1e-2)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def features(rows: int = ROWS + CANARIES) -> RowFeatures:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 9, (3,), generator=generator).tolist() for _ in range(rows)]
    return RowFeatures("words", torch.randn(rows, 5, generator=generator), tokens)


def context(**changes: Any) -> MethodContext:
    plain = MethodContext(
        row_count=ROWS,
        canary_count=CANARIES,
        user_steps=9,
        steps_per_epoch=3,
        parameters={},
        seed=7,
        features=features(),
    )
    return plain._replace(**changes)


def scalar(options: SchedulerOptions = SCALAR, **changes: Any) -> ScalarBds:
    return ScalarBds(context(**changes), options)


def neural(options: SchedulerOptions = NEURAL, **changes: Any) -> NeuralBds:
    return NeuralBds(context(**changes), options)


def spread() -> ScalarBds:
    """A scalar method whose logits have moved apart."""
    method = scalar()
    with torch.no_grad():
        method.scheduler.v_N.copy_(f64([*V, *CANARY_V]))
    return method


def losses_of(
    ids: list[int], own: slice = slice(None), processes: int = 1, epoch: int = 0, seed: int = 0
) -> StepLosses:
    """A step over the rows `ids` and as many alignment rows; `own` is this process's part."""
    generator = torch.Generator().manual_seed(seed)
    user = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    alignment = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    return StepLosses(
        user_B=user[own].requires_grad_(),
        alignment_B=alignment[own].requires_grad_(),
        row_ids_B=torch.tensor(ids, dtype=torch.int64)[own],
        step_ids=torch.tensor(ids, dtype=torch.int64),
        user_count=len(ids),
        alignment_count=len(ids),
        step=0,
        epoch=epoch,
        processes=processes,
    )


def record_of(step: int, seed: int = 3) -> StepRecord:
    generator = torch.Generator().manual_seed(seed + step)
    return StepRecord(
        row_ids=torch.randperm(ROWS, generator=generator)[:4],
        losses=torch.rand(4, generator=generator, dtype=torch.float64),
        canary_ids=ROWS + torch.randperm(CANARIES, generator=generator)[:2],
        canary_losses=torch.rand(2, generator=generator, dtype=torch.float64),
        step=step,
        epoch=step // 3,
    )


def whole_record(harmful: Tensor) -> StepRecord:
    """Losses of the whole set, high on the rows marked harmful."""
    losses = torch.where(harmful, 2.0, 0.5).double()
    ids = torch.arange(ROWS + CANARIES)
    return StepRecord(ids[:ROWS], losses[:ROWS], ids[ROWS:], losses[ROWS:], 2, 0)


METHODS = {"scalar": scalar, "neural": neural}


def options_of(form: str, **changes: Any) -> SchedulerOptions:
    return (SCALAR if form == "scalar" else NEURAL).model_copy(update=changes)


def test_the_scalar_objective_is_the_released_one_without_canaries() -> None:
    method = scalar(SCALAR.model_copy(update={"alignment_coefficient": 1.5}), canary_count=0)
    with torch.no_grad():
        method.scheduler.v_N.copy_(f64(V))
    losses = losses_of([1, 4, 7])
    weights = method.scheduler.weights(losses.row_ids_B)
    expected = bds_objective(losses.alignment_B, losses.user_B, weights, 1.5)
    torch.testing.assert_close(method.objective(losses), expected)


def test_the_objective_of_the_tiny_llama_is_the_golden_one(
    tiny: Any, ft_rows: Any, harmful_rows: Any, safe_rows: Any
) -> None:
    # Golden values of tests/defenses/test_bds_joint_step.py, through the method's interface.
    method = ScalarBds(context(row_count=4, canary_count=0), SchedulerOptions(learning_rate=5e-3))
    with torch.no_grad():
        method.scheduler.v_N.copy_(f64([0.1, -0.2, 0.3, 0.0]))
    user = tiny.row_losses([ft_rows[0], harmful_rows[0]])
    ids = torch.tensor([0, 2])
    losses = StepLosses(user, tiny.row_losses(safe_rows), ids, ids, 2, 2, 0, 0, 1)
    objective = method.objective(losses)
    assert float(objective.detach()) == pytest.approx(7.45694474012646, abs=1e-9)
    gradients = torch.autograd.grad(objective, list(tiny.trainable.values()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    assert float(norm) == pytest.approx(8.198618655748657, abs=1e-8)
    none = torch.zeros(0, dtype=torch.int64)
    metrics = method.learn(StepRecord(ids, user.detach(), none, none.double(), 0, 0))
    assert metrics["scheduler_loss"] == pytest.approx(3.8291260417725432, abs=1e-9)
    golden = f64([0.0950000001, -0.1950000001, 0.2950000000, 0.0049999999])
    torch.testing.assert_close(method.logits(), golden, rtol=0, atol=2e-10)


def test_canaries_take_no_weight_from_the_users_rows() -> None:
    method = spread()
    expected = ROWS * torch.softmax(f64(V), dim=0)
    torch.testing.assert_close(method.weights(), expected)
    losses = losses_of([1, 4, 7])
    weighted = bds_objective(losses.alignment_B, losses.user_B, expected[losses.row_ids_B])
    torch.testing.assert_close(method.objective(losses), weighted)


def test_scalar_logits_are_those_of_rows_and_canaries() -> None:
    assert spread().logits().tolist() == pytest.approx([*V, *CANARY_V])


def test_sigmoid_weights_know_no_neighbours() -> None:
    method = scalar(SCALAR.model_copy(update={"transform": "sigmoid"}))
    with torch.no_grad():
        method.scheduler.v_N.copy_(f64([*V, *CANARY_V]))
    torch.testing.assert_close(method.weights(), 2 * torch.sigmoid(f64(V)))


def test_canaries_are_learned_like_any_row() -> None:
    method, plain = scalar(), ScalarScheduler(ROWS + CANARIES, SCALAR)
    for step in range(4):
        record = record_of(step)
        metrics = method.learn(record)
        moved = plain.step(
            torch.cat([record.row_ids, record.canary_ids]),
            torch.cat([record.losses, record.canary_losses]),
        )
        assert metrics["scheduler_loss"] == moved.loss
    assert torch.equal(method.logits(), plain.v_N.detach())
    assert metrics["effective_sample_size"] == effective_sample_size(method.weights())


def test_neural_weights_are_normalised_over_the_users_rows_of_the_step() -> None:
    method, losses = neural(), losses_of([8, 2, 5])
    f_B = method.logits()[[8, 2, 5]]
    weights = 3 * torch.softmax(f_B, dim=0)
    expected = bds_objective(losses.alignment_B, losses.user_B, weights)
    torch.testing.assert_close(method.objective(losses), expected, rtol=1e-6, atol=1e-7)


def test_neural_weights_of_the_set_are_normalised_over_the_users_rows() -> None:
    method = neural()
    assert method.logits().shape == (ROWS + CANARIES,)
    expected = ROWS * torch.softmax(method.logits()[:ROWS], dim=0)
    torch.testing.assert_close(method.weights(), expected)


def test_neural_learning_is_over_the_batch_with_its_canaries() -> None:
    method, record = neural(), record_of(0)
    ids = torch.cat([record.row_ids, record.canary_ids])
    f_B = method.scheduler.logits(ids)
    pi_B = torch.softmax(f_B, dim=0)
    expected = float((pi_B * torch.cat([record.losses, record.canary_losses])).sum())
    metrics = method.learn(record)
    assert metrics["scheduler_loss"] == pytest.approx(expected, abs=1e-12)
    share = effective_sample_size(torch.softmax(f_B[:4], dim=0))
    assert metrics["effective_sample_size"] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("form", METHODS)
def test_the_weights_are_held_constant(form: str) -> None:
    method, losses = METHODS[form](), losses_of([3, 1, 6])
    (gradient,) = torch.autograd.grad(method.objective(losses), [losses.user_B])
    again = losses_of([3, 1, 6], seed=12)
    (at_other_losses,) = torch.autograd.grad(method.objective(again), [again.user_B])
    assert torch.equal(gradient, at_other_losses)


@pytest.mark.parametrize("form", METHODS)
@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_the_parts_of_two_processes_add_up_to_the_objective(form: str, cut: int) -> None:
    method, ids = METHODS[form](), [3, 1, 6, 0, 9]
    method.learn(record_of(0))
    whole = method.objective(losses_of(ids))
    parts = [
        method.objective(losses_of(ids, own, processes=2))
        for own in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(sum(parts, f64(0.0)), whole)


@pytest.mark.parametrize("form", METHODS)
def test_the_gradients_of_two_processes_add_up_to_the_objectives(form: str) -> None:
    method, ids = METHODS[form](), [3, 1, 6, 0, 9]
    method.learn(record_of(0))

    def gradient(own: slice) -> Tensor:
        losses = losses_of(ids, own, processes=2)
        found = torch.autograd.grad(method.objective(losses), [losses.user_B, losses.alignment_B])
        return torch.stack(found)

    parts = torch.cat([gradient(slice(0, 2)), gradient(slice(2, None))], dim=1)
    torch.testing.assert_close(parts, gradient(slice(None)))


@pytest.mark.parametrize("form", METHODS)
@pytest.mark.parametrize("sampler", ["adam", "sgld"])
def test_resuming_continues_bit_for_bit(form: str, sampler: str) -> None:
    options = options_of(form, sampler=sampler, sgld_step=1e-3)
    straight = METHODS[form](options)
    first = METHODS[form](options)
    for step in range(4):
        straight.learn(record_of(step))
        first.learn(record_of(step))
    resumed = METHODS[form](options, seed=8)
    resumed.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for step in range(4, 8):
        assert resumed.learn(record_of(step)) == straight.learn(record_of(step))
    assert torch.equal(resumed.logits(), straight.logits())
    assert torch.equal(resumed.objective(losses_of([1, 2])), straight.objective(losses_of([1, 2])))


@pytest.mark.parametrize("form", METHODS)
def test_a_state_is_flat_and_can_be_written_as_safetensors(form: str) -> None:
    import safetensors.torch

    method = METHODS[form]()
    method.learn(record_of(0))
    loaded = safetensors.torch.load(safetensors.torch.save(method.state()))
    resumed, straight = METHODS[form](), method
    resumed.load_state(loaded)
    resumed.learn(record_of(1))
    straight.learn(record_of(1))
    assert torch.equal(resumed.logits(), straight.logits())


def test_the_scalar_state_has_the_documented_names() -> None:
    method = scalar()
    method.learn(record_of(0))
    assert set(method.state()) == {
        "v",
        "transform",
        "adam/step",
        "adam/exp_avg",
        "adam/exp_avg_sq",
    }


@pytest.mark.parametrize("form", METHODS)
def test_a_state_of_another_number_of_rows_is_refused(form: str) -> None:
    other = METHODS[form](row_count=9, features=features(9 + CANARIES))
    with pytest.raises(SchedulerStateError, match="13 rows, this training set has 14"):
        METHODS[form]().load_state(other.state())


@pytest.mark.parametrize("form", METHODS)
def test_a_state_of_another_transform_is_refused(form: str) -> None:
    other = METHODS[form](options_of(form, transform="sigmoid"))
    with pytest.raises(SchedulerStateError, match="sigmoid transform"):
        METHODS[form]().load_state(other.state())


@pytest.mark.parametrize(("own", "other"), [("scalar", "neural"), ("neural", "scalar")])
def test_a_state_of_the_other_form_is_refused(own: str, other: str) -> None:
    with pytest.raises(SchedulerStateError):
        METHODS[own]().load_state(METHODS[other]().state())


@pytest.mark.parametrize("form", METHODS)
def test_an_empty_state_is_refused(form: str) -> None:
    with pytest.raises(SchedulerStateError):
        METHODS[form]().load_state({})


@pytest.mark.parametrize("form", METHODS)
def test_a_loss_that_is_not_finite_is_an_error_and_moves_nothing(form: str) -> None:
    method = METHODS[form]()
    before = method.logits()
    broken = record_of(0)._replace(losses=f64([0.1, float("nan"), 0.2, 0.3]))
    with pytest.raises(NonFiniteLossError) as caught:
        method.learn(broken)
    assert caught.value.row_ids == [int(broken.row_ids[1])]
    assert torch.equal(method.logits(), before)


@pytest.mark.parametrize("form", METHODS)
def test_a_canary_among_the_models_rows_is_an_error(form: str) -> None:
    with pytest.raises(RowIdError, match=r"those are 0\.\.9"):
        METHODS[form]().objective(losses_of([0, ROWS]))


@pytest.mark.parametrize("form", METHODS)
def test_one_row_keeps_weight_one(form: str) -> None:
    method = METHODS[form](row_count=1, canary_count=0, features=features(1))
    none = torch.zeros(0, dtype=torch.int64)
    record = StepRecord(torch.tensor([0]), f64([1.7]), none, none.double(), 0, 0)
    for _ in range(5):
        assert method.learn(record)["effective_sample_size"] == pytest.approx(1.0)
    assert method.weights().tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("form", METHODS)
def test_equal_rows_keep_equal_weights_in_full_batches(form: str) -> None:
    same = RowFeatures("words", tokens=[[1, 2, 3]] * ROWS)
    method = METHODS[form](canary_count=0, features=same)
    none = torch.zeros(0, dtype=torch.int64)
    record = StepRecord(
        torch.arange(ROWS), torch.full((ROWS,), 1.3).double(), none, none.double(), 0, 0
    )
    for _ in range(50):
        method.learn(record)
    torch.testing.assert_close(
        method.weights(), torch.ones(ROWS, dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("form", METHODS)
def test_a_step_without_user_rows_is_the_alignment_loss(form: str) -> None:
    losses = losses_of([0, 1])._replace(
        user_B=torch.zeros(0, dtype=torch.float64),
        row_ids_B=torch.zeros(0, dtype=torch.int64),
        step_ids=torch.zeros(0, dtype=torch.int64),
        user_count=0,
    )
    torch.testing.assert_close(METHODS[form]().objective(losses), losses.alignment_B.mean())


@pytest.mark.parametrize("form", METHODS)
def test_a_record_without_rows_teaches_nothing(form: str) -> None:
    method, none = METHODS[form](), torch.zeros(0, dtype=torch.int64)
    before = method.logits()
    assert method.learn(StepRecord(none, none.double(), none, none.double(), 0, 0)) == {}
    assert torch.equal(method.logits(), before)


def test_a_process_without_rows_of_its_own_contributes_nothing_and_does_not_fail() -> None:
    losses = losses_of([4, 2], slice(0, 0), processes=2)
    assert float(neural().objective(losses).detach()) == 0.0


def test_seal_coefficients_fall_from_one_by_equal_amounts() -> None:
    options = SCALAR.model_copy(update={"coefficients": "seal", "alignment_coefficient": 9.0})
    found = [coefficients(options, epoch, 4) for epoch in range(4)]
    assert found == [(1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75)]


def test_constant_coefficients_are_the_options() -> None:
    options = SCALAR.model_copy(update={"alignment_coefficient": 2.5})
    assert [coefficients(options, epoch, 3) for epoch in range(3)] == [(2.5, 1.0)] * 3


def test_the_objective_follows_the_seal_coefficients() -> None:
    # 9 user steps of 3 an epoch: three epochs, u = 1, 2/3, 1/3.
    method = scalar(SCALAR.model_copy(update={"coefficients": "seal"}))
    for epoch, u in enumerate((1.0, 2 / 3, 1 / 3)):
        losses = losses_of([1, 4], epoch=epoch)
        weighted = (method.weights()[losses.row_ids_B] * losses.user_B).mean()
        expected = u * losses.alignment_B.mean() + (1 - u) * weighted
        torch.testing.assert_close(method.objective(losses), expected)


@pytest.mark.parametrize("form", METHODS)
def test_rescoring_is_asked_for_by_the_option(form: str) -> None:
    assert METHODS[form](options_of(form, rescore=True)).rescores
    assert not METHODS[form](options_of(form, rescore=False)).rescores


def steps_taken(method: ScalarBds | NeuralBds) -> set[int]:
    return {int(t) for name, t in method.state().items() if name.endswith("/step")}


def test_a_scorer_relearns_in_as_many_steps_as_an_epoch() -> None:
    method = neural()
    method.relearn(whole_record(torch.arange(ROWS + CANARIES) < 5))
    assert steps_taken(method) == {3}


def test_the_logits_are_the_closed_form_of_the_entropy_prior() -> None:
    # Brief, closed form: l = [0.2, 1.5, 3.0, 0.7], c_H = 0.5.
    options = SCALAR.model_copy(update={"rescore_temperature": 0.5})
    method = scalar(options, row_count=4, canary_count=0)
    losses = f64([0.2, 1.5, 3.0, 0.7])
    method.relearn(StepRecord(torch.arange(4), losses, torch.arange(0), f64([]), 8, 2))
    expected = f64([0.691634256, 0.051370150, 0.002557569, 0.254438024])
    torch.testing.assert_close(method.weights() / 4, expected, rtol=0, atol=1e-8)


def test_the_estimate_is_held_back_early_and_forgets_what_was_before() -> None:
    method, fresh = scalar(), scalar()
    method.learn(record_of(0))
    record = whole_record(torch.arange(ROWS + CANARIES) < 5)
    for each in (method, fresh):
        each.relearn(record._replace(step=2))
    assert torch.equal(method.logits(), fresh.logits())
    fresh.relearn(record._replace(step=8))
    torch.testing.assert_close(method.logits(), fresh.logits() / 3)


def test_no_logit_is_estimated_beyond_six() -> None:
    method = scalar(SCALAR, row_count=3, canary_count=0)
    losses = f64([0.0, 0.1, 40.0])
    method.relearn(StepRecord(torch.arange(3), losses, torch.arange(0), f64([]), 8, 2))
    assert method.logits().tolist() == [6.0, 6.0, -6.0]


def test_sigmoid_weights_fall_for_rows_above_the_mean_and_rise_below() -> None:
    method = scalar(SCALAR.model_copy(update={"transform": "sigmoid"}))
    method.relearn(whole_record(torch.arange(ROWS + CANARIES) < 5))
    weights = method.weights()
    assert float(weights[:5].max()) < 1.0 < float(weights[5:].min())


def test_a_loss_that_is_not_finite_leaves_the_logits_as_they_were() -> None:
    method = scalar()
    method.learn(record_of(0))
    before = method.logits()
    record = whole_record(torch.arange(ROWS + CANARIES) < 5)
    spoiled = record.losses.clone()
    spoiled[2] = math.nan
    with pytest.raises(NonFiniteLossError):
        method.relearn(record._replace(losses=spoiled))
    assert torch.equal(method.logits(), before)


def test_a_chain_is_not_started_anew() -> None:
    assert not scalar(SCALAR.model_copy(update={"sampler": "sgld"})).rescores


@pytest.mark.parametrize(
    ("steps", "per_epoch", "rescore", "rate"),
    [
        (20, 10, False, 5e-2),
        (400, 40, False, 2.5e-2),
        (2000, 100, False, 5e-3),
        (64, 32, True, 0.5 / 32),
        (2000, 100, True, 5e-3),
    ],
)
def test_the_rate_bounds_the_climb_of_a_run_and_the_drift_of_an_epoch(
    steps: int, per_epoch: int, rescore: bool, rate: float
) -> None:
    options = SchedulerOptions(rescore=rescore)
    assert scheduler_rate(options, steps, per_epoch) == pytest.approx(rate)
    chosen = SchedulerOptions(learning_rate=0.3)
    assert scheduler_rate(chosen, steps, per_epoch) == 0.3


def test_relearning_ranks_the_rows_by_their_losses_alone() -> None:
    method = scalar()
    harmful = torch.arange(ROWS + CANARIES) % 3 == 0
    method.relearn(whole_record(harmful))
    logits = method.logits()
    assert float(logits[harmful].max()) < float(logits[~harmful].min())
    torch.testing.assert_close(logits[harmful], logits[harmful][:1].expand(int(harmful.sum())))


def test_relearning_is_the_same_on_every_process() -> None:
    first, second = neural(), neural()
    for method in (first, second):
        method.relearn(whole_record(torch.arange(ROWS + CANARIES) < 5))
    assert torch.equal(first.logits(), second.logits())


def frozen_neural() -> NeuralBds:
    scorer = TokenScorer(9, torch.Generator().manual_seed(4))
    return NeuralBds(context(), NEURAL, scorer, frozen=True)


def test_a_transferred_scorer_weighs_but_does_not_learn() -> None:
    method = frozen_neural()
    logits = method.logits()
    metrics = method.learn(record_of(0))
    assert set(metrics) == {"scheduler_loss", "effective_sample_size"}
    assert torch.equal(method.logits(), logits)
    losses = losses_of([8, 2, 5])
    weights = 3 * torch.softmax(logits[[8, 2, 5]], dim=0)
    expected = bds_objective(losses.alignment_B, losses.user_B, weights)
    torch.testing.assert_close(method.objective(losses), expected)


def test_a_transferred_scorer_asks_for_no_rescoring() -> None:
    assert not frozen_neural().rescores


def test_a_transferred_run_resumes() -> None:
    first, resumed = frozen_neural(), frozen_neural()
    resumed.load_state(first.state())
    losses = losses_of([8, 2, 5])
    assert torch.equal(resumed.objective(losses), first.objective(losses))


def test_frozen_without_a_scorer_is_refused() -> None:
    with pytest.raises(MethodError, match="load one first"):
        NeuralBds(context(), NEURAL, frozen=True)


def test_a_neural_scheduler_without_features_is_refused() -> None:
    with pytest.raises(MethodError, match="reads the rows"):
        neural(features=None)


def test_features_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(MethodError, match="features describe 10 rows, the set has 14"):
        neural(features=features(ROWS))


def test_the_default_scorer_reads_sentence_embeddings() -> None:
    method = neural(SchedulerOptions(form="neural"))
    assert method.scheduler.scorer.kind == "embedding"


def test_both_forms_ask_for_the_alignment_set_and_canaries() -> None:
    for method in (scalar(), neural()):
        assert (method.uses_alignment, method.uses_canaries, method.uses_reference) == (
            True,
            True,
            False,
        )
        assert method.reads(0) == "both"
