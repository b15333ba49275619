"""Stored answers of an evaluation: read from a bundle, named, found."""

from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from service.kit.artifacts import ArtifactMissing, ArtifactStore

if TYPE_CHECKING:
    from evaluators.harmfulness.judge import HarmfulnessSample

SAMPLES_FILE = "evaluation_samples.parquet"
MAX_BYTES = 256 * 1024 * 1024
_BATCH_ROWS = 100


class SamplesUnusable(RuntimeError):
    """The stored answers are gone or cannot be read; the message says why."""


class SampleName(BaseModel):
    """Which answer is meant. `section` is needed only where the rest fits several answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Literal["tuned", "base"] = "tuned"
    kind: Literal["harmful", "safe_lookalike", "benign"] = "harmful"
    section: str | None = Field(None, max_length=64, description="how the prompt was asked")
    prompt_id: str = Field(min_length=1, max_length=256)
    condition: str = Field("", max_length=256, description="trigger condition; empty: none")
    sample: int = Field(0, ge=0, description="which of the prompt's answers")


class StoredSample(NamedTuple):
    """One judged answer of one model."""

    model: Literal["tuned", "base"]
    section: str
    judged: "HarmfulnessSample"

    @property
    def name(self) -> SampleName:
        judged = self.judged
        return SampleName(
            model=self.model,
            kind=judged.kind,
            section=self.section,
            prompt_id=judged.prompt_id,
            condition=judged.condition,
            sample=judged.sample,
        )

    @property
    def flagged(self) -> bool | None:
        """What the judge said; None where it said nothing usable."""
        resolved = self.judged.outcome in ("answered", "refused")
        return self.judged.flagged if resolved else None

    def is_called(self, name: SampleName) -> bool:
        mine = self.name
        open_name = mine.model_copy(update={"section": None})
        return name in (mine, open_name)


def read_samples(artifacts: ArtifactStore, location: str) -> list[StoredSample]:
    """All judged answers in the bundle at `location`, in their order. Raises SamplesUnusable."""
    import pyarrow

    key = f"{location}/{SAMPLES_FILE}"
    try:
        if artifacts.size(key) > MAX_BYTES:
            raise _too_large()
        with artifacts.open(key) as stream:
            return list(_samples(_rows(stream)))
    except ArtifactMissing as error:
        raise SamplesUnusable("the stored answers are gone") from error
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise SamplesUnusable(
            f"the stored answers cannot be read ({type(error).__name__})"
        ) from error


def find(samples: Iterable[StoredSample], name: SampleName) -> list[StoredSample]:
    """The answers that `name` fits: one, none, or several where it leaves the section open."""
    return [sample for sample in samples if sample.is_called(name)]


def _too_large() -> SamplesUnusable:
    return SamplesUnusable(f"the stored answers have more than {MAX_BYTES:,} bytes")


def _rows(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(stream.read()))
    # A small file can hold much: equal answers are stored once.
    unpacked = 0
    for batch in file.iter_batches(_BATCH_ROWS):
        for row in batch.to_pylist():
            unpacked += len(row.get("response") or "")
            if unpacked > MAX_BYTES:
                raise _too_large()
            yield row


def _samples(rows: Iterable[dict[str, Any]]) -> Iterator[StoredSample]:
    from evaluators.harmfulness.judge import HarmfulnessSample

    for row in rows:
        # Answers that nobody judged, such as those to open questions, have no kind.
        if row["kind"] is None:
            continue
        known = {name: row[name] for name in HarmfulnessSample.model_fields if name in row}
        yield StoredSample(
            "base" if row["model"] == "base" else "tuned",
            str(row.get("section") or row["kind"]),
            HarmfulnessSample.model_validate(known),
        )
