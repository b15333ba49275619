"""The bundle: everything that is released or quarantined, with a SHA-256 for every file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from defenses.panacea.layers import layer_coefficients
from evaluators.diversity.store import ANSWERS
from workers.pipeline.bundle import (
    ADAPTER,
    ADAPTER_BEFORE,
    ADAPTER_CONFIG,
    EPS,
    LAYER_CHART,
    MANIFEST,
    PERTURBATION,
    REPORT,
    SAMPLES,
    SCHEDULER,
)
from workers.pipeline.folders import write_folder
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import trainable
from workers.pipeline.perturb import Perturbed
from workers.pipeline.plots import layer_chart
from workers.pipeline.rows import PairRow, TokenRow
from workers.pipeline.tune import Tuned


class ArtifactChanged(RuntimeError):
    """The adapter on disk is not the one that was evaluated."""


def save_adapter(model: Any, base_name: str, folder: Path) -> str:
    """Write adapter_model.safetensors and adapter_config.json; returns the weights' SHA-256.

    The config names the catalogue entry, not a cache folder of this machine. Raises ArtifactChanged
    unless the file holds, bit for bit, the adapter that is in memory and will be evaluated.
    """

    def fill(aside: Path) -> None:
        model.save_pretrained(aside, safe_serialization=True)
        (aside / "README.md").unlink(missing_ok=True)
        path = aside / ADAPTER_CONFIG
        config = json.loads(path.read_text("utf-8"))
        config["base_model_name_or_path"] = base_name
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")

    write_folder(folder, fill)
    _check_saved(model, folder / ADAPTER)
    return file_sha256(folder / ADAPTER)


def _check_saved(model: Any, path: Path) -> None:
    """The artifact that is released is the very one that answers the evaluation's questions."""
    saved = load_file(path)
    for name, parameter in trainable(model).items():
        # peft leaves out the adapter's own name.
        tensor = saved.pop(name.replace(".default.", "."), None)
        if tensor is None or not _same_bits(tensor, parameter.detach().cpu()):
            raise ArtifactChanged(f"the saved adapter differs from the tuned one in {name}")
    if saved:
        raise ArtifactChanged(f"the saved adapter has a tensor too many: {min(saved)}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # torch.equal would call a NaN different from itself.
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def save_perturbation(model: Any, perturbed: Perturbed, folder: Path) -> None:
    """Write eps, the adapter as it was before it, and a chart of where eps acts.

    The two together allow the step to be rescaled or undone (stored_perturbation.py).
    """
    mode = str(perturbed.report["mode"])
    title = f"Where the change of {mode} acts (released at scale {perturbed.scale:g})"
    chart = layer_chart(layer_coefficients(perturbed.eps), perturbed.average, title)

    def fill(aside: Path) -> None:
        eps = {name: tensor.detach().cpu().contiguous() for name, tensor in perturbed.eps.items()}
        about = {"mode": mode, "scale": repr(perturbed.scale)}
        save_file(eps, aside / EPS, metadata=about)
        before = {name: p.detach().cpu().contiguous() for name, p in trainable(model).items()}
        save_file(before, aside / ADAPTER_BEFORE)
        (aside / LAYER_CHART).write_text(chart, "utf-8")

    write_folder(folder, fill)


def publish(
    bundle: Path,
    adapter: Path,
    adapter_sha256: str,
    tokenizer: Any,
    report: Mapping[str, Any],
    weights: pa.Table | None,
    samples: pa.Table,
    perturbation: Path | None,
    scheduler: Path | None = None,
    open_answers: pa.Table | None = None,
) -> None:
    """Assemble the bundle folder; it exists only when it is whole.

    samples: every answer with its scores (samples.sample_table). open_answers: those to open
    questions with their embeddings (evaluators.diversity.store), by which released models are
    compared; None: none were asked.
    perturbation, scheduler: folders that become the bundle's of these names; None: there is none.
    Raises ArtifactChanged if the adapter's hash is not the one that the gate judged.
    """
    if file_sha256(adapter / ADAPTER) != adapter_sha256:
        raise ArtifactChanged(
            "the adapter's file changed after it was evaluated; nothing is published"
        )

    def fill(aside: Path) -> None:
        tokenizer.save_pretrained(aside)
        _copy(adapter, aside)
        for name, folder in ((PERTURBATION, perturbation), (SCHEDULER, scheduler)):
            if folder is not None:
                (aside / name).mkdir()
                _copy(folder, aside / name)
        if weights is not None:
            pq.write_table(weights, aside / "safety_weights.parquet")
        pq.write_table(samples, aside / SAMPLES)
        if open_answers is not None:
            pq.write_table(open_answers, aside / ANSWERS, compression="zstd")
        text = json.dumps(report, indent=2, allow_nan=False)
        (aside / REPORT).write_text(text + "\n", "utf-8")
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


def weight_table(tuned: Tuned, rows: Sequence[TokenRow | PairRow]) -> pa.Table | None:
    """Per-row safety weights: row (from 0), line, logit (at the end), weight (that the model was
    tuned with last; mean 1 under softmax), rank (by the logit; 1 is trusted least), nll (last seen
    mean response loss, nats a token), trained tokens, kept (whether the row was learned in the
    end, where the method chose among them)."""
    weights, ranking = tuned.weights(), tuned.method.weights()
    if weights is None or ranking is None:
        return None
    logits = tuned.method.logits()
    kept = None if tuned.kept is None else set(tuned.kept)
    order = torch.argsort(ranking, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(1, len(rows) + 1)
    return pa.table(
        {
            "row": list(range(len(rows))),
            "line": [row.line for row in rows],
            "logit": [None] * len(rows) if logits is None else logits[: len(rows)].tolist(),
            "weight": weights.tolist(),
            "rank": rank.tolist(),
            "nll": tuned.last_nll.tolist(),
            "trained_tokens": [row.trained_tokens for row in rows],
            "kept": [kept is None or row in kept for row in range(len(rows))],
        }
    )


def _copy(source: Path, target: Path) -> None:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
