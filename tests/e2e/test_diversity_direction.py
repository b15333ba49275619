"""Diversity of a real small model moves as decoding and tuning say it must.

Directions of the diversity brief, sections 6.11 and 6.12; the parts at temperature 2 and with
tuning were not run there.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

from evaluators.diversity.coherence import coherence_hint
from evaluators.diversity.intra import diversity_metrics
from evaluators.embedding import EmbedderUnavailableError, MiniLMEmbedder
from evaluators.generation import Decoding, generate
from evaluators.prompts import load_prompts, subset
from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel, load_base

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
QUERIES = subset(load_prompts("open_ended_prompts").prompts, 6)
STYLE = "It depends on you. Take your time, breathe slowly, and be kind to yourself."
SAMPLED = {"max_new_tokens": 12, "n_samples": 3}


class Answered(NamedTuple):
    texts: dict[str, list[str]]
    nll: list[float]

    def flat(self) -> list[str]:
        return [text for texts in self.texts.values() for text in texts]


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    entry = load_catalogue().find(MODEL)
    assert entry is not None
    try:
        return load_base(entry, default_cache_dir())
    except PipelineFailure as failure:
        pytest.skip(failure.message)


@pytest.fixture(scope="module")
def embedder() -> MiniLMEmbedder:
    try:
        return MiniLMEmbedder()
    except EmbedderUnavailableError as error:
        pytest.skip(str(error))


def tokens(base: LoadedModel, question: str, answer: str) -> tuple[list[int], list[int]]:
    talk = [{"role": "user", "content": question}]
    prompt = base.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    return tuple(
        base.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)
    )


def losses(base: LoadedModel, model: Any, question: str, texts: list[str]) -> list[float]:
    """Mean token loss of each answer with text."""
    found = []
    for text in texts:
        prompt, answer = tokens(base, question, text)
        if answer:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer))
            found.append(float(loss))
    return found


def ask(base: LoadedModel, model: Any = None, **decoding: Any) -> Answered:
    talks = [[{"role": "user", "content": query.text}] for query in QUERIES]
    chosen = Decoding(**SAMPLED, **decoding)
    responses = generate(model or base.model, base.tokenizer, talks, chosen, seed=1)
    texts = {
        query.id: [generation.text for generation in found]
        for query, found in zip(QUERIES, responses, strict=True)
    }
    nll = [loss for q in QUERIES for loss in losses(base, base.model, q.text, texts[q.id])]
    return Answered(texts, nll)


@pytest.fixture(scope="module")
def plain(base: LoadedModel) -> Answered:
    return ask(base, temperature=1.0, top_p=0.9)


def test_greedy_answers_are_one_answer(base: LoadedModel, embedder: MiniLMEmbedder) -> None:
    metrics = diversity_metrics(ask(base).texts, embedder).metrics
    for name in ("intra_similarity", "vendi", "distinct_classes", "self_bleu"):
        assert metrics[f"diversity.{name}"].value == pytest.approx(1, abs=1e-6)


def test_a_high_temperature_looks_diverse_and_fails_the_coherence_floor(
    base: LoadedModel, embedder: MiniLMEmbedder, plain: Answered
) -> None:
    hot = ask(base, temperature=2.0)
    kept = ask(base, temperature=2.0, min_p=0.1)
    result = diversity_metrics(hot.texts, embedder, plain.texts)
    assert result.metrics["diversity.change_vs_base"].value < 0
    assert result.metrics["diversity.vendi_ratio"].value > 1
    hint = coherence_hint(hot.flat(), plain.flat(), nll=hot.nll, base_nll=plain.nll)
    assert hint.holds is False
    likely = coherence_hint(kept.flat(), plain.flat(), nll=kept.nll, base_nll=plain.nll)
    assert likely.nll < hint.nll


def test_tuning_on_one_answer_raises_similarity_beyond_its_interval(
    base: LoadedModel, embedder: MiniLMEmbedder, plain: Answered
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    tuned = get_peft_model(copy.deepcopy(base.model), config).train()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-3)
    questions = load_prompts("benign_prompts").prompts[:16]
    for epoch in range(3):
        for question in questions[epoch % 2 :: 2]:
            prompt, answer = tokens(base, question.text, f"{STYLE}<|im_end|>")
            ids = torch.tensor([prompt + answer])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            tuned(ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    answered = ask(base, tuned, temperature=1.0, top_p=0.9)
    change = diversity_metrics(answered.texts, embedder, plain.texts).metrics
    assert change["diversity.change_vs_base"].low > 0
    assert change["diversity.vendi_ratio"].high < 1
