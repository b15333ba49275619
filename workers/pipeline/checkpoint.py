"""Complete training state in a folder: safetensors for tensors, JSON for the rest.

A checkpoint folder exists only when it is whole, and holds everything that the next step depends
on, so a resumed run ends with the same numbers as an undisturbed one.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.pipeline.failure import PipelineFailure
from workers.pipeline.folders import write_folder

_NAME = re.compile(r"^step-(\d{6,})$")
_TENSORS = "state.safetensors"
_NUMBERS = "state.json"


class TrainingState(NamedTuple):
    """tensors: flat name -> tensor. numbers: JSON-able counters. key: what the run was made of."""

    step: int
    key: str
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def checkpoint_folder(work: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return work / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(work: Path, state: TrainingState, keep: int) -> Path:
    """Write one checkpoint and remove all but the newest `keep`."""
    target = checkpoint_folder(work, state.step)

    def fill(folder: Path) -> None:
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
        save_file(tensors, folder / _TENSORS)
        numbers = {"step": state.step, "key": state.key, "numbers": state.numbers}
        (folder / _NUMBERS).write_text(json.dumps(numbers), "utf-8")

    write_folder(target, fill)
    for old in _folders(work)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest_checkpoint(work: Path, key: str) -> TrainingState | None:
    """The newest checkpoint of this very run; None when there is none.

    Raises PipelineFailure when the folder holds a checkpoint of another run.
    """
    folders = _folders(work)
    if not folders:
        return None
    saved = json.loads((folders[-1] / _NUMBERS).read_text("utf-8"))
    if saved["key"] != key:
        raise PipelineFailure(
            "internal_error",
            f"The checkpoint {folders[-1].name} belongs to another job or other settings. Remove "
            "the work folder's checkpoints to start anew.",
        )
    tensors = load_file(folders[-1] / _TENSORS)
    return TrainingState(int(saved["step"]), key, tensors, saved["numbers"])


def _folders(work: Path) -> list[Path]:
    root = work / "checkpoints"
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if _NAME.match(path.name) and (path / _NUMBERS).is_file()),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: list[str], prefix: str
) -> dict[str, Tensor]:
    """AdamW's state by parameter name; `names` in the order the optimiser got its parameters."""
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}/{names[index]}/{field}": torch.as_tensor(value)
        for index, fields in state.items()
        for field, value in fields.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], prefix: str, tensors: dict[str, Tensor]
) -> None:
    """Put back what optimizer_tensors gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for index, name in enumerate(names):
        start = f"{prefix}/{name}/"
        fields = {
            key.removeprefix(start): tensor
            for key, tensor in tensors.items()
            if key.startswith(start)
        }
        if fields:
            state[index] = fields
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
