"""A job's method and its hyper-parameters, in OpenAI's names, and how "auto" is resolved."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictInt, Tag, model_validator

from jobspec.frozen import Frozen

Auto = Literal["auto"]
Method = Literal["supervised", "dpo"]

DEFAULT_BETA = 0.1
DPO_RATE_MULTIPLIER = 0.2


class Hyperparameters(Frozen):
    """As a client asks for them: numbers or "auto"."""

    n_epochs: Auto | Annotated[StrictInt, Field(ge=1, le=50)] = Field(
        "auto", description="passes over the training file, 1 to 50"
    )
    batch_size: Auto | Annotated[StrictInt, Field(ge=1, le=256)] = Field(
        "auto", description="rows of the training file a step, 1 to 256"
    )
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = Field(
        "auto", description="factor on the base model's own learning rate, above 0"
    )


class DpoHyperparameters(Hyperparameters):
    """Those of direct preference optimisation; a row is a pair of answers."""

    beta: Auto | Annotated[float, Field(gt=0, le=2)] = Field(
        "auto", description="how strongly the model is held to the one before tuning, up to 2"
    )


class ResolvedHyperparameters(Frozen):
    """The numbers that a job really uses."""

    n_epochs: int = Field(ge=1, le=50, description="passes over the training file")
    batch_size: int = Field(ge=1, le=256, description="rows of the training file a step")
    learning_rate_multiplier: float = Field(gt=0, description="factor on the base's rate")


class ResolvedDpoHyperparameters(ResolvedHyperparameters):
    """The numbers that a DPO job really uses."""

    beta: float = Field(gt=0, le=2, description="beta of the DPO loss")


def _has_beta(value: Any) -> str:
    found = "beta" in value if isinstance(value, Mapping) else isinstance(value, DpoHyperparameters)
    return "dpo" if found else "supervised"


class TrainingMethod(Frozen):
    """What a job learns from its rows, shared by the job spec and the local spec file."""

    method: Method = Field(
        "supervised", description="supervised: learn the answers; dpo: prefer one to another"
    )
    hyperparameters: Annotated[
        Annotated[Hyperparameters, Tag("supervised")] | Annotated[DpoHyperparameters, Tag("dpo")],
        Discriminator(_has_beta),
    ] = Hyperparameters()

    @model_validator(mode="before")
    @classmethod
    def _dpo_has_a_beta(cls, values: Any) -> Any:
        """Left out, beta is "auto", whatever else of the hyper-parameters is given."""
        if not isinstance(values, Mapping) or values.get("method") != "dpo":
            return values
        asked = values.get("hyperparameters", {})
        if isinstance(asked, Hyperparameters):
            asked = asked.model_dump()
        if isinstance(asked, Mapping):
            asked = {"beta": "auto", **asked}
        return {**values, "hyperparameters": asked}

    @model_validator(mode="after")
    def _beta_is_of_dpo(self) -> "TrainingMethod":
        if self.method != "dpo" and isinstance(self.hyperparameters, DpoHyperparameters):
            raise ValueError(f"beta is not a hyper-parameter of the method {self.method}")
        return self


def resolve(asked: Hyperparameters, rows: int, default_batch_size: int) -> ResolvedHyperparameters:
    """Replace "auto".

    Batch size: that of the base model's catalogue entry, never above the rows. Epochs: as many as
    give about 300 seen rows, between 1 and 10. Learning rate multiplier: 1, and 0.2 for DPO (our
    choice: a catalogue's rate is that of supervised tuning, and TRL's recipes tune with DPO at a
    20th to a 40th of it; ours are short). beta: 0.1, as in the experiments of arXiv 2305.18290.
    """
    batch_size = default_batch_size if asked.batch_size == "auto" else asked.batch_size
    n_epochs = (
        max(1, min(10, round(300 / max(rows, 1)))) if asked.n_epochs == "auto" else asked.n_epochs
    )
    multiplier = asked.learning_rate_multiplier
    if multiplier == "auto":
        multiplier = DPO_RATE_MULTIPLIER if isinstance(asked, DpoHyperparameters) else 1.0
    resolved = ResolvedHyperparameters(
        n_epochs=n_epochs,
        batch_size=max(1, min(batch_size, rows)),
        learning_rate_multiplier=multiplier,
    )
    if not isinstance(asked, DpoHyperparameters):
        return resolved
    beta = DEFAULT_BETA if asked.beta == "auto" else asked.beta
    return ResolvedDpoHyperparameters(**resolved.model_dump(), beta=beta)
