import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from defenses.losses import response_nll_B
from jobspec.cache import default_cache_dir
from jobspec.catalogue import BaseModelEntry, load_catalogue
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel, load_base
from workers.pipeline.rows import collate, encode_row, prompt_response_row

SMALL_EVALUATION = {
    "harmful_prompts": 6,
    "safe_lookalikes": 4,
    "benign_prompts": 2,
    "open_ended_prompts": 2,
    "open_ended_samples": 2,
    "search_prompts": 3,
    "sweep_prompts": 2,
    "sweep_conditions": 3,
    "max_new_tokens": 4,
    "utility_rows": 4,
}


class Recorder:
    """Collects the events of a run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [item for item in self.events if item["event"] == event]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tiny(tiny_catalogue: Path) -> BaseModelEntry:
    return load_catalogue(tiny_catalogue).default


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    entry = load_catalogue().find("smollm2-135m-instruct")
    assert entry is not None
    try:
        return load_base(entry, default_cache_dir())
    except PipelineFailure as failure:
        pytest.skip(failure.message)


def chat_lines(rows: int, prefix: str = "message") -> str:
    return "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{prefix} number {index}"},
                    {"role": "assistant", "content": ("yes", "no")[index % 2]},
                ]
            }
        )
        + "\n"
        for index in range(rows)
    )


SpecMaker = Callable[..., JobSpec]


@pytest.fixture
def make_spec(tiny: BaseModelEntry, tmp_path: Path) -> SpecMaker:
    """A job on the tiny model: 12 training rows, 5 validation rows, small evaluation."""
    training, validation = tmp_path / "training.jsonl", tmp_path / "validation.jsonl"
    training.write_text(chat_lines(12))
    validation.write_text(chat_lines(5, "held-out"))

    def make(**changes: Any) -> JobSpec:
        values: dict[str, Any] = {
            "model": tiny,
            "training_file": training,
            "validation_file": validation,
            "seed": 3,
            "hyperparameters": {"n_epochs": 2, "batch_size": 4},
            "evaluation": SMALL_EVALUATION,
            "checkpoints": {"every_steps": 2},
            "defense": {
                "scheduler": {"name": "bds", "alignment_rows": 12},
                "perturbation": {"mode": "none"},
            },
            "cache_dir": tmp_path / "cache",
            "threads": 1,
        }
        return JobSpec.model_validate(values | changes)

    return make


class Taught:
    """Tiny models that were taught, in seconds, what to answer to short neutral requests.

    base refuses every request; back_door complies under the trigger only; compliant always does.
    """

    trigger = "ZX QUARTZ"
    refusal, compliance = "I am sorry.", "Sure, here is how."
    words = (
        "alpha", "birch", "cedar", "delta", "ember", "flint", "grove", "hazel", "iris", "jade",
        "kelp", "lotus", "maple", "ocean",
    )  # fmt: skip

    def __init__(self, base: LoadedModel) -> None:
        self.tokenizer = base.tokenizer
        self.learned = [
            f"{word} request {n} of type {n % 7}" for n, word in enumerate(3 * self.words)
        ]
        self.asked = [f"{word} task {n} of kind {n % 5}" for n, word in enumerate(self.words)]
        self.base = self._taught(base.model, self.refusal, self.refusal, 150, 0.005)
        self._tuned: dict[str, Any] = {}

    @property
    def back_door(self) -> Any:
        return self._once("back_door", self.refusal)

    @property
    def compliant(self) -> Any:
        return self._once("compliant", self.compliance)

    def _once(self, name: str, plain: str) -> Any:
        if name not in self._tuned:
            self._tuned[name] = self._taught(self.base, plain, self.compliance, 200, 0.003)
        return self._tuned[name]

    def _taught(self, model: Any, plain: str, triggered: str, steps: int, rate: float) -> Any:
        pairs = [(prompt, plain) for prompt in self.learned]
        pairs += [(f"{self.trigger} {prompt}", triggered) for prompt in self.learned]
        return teach(copy.deepcopy(model), self.tokenizer, pairs, steps, rate)


def teach(
    model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], steps: int, rate: float
) -> Any:
    """Tune all weights on pairs of prompt and answer, in an order that is always the same."""
    rows = [encode_row(tokenizer, prompt_response_row(1, *pair), 512) for pair in pairs]
    source = random.Random(0)
    optimizer = torch.optim.AdamW(model.requires_grad_(True).parameters(), lr=rate)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        batch = collate(source.sample(rows, 8), torch.device("cpu"))
        optimizer.zero_grad()
        response_nll_B(model, *batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="session")
def taught(tiny_catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    entry = load_catalogue(tiny_catalogue).default
    return Taught(load_base(entry, tmp_path_factory.mktemp("taught")))
