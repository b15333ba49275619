"""Token-level PPO with LoRA on a tiny random model, and scores of its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from analyses.context import AnalysisContext, AnalysisError, JobFolder
from analyses.online_rl.spec import ONLINE_RL
from analyses.online_rl.token_influence import answer_losses, score_answers, token_target
from analyses.online_rl.token_ppo import TokenPPO, TokenPPOSettings, adapted
from analyses.online_rl.tokens import (
    Answers,
    padded,
    sample,
    token_gae,
    token_log_prob,
    token_rewards,
    whiten,
)
from analyses.run import read_request, run_analysis
from jobspec.catalogue import BaseModelEntry, FolderSource

VOCABULARY = 32
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15, 16]]


def tiny(seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """A Llama of 10 thousand weights with rank-4 LoRA whose B is not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = get_peft_model(LlamaForCausalLM(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "lm_head" in name:
            # At the default size all tokens stay alike whatever the adapter does.
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def share_of_low_tokens(_prompt: Any, answer: Any) -> float:
    return sum(token < VOCABULARY // 2 for token in answer) / len(answer)


def trainer(**options: Any) -> TokenPPO:
    settings = TokenPPOSettings(new_tokens=6, **options)
    return TokenPPO(tiny(), share_of_low_tokens, settings, seed=0)


@pytest.fixture(scope="module")
def rolled_out() -> tuple[TokenPPO, Answers]:
    ppo = trainer()
    # Another value than 0, so that the value loss has a gradient in the trunk.
    assert ppo.policy.value_net is not None
    torch.nn.init.normal_(ppo.policy.value_net.weight, std=0.3)
    return ppo, ppo.roll_out(PROMPTS)[0]


def test_whitened_advantages_are_the_briefs() -> None:
    found = whiten(torch.tensor([0.43675, 0.565, 0.7], dtype=torch.float64))
    assert found.tolist() == pytest.approx([-0.991344, -0.017092, 1.008436], abs=5e-7)


def test_token_advantages_are_the_briefs_and_stop_at_the_answers_end() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0.0]], dtype=torch.float64)
    rewards = torch.tensor([[9, 0, 0, 1, 9.0]], dtype=torch.float64) * mask
    values = torch.tensor([[9, 0.5, 0.4, 0.3, 9.0]], dtype=torch.float64)
    advantages, returns = token_gae(rewards, values, mask, 1.0, 0.95)
    assert advantages[0].tolist() == pytest.approx([0, 0.43675, 0.565, 0.7, 0])
    assert returns[0].tolist() == pytest.approx([0, 0.93675, 0.965, 1, 0])


def test_the_divergence_is_paid_at_each_token_and_the_score_at_the_last() -> None:
    mask = torch.tensor([[0.0, 1, 1], [1, 0, 0]])
    found = token_rewards(
        torch.tensor([2.0, 3.0]),
        torch.full((2, 3), -1.0),
        torch.full((2, 3), -1.5),
        mask,
        torch.tensor([2, 0]),
        0.1,
    )
    assert torch.allclose(found, torch.tensor([[0, -0.05, 1.95], [2.95, 0, 0]]))


def test_the_divergences_weight_follows_its_target() -> None:
    assert adapted(0.04, 12.0, 6.0, 256, 10_000) == pytest.approx(0.04 * (1 + 0.2 * 0.0256))
    assert adapted(0.04, 0.0, 6.0, 256, 10_000) == pytest.approx(0.04 * (1 - 0.2 * 0.0256))


def test_sampling_uses_the_distribution_of_each_prompt_without_padding() -> None:
    model = tiny()
    answers = sample(model, PROMPTS, 5, torch.Generator().manual_seed(0))
    assert answers == sample(model, PROMPTS, 5, torch.Generator().manual_seed(0))
    assert [len(answer) for answer in answers] == [5] * len(PROMPTS)
    # The first draw equals one from the prompt alone: padding to the left changes nothing.
    with torch.no_grad():
        rows = [model(torch.tensor([p])).logits[0, -1].softmax(dim=0) for p in PROMPTS]
    first = torch.multinomial(torch.stack(rows), 1, generator=torch.Generator().manual_seed(0))
    assert first[:, 0].tolist() == [answer[0] for answer in answers]


def test_an_end_token_closes_an_answer() -> None:
    model = tiny()
    free = sample(model, PROMPTS, 8, torch.Generator().manual_seed(0))
    end = free[0][2]
    answers = sample(model, PROMPTS, 8, torch.Generator().manual_seed(0), end=end)
    assert answers[0] == free[0][: free[0].index(end) + 1]


@pytest.mark.parametrize("reference", ["buffer", "leave_one_out", "holdout"])
@pytest.mark.parametrize("kind", ["sequence", "return"])
def test_scores_equal_autograd_answer_by_answer(
    rolled_out: tuple[TokenPPO, Answers], reference: Any, kind: Any
) -> None:
    ppo, answers = rolled_out
    held = answers.at(torch.tensor([1, 4])) if reference == "holdout" else None
    scores = score_answers(ppo.policy, answers, kind, held, reference=reference, chunk=4)
    lora = [p for name, p in ppo.policy.named_parameters() if "lora" in name]

    def rows(values: torch.Tensor) -> torch.Tensor:
        grads = [torch.autograd.grad(value, lora, retain_graph=True) for value in values]
        return torch.stack([torch.cat([g.flatten() for g in one]) for one in grads])

    loss, log_prob, _ = answer_losses(ppo.policy, answers, clip_range=0.2, vf_clip=0.2, vf_coef=0.1)
    training = rows(loss)
    data = held or answers
    log_prob = ppo.policy(data.ids, data.attention)[0]
    target = rows(token_target(kind, log_prob, data))
    mean = target.mean(dim=0).expand_as(training)
    if reference == "leave_one_out":
        mean = (target.sum(dim=0) - target) / (len(target) - 1)
    expected = -(training * mean).sum(dim=1).double()
    assert float((scores.score_N - expected).abs().max() / expected.abs().max()) < 1e-5


