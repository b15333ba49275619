"""One cell, in a process of its own: build the set, tune, change the adapter, measure.

python -m benchmarks.defenses.cell SETTINGS.json OUT.json --cache FOLDER --threads 1
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.defenses.rung import Prepared
from benchmarks.defenses.settings import CellSettings
from defenses.baselines.prefilter import unflagged_rows
from defenses.bds.ranking import effective_sample_size, separation_auc
from defenses.panacea.perturbation import apply_perturbation, global_norm
from jobspec.defense import PrefilterOptions, SchedulerOptions
from jobspec.spec import CheckpointOptions
from workers.pipeline.models import trainable
from workers.pipeline.training import TuneSettings
from workers.pipeline.tune import Tuned, tune

# A cell is short and not resumed inside, so its training state is never worth writing.
NO_CHECKPOINTS = CheckpointOptions(every_steps=10**9, every_seconds=1e9)
LIBRARIES = ("torch", "transformers", "peft")


def prepare(settings: CellSettings, cache: Path) -> Prepared:
    """The rung's model and sets."""
    if settings.rung == "toy":
        from benchmarks.defenses.toy_rung import prepare_toy

        return prepare_toy(settings, cache)
    from benchmarks.defenses.text_rung import prepare_text

    return prepare_text(settings, cache)


def run_cell(settings: CellSettings, cache: Path) -> dict[str, Any]:
    """Run a cell and return its result as plain values."""
    started = time.monotonic()
    torch.manual_seed(settings.seed)
    prepared = prepare(settings, cache)
    tuning_started = time.monotonic()
    kept = _kept(prepared)
    tuned = _tune(prepared, settings, kept)
    learned = kept if tuned.kept is None else [kept[i] for i in tuned.kept]
    tuning_seconds = time.monotonic() - tuning_started
    change, norm = nullcontext(), 0.0
    if prepared.defense.perturbation.mode != "none":
        delta = prepared.repair(tuned)
        norm = settings.scale * global_norm(delta)
        change = apply_perturbation(trainable(prepared.model), delta, settings.scale)  # type: ignore[assignment]
    repaired = time.monotonic()
    with change:
        metrics = prepared.measure()
    return {
        "key": settings.key,
        "settings": settings.model_dump(mode="json"),
        "defense": prepared.defense.model_dump(mode="json"),
        "metrics": {name: metric.model_dump(mode="json") for name, metric in metrics.items()},
        "rows": len(prepared.poisoned),
        "poisoned": sum(prepared.poisoned),
        "kept": len(learned),
        "kept_poisoned": sum(prepared.poisoned[i] for i in learned),
        "manifest_sha256": prepared.manifest_sha256,
        "dropped": prepared.dropped,
        "alignment_rows": len(prepared.data.alignment),
        "steps": tuned.steps,
        "counters": tuned.counters,
        "change_norm": norm,
        **_weights(prepared, tuned, kept),
        "seconds": {
            "preparing": round(tuning_started - started, 2),
            "tuning": round(tuning_seconds, 2),
            "repairing": round(repaired - tuning_started - tuning_seconds, 2),
            "measuring": round(time.monotonic() - repaired, 2),
            "total": round(time.monotonic() - started, 2),
            # Of the whole process; on a shared machine wall time says little.
            "cpu": round(time.process_time(), 2),
        },
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": {name: version(name) for name in LIBRARIES},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "error": None,
    }


def _kept(prepared: Prepared) -> list[int]:
    if not isinstance(prepared.defense.scheduler, PrefilterOptions):
        return list(range(len(prepared.poisoned)))
    return unflagged_rows(prepared.flagged())


def _tune(prepared: Prepared, settings: CellSettings, kept: list[int]) -> Tuned:
    scheduler = prepared.defense.scheduler
    neural = isinstance(scheduler, SchedulerOptions) and scheduler.form == "neural"
    rows: Sequence[Any] = prepared.data.user
    data = prepared.data._replace(user=[rows[i] for i in kept])
    with tempfile.TemporaryDirectory(prefix="tunegate-cell-") as work:
        return tune(
            prepared.model,
            data,
            TuneSettings(
                hyperparameters=prepared.hyperparameters,
                lora=prepared.lora,
                defense=prepared.defense,
                checkpoints=NO_CHECKPOINTS,
                seed=settings.seed,
                key=settings.key,
                features=prepared.features() if neural else None,
            ),
            Path(work),
            lambda event, **fields: None,
            lambda: False,
        )


def _weights(prepared: Prepared, tuned: Tuned, kept: list[int]) -> dict[str, float | None]:
    """How the method's row weights relate to the poison; None for methods without weights.

    A filter weighs a row 0 or 1; its weights are scaled to mean 1 like the others.
    """
    harmful = torch.tensor(prepared.poisoned)
    found = tuned.method.weights()
    if isinstance(prepared.defense.scheduler, PrefilterOptions):
        found = torch.zeros(len(harmful), dtype=torch.float64)
        found[kept] = len(harmful) / len(kept)
    if found is None:
        return dict.fromkeys(("auc", "effective_sample_size", "weight_poison", "weight_benign"))
    both = bool(harmful.any()) and not bool(harmful.all())
    return {
        "auc": separation_auc(found, harmful) if both else None,
        "effective_sample_size": effective_sample_size(found),
        "weight_poison": float(found[harmful].mean()) if bool(harmful.any()) else None,
        "weight_benign": float(found[~harmful].mean()) if not bool(harmful.all()) else None,
    }


def peak_memory_bytes() -> int | None:
    """Peak resident memory of this process (VmHWM), counted from the start of its program."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one cell of the attack bench.")
    parser.add_argument("settings", type=Path, help="cell settings, JSON")
    parser.add_argument("out", type=Path, help="where the result goes, JSON")
    parser.add_argument("--cache", type=Path, required=True, help="folder of made models")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = CellSettings.model_validate_json(options.settings.read_text("utf-8"))
    result = run_cell(settings, options.cache)
    aside = options.out.with_suffix(".part")
    aside.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
    os.replace(aside, options.out)


if __name__ == "__main__":
    main()
