"""The spec of an analysis: a question about a job or its data, with what it may read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from jobspec.catalogue import BaseModelEntry
from jobspec.frozen import Frozen

FILE_NAME = r"^[a-z][a-z0-9_]{0,63}$"
MOST_SEED = 2**31 - 1


class AnalysedJob(Frozen):
    """A finished job's parts on this machine."""

    job_id: str = Field(min_length=1, max_length=128)
    base: BaseModelEntry = Field(description="the base model that the job tuned")
    bundle: Path = Field(description="folder with the adapter and report.json")
    training_file: Path = Field(description="rows that the job was tuned on")


class AnalysisSpec(Frozen):
    """One attempt of one analysis. Paths are local to the machine that runs it."""

    analysis_id: str = Field("local", min_length=1, max_length=128)
    kind: str = Field(min_length=1, max_length=128, description="name in analyses.registry")
    request: dict[str, Any] = Field(description="what is asked, checked by the kind's own class")
    files: dict[str, Path] = Field({}, description="by name, such as a field of the request")
    job: AnalysedJob | None = Field(None, description="where the kind reads a finished job")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="of all randomness in the method")
    cache_dir: Path = Field(description="content-addressed cache of converted models and factors")


def with_files(
    request: type[BaseModel], raw: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """The request with the files that stand beside it: a file whose name is a field of the kind's
    request, and that the request does not name itself, becomes that field's value."""
    return {**{name: at for name, at in files.items() if name in request.model_fields}, **raw}
