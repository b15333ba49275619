"""Continuing from a tuned model: its adapter's weights become the first ones of a new job.

One adapter holds all that was tuned since the base, and every comparison switches the adapter off.
So a model that was tuned in several jobs is compared with the original base, not with its parent.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jobspec.catalogue import LoraDefaults
from jobspec.spec import JobSpec
from workers.pipeline.bundle import ADAPTER, ADAPTER_CONFIG, REPORT
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.hashing import file_sha256

# Settings of peft that change what the same weights mean; a job's own adapter has none of them.
_PLAIN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


def parent_weights(spec: JobSpec, fingerprint: str) -> dict[str, Tensor] | None:
    """The adapter that the job continues from, by names of its file; None: it starts afresh.

    Raises PipelineFailure(model_unavailable) where it does not fit: another shape (rank, alpha,
    target modules), or tuned on a base with other weights than `fingerprint` names.
    """
    folder = spec.parent_adapter
    if folder is None:
        return None
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
        tensors: dict[str, Tensor] = load_file(folder / ADAPTER)
        report_path = folder / REPORT
        report = json.loads(report_path.read_text("utf-8")) if report_path.is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(f"it cannot be read ({type(error).__name__})") from error
    _check_shape(config, spec.model.lora)
    known = report.get("model", {}).get("fingerprint")
    if known is not None and known != fingerprint:
        raise _refused(
            f"it was tuned on another version of {spec.model.name}: the weights of the catalogue's "
            "entry have changed since"
        )
    return tensors


def start_from(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give the adapter of `model` the weights of its parent's file.

    Raises PipelineFailure(model_unavailable) naming the first tensor that is absent, left over or
    of another shape.
    """
    mine = {_saved(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name in sorted({*mine, *tensors}):
        if name not in mine or name not in tensors:
            holder = "the new adapter" if name in mine else "it"
            raise _refused(f"only {holder} has the tensor {name}")
        if mine[name].shape != tensors[name].shape:
            raise _refused(
                f"the tensor {name} has the shape {tuple(tensors[name].shape)}, the new adapter "
                f"needs {tuple(mine[name].shape)}"
            )
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])


def parent_sha256(folder: Path) -> str:
    """Hash of the weights that a job continues from."""
    return file_sha256(folder / ADAPTER)


def lineage(spec: JobSpec) -> dict[str, Any]:
    """What the report says of where the model comes from.

    lineage: the base, then every tuned model on the way, the oldest first. compared_with: what all
    changes are measured against, which is the base however many jobs there were.
    """
    if spec.parent_adapter is None:
        return {"lineage": [spec.model.name], "compared_with": spec.model.name}
    sha256 = parent_sha256(spec.parent_adapter)
    return {
        "lineage": [spec.model.name, *(spec.lineage or (f"adapter {sha256}",))],
        "compared_with": spec.model.name,
        "parent_adapter_sha256": sha256,
    }


def _check_shape(config: Mapping[str, Any], lora: LoraDefaults) -> None:
    targets = config.get("target_modules")
    found = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": sorted(targets) if isinstance(targets, list) else targets,
    }
    wanted = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    for name, value in wanted.items():
        if found[name] != value:
            raise _refused(f"its {name} is {found[name]}, the catalogue's lora.{name} is {value}")
    for name in _PLAIN:
        if config.get(name):
            raise _refused(f"its adapter_config.json sets {name}, which a job cannot continue")


def _saved(name: str) -> str:
    """A parameter's name in an adapter file: peft leaves out the adapter's own name."""
    return name.replace(".default.", ".")


def _refused(why: str) -> PipelineFailure:
    return PipelineFailure(
        "model_unavailable",
        f"The job cannot continue from this tuned model: {why}. Tune the base model instead.",
    )
