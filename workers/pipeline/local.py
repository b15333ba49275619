"""Commands of the pipeline that need no service: a job from a YAML file, and alignment."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from jobspec.local import LocalSpecError, load_local_spec
from jobspec.spec import JobSpec
from workers.pipeline.align import AlignmentRecipe, align
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.folders import write_folder
from workers.pipeline.pairs import packaged
from workers.pipeline.processes import ALONE, Processes
from workers.pipeline.run import run_job


def read_spec(path: Path) -> JobSpec:
    """The job of a YAML file. Raises PipelineFailure(invalid_spec)."""
    try:
        return load_local_spec(path)
    except LocalSpecError as error:
        raise PipelineFailure("invalid_spec", str(error)) from error


def run_local(
    spec: JobSpec, out: Path, emit: Emit, stop: Callable[[], bool], processes: Processes = ALONE
) -> None:
    """Run a job; `out` then holds report.json, and the bundle in released/ or quarantine/.

    A second call with the same `out` continues an interrupted run from its last checkpoint.
    """
    report = run_job(spec, out / "work", emit, stop, processes)
    if report is None:
        return
    passed = report["gate"]["verdict"] == "passed"
    for name in ("released", "quarantine"):
        shutil.rmtree(out / name, ignore_errors=True)
    target = out / ("released" if passed else "quarantine")
    write_folder(
        target, lambda folder: shutil.copytree(out / "work" / "bundle", folder, dirs_exist_ok=True)
    )
    shutil.copyfile(target / "report.json", out / "report.json")


def run_align(options: argparse.Namespace, emit: Emit, stop: Callable[[], bool]) -> None:
    """Make an alignment adapter for a base of the catalogue."""
    catalogue = load_catalogue(options.catalogue)
    entry = catalogue.find(options.base)
    if entry is None:
        known = ", ".join(entry.name for entry in catalogue.offered)
        raise PipelineFailure(
            "model_unavailable", f"{options.base} is not in the catalogue. Known: {known}."
        )
    chosen = {"steps": options.steps, "dtype": options.dtype}
    recipe = AlignmentRecipe(
        seed=options.seed, **{name: value for name, value in chosen.items() if value is not None}
    )

    def progress(step: int, total: int, loss: float) -> None:
        if stop():
            raise Stopped
        emit("progress", stage="aligning", done=step, total=total, loss=loss)

    align(
        entry,
        options.data,
        options.harmless or packaged("alignment_harmless.jsonl"),
        recipe,
        options.cache or default_cache_dir(),
        options.out,
        progress,
    )
    emit("message", level="info", message=f"The adapter is in {options.out}.", data=None)
