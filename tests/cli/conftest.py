"""The command as a user types it, and a base model small enough for tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "service.cli.main"]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Cli:
    """Runs `tunegate` in processes of its own, with a data folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TUNEGATE_", "OPENAI_"))
        } | {
            "TUNEGATE_DATA_DIR": str(self.data_dir),
            "TUNEGATE_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def cli(tmp_path: Path) -> Any:
    made = Cli(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    def wait(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        raise AssertionError("waited in vain")

    return wait


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as lines:
        for index in range(16):
            messages = [
                {"role": "user", "content": f"Say number {index}"},
                {"role": "assistant", "content": f"Number {index}"},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue whose default is a two-layer model with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["Say number 1", "Number 1"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text(
        "models:\n  tiny:\n    default: true\n"
        f"    source: {{kind: folder, path: {folder / 'model'}}}\n"
        "    lora: {rank: 4, batch_size: 4, max_length: 512}\n"
    )
    return catalogue
