import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobspec.cache import default_cache_dir
from jobspec.catalogue import BaseModelEntry, load_catalogue
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel, load_base

SMALL_EVALUATION = {
    "harmful_prompts": 6,
    "safe_lookalikes": 4,
    "benign_prompts": 2,
    "open_ended_prompts": 2,
    "open_ended_samples": 2,
    "search_prompts": 3,
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
