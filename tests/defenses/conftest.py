"""A Llama small enough to compute by hand, filled by a rule instead of a random generator."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from defenses.losses import response_nll_B, response_token_mean_nll

PROMPT_LENGTH = 3
FT_ROWS = [[1, 5, 9, 13, 17, 21], [1, 6, 10, 14, 18, 22]]
HARMFUL_ROWS = [[1, 7, 11, 15, 19, 23], [1, 8, 12, 16, 20, 24]]
SAFE_ROWS = [[1, 7, 11, 15, 3, 2], [1, 8, 12, 16, 3, 2]]


@dataclass(frozen=True)
class TinyLlama:
    """Two layers of width 16 with LoRA r=2 on q, k, v, float64; 33 tensors, 12 trainable."""

    model: PeftModel

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def row_losses(self, rows: list[list[int]]) -> Tensor:
        return response_nll_B(self.model, *batch_of(rows))

    def token_mean_loss(self, rows: list[list[int]]) -> Tensor:
        return response_token_mean_nll(self.model, *batch_of(rows))


def batch_of(rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    input_ids = torch.tensor(rows)
    labels = input_ids.clone()
    labels[:, :PROMPT_LENGTH] = -100
    return input_ids, torch.ones_like(input_ids), labels


def tiny_llama() -> TinyLlama:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    lora = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(LlamaForCausalLM(config), lora).double()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for rank, name in enumerate(sorted(parameters)):
            tensor = parameters[name]
            n = torch.arange(tensor.numel(), dtype=torch.float64)
            s = torch.sin(0.37 * n + 0.61 * rank).reshape(tensor.shape)
            if "norm" in name:
                tensor.copy_(1.0 + 0.1 * s)
            else:
                tensor.copy_((0.3 if "lora_" in name else 0.2) * s)
    return TinyLlama(model.train())


@pytest.fixture
def tiny() -> TinyLlama:
    return tiny_llama()


@pytest.fixture
def make_tiny() -> Callable[[], TinyLlama]:
    """For tests that compare two models from the same start."""
    return tiny_llama


@pytest.fixture
def ft_rows() -> list[list[int]]:
    return FT_ROWS


@pytest.fixture
def harmful_rows() -> list[list[int]]:
    return HARMFUL_ROWS


@pytest.fixture
def safe_rows() -> list[list[int]]:
    return SAFE_ROWS
