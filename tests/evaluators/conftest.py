from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evaluators.embedding import EmbedderUnavailableError, MiniLMEmbedder, minilm_folder

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "A request of category X and an answer of category Y.",
    "user assistant system: hello, how are you today?",
]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose pad token equals its end token, as SmolLM2's does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def tiny_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_range=0.4,
    )


@pytest.fixture(scope="session")
def model(tiny_config: LlamaConfig) -> LlamaForCausalLM:
    """Random weights, float64: batch composition then changes no token of a greedy run."""
    torch.manual_seed(7)
    return LlamaForCausalLM(tiny_config).double().eval()


@pytest.fixture(scope="session")
def embedder() -> MiniLMEmbedder:
    try:
        minilm_folder()
    except EmbedderUnavailableError as error:
        pytest.skip(str(error))
    return MiniLMEmbedder()


class TableEmbedder:
    """Looks every text up in a table of vectors; an unlisted blank text is the zero vector."""

    id = "table"

    def __init__(self, table: dict[str, list[float]]) -> None:
        self._table = table
        self.dimension = len(next(iter(table.values())))

    def embed(self, texts: Any) -> NDArray[np.float32]:
        zero = [0.0] * self.dimension
        return np.array(
            [self._table[text] if text.strip() else zero for text in texts], dtype=np.float32
        ).reshape(len(texts), self.dimension)


@pytest.fixture
def table_embedder() -> type[TableEmbedder]:
    return TableEmbedder