def test_the_value_head_is_not_scored_but_its_loss_is(
    rolled_out: tuple[TokenPPO, Answers],
) -> None:
    ppo, answers = rolled_out
    with_value = score_answers(ppo.policy, answers, "sequence", vf_coef=0.1)
    without = score_answers(ppo.policy, answers, "sequence", vf_coef=0.0)
    assert not torch.allclose(with_value.score_N, without.score_N)


def test_chunks_do_not_change_scores(rolled_out: tuple[TokenPPO, Answers]) -> None:
    ppo, answers = rolled_out
    one, all_ = (score_answers(ppo.policy, answers, "sequence", chunk=c) for c in (1, 6))
    assert torch.allclose(one.score_N, all_.score_N, rtol=1e-4, atol=1e-8)


def test_ppo_raises_the_reward_and_is_reproducible() -> None:
    def learn() -> list[float]:
        ppo = trainer(learning_rate=0.01, minibatch_size=12, kl_coef=0.0, kl_target=None)
        return [ppo.round(PROMPTS * 8).mean_reward for _ in range(6)]

    rewards = learn()
    assert rewards[-1] > rewards[0] + 0.15
    assert rewards == learn()


def test_a_filtered_round_trains_on_helpful_answers_alone() -> None:
    ppo = trainer(learning_rate=0.01, minibatch_size=4, filter=True)
    done = ppo.round(PROMPTS * 2, validation=PROMPTS)
    assert done.scores is not None
    assert done.kept == tuple((done.scores.score_N > 0).nonzero().flatten().tolist())
    assert 0 < len(done.kept) < 12


def test_the_holdout_filter_asks_for_validation_prompts() -> None:
    with pytest.raises(AnalysisError, match="answers of its own"):
        trainer(filter=True).round(PROMPTS)


def test_an_answer_without_tokens_is_refused() -> None:
    with pytest.raises(AnalysisError, match="answer 1: prompt and answer need a token"):
        padded([[1, 2], [3]], [1, 1])


@pytest.fixture
def ask(tiny_model_folder: Path, tmp_path: Path) -> Any:
    """Ask about answers recorded from a job of a tiny model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    entry = BaseModelEntry(name="tiny", source=FolderSource(path=tiny_model_folder))
    job = JobFolder("job-1", entry, tmp_path, tmp_path / "rows.jsonl", {})

    def loaded(_entry: BaseModelEntry, _folder: Path | None) -> tuple[Any, Any]:
        model = tiny(vocabulary=len(tokenizer))
        return model.requires_grad_(False), tokenizer

    def run(rows: list[dict[str, Any]], raw: dict[str, Any] | None = None) -> dict[str, Any]:
        path = tmp_path / "buffer.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        context = AnalysisContext(
            work=tmp_path / "work",
            cache_dir=tmp_path / "cache",
            files={"buffer": path, "holdout": path},
            job=job,
            load_model=loaded,
        )
        request = read_request(ONLINE_RL, {"buffer": "b", **(raw or {})})
        return run_analysis(ONLINE_RL, request, context, tmp_path / "out")

    return run


ROWS = [
    {"prompt": "hello", "completion": "good day", "advantage": 1.0},
    {"prompt": "hello", "completion": "go away", "advantage": -1.0},
    {"prompt": "thanks", "completion": "welcome", "advantage": 0.5},
]


def test_the_rewarded_answer_promotes_its_own_completion(ask: Any) -> None:
    target = {"kind": "action", "prompt": "hello", "completion": "good day"}
    result = ask(ROWS, {"target": target, "normalize_advantage": False})
    assert result["records"][0]["rank"] == 1
    assert result["records"][0]["score"] > 0
    assert any("No logp_old" in text for text in result["warnings"])


@pytest.mark.parametrize("kind", ["sequence", "return"])
def test_recorded_answers_are_scored_against_a_holdout(ask: Any, kind: str) -> None:
    raw = {"target": {"kind": kind}, "reference": "holdout", "holdout": "h"}
    assert len(ask(ROWS, raw)["records"]) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "line 1: lacks advantage"),
        ({"prompt": "a", "completion": "", "advantage": 1}, "has no token"),
        ({"prompt": "a", "completion": "bc", "advantage": [1]}, "1 values, the completion 2"),
        ({"prompt": "a", "completion": "b", "advantage": "x"}, "is no number"),
        ({"prompt": "a", "completion": 3, "advantage": 1}, "are texts"),
        ({"prompt": "a", "completion": "b" * 200, "advantage": 1}, "context holds 128"),
    ],
)
def test_a_bad_answer_names_its_line(ask: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        ask([row])


def test_no_answers_are_refused(ask: Any) -> None:
    with pytest.raises(AnalysisError, match="no records"):
        ask([])


def test_log_probabilities_belong_to_the_next_token() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = 50.0
    found = token_log_prob(logits, torch.tensor([[1, 2, 3]]))
    assert found[0].tolist() == pytest.approx([0.0, -1.386294], abs=1e-5)
