"""A small tokenizer and models that are made up in memory: random ones, and one that writes a
given text whatever it read."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

# Writes out everything that a chat template is given.
SHOW_ALL = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}[{{ part['type'] }}]{{ part['text'] }}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if guardian_config is defined %}|config={{ guardian_config | tojson }}{% endif %}"
    "{% if think is defined %}|think={{ think }}{% endif %}"
    "{% if add_generation_prompt %}|assistant|{% endif %}"
)
VERDICTS = ("Yes", "No", "yes", "no", "unsafe", "safe", "1", "2", "3", "4", "5")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """One token a byte, with <s>, </s>, <pad> and <|turn|>; `words` are tokens too."""

    def make(words: Sequence[str] = (), chat_template: str | None = SHOW_ALL) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        specials = ["<s>", "</s>", "<pad>", "<|turn|>"]
        vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
        bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytewise.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bytewise,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(VERDICTS)


def settings(tokenizer: Any, **changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.4,
    }
    return LlamaConfig(**{**values, **changes})


@pytest.fixture(scope="session")
def causal_model(tokenizer: Any) -> LlamaForCausalLM:
    """Random weights in float64, so that batches differ in the last bits only."""
    torch.manual_seed(7)
    return LlamaForCausalLM(settings(tokenizer)).double().eval()


@pytest.fixture(scope="session")
def make_classifier(tokenizer: Any) -> Callable[..., LlamaForSequenceClassification]:
    def make(labels: int = 14) -> LlamaForSequenceClassification:
        torch.manual_seed(11)
        config = settings(tokenizer, num_labels=labels, max_position_embeddings=1024)
        return LlamaForSequenceClassification(config).double().eval()

    return make


@pytest.fixture(scope="session")
def make_writer(make_tokenizer: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """A model that writes `text` and stops, after any input that ends in `after`.

    Its layers add nothing, so the next token depends on the last one alone: `after` leads to one
    token that is the whole text, and that to the end token.
    """

    def make(text: str, after: str = "\n") -> tuple[Any, Any]:
        tokenizer = make_tokenizer([text])
        size = len(tokenizer)
        model = LlamaForCausalLM(
            settings(tokenizer, hidden_size=-(-size // 8) * 8, num_hidden_layers=1)
        )
        layer = model.model.layers[0]
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(size, model.config.hidden_size))
            model.lm_head.weight.zero_()
            written = tokenizer.convert_tokens_to_ids(text)
            last = tokenizer(after, add_special_tokens=False)["input_ids"][-1]
            model.lm_head.weight[written, last] = 5.0
            model.lm_head.weight[tokenizer.eos_token_id, written] = 5.0
        return model.eval(), tokenizer

    return make
