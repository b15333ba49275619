"""Adapters of models that are in the artifact store: fetched, checked, and where they come from."""

import shutil
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.fine_tuning.attempts import JobError
from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.store.models import Job, ReleasedModel
from workers.bundles import (
    ADAPTER,
    ADAPTER_CONFIG,
    MANIFEST,
    REPORT,
    BundleDamaged,
    read_part,
)

LONGEST_LINEAGE = 1000
_PARTS = (ADAPTER, ADAPTER_CONFIG, REPORT)


class AdapterUnavailable(RuntimeError):
    """The stored adapter cannot be used; trying again would not help."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(why)
        self.error = JobError("model_unavailable", f"The model {model} {why}.")


def fetch_adapter(
    artifacts: ArtifactStore, model: str, location: str, manifest_sha256: str | None, target: Path
) -> Path:
    """Weights, config and report of a stored bundle in the folder `target`, checked against the
    bundle's manifest. A copy that is there and sound is kept. Raises AdapterUnavailable.
    """
    try:
        read_part(target, _PARTS, manifest_sha256)
    except (BundleDamaged, OSError):
        shutil.rmtree(target, ignore_errors=True)
    else:
        return target
    draft = target.with_name(f"{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for name in (*_PARTS, MANIFEST):
            with (draft / name).open("wb") as stream:
                for chunk in artifacts.iterate(f"{location}/{name}"):
                    stream.write(chunk)
        read_part(draft, _PARTS, manifest_sha256)
    except ArtifactMissing as error:
        raise AdapterUnavailable(model, "is no longer in the artifact store") from error
    except BundleDamaged as error:
        raise AdapterUnavailable(model, f"is damaged in the artifact store: {error}") from error
    return draft.replace(target)


def released(session: Session, organization_id: str, name: str) -> ReleasedModel:
    """The model that a job continues from. Raises AdapterUnavailable once it was withdrawn."""
    found = session.scalar(
        select(ReleasedModel).where(
            ReleasedModel.id == name,
            ReleasedModel.organization_id == organization_id,
            ReleasedModel.deleted_at.is_(None),
        )
    )
    if found is None:
        raise AdapterUnavailable(name, "was deleted before the job began")
    return found


def lineage(session: Session, name: str | None) -> tuple[str, ...]:
    """The tuned models from the base to `name`, the oldest first; withdrawn ones are in it."""
    names: list[str] = []
    while name is not None and name not in names and len(names) < LONGEST_LINEAGE:
        names.append(name)
        name = session.scalar(
            select(Job.parent_model)
            .join(ReleasedModel, ReleasedModel.job_id == Job.id)
            .where(ReleasedModel.id == name)
        )
    return tuple(reversed(names))
