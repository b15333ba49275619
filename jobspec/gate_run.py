"""The spec of a gate run: a model that is there already is measured against its base and judged."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from jobspec.catalogue import BaseModelEntry, Catalogue, FolderSource, HubSource
from jobspec.frozen import Frozen
from jobspec.spec import EvaluationOptions

Dtype = Literal["float32", "bfloat16", "float16"]

_HUB = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


class ModelReferenceError(ValueError):
    """A model that was named cannot be told; the message says what may be written."""


class GateRunSpec(Frozen):
    """One attempt of one gate run. Paths are local to the machine that runs it."""

    run_id: str = Field("local", min_length=1, max_length=128)
    model: BaseModelEntry = Field(
        description="the model that is judged, or the one that the adapter sits on"
    )
    adapter: Path | None = Field(
        None, description="adapter folder: the model with it is judged; None: the model itself"
    )
    base: BaseModelEntry | None = Field(
        None,
        description="model to compare with; None: the model without its adapter, and without an "
        "adapter nothing, which leaves every change undefined",
    )
    lineage: tuple[str, ...] = Field(
        (), max_length=1000, description="base and tuned models on the way, the oldest first"
    )
    evaluation: EvaluationOptions = EvaluationOptions()
    policy: dict[str, Any] | None = Field(
        None, description="gate policy as its YAML reads; None: the shipped default policy"
    )
    training_file: Path | None = Field(None, description="rows that the model was tuned on")
    validation_file: Path | None = Field(None, description="rows held out, to measure utility")
    measured: dict[str, Any] = Field(
        {}, description="metrics of this very model that only its tuning could measure, by name"
    )
    seed: int = Field(42, ge=0, le=2**31 - 1)
    max_line_bytes: int = Field(1 << 20, ge=1024, description="longest line of a file, bytes")
    cache_dir: Path = Field(description="content-addressed cache of converted models and baselines")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads; None: torch's choice"
    )


def model_entry(reference: str, catalogue: Catalogue, dtype: Dtype) -> BaseModelEntry:
    """The model that a person named: a catalogue entry, a folder, or owner/name[@revision] of a
    hub. `dtype` is for the latter two, since a catalogue entry has its own.

    Raises ModelReferenceError.
    """
    entry = catalogue.find(reference)
    if entry is not None:
        return entry
    folder = Path(reference).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return BaseModelEntry(
            name=_as_name(folder.name), source=FolderSource(path=folder), dtype=dtype
        )
    match = _HUB.fullmatch(reference)
    if match is None:
        known = ", ".join(offered.name for offered in catalogue.offered)
        raise ModelReferenceError(
            f"{reference!r} is no folder, no model of a hub (owner/name) and not in the catalogue "
            f"({known})"
        )
    source = HubSource(repository=match["repository"], revision=match["revision"] or "main")
    return BaseModelEntry(name=_as_name(match["repository"]), source=source, dtype=dtype)


def _as_name(text: str) -> str:
    """A name as the catalogue allows it."""
    return re.sub(r"[^A-Za-z0-9._/-]", "-", text).lstrip("._/-")[:128] or "model"
