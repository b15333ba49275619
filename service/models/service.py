"""Decisions about models: which exist for a caller, and which may be deleted."""

from typing import NamedTuple

from sqlalchemy.orm import Session

from jobspec.catalogue import Catalogue
from service.kit.artifacts import ArtifactStore
from service.kit.clock import now
from service.kit.errors import ApiError
from service.models.repository import ModelRepository
from service.models.schemas import ModelFile, ModelObject
from service.organizations.service import Caller
from service.store.models import ReleasedModel

OPERATOR_FILES = ("perturbation/", "scheduler/", "evaluation_samples.parquet")


class BundleFile(NamedTuple):
    """Where a file of a bundle is stored, and its size."""

    key: str
    bytes: int


def not_found(name: str) -> ApiError:
    """One answer for a model that is unknown, deleted, in quarantine or somebody else's."""
    return ApiError(
        404,
        f"The model '{name}' does not exist or you do not have access to it.",
        "model_not_found",
        "model",
    )


def visible(session: Session, catalogue: Catalogue, caller: Caller) -> list[ModelObject]:
    """Base models on offer, then the organisation's released ones."""
    released = ModelRepository(session, caller.organization_id).all()
    return [
        *(ModelObject.base(entry) for entry in catalogue.offered),
        *(ModelObject.released(row, caller.organization) for row in released),
    ]


def find(session: Session, catalogue: Catalogue, caller: Caller, name: str) -> ModelObject:
    """Raises ApiError 404."""
    entry = catalogue.find(name)
    if entry is not None:
        return ModelObject.base(entry)
    return ModelObject.released(find_released(session, caller, name), caller.organization)


def find_released(session: Session, caller: Caller, name: str) -> ReleasedModel:
    """Raises ApiError 404."""
    row = ModelRepository(session, caller.organization_id).get(name)
    if row is None:
        raise not_found(name)
    return row


def mark_deleted(
    session: Session, catalogue: Catalogue, caller: Caller, name: str
) -> ReleasedModel:
    """Withdraw a released model; its bundle goes after the commit. Raises ApiError 403 or 404."""
    if catalogue.find(name) is not None:
        raise ApiError(
            403,
            f"{name} is a base model; only an operator can take it out of the catalogue.",
            "insufficient_permissions",
            "model",
        )
    row = ModelRepository(session, caller.organization_id).get(name, lock=True)
    if row is None:
        raise not_found(name)
    row.deleted_at = int(now())
    return row


def bundle(artifacts: ArtifactStore, row: ReleasedModel) -> list[ModelFile]:
    """The files of a released model that its tenant may download, by name."""
    return [
        ModelFile(path=key.removeprefix(f"{row.location}/"), bytes=artifacts.size(key))
        for key in _downloadable(artifacts, row)
    ]


def bundle_file(artifacts: ArtifactStore, row: ReleasedModel, path: str) -> BundleFile:
    """One file of a released model. Raises ApiError 404."""
    key = f"{row.location}/{path}"
    # Looked up in the listing, so that no path can lead out of the bundle.
    if key not in _downloadable(artifacts, row):
        raise ApiError(404, f"The model has no file {path}", "file_not_found", "path")
    return BundleFile(key, artifacts.size(key))


def _downloadable(artifacts: ArtifactStore, row: ReleasedModel) -> list[str]:
    """Keys of the bundle without the operator's part: the adapter as it was before the
    perturbation never passed the gate, and the samples hold the evaluation's prompts."""
    kept = [f"{row.location}/{name}" for name in OPERATOR_FILES]
    return [key for key in artifacts.list(row.location) if not key.startswith(tuple(kept))]
