"""The YAML file of `tunegate run`: a job without a service."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from jobspec.cache import default_cache_dir
from jobspec.catalogue import CatalogueError, load_catalogue
from jobspec.defense import DefenseRequest
from jobspec.frozen import Frozen
from jobspec.hyperparameters import Hyperparameters
from jobspec.spec import CheckpointOptions, EvaluationOptions, JobSpec


class LocalSpecError(ValueError):
    """The file cannot be used; the message names the field and what to do."""


class LocalSpec(Frozen):
    """Paths of files are relative to the spec file."""

    model: str | None = Field(None, description="catalogue name; None: the catalogue's default")
    training_file: Path
    validation_file: Path | None = None
    seed: int = Field(42, ge=0, le=2**31 - 1)
    hyperparameters: Hyperparameters = Hyperparameters()
    defense: DefenseRequest = DefenseRequest()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    policy: Path | dict[str, Any] | None = Field(
        None, description="gate policy: a file or its content; None: the shipped default"
    )
    max_length: int | None = Field(None, ge=16)
    truncate: bool = False
    catalogue: Path | None = None
    cache_dir: Path | None = None
    threads: int | None = Field(None, ge=1, le=1024)


def load_local_spec(path: Path) -> JobSpec:
    """Read and resolve a spec file. Raises LocalSpecError."""
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
        spec = LocalSpec.model_validate(raw)
    except OSError as error:
        raise LocalSpecError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LocalSpecError(f"{path}: not valid YAML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise LocalSpecError(f"{path}: {where}: {first['msg']}") from error
    folder = path.resolve().parent
    try:
        catalogue = load_catalogue(None if spec.catalogue is None else folder / spec.catalogue)
    except CatalogueError as error:
        raise LocalSpecError(f"{path}: catalogue: {error}") from error
    model = catalogue.default if spec.model is None else catalogue.find(spec.model)
    if model is None:
        known = ", ".join(entry.name for entry in catalogue.offered)
        raise LocalSpecError(f"{path}: model: {spec.model!r} is not in the catalogue ({known})")
    policy = spec.policy
    if isinstance(policy, Path):
        try:
            policy = yaml.safe_load((folder / policy).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise LocalSpecError(f"{path}: policy: {error}") from error
        if not isinstance(policy, dict):
            raise LocalSpecError(f"{path}: policy: expected a mapping with version and rules")
    for name in ("training_file", "validation_file"):
        value = getattr(spec, name)
        if value is not None and not (folder / value).is_file():
            raise LocalSpecError(f"{path}: {name}: there is no file {folder / value}")
    return JobSpec(
        model=model,
        training_file=folder / spec.training_file,
        validation_file=None if spec.validation_file is None else folder / spec.validation_file,
        seed=spec.seed,
        hyperparameters=spec.hyperparameters,
        defense=spec.defense.resolve(),
        evaluation=spec.evaluation,
        checkpoints=spec.checkpoints,
        policy=policy,
        max_length=spec.max_length,
        truncate=spec.truncate,
        cache_dir=default_cache_dir() if spec.cache_dir is None else folder / spec.cache_dir,
        threads=spec.threads,
    )
