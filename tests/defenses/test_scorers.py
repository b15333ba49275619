"""Scorers of the neural data scheduler: shapes, padding, seeds, bounds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from defenses.bds.scorers import (
    CausalLmScorer,
    EmbeddingScorer,
    Scorer,
    TokenScorer,
    empty_scorer,
    masked_mean,
    new_scorer,
    padded_tokens,
    rows_of,
)
from defenses.method import MethodError, RowFeatures

TOKENS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5]]
EMBEDDINGS = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
FEATURES = RowFeatures(tokenizer="test", embeddings_ND=EMBEDDINGS, tokens=TOKENS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_causal_model() -> Any:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config)


def scorers() -> dict[str, Scorer]:
    return {
        "tokens": TokenScorer(10, seeded()),
        "embedding": EmbeddingScorer(12, seeded()),
        "causal_lm": CausalLmScorer(tiny_causal_model(), seeded()),
    }


@pytest.mark.parametrize("kind", ["tokens", "embedding", "causal_lm"])
def test_every_scorer_gives_one_finite_logit_a_row(kind: str) -> None:
    logits = scorers()[kind](FEATURES)
    assert logits.shape == (3,)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("kind", ["tokens", "embedding", "causal_lm"])
def test_a_rows_logit_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    scorer = scorers()[kind]
    alone = torch.cat([scorer(rows_of(FEATURES, torch.tensor([i]))) for i in range(3)])
    torch.testing.assert_close(scorer(FEATURES), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["tokens", "embedding", "causal_lm"])
def test_making_and_running_a_scorer_leaves_the_global_generator_alone(kind: str) -> None:
    before = torch.get_rng_state()
    scorer = scorers()[kind]
    scorer(FEATURES)
    empty_scorer(scorer.kind, scorer.sizes())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["tokens", "embedding", "causal_lm"])
def test_every_weight_of_a_scorer_is_trained_in_float32(kind: str) -> None:
    assert {(p.requires_grad, p.dtype) for p in scorers()[kind].parameters()} == {
        (True, torch.float32)
    }


@pytest.mark.parametrize("kind", ["tokens", "embedding"])
def test_the_seed_decides_the_first_weights(kind: Any) -> None:
    first, again, other = (new_scorer(kind, FEATURES, seed)(FEATURES) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_token_scorer_follows_its_formula() -> None:
    scorer = TokenScorer(10, seeded())
    e = scorer.embedding.weight[torch.tensor(TOKENS[1])]
    hidden = torch.tanh(e @ scorer.hidden.weight.T + scorer.hidden.bias)
    expected = hidden.mean(dim=0) @ scorer.head.weight[0] + scorer.head.bias[0]
    torch.testing.assert_close(scorer(FEATURES)[1], expected)


def test_the_token_scorer_has_the_width_of_the_toy_by_default() -> None:
    assert TokenScorer(10, seeded()).embedding.weight.shape == (11, 32)


def test_ids_beyond_the_vocabulary_share_one_embedding() -> None:
    scorer = TokenScorer(10, seeded())
    logits = scorer(RowFeatures("test", tokens=[[1, 10], [1, 11], [1, 9]])).tolist()
    assert logits[0] == logits[1]
    assert logits[0] != logits[2]


def test_the_embedding_scorer_follows_its_formula() -> None:
    scorer = EmbeddingScorer(12, seeded())
    x = EMBEDDINGS / EMBEDDINGS.square().mean(dim=1, keepdim=True).sqrt()
    hidden = torch.tanh(x @ scorer.hidden.weight.T + scorer.hidden.bias)
    expected = hidden @ scorer.head.weight[0] + scorer.head.bias
    torch.testing.assert_close(scorer(FEATURES), expected)


def test_the_embedding_scorer_ignores_the_embedders_scale() -> None:
    scorer = EmbeddingScorer(12, seeded())
    scaled = FEATURES._replace(embeddings_ND=EMBEDDINGS * 0.01)
    torch.testing.assert_close(scorer(scaled), scorer(FEATURES))


def test_the_causal_scorer_averages_the_last_hidden_states_of_real_positions() -> None:
    model = tiny_causal_model()
    scorer = CausalLmScorer(model, seeded())
    hidden = model.model(input_ids=torch.tensor([TOKENS[1]])).last_hidden_state[0]
    expected = hidden.mean(dim=0) @ scorer.head.weight[0] + scorer.head.bias[0]
    torch.testing.assert_close(scorer(FEATURES)[1], expected)


def test_the_causal_scorer_leaves_the_vocabulary_head_out() -> None:
    names = {name for name, _ in CausalLmScorer(tiny_causal_model(), seeded()).named_parameters()}
    assert not any("lm_head" in name for name in names)
    assert "backbone.embed_tokens.weight" in names


def test_the_causal_scorer_turns_a_half_precision_model_to_float32() -> None:
    scorer = CausalLmScorer(tiny_causal_model().to(torch.bfloat16), seeded())
    assert scorer(FEATURES).dtype == torch.float32


def test_masked_mean_counts_real_positions_only() -> None:
    hidden = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert masked_mean(hidden, torch.tensor([[True, True, False]])).tolist() == [[2.0]]


def test_padding_is_on_the_right() -> None:
    padded = padded_tokens([[7, 8], [9]], torch.device("cpu"))
    assert padded.tokens_BT.tolist() == [[7, 8], [9, 0]]
    assert padded.real_BT.tolist() == [[True, True], [True, False]]


def test_rows_are_picked_in_the_order_asked_for() -> None:
    picked = rows_of(FEATURES, torch.tensor([2, 0]))
    assert picked.tokens == [TOKENS[2], TOKENS[0]]
    assert isinstance(picked.embeddings_ND, Tensor)
    assert torch.equal(picked.embeddings_ND, EMBEDDINGS[[2, 0]])


def test_a_row_without_tokens_is_refused() -> None:
    with pytest.raises(MethodError, match="at least one token"):
        TokenScorer(10, seeded())(RowFeatures("test", tokens=[[1], []]))


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("tokens", RowFeatures("test", embeddings_ND=EMBEDDINGS)),
        ("embedding", RowFeatures("test", tokens=TOKENS)),
    ],
)
def test_features_of_the_other_kind_are_refused(kind: Any, lacking: RowFeatures) -> None:
    with pytest.raises(MethodError, match="scorer needs"):
        new_scorer(kind, lacking, 0)


def test_a_causal_scorer_is_not_made_out_of_nothing() -> None:
    with pytest.raises(MethodError, match="loaded model"):
        new_scorer("causal_lm", FEATURES, 0)
