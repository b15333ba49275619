"""The neural data scheduler. Golden values of the head: arXiv 2510.27172's batch softmax, computed
in float64 by an independent script."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from defenses.bds.errors import NonFiniteLossError, RowIdError, SchedulerStateError
from defenses.bds.langevin import langevin_step
from defenses.bds.neural import (
    NeuralScheduler,
    learning_rate,
    load_scorer,
    save_scorer,
)
from defenses.bds.ranking import separation_auc
from defenses.bds.scheduler import (
    gaussian_penalty,
    negative_entropy,
    scheduler_loss,
    scheduler_potential,
    softmax_weights,
)
from defenses.bds.scorers import CausalLmScorer, EmbeddingScorer, Scorer, TokenScorer
from defenses.method import MethodError, RowFeatures
from jobspec.defense import SchedulerOptions

LOGITS = [0.2, -0.1, 0.5]
LOSSES = torch.tensor([0.2, 1.5, 3.0], dtype=torch.float64)
GRADIENT = [-0.4964957180216444, -0.05621025143328179, 0.5527059694549259]
ALL = torch.arange(3)
OPTIONS = SchedulerOptions(form="neural", scorer_learning_rate=1e-2)


class TableScorer(Scorer):
    """One free logit a row plus a bias, float64: f(z_i) = phi_i + c with one-hot features."""

    kind = "embedding"
    reads = "embeddings"
    rows_per_pass = 2

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.phi = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, rows: RowFeatures) -> Tensor:
        assert rows.embeddings_ND is not None
        return rows.embeddings_ND.to(self.phi) @ self.phi + self.bias


def one_hot(count: int) -> RowFeatures:
    return RowFeatures(tokenizer="one-hot", embeddings_ND=torch.eye(count))


def table(options: SchedulerOptions = OPTIONS, **more: Any) -> NeuralScheduler:
    return NeuralScheduler(TableScorer(LOGITS), one_hot(3), options, **more)


def random_features(count: int = 12, seed: int = 0) -> RowFeatures:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(0, 20, (n,), generator=generator).tolist() for n in lengths]
    return RowFeatures("words", torch.randn(count, 6, generator=generator), tokens)


def token_scheduler(options: SchedulerOptions = OPTIONS, **more: Any) -> NeuralScheduler:
    scorer = TokenScorer(20, torch.Generator().manual_seed(2))
    return NeuralScheduler(scorer, random_features(), options, **more)


def steps(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randperm(12, generator=generator)[:4], torch.rand(4, generator=generator))
        for _ in range(count)
    ]


def phi_of(scheduler: NeuralScheduler) -> Tensor:
    return torch.cat([p.detach().flatten() for p in scheduler.scorer.parameters()])


def close(actual: Any, expected: Any, atol: float = 1e-14) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_the_batch_weights_are_the_golden_ones() -> None:
    pi = [0.32355370388, 0.23969447921, 0.43675181691]
    close(table().weights(ALL) / 3, pi, atol=1e-11)


def test_the_loss_and_the_norm_of_its_gradient_are_the_golden_ones() -> None:
    step = table().step(ALL, LOSSES)
    close(step.loss, 1.7345079103178191)
    close(step.gradient_norm, float(torch.tensor(GRADIENT, dtype=torch.float64).norm()))
    close(step.logits_B, LOGITS)


def test_the_gradient_of_the_batch_logits_is_the_golden_one_and_the_bias_is_inert() -> None:
    scorer = TableScorer(LOGITS)
    loss = scheduler_loss(scorer(one_hot(3)), ALL, LOSSES)
    by_phi, by_bias = torch.autograd.grad(loss, [scorer.phi, scorer.bias])
    close(by_phi, GRADIENT)
    close(by_bias, 0.0, atol=1e-15)


def test_learning_leaves_the_bias_of_the_head_where_it_was() -> None:
    scheduler = table()
    for _ in range(5):
        scheduler.step(ALL, LOSSES)
    assert isinstance(scheduler.scorer, TableScorer)
    close(scheduler.scorer.bias.detach(), 0.0, atol=1e-9)
    assert float(scheduler.scorer.phi[0].detach()) > LOGITS[0] + 0.02


def test_a_common_shift_of_the_logits_changes_no_weight() -> None:
    shifted = NeuralScheduler(TableScorer([x + 7.0 for x in LOGITS]), one_hot(3), OPTIONS)
    close(shifted.weights(ALL), table().weights(ALL), atol=1e-13)


def test_the_batch_weights_have_mean_one() -> None:
    assert float(token_scheduler().weights(torch.tensor([4, 0, 9])).mean()) == pytest.approx(1.0)


def test_permuting_the_batch_permutes_the_weights() -> None:
    order = torch.tensor([2, 0, 1])
    close(table().weights(order), table().weights(ALL)[order])


def test_only_the_batch_counts_for_its_weights() -> None:
    close(
        table().weights(torch.tensor([0, 2])),
        softmax_weights(torch.tensor([0.2, 0.5], dtype=torch.float64)),
    )


def test_the_priors_are_those_of_the_batch_logits() -> None:
    options = OPTIONS.model_copy(update={"entropy_coefficient": 0.5, "gaussian_coefficient": 0.25})
    f = torch.tensor(LOGITS, dtype=torch.float64)
    expected = 1.7345079103178191 + 0.5 * negative_entropy(f) + 0.25 * gaussian_penalty(f)
    close(table(options).step(ALL, LOSSES).loss, float(expected))


def test_the_sigmoid_transform_weighs_each_row_on_its_own() -> None:
    options = OPTIONS.model_copy(update={"transform": "sigmoid"})
    f = torch.tensor(LOGITS, dtype=torch.float64)
    close(table(options).weights(ALL), 2 * torch.sigmoid(f))
    close(table(options).step(ALL, LOSSES).loss, float((2 * torch.sigmoid(f) * LOSSES).mean()))


def test_equal_losses_leave_the_weights_as_they_are() -> None:
    scheduler = NeuralScheduler(TableScorer([0.0, 0.0, 0.0]), one_hot(3), OPTIONS)
    for _ in range(20):
        scheduler.step(ALL, torch.full((3,), 1.3))
    close(scheduler.weights(ALL), [1.0, 1.0, 1.0], atol=1e-6)


def test_one_row_keeps_weight_one_and_moves_nothing() -> None:
    scheduler = NeuralScheduler(TableScorer([0.4]), one_hot(1), OPTIONS)
    scheduler.step(torch.tensor([0]), torch.tensor([2.0]))
    close(scheduler.weights(torch.tensor([0])), [1.0])
    close(phi_of(scheduler), [0.4, 0.0])


def test_phi_is_learned_and_separates_rows_by_what_they_say() -> None:
    # Ids below 10 stand for rows that stay hard; what a row holds is all the scorer sees.
    generator = torch.Generator().manual_seed(0)
    harmful = torch.arange(40) < 12
    tokens = [
        (torch.randint(0, 10, (6,), generator=generator) + (0 if bad else 10)).tolist()
        for bad in harmful.tolist()
    ]
    features = RowFeatures("words", tokens=tokens)
    scheduler = NeuralScheduler(
        TokenScorer(20, generator), features, SchedulerOptions(form="neural")
    )
    losses = torch.where(harmful, 1.5, 0.2)
    for _ in range(60):
        ids = torch.randperm(32, generator=generator)[:8] + 4
        scheduler.step(ids, losses[ids])
    scores = scheduler.score_all()
    unseen = torch.cat([torch.arange(4), torch.arange(36, 40)])
    assert separation_auc(scores, harmful) == 1.0
    assert separation_auc(scores[unseen], harmful[unseen]) == 1.0


def test_scoring_all_rows_gives_each_the_logit_of_its_own() -> None:
    scheduler = token_scheduler()
    alone = torch.cat([scheduler.logits(torch.tensor([i])) for i in range(12)])
    close(scheduler.score_all(), alone, atol=1e-6)


def test_a_step_makes_old_scores_invalid() -> None:
    scheduler = token_scheduler()
    before = scheduler.score_all()
    scheduler.step(*steps(1)[0])
    assert not torch.equal(scheduler.score_all(), before)


def test_scoring_does_not_change_what_follows() -> None:
    scored, plain = token_scheduler(), token_scheduler()
    for ids, losses in steps(4):
        scored.score_all()
        scored.step(ids, losses)
        plain.step(ids, losses)
    assert torch.equal(phi_of(scored), phi_of(plain))


@pytest.mark.parametrize("sampler", ["adam", "sgld"])
def test_resuming_continues_bit_for_bit(sampler: str) -> None:
    options = OPTIONS.model_copy(update={"sampler": sampler, "sgld_step": 1e-3})
    straight, first = token_scheduler(options, seed=5), token_scheduler(options, seed=5)
    for ids, losses in steps(9)[:4]:
        straight.step(ids, losses)
        first.step(ids, losses)
    resumed = token_scheduler(options, seed=77)
    resumed.load_state(first.state())
    for ids, losses in steps(9)[4:]:
        straight.step(ids, losses)
        resumed.step(ids, losses)
    assert torch.equal(phi_of(resumed), phi_of(straight))


def test_a_state_from_before_the_first_step_can_be_resumed() -> None:
    resumed, straight = token_scheduler(), token_scheduler()
    resumed.load_state(token_scheduler().state())
    resumed.step(*steps(1)[0])
    straight.step(*steps(1)[0])
    assert torch.equal(phi_of(resumed), phi_of(straight))


def test_a_langevin_step_of_phi_descends_the_potential_of_the_whole_set() -> None:
    options = OPTIONS.model_copy(
        update={"sampler": "sgld", "sgld_step": 0.01, "gaussian_coefficient": 0.3}
    )
    scheduler = NeuralScheduler(TableScorer([*LOGITS, 0.9]), one_hot(4), options, seed=8)
    phi = torch.tensor([*LOGITS, 0.9], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    potential = scheduler_potential(
        phi[:3] + bias, ALL, LOSSES, row_count=4, gaussian_coefficient=0.3
    )
    gradients = torch.autograd.grad(potential, [phi, bias])
    generator = torch.Generator().manual_seed(8)
    expected = langevin_step([phi, bias], [-g for g in gradients], 0.01, generator)
    scheduler.step(ALL, LOSSES)
    close(phi_of(scheduler), torch.cat([x.flatten() for x in expected]))


def test_a_frozen_scheduler_measures_and_changes_nothing() -> None:
    learning, frozen = table(), table(frozen=True)
    before = phi_of(frozen)
    step = frozen.step(ALL, LOSSES)
    close(step.loss, learning.step(ALL, LOSSES).loss)
    assert torch.equal(phi_of(frozen), before)
    close(frozen.weights(ALL), table().weights(ALL))


def test_a_frozen_scheduler_scores_every_row_once() -> None:
    frozen = token_scheduler(frozen=True)
    calls: list[int] = []
    frozen.scorer.register_forward_hook(lambda *_: calls.append(1))
    for ids, losses in steps(5):
        frozen.weights(ids)
        frozen.step(ids, losses)
    assert len(calls) == 1


def test_a_frozen_state_carries_the_logits_alone() -> None:
    frozen = token_scheduler(frozen=True)
    state = frozen.state()
    assert set(state) == {"logits"}
    resumed = token_scheduler(frozen=True)
    resumed.load_state(state)
    assert torch.equal(resumed.score_all(), frozen.score_all())


def test_a_frozen_state_does_not_resume_a_learning_scheduler() -> None:
    with pytest.raises(SchedulerStateError, match="frozen"):
        token_scheduler().load_state(token_scheduler(frozen=True).state())


def test_a_state_of_another_set_is_refused() -> None:
    other = NeuralScheduler(
        TokenScorer(20, torch.Generator().manual_seed(2)), random_features(11), OPTIONS
    )
    with pytest.raises(SchedulerStateError, match="11 rows, this training set has 12"):
        token_scheduler().load_state(other.state())


def test_a_state_of_another_scorer_is_refused() -> None:
    wider = NeuralScheduler(
        TokenScorer(20, torch.Generator().manual_seed(2), width=8), random_features(), OPTIONS
    )
    with pytest.raises(SchedulerStateError, match="other tensors or shapes"):
        token_scheduler().load_state(wider.state())


def test_a_state_of_another_sampler_is_refused_and_changes_nothing() -> None:
    langevin = token_scheduler(OPTIONS.model_copy(update={"sampler": "sgld"}))
    langevin.step(*steps(1)[0])
    scheduler = token_scheduler()
    before = phi_of(scheduler)
    with pytest.raises(SchedulerStateError, match="not of this adam sampler"):
        scheduler.load_state(langevin.state())
    assert torch.equal(phi_of(scheduler), before)


def test_a_loss_that_is_not_finite_names_its_rows_and_moves_nothing() -> None:
    scheduler = table()
    with pytest.raises(NonFiniteLossError) as caught:
        scheduler.step(ALL, torch.tensor([1.0, float("nan"), float("inf")]))
    assert caught.value.row_ids == [1, 2]
    close(phi_of(scheduler), [*LOGITS, 0.0])


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(RowIdError, match=r"known rows are 0\.\.2"):
        table().weights(torch.tensor([3]))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (RowFeatures("words", tokens=[[1], [], [2]]), r"rows \[1\] have no token"),
        (RowFeatures("words", embeddings_ND=torch.eye(2)), "reads tokens"),
    ],
)
def test_features_that_do_not_fit_are_refused(features: RowFeatures, message: str) -> None:
    scorer = TokenScorer(20, torch.Generator().manual_seed(2))
    with pytest.raises(MethodError, match=message):
        NeuralScheduler(scorer, features, OPTIONS)


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    features = RowFeatures("words", embeddings_ND=torch.tensor([[1.0, float("nan")]]))
    scorer = EmbeddingScorer(2, torch.Generator().manual_seed(2))
    with pytest.raises(MethodError, match="not finite"):
        NeuralScheduler(scorer, features, OPTIONS)


def test_a_backbone_learns_more_slowly_than_a_network_from_scratch() -> None:
    free = SchedulerOptions(form="neural")
    assert learning_rate(causal_scorer(), free) == 5e-5
    assert learning_rate(TableScorer([0.0]), free) == 1e-3
    assert learning_rate(causal_scorer(), OPTIONS) == 1e-2


def causal_scorer() -> CausalLmScorer:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return CausalLmScorer(LlamaForCausalLM(config), torch.Generator().manual_seed(1))


def test_a_causal_scorer_learns_all_its_weights() -> None:
    scheduler = NeuralScheduler(causal_scorer(), random_features(), OPTIONS)
    before = {n: p.detach().clone() for n, p in scheduler.scorer.named_parameters()}
    for _ in range(3):
        scheduler.step(torch.arange(12), torch.linspace(0.0, 3.0, 12))
    after = dict(scheduler.scorer.named_parameters())
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []


def saved_scorers() -> dict[str, Scorer]:
    generator = torch.Generator().manual_seed(6)
    return {
        "tokens": TokenScorer(20, generator, width=4),
        "embedding": EmbeddingScorer(6, generator, width=5),
        "causal_lm": causal_scorer(),
    }


@pytest.mark.parametrize("kind", ["tokens", "embedding", "causal_lm"])
def test_a_saved_scorer_scores_as_before(kind: str, tmp_path: Path) -> None:
    scorer, features = saved_scorers()[kind], random_features()
    save_scorer(tmp_path / "scorer", scorer, tokenizer="words", transform="softmax")
    loaded = load_scorer(tmp_path / "scorer", "words")
    assert torch.equal(loaded(features), scorer(features))


def test_a_transferred_scorer_weighs_rows_of_a_new_set(tmp_path: Path) -> None:
    trained = token_scheduler()
    for ids, losses in steps(6):
        trained.step(ids, losses)
    save_scorer(tmp_path, trained.scorer, tokenizer="words", transform="softmax")
    new_set = random_features(7, seed=4)
    transferred = NeuralScheduler(load_scorer(tmp_path, "words"), new_set, OPTIONS, frozen=True)
    before = phi_of(transferred)
    transferred.step(torch.arange(7), torch.rand(7))
    assert torch.equal(phi_of(transferred), before)
    close(transferred.score_all(), trained.scorer(new_set).detach().double(), atol=1e-6)


def test_a_scorer_of_another_tokenizer_is_refused_with_both_names(tmp_path: Path) -> None:
    save_scorer(tmp_path, TokenScorer(20, torch.Generator()), tokenizer="a1", transform="softmax")
    with pytest.raises(SchedulerStateError, match=r"'a1'.*'b2'.*train a new scorer"):
        load_scorer(tmp_path, "b2")


def test_a_scorer_of_another_transform_is_refused(tmp_path: Path) -> None:
    save_scorer(tmp_path, TokenScorer(20, torch.Generator()), tokenizer="a1", transform="sigmoid")
    with pytest.raises(SchedulerStateError, match="sigmoid transform"):
        load_scorer(tmp_path, "a1")


def test_a_folder_without_a_scorer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchedulerStateError, match="no complete scorer"):
        load_scorer(tmp_path, "words")


def test_a_scorer_whose_weights_do_not_fit_its_description_is_refused(tmp_path: Path) -> None:
    save_scorer(tmp_path, TokenScorer(20, torch.Generator()), tokenizer="a1", transform="softmax")
    description = json.loads((tmp_path / "scorer.json").read_text())
    description["sizes"]["vocabulary"] = 30
    (tmp_path / "scorer.json").write_text(json.dumps(description))
    with pytest.raises(SchedulerStateError, match="do not fit"):
        load_scorer(tmp_path, "a1")
