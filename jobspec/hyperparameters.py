"""Hyper-parameters of a supervised job, in OpenAI's names, and how "auto" is resolved."""

from typing import Annotated, Literal

from pydantic import Field, StrictInt

from jobspec.frozen import Frozen

Auto = Literal["auto"]


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


class ResolvedHyperparameters(Frozen):
    """The numbers that a job really uses."""

    n_epochs: int = Field(ge=1, le=50)
    batch_size: int = Field(ge=1, le=256)
    learning_rate_multiplier: float = Field(gt=0)


def resolve(asked: Hyperparameters, rows: int, default_batch_size: int) -> ResolvedHyperparameters:
    """Replace "auto": batch size of the base model's catalogue entry (never above the rows), and
    as many epochs as give about 300 seen rows, between 1 and 10."""
    batch_size = default_batch_size if asked.batch_size == "auto" else asked.batch_size
    n_epochs = (
        max(1, min(10, round(300 / max(rows, 1)))) if asked.n_epochs == "auto" else asked.n_epochs
    )
    multiplier = 1.0 if asked.learning_rate_multiplier == "auto" else asked.learning_rate_multiplier
    return ResolvedHyperparameters(
        n_epochs=n_epochs,
        batch_size=max(1, min(batch_size, rows)),
        learning_rate_multiplier=multiplier,
    )
