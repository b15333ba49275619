from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from defenses.losses import (
    UnsupervisedRowError,
    response_nll_and_accuracy_B,
    response_nll_B,
    response_token_mean_nll,
)

SIZE = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = LlamaConfig(**SIZE)
ARCHITECTURES = {
    "llama": LLAMA,
    "llama with tied embeddings": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZE),
    "gemma2, soft-capped logits": Gemma2Config(**SIZE, head_dim=8, final_logit_softcapping=0.5),
    "granite, divided logits": GraniteConfig(**SIZE, logits_scaling=3.0),
    "cohere2, multiplied logits": Cohere2Config(**SIZE, logit_scale=0.25),
    "phi, biased head": PhiConfig(**{**SIZE, "num_key_value_heads": 2}),
    "gpt2": GPT2Config(vocab_size=41, n_embd=16, n_layer=2, n_head=2),
    "opt": OPTConfig(
        vocab_size=41, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2
    ),
}
LENGTHS = ((9, 4), (12, 7), (6, 5), (12, 1))
"""(tokens, of which prompt) of each row of the batch."""


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def padded_batch(side: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    longest = max(total for total, _ in LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (total, prompt) in enumerate(LENGTHS):
        start = 0 if side == "right" else longest - total
        tokens = torch.randint(3, 41, (total,), generator=generator)
        ids[row, start : start + total] = tokens
        mask[row, start : start + total] = 1
        labels[row, start + prompt : start + total] = tokens[prompt:]
    return ids, mask, labels


def reference_nll_B(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    nll = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return nll.view(len(ids), -1).sum(1) / (labels[:, 1:] != -100).sum(1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_losses_equal_those_of_the_full_logits(name: str, side: str) -> None:
    model, batch = build(ARCHITECTURES[name]), padded_batch(side)
    torch.testing.assert_close(
        response_nll_B(model, *batch), reference_nll_B(model, *batch), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_token_mean_equals_the_loss_of_the_model_itself(name: str, side: str) -> None:
    model, (ids, mask, labels) = build(ARCHITECTURES[name]), padded_batch(side)
    own = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss = response_token_mean_nll(model, ids, mask, labels)
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_row_losses_of_a_peft_model_equal_those_of_the_full_logits(targets: list[str]) -> None:
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model, batch = get_peft_model(build(LLAMA), lora), padded_batch("right")
    torch.testing.assert_close(
        response_nll_B(model, *batch), reference_nll_B(model, *batch), rtol=1e-6, atol=1e-6
    )


def test_gradients_of_a_peft_model_equal_those_of_the_full_logits() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, batch = get_peft_model(build(LLAMA), lora).train(), padded_batch("right")
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.tensor([0.2, 1.0, 2.0, 0.7])
    ours = torch.autograd.grad((weights * response_nll_B(model, *batch)).sum(), parameters)
    full = torch.autograd.grad((weights * reference_nll_B(model, *batch)).sum(), parameters)
    for mine, reference in zip(ours, full, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_changes_nothing() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, batch = get_peft_model(build(LLAMA), lora).train(), padded_batch("right")
    parameters = [p for p in model.parameters() if p.requires_grad]
    plain = torch.autograd.grad(response_nll_B(model, *batch).sum(), parameters)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = torch.autograd.grad(response_nll_B(model, *batch).sum(), parameters)
    for one, other in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_head_sees_supervised_positions_only() -> None:
    model, (ids, mask, labels) = build(LLAMA), padded_batch("right")
    seen: list[int] = []
    model.lm_head.register_forward_hook(
        lambda _module, _inputs, logits: seen.append(logits.shape[:-1].numel())
    )
    response_nll_B(model, ids, mask, labels)
    assert seen == [int((labels[:, 1:] != -100).sum())]


def test_the_model_is_left_without_hooks() -> None:
    model, batch = build(LLAMA), padded_batch("right")
    response_nll_B(model, *batch)
    assert not model.lm_head._forward_pre_hooks


def test_a_failing_forward_leaves_no_hook_behind() -> None:
    model, (ids, mask, labels) = build(LLAMA), padded_batch("right")
    with pytest.raises(IndexError):
        response_nll_B(model, ids + 1000, mask, labels)
    assert not model.lm_head._forward_pre_hooks


class HeadOutsideTheGraph(nn.Module):
    """A causal model whose projection is no module of its own."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_model_without_output_embeddings_is_served_from_its_full_logits() -> None:
    model, batch = build(LLAMA), padded_batch("right")
    wrapped = HeadOutsideTheGraph(model)
    torch.testing.assert_close(
        response_nll_B(wrapped, *batch), reference_nll_B(model, *batch), rtol=1e-6, atol=1e-6
    )


def test_accuracy_counts_equal_those_of_the_full_logits() -> None:
    model, (ids, mask, labels) = build(LLAMA), padded_batch("left")
    predicted = model(input_ids=ids, attention_mask=mask).logits[:, :-1].argmax(-1)
    labels[:, 1:] = torch.where(
        (labels[:, 1:] != -100) & (ids[:, 1:] % 2 == 0), predicted, labels[:, 1:]
    )
    scores = response_nll_and_accuracy_B(model, ids, mask, labels)
    correct = (predicted == labels[:, 1:]).sum(1)
    assert scores.correct.tolist() == correct.tolist()
    assert 0 < int(correct.sum()) < int(scores.token_count.sum())


def test_token_counts_are_the_supervised_tokens_of_each_row() -> None:
    scores = response_nll_and_accuracy_B(build(LLAMA), *padded_batch("right"))
    assert scores.token_count.tolist() == [total - prompt for total, prompt in LENGTHS]


def test_a_row_without_supervised_token_is_named() -> None:
    ids, mask, labels = padded_batch("right")
    labels[2] = -100
    with pytest.raises(UnsupervisedRowError, match="drop rows") as caught:
        response_nll_B(build(LLAMA), ids, mask, labels)
    assert caught.value.rows == [2]


def test_a_label_on_the_first_token_alone_predicts_nothing() -> None:
    ids, mask, labels = padded_batch("right")
    labels[1] = -100
    labels[1, 0] = ids[1, 0]
    with pytest.raises(UnsupervisedRowError):
        response_nll_B(build(LLAMA), ids, mask, labels)


def test_losses_of_a_bfloat16_model_are_float32() -> None:
    losses = response_nll_B(build(LLAMA).bfloat16(), *padded_batch("right"))
    assert losses.dtype == torch.float32


def test_losses_of_a_float64_model_are_float64() -> None:
    losses = response_nll_B(build(LLAMA).double(), *padded_batch("right"))
    assert losses.dtype == torch.float64
