"""What a client may ask for when it creates a job, with OpenAI's bounds."""

import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from evaluators.gate import Rule
from jobspec.defense import DefenseRequest
from jobspec.hyperparameters import DpoHyperparameters, Hyperparameters
from jobspec.privacy import PrivacyOptions

MAX_SEED = 2**31 - 1
MAX_SUFFIX = 64
MAX_LABELS = 16
MAX_LABEL_KEY = 64
MAX_LABEL_VALUE = 512

_SUFFIX = re.compile(r"[A-Za-z0-9._-]+")


def _whole(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value == "auto" or (
            isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        ):
            return value
        raise ValueError(f'expected "auto" or a whole number from {low} to {high}')

    return check


def _positive(high: float = sys.float_info.max) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value == "auto":
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= high:
            return float(value)
        most = "" if high == sys.float_info.max else f" and at most {high:g}"
        raise ValueError(f'expected "auto" or a number above 0{most}')

    return check


class _Strict(BaseModel):
    """An unknown field is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HyperparametersRequest(_Strict):
    """Numbers or "auto"; null counts as left out."""

    n_epochs: Annotated[Any, BeforeValidator(_whole(1, 50))] = "auto"
    batch_size: Annotated[Any, BeforeValidator(_whole(1, 256))] = "auto"
    learning_rate_multiplier: Annotated[Any, BeforeValidator(_positive())] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value

    def asked(self) -> Hyperparameters:
        return Hyperparameters(
            n_epochs=self.n_epochs,
            batch_size=self.batch_size,
            learning_rate_multiplier=self.learning_rate_multiplier,
        )


class SupervisedRequest(_Strict):
    hyperparameters: HyperparametersRequest | None = None


class DpoHyperparametersRequest(HyperparametersRequest):
    """Those of direct preference optimisation."""

    beta: Annotated[Any, BeforeValidator(_positive(2))] = "auto"

    def asked(self) -> DpoHyperparameters:
        return DpoHyperparameters(
            n_epochs=self.n_epochs,
            batch_size=self.batch_size,
            learning_rate_multiplier=self.learning_rate_multiplier,
            beta=self.beta,
        )


class DpoRequest(_Strict):
    hyperparameters: DpoHyperparametersRequest | None = None


class MethodRequest(_Strict):
    """The method's name and the block of the same name."""

    type: Literal["supervised", "dpo", "reinforcement"] = "supervised"
    supervised: SupervisedRequest | None = None
    dpo: DpoRequest | None = None
    reinforcement: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_its_own_block(self) -> "MethodRequest":
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"the type is {self.type}, so leave the block `{name}` out")
        return self


class GateRequest(_Strict):
    """More rules for this job. The organisation's own rules always hold as well."""

    rules: tuple[Rule, ...] = Field((), max_length=50, description="rules to add")


class JobRequest(_Strict):
    """The body of POST /v1/fine_tuning/jobs; `defense`, `gate` and `privacy` are ours."""

    model: str = Field(min_length=1, max_length=256, description="a base model of the catalogue")
    training_file: str = Field(min_length=1, max_length=64, description="id of a fine-tune file")
    validation_file: str | None = Field(None, min_length=1, max_length=64)
    suffix: str | None = Field(None, min_length=1, max_length=MAX_SUFFIX)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, strict=True)
    method: MethodRequest | None = None
    hyperparameters: HyperparametersRequest | None = None
    integrations: list[dict[str, Any]] | None = Field(None, max_length=5)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_LABELS)
    defense: DefenseRequest | None = Field(None, description="how the job is defended")
    gate: GateRequest | None = Field(None, description="rules added to the gate policy")
    privacy: PrivacyOptions | None = Field(
        None, description="tune with differential privacy; left out: without"
    )

    @field_validator("suffix")
    @classmethod
    def _suffix_is_plain(cls, suffix: str | None) -> str | None:
        if suffix is not None and not _SUFFIX.fullmatch(suffix):
            raise ValueError("use only letters, digits, '.', '_' and '-'")
        return suffix

    @field_validator("metadata")
    @classmethod
    def _labels_are_short(cls, labels: dict[str, str] | None) -> dict[str, str] | None:
        for key, value in (labels or {}).items():
            if not 1 <= len(key) <= MAX_LABEL_KEY:
                raise ValueError(f"a key has 1 to {MAX_LABEL_KEY} characters")
            if len(value) > MAX_LABEL_VALUE:
                raise ValueError(f"a value has at most {MAX_LABEL_VALUE} characters")
        return labels
