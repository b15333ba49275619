"""min-p sampling: setting B of Artificial Hivemind, arXiv 2510.22954."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from evaluators import generation
from evaluators.diversity.decoding import open_ended_decoding
from evaluators.generation import Decoding, generate

CONVERSATIONS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}],
]
DRAWS = 4000


def shares(logits_V, temperature, top_p, min_p):
    """Frequencies of the tokens at evenly spread u."""
    u_B = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    logits_B_V = logits_V.expand(DRAWS, -1)
    token_B = generation._sample(logits_B_V, u_B, temperature, top_p, min_p)
    return torch.bincount(token_B, minlength=len(logits_V)).double() / DRAWS


@pytest.mark.parametrize("shortlist", [3, 256])
@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p"),
    [(2.0, 1.0, 0.1), (1.0, 0.9, 0.3), (0.7, 0.6, 0.05), (2.0, 0.95, 0.0)],
)
def test_the_distribution_is_that_of_transformers_in_its_order(
    monkeypatch, temperature, top_p, min_p, shortlist
):
    monkeypatch.setattr(generation, "_NUCLEUS_SHORTLIST", shortlist)
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits_V[None])
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected_V = torch.softmax(scores[0].double(), -1)
    found_V = shares(logits_V, temperature, top_p, min_p)
    assert (found_V > 0).tolist() == (expected_V > 1 / DRAWS).tolist()
    assert found_V.tolist() == pytest.approx(expected_V.tolist(), abs=2 / DRAWS)


def test_no_token_below_the_share_of_the_likeliest_is_drawn():
    logits_V = torch.tensor([0.0, -1.0, -2.5, -6.0])
    found_V = shares(logits_V, 1.0, 1.0, 0.1)
    assert (found_V > 0).tolist() == [True, True, False, False]


def test_without_min_p_nothing_is_touched():
    p_B_K = torch.rand(3, 5, dtype=torch.float64)
    assert generation._likely(p_B_K, 0.0) is p_B_K


def test_min_p_leaves_greedy_decoding_alone(model, tokenizer):
    plain = generate(model, tokenizer, CONVERSATIONS, Decoding(max_new_tokens=6))
    assert generate(model, tokenizer, CONVERSATIONS, Decoding(max_new_tokens=6, min_p=0.5)) == plain


def test_a_min_p_near_one_is_greedy(model, tokenizer):
    plain = generate(model, tokenizer, CONVERSATIONS, Decoding(max_new_tokens=6))
    narrow = Decoding(max_new_tokens=6, temperature=2.0, min_p=0.999999)
    assert generate(model, tokenizer, CONVERSATIONS, narrow) == plain


def test_min_p_one_is_refused():
    with pytest.raises(ValueError, match="min_p"):
        Decoding(min_p=1.0)


# Setting A and B of the paper, section 4.1.
def test_the_papers_settings():
    a = open_ended_decoding("A")
    b = open_ended_decoding("B", n_samples=6, max_new_tokens=32)
    assert (a.temperature, a.top_p, a.min_p, a.n_samples, a.max_new_tokens) == (1, 0.9, 0, 50, 2048)
    assert (b.temperature, b.top_p, b.min_p, b.n_samples, b.max_new_tokens) == (2, 1, 0.1, 6, 32)
