"""The bundle: everything that is released or quarantined, with a SHA-256 for every file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import Tensor

from evaluators.harmfulness.judge import HarmfulnessSample
from workers.pipeline.folders import write_folder
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import trainable
from workers.pipeline.rows import TokenRow
from workers.pipeline.tune import Tuned

ADAPTER = "adapter_model.safetensors"
MANIFEST = "manifest.json"


class ArtifactChanged(RuntimeError):
    """The adapter on disk is not the one that was evaluated."""


def save_adapter(model: Any, base_name: str, folder: Path) -> str:
    """Write adapter_model.safetensors and adapter_config.json; returns the weights' SHA-256.

    The config names the catalogue entry, not a cache folder of this machine.
    """

    def fill(aside: Path) -> None:
        model.save_pretrained(aside, safe_serialization=True)
        (aside / "README.md").unlink(missing_ok=True)
        path = aside / "adapter_config.json"
        config = json.loads(path.read_text("utf-8"))
        config["base_model_name_or_path"] = base_name
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")

    write_folder(folder, fill)
    return file_sha256(folder / ADAPTER)


def save_perturbation(model: Any, eps: Mapping[str, Tensor], scale: float, folder: Path) -> None:
    """Write eps and the adapter as it was before, so that the step can be rescaled or undone."""

    def fill(aside: Path) -> None:
        save_file({name: t.detach().cpu().contiguous() for name, t in eps.items()},
                  aside / "eps.safetensors", metadata={"scale": repr(scale)})  # fmt: skip
        before = {name: p.detach().cpu().contiguous() for name, p in trainable(model).items()}
        save_file(before, aside / "adapter_before.safetensors")

    write_folder(folder, fill)


def publish(
    bundle: Path,
    adapter: Path,
    adapter_sha256: str,
    tokenizer: Any,
    report: Mapping[str, Any],
    weights: pa.Table | None,
    samples: Mapping[str, Sequence[HarmfulnessSample]],
    perturbation: Path | None,
) -> None:
    """Assemble the bundle folder; it exists only when it is whole.

    Raises ArtifactChanged if the adapter's hash is not the one that the gate judged.
    """
    if file_sha256(adapter / ADAPTER) != adapter_sha256:
        raise ArtifactChanged(
            "the adapter's file changed after it was evaluated; nothing is published"
        )

    def fill(aside: Path) -> None:
        tokenizer.save_pretrained(aside)
        _copy(adapter, aside)
        if perturbation is not None:
            (aside / "perturbation").mkdir()
            _copy(perturbation, aside / "perturbation")
        if weights is not None:
            pq.write_table(weights, aside / "safety_weights.parquet")
        pq.write_table(_sample_table(samples), aside / "evaluation_samples.parquet")
        text = json.dumps(report, indent=2, allow_nan=False)
        (aside / "report.json").write_text(text + "\n", "utf-8")
        manifest = {
            "files": {
                path.relative_to(aside).as_posix(): {
                    "sha256": file_sha256(path),
                    "bytes": path.stat().st_size,
                }
                for path in sorted(aside.rglob("*"))
                if path.is_file()
            }
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")

    write_folder(bundle, fill)


def weight_table(tuned: Tuned, rows: Sequence[TokenRow]) -> pa.Table | None:
    """Per-row safety weights: row (from 0), line, logit, weight (mean 1 under softmax), rank (1 is
    trusted least), nll (last seen mean response loss, nats a token), trained tokens."""
    if tuned.scheduler is None:
        return None
    weights = tuned.scheduler.all_weights()
    order = torch.argsort(weights, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(1, len(rows) + 1)
    return pa.table(
        {
            "row": list(range(len(rows))),
            "line": [row.line for row in rows],
            "logit": tuned.scheduler.v_N.detach().tolist(),
            "weight": weights.tolist(),
            "rank": rank.tolist(),
            "nll": tuned.last_nll.tolist(),
            "trained_tokens": [row.trained_tokens for row in rows],
        }
    )


def _sample_table(samples: Mapping[str, Sequence[HarmfulnessSample]]) -> pa.Table:
    rows = [
        {"model": model, **sample.model_dump()}
        for model, answered in samples.items()
        for sample in answered
    ]
    return pa.Table.from_pylist(rows)


def _copy(source: Path, target: Path) -> None:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
