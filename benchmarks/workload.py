"""The model and the rows that the speed benchmarks share."""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from defenses.losses import IGNORED_LABEL
from workers.pipeline.rows import Batch, TokenRow, collate

CPU = torch.device("cpu")
LORA_TARGETS = ["q_proj", "k_proj", "v_proj"]

SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def adapted_model(model_path: str | None = None) -> Any:
    """A causal model in float32 with a fresh LoRA; random weights of SmolLM2-135M's shape unless
    a folder is given."""
    torch.manual_seed(0)
    base = (
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        if model_path
        else AutoModelForCausalLM.from_config(SMOLLM2_135M, dtype=torch.float32)
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(base, lora).train()


def equal_rows(
    count: int, seed: int, *, tokens: int = 96, supervised: int = 24, vocabulary: int = 49152
) -> list[TokenRow]:
    """Rows of one length; the last `supervised` tokens are the answer."""
    generator = random.Random(seed)
    return [_row(i, tokens, supervised, vocabulary, generator) for i in range(count)]


def mixed_rows(
    count: int,
    seed: int,
    *,
    shortest: int = 24,
    longest: int = 256,
    median: float = 72.0,
    spread: float = 0.7,
    vocabulary: int = 49152,
) -> list[TokenRow]:
    """Rows as chat data has them: lognormal lengths within bounds, 10 to 40 % of each an answer."""
    generator = random.Random(seed)
    rows: list[TokenRow] = []
    while len(rows) < count:
        tokens = round(generator.lognormvariate(math.log(median), spread))
        if shortest <= tokens <= longest:
            supervised = max(1, round(tokens * generator.uniform(0.1, 0.4)))
            rows.append(_row(len(rows), tokens, supervised, vocabulary, generator))
    return rows


def _row(
    line: int, tokens: int, supervised: int, vocabulary: int, generator: random.Random
) -> TokenRow:
    ids = tuple(generator.randrange(3, vocabulary) for _ in range(tokens))
    labels = (IGNORED_LABEL,) * (tokens - supervised) + ids[tokens - supervised :]
    return TokenRow(line, ids, labels, False)


def batch_of(rows: Sequence[TokenRow]) -> Batch:
    return collate(rows, CPU)


def multiplications(
    model: Any, padded_tokens: float, projected_tokens: float, passes: float = 1.0
) -> float:
    """Multiplications of the model's frozen matrices in forward-and-backward passes over so many
    padded positions, the vocabulary projection on `projected_tokens` of them; attention left out.

    Forward and the gradient of the inputs cost as much each; the weights' own gradient is not
    taken.
    """
    head: int = model.get_output_embeddings().weight.numel()
    vocabulary = model.config.vocab_size
    matrices: int = sum(
        p.numel() for p in model.parameters() if p.dim() == 2 and p.shape[0] != vocabulary
    )
    return 2.0 * passes * (matrices * padded_tokens + head * projected_tokens)
