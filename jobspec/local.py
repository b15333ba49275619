"""The YAML file of `tunegate run`: a job without a service."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from jobspec.cache import default_cache_dir
from jobspec.catalogue import CatalogueError, load_catalogue
from jobspec.defense import DefenseRequest
from jobspec.hyperparameters import TrainingMethod
from jobspec.privacy import PrivacyOptions, unsuited
from jobspec.spec import CheckpointOptions, EvaluationOptions, JobSpec, mismatch


class LocalSpecError(ValueError):
    """The file cannot be used; the message names the field and what to do."""


class LocalSpec(TrainingMethod):
    """Paths of files are relative to the spec file."""

    model: str | None = Field(None, description="catalogue name; None: the catalogue's default")
    training_file: Path
    validation_file: Path | None = None
    seed: int = Field(42, ge=0, le=2**31 - 1)
    defense: DefenseRequest = DefenseRequest()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    policy: Path | dict[str, Any] | None = Field(
        None, description="gate policy: a file or its content; None: the shipped default"
    )
    max_length: int | None = Field(None, ge=16)
    truncate: bool = False
    alignment_file: Path | None = None
    harmful_file: Path | None = None
    scheduler_checkpoint: Path | None = None
    catalogue: Path | None = None
    cache_dir: Path | None = None
    threads: int | None = Field(None, ge=1, le=1024)
    privacy: PrivacyOptions | None = Field(
        None, description="tune with differential privacy; None: without"
    )


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
        raise LocalSpecError(f"{path}: {_first_fault(error)}") from error
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
    scorer_name = getattr(spec.defense.resolve().scheduler, "scorer_model", None)
    scorer = None if scorer_name is None else catalogue.find(scorer_name)
    if scorer_name is not None and scorer is None:
        raise LocalSpecError(
            f"{path}: defense.scheduler.scorer_model: {scorer_name!r} is not in the catalogue"
        )
    for name in ("training_file", "validation_file", "alignment_file", "harmful_file"):
        value = getattr(spec, name)
        if value is not None and not (folder / value).is_file():
            raise LocalSpecError(f"{path}: {name}: there is no file {folder / value}")
    defense = spec.defense.resolve()
    if problem := mismatch(spec.method, defense):
        raise LocalSpecError(f"{path}: defense.scheduler: {problem}")
    if unfit := unsuited(spec.privacy, spec.method, defense, model):
        raise LocalSpecError(f"{path}: {unfit.param}: {unfit.message}")
    return JobSpec(
        model=model,
        training_file=folder / spec.training_file,
        validation_file=_beside(folder, spec.validation_file),
        seed=spec.seed,
        method=spec.method,
        hyperparameters=spec.hyperparameters,
        defense=defense,
        evaluation=spec.evaluation,
        checkpoints=spec.checkpoints,
        policy=policy,
        alignment_file=_beside(folder, spec.alignment_file),
        harmful_file=_beside(folder, spec.harmful_file),
        scheduler_checkpoint=_beside(folder, spec.scheduler_checkpoint),
        scorer=scorer,
        max_length=spec.max_length,
        truncate=spec.truncate,
        cache_dir=default_cache_dir() if spec.cache_dir is None else folder / spec.cache_dir,
        threads=spec.threads,
        privacy=spec.privacy,
    )


def _beside(folder: Path, path: Path | None) -> Path | None:
    return None if path is None else folder / path


def _first_fault(error: ValidationError) -> str:
    """Field and message. A union reports the complaint of each member; the deepest is meant."""
    problems = error.errors()
    same = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    deepest = max(same, key=lambda problem: len(_field(problem["loc"])))
    return f"{'.'.join(_field(deepest['loc'])) or 'the file'}: {deepest['msg']}"


def _field(location: Sequence[int | str]) -> list[str]:
    """A location without the names of unions and of their chosen members."""
    parts = [str(part) for part in location]
    unions = [index for index, part in enumerate(parts) if part.startswith("tagged-union[")]
    added = {*unions, *(index + 1 for index in unions)}
    return [
        part
        for index, part in enumerate(parts)
        if index not in added and not part.startswith("literal[")
    ]
