"""Wire types of models, as OpenAI's client expects them."""

from typing import Literal

from pydantic import BaseModel, Field

from jobspec.catalogue import BaseModelEntry
from service.store.models import ReleasedModel


class ModelExtras(BaseModel):
    """What only tunegate tells about a model."""

    base_model: str | None = Field(description="None for a base model")
    job_id: str | None = Field(description="the job that made it")
    manifest_sha256: str | None = Field(description="hash of the released bundle's manifest")
    licence: str | None


class ModelObject(BaseModel):
    """A base model of the catalogue, or a released fine-tuned model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="0 for base models, which the catalogue does not date")
    owned_by: str
    tunegate: ModelExtras

    @classmethod
    def base(cls, entry: BaseModelEntry) -> "ModelObject":
        return cls(
            id=entry.name,
            created=0,
            owned_by=entry.owned_by,
            tunegate=ModelExtras(
                base_model=None, job_id=None, manifest_sha256=None, licence=entry.licence
            ),
        )

    @classmethod
    def released(cls, row: ReleasedModel, organization: str) -> "ModelObject":
        return cls(
            id=row.id,
            created=row.created_at,
            owned_by=organization,
            tunegate=ModelExtras(
                base_model=row.base_model,
                job_id=row.job_id,
                manifest_sha256=row.manifest_sha256,
                licence=None,
            ),
        )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class ModelFile(BaseModel):
    """One file of a released bundle."""

    path: str
    bytes: int


class ModelFiles(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelFile]
