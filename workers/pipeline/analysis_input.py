"""The files of an analysis without a service: a request, and what lies beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jobspec.analysis import AnalysedJob, AnalysisSpec, with_files
from jobspec.cache import default_cache_dir
from jobspec.catalogue import BaseModelEntry, Catalogue, CatalogueError, load_catalogue
from jobspec.gate_run import ModelReferenceError, model_entry
from workers.pipeline.analysis import find_kind
from workers.pipeline.bundle import ADAPTER, REPORT
from workers.pipeline.failure import PipelineFailure

# Where `tunegate run` leaves the bundle of a finished job.
BUNDLES = ("released", "quarantine")


def local_spec(
    kind: str,
    source: Path,
    *,
    files: Mapping[str, Path],
    bundle: Path | None,
    training_file: Path | None,
    base: str | None,
    catalogue: Path | None,
    seed: int,
) -> AnalysisSpec:
    """The spec of a question in the file `source`. Raises PipelineFailure(invalid_analysis) naming
    the option or the field.

    A field of the request that names a file, by a path relative to `source`, is read as that file;
    `files` are given by name besides, and become the field of that name where it is left out.
    """
    given = {name: str(path) for name, path in files.items()}
    request = with_files(find_kind(kind).request, read_input(source), given)
    found = _named_files(request, source.resolve().parent)
    for name, path in files.items():
        if not path.exists():
            raise _bad(f"{name}: there is no file {path}", name)
        found[name] = path.resolve()
    if (bundle is None) != (training_file is None):
        missing = "--bundle" if bundle is None else "--training-file"
        raise _bad(f"{missing}: a job is given by --bundle and --training-file together", "job")
    job = None
    if bundle is not None and training_file is not None:
        job = _job(bundle, training_file, base, catalogue)
    return AnalysisSpec(
        kind=kind,
        request=request,
        files=found,
        job=job,
        seed=seed,
        cache_dir=default_cache_dir(),
    )


def read_input(source: Path) -> dict[str, Any]:
    """The request in a JSON or YAML file. Raises PipelineFailure(invalid_analysis)."""
    try:
        text = source.read_text("utf-8")
    except OSError as error:
        raise _bad(f"{source}: {error.strerror or error}", "input") from error
    except UnicodeDecodeError as error:
        raise _bad(f"{source}: is no text in UTF-8", "input") from error
    try:
        # JSON is YAML, but for numbers such as 1e-5, which YAML takes for text.
        raw = json.loads(text) if source.suffix.lower() == ".json" else yaml.safe_load(text)
        # YAML has values that JSON has not, such as dates.
        raw = json.loads(json.dumps(raw))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise _bad(f"{source}: not valid JSON or YAML ({error})", "input") from error
    if not isinstance(raw, dict):
        raise _bad(f"{source}: expected an object with the fields of the request", "input")
    return raw


def _named_files(request: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Files that top-level fields of the request name."""
    found = {}
    for name, value in request.items():
        if isinstance(value, str) and "\0" not in value and len(value) < 1024:
            path = folder / value
            try:
                there = path.is_file()
            except OSError:
                there = False
            if there:
                found[name] = path
    return found


def _job(
    bundle: Path, training_file: Path, base: str | None, catalogue: Path | None
) -> AnalysedJob:
    if not training_file.is_file():
        raise _bad(f"--training-file: there is no file {training_file}", "training_file")
    folder = _bundle_folder(bundle)
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        name, job_id = str(report["model"]["name"]), str(report["job_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad(
            f"--bundle: {folder / REPORT} is no report of a job ({type(error).__name__})", "bundle"
        ) from error
    try:
        known = load_catalogue(None if catalogue is None else catalogue.resolve())
    except CatalogueError as error:
        raise _bad(f"--catalogue: {error}", "catalogue") from error
    return AnalysedJob(
        job_id=job_id or "local",
        base=_base(base or name, known),
        bundle=folder,
        training_file=training_file.resolve(),
    )


def _base(name: str, known: Catalogue) -> BaseModelEntry:
    try:
        return model_entry(name, known, "float32")
    except ModelReferenceError as error:
        raise _bad(f"--base: {error}", "base") from error


def _bundle_folder(folder: Path) -> Path:
    """The bundle itself, or the one in the folder that `tunegate run` was given."""
    for found in (folder, *(folder / name for name in BUNDLES)):
        if (found / ADAPTER).is_file():
            return found.resolve()
    raise _bad(
        f"--bundle: {folder} has no {ADAPTER}, and no {' or '.join(BUNDLES)} folder with one",
        "bundle",
    )


def _bad(message: str, param: str) -> PipelineFailure:
    return PipelineFailure("invalid_analysis", message, param=param)
