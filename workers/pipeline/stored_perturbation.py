"""What can be done with a bundle's perturbation later: look at it, rescale it, undo it.

adapter(S) = adapter_before + S * eps;  S = 0 is the adapter before, bit for bit
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from defenses.panacea.layers import effective_change_norms, layer_coefficients, layer_number
from defenses.panacea.perturbation import global_norm, perturbed_parameters
from workers.pipeline.bundle import (
    ADAPTER,
    ADAPTER_BEFORE,
    ADAPTER_CONFIG,
    EPS,
    PERTURBATION,
    REPORT,
)
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.folders import write_folder
from workers.pipeline.hashing import file_sha256

NOTE = "rescaled.json"
NOT_JUDGED = (
    "The gate judged the adapter of the bundle, not this one. Run the evaluation again before "
    "anybody uses it."
)


class StoredPerturbation(NamedTuple):
    """eps and before: by the adapter's parameter names, on the CPU. scale: what was released.
    lora_scaling: alpha / r of the adapter. report: the bundle's account of the perturbation."""

    eps: dict[str, Tensor]
    before: dict[str, Tensor]
    mode: str
    scale: float
    lora_scaling: float
    report: dict[str, Any]


def load_perturbation(bundle: Path) -> StoredPerturbation:
    """Read a bundle's perturbation. Raises PipelineFailure(invalid_spec), saying what is wrong."""
    folder = bundle / PERTURBATION
    if not bundle.is_dir():
        raise _refused(f"{bundle}: no such folder. Name the folder of a bundle.")
    if not (folder / EPS).is_file() or not (folder / ADAPTER_BEFORE).is_file():
        raise _refused(
            f"{bundle} holds no perturbation: the job ran without one, or the folder is no bundle "
            "of an operator. Look for perturbation/eps.safetensors in it."
        )
    try:
        with safe_open(folder / EPS, framework="pt") as stored:
            about = stored.metadata() or {}
        eps, before = load_file(folder / EPS), load_file(folder / ADAPTER_BEFORE)
        config = json.loads((bundle / ADAPTER_CONFIG).read_text("utf-8"))
        report_path = bundle / REPORT
        report = json.loads(report_path.read_text("utf-8")) if report_path.is_file() else {}
        alpha, rank = float(config["lora_alpha"]), int(config["r"])
        scale = float(about.get("scale", "nan"))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _refused(f"{bundle} cannot be read: {error!r}. Copy the bundle anew.") from error
    _check_shapes(eps, before)
    account = report.get("defense", {}).get("perturbation", {})
    mode = about.get("mode", account.get("mode", "unknown"))
    return StoredPerturbation(eps, before, mode, scale, alpha / rank, account)


def describe_perturbation(bundle: Path) -> dict[str, Any]:
    """Norms, coefficients and scale of a bundle's perturbation, as plain values.

    by_layer: coefficient c_k, its average over the last joint steps where the report has one, and
    the norm of the effective change of the layer's matrices at scale 1.
    """
    stored = load_perturbation(bundle)
    found = layer_coefficients(stored.eps)
    average = stored.report.get("layer_coefficients_average") or {}
    changes = effective_change_norms(stored.before, stored.eps, stored.lora_scaling)
    by_layer = []
    for layer, share in found.by_layer.items():
        own = [norm for name, norm in changes.items() if layer_number(name) == layer]
        by_layer.append(
            {
                "layer": layer,
                "coefficient": share,
                "average": average.get(str(layer)),
                "effective_change": math.hypot(*own) if own else None,
            }
        )
    return {
        "mode": stored.mode,
        "fidelity": stored.report.get("fidelity"),
        "scale": None if math.isnan(stored.scale) else stored.scale,
        "rho": stored.report.get("rho"),
        "norm": global_norm(stored.eps),
        "adapter_norm": global_norm(stored.before),
        "by_layer": by_layer,
        "by_module": found.by_module,
        "by_factor": found.by_factor,
    }


def rescale_perturbation(bundle: Path, scale: float, out: Path) -> dict[str, Any]:
    """Write adapter_before + scale * eps to the new folder `out`, with the adapter's config.

    Raises PipelineFailure(invalid_spec): no perturbation in the bundle, shapes that differ, a scale
    that is negative or not finite, or an `out` that exists.
    """
    if not (math.isfinite(scale) and scale >= 0.0):
        raise _refused(f"The scale must be a finite number of at least 0, not {scale:g}.")
    if out.exists():
        raise _refused(f"{out} exists already. Name a folder that does not.")
    stored = load_perturbation(bundle)
    tensors = perturbed_parameters(stored.before, stored.eps, scale)
    saved = {_as_saved(name): tensor.contiguous() for name, tensor in tensors.items()}
    judged = file_sha256(bundle / ADAPTER) if (bundle / ADAPTER).is_file() else None
    about: dict[str, Any] = {}

    def fill(folder: Path) -> None:
        save_file(saved, folder / ADAPTER, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_bytes((bundle / ADAPTER_CONFIG).read_bytes())
        adapter = file_sha256(folder / ADAPTER)
        same = adapter == judged
        about.update(
            {
                "scale": scale,
                "released_scale": None if math.isnan(stored.scale) else stored.scale,
                "adapter_sha256": adapter,
                "judged_adapter_sha256": judged,
                "judged": same,
                "warning": None if same else NOT_JUDGED,
            }
        )
        (folder / NOTE).write_text(json.dumps(about, indent=2) + "\n", "utf-8")

    write_folder(out, fill)
    return about


def _check_shapes(eps: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    unlike = sorted(
        name
        for name in {*eps, *before}
        if name not in eps or name not in before or eps[name].shape != before[name].shape
    )
    if unlike:
        raise _refused(
            f"eps and the adapter before it do not belong together: {unlike[0]} differs"
            f"{f' (and {len(unlike) - 1} more)' if len(unlike) > 1 else ''}. Copy the bundle anew."
        )


def _as_saved(name: str) -> str:
    """A parameter's name in an adapter file: peft leaves out the adapter's own name."""
    return name.replace(".default.", ".")


def _refused(message: str) -> PipelineFailure:
    return PipelineFailure("invalid_spec", message)
