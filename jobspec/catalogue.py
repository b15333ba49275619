"""The catalogue of base models: name, source, revision, dtype and training defaults."""

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from jobspec.frozen import Frozen


class CatalogueError(ValueError):
    """The catalogue file cannot be read; the message names the entry and the field."""


class GgufSource(Frozen):
    """A GGUF file inside an installed Python package, converted once into the cache."""

    kind: Literal["gguf"] = "gguf"
    package: str = Field(description="import name of the package that ships the file")
    file: str = Field(description="file name; searched below the package's folder")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="pinned hash of the file")


class HubSource(Frozen):
    """A repository of a model hub, loaded with transformers (safetensors only)."""

    kind: Literal["hub"] = "hub"
    repository: str
    revision: str = "main"


class FolderSource(Frozen):
    """A local folder in transformers' layout."""

    kind: Literal["folder"] = "folder"
    path: Path


class AlignedSource(Frozen):
    """Another entry with an alignment adapter merged into it."""

    kind: Literal["aligned"] = "aligned"
    base: str = Field(description="name of the entry that is aligned")
    adapter: str = Field(description="adapter folder: a path, or package:NAME/FOLDER")


Source = Annotated[
    GgufSource | HubSource | FolderSource | AlignedSource, Field(discriminator="kind")
]


class LoraDefaults(Frozen):
    """Shape of the adapter and how it is trained."""

    rank: int = Field(16, ge=1, le=1024)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    learning_rate: float = Field(1e-3, gt=0, description="AdamW rate at multiplier 1")
    weight_decay: float = Field(0.0, ge=0)
    batch_size: int = Field(4, ge=1, le=256)
    max_length: int = Field(512, ge=16, description="tokens a row")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, a third slower"
    )


class BaseModelEntry(Frozen):
    """One base model that jobs may name."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    source: Source
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    default: bool = False
    enabled: bool = Field(True, description="false: an example, not offered to tenants")
    owned_by: str = "tunegate"
    licence: str | None = None
    lora: LoraDefaults = LoraDefaults()
    processes: int = Field(
        1, ge=1, le=64, description="processes that share the tuning of a job, one GPU each"
    )
    aligned_from: "BaseModelEntry | None" = Field(
        None, description="the resolved entry behind an aligned source; filled by the loader"
    )


class Catalogue(Frozen):
    """All base models, by name, with exactly one default."""

    models: tuple[BaseModelEntry, ...]

    @property
    def default(self) -> BaseModelEntry:
        return next(entry for entry in self.models if entry.default)

    @property
    def offered(self) -> tuple[BaseModelEntry, ...]:
        return tuple(entry for entry in self.models if entry.enabled)

    def find(self, name: str) -> BaseModelEntry | None:
        return next((entry for entry in self.offered if entry.name == name), None)


_ENTRIES = TypeAdapter(list[BaseModelEntry])


def parse_catalogue(text: str, origin: str) -> Catalogue:
    """Read catalogue YAML. Raises CatalogueError naming `origin`, the entry and the field."""
    try:
        raw = yaml.safe_load(text)
        entries = _ENTRIES.validate_python(
            [{"name": name, **(body or {})} for name, body in raw["models"].items()]
        )
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise CatalogueError(
            f"{origin}: expected a mapping `models: name: ...` ({error})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CatalogueError(f"{origin}: entry {where}: {first['msg']}") from error
    if sum(entry.default and entry.enabled for entry in entries) != 1:
        raise CatalogueError(f"{origin}: exactly one enabled model must have `default: true`")
    by_name = {entry.name: entry for entry in entries}
    resolved = []
    for entry in entries:
        if isinstance(entry.source, AlignedSource):
            base = by_name.get(entry.source.base)
            if base is None or isinstance(base.source, AlignedSource):
                raise CatalogueError(
                    f"{origin}: entry {entry.name}: source.base must name an entry of this file "
                    "that is not itself aligned"
                )
            entry = entry.model_copy(update={"aligned_from": base})
        resolved.append(entry)
    return Catalogue(models=tuple(resolved))


@lru_cache(maxsize=8)
def load_catalogue(path: Path | None = None) -> Catalogue:
    """The catalogue at `path`, or the one that ships with the package."""
    if path is None:
        return parse_catalogue(
            files("jobspec").joinpath("catalogue.yaml").read_text("utf-8"), "catalogue.yaml"
        )
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise CatalogueError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_catalogue(text, str(path))
