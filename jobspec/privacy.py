"""Options of a job that tunes with differential privacy, and what they cannot be combined with."""

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from jobspec.catalogue import BaseModelEntry
from jobspec.defense import DefenseOptions, PerturbationOptions, PlainOptions
from jobspec.frozen import Frozen
from jobspec.hyperparameters import Method

PrivacyAttack = Literal["reconstruction", "reidentification", "attribute_inference", "membership"]


class PrivacyTarget(Frozen):
    """What an attacker may reach; the least noise that keeps it is looked for before tuning."""

    attack: PrivacyAttack = Field("reconstruction", description="what the attacker is after")
    baseline: float = Field(gt=0, lt=1, description="chance of success without the model")
    max_success: float = Field(
        gt=0, lt=1, description="largest chance of success allowed with the model"
    )

    @model_validator(mode="after")
    def _above_the_baseline(self) -> Self:
        if self.max_success <= self.baseline:
            raise ValueError(
                f"max_success {self.max_success:g} is not above the baseline {self.baseline:g}: "
                "no noise can make an attack do worse than its chance without the model"
            )
        return self


class PrivacyOptions(Frozen):
    """DP-SGD on the adapter. Give the noise itself, or the target that it has to keep."""

    noise_multiplier: float | None = Field(
        None, ge=0.3, le=1000, description="sigma: standard deviation of the noise over the clip"
    )
    target: PrivacyTarget | None = Field(
        None, description="largest success of an attack, instead of noise_multiplier"
    )
    clip: float = Field(
        1.0, gt=0, le=1000, description="C: largest L2 norm of a row's gradient (LoRA: 0.1 to 1)"
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="delta at which epsilon is shown; below 1 over the rows"
    )

    @model_validator(mode="after")
    def _noise_or_target(self) -> Self:
        if (self.noise_multiplier is None) == (self.target is None):
            raise ValueError("give exactly one of noise_multiplier and target")
        return self


class Unsuited(NamedTuple):
    """Why a job cannot be private as it stands. param: the field to change."""

    param: str
    message: str


def unsuited(
    privacy: PrivacyOptions | None,
    method: Method,
    defense: DefenseOptions,
    model: BaseModelEntry | None = None,
) -> Unsuited | None:
    """The first thing in a job that its privacy cannot be had with; None where there is none."""
    if privacy is None:
        return None
    if method != "supervised":
        return Unsuited(
            "method",
            f"privacy is for the method supervised; the method is {method}. Choose supervised, or "
            "leave privacy out",
        )
    if not isinstance(defense.scheduler, PlainOptions):
        return Unsuited(
            "defense.scheduler",
            f"with privacy every row counts alike, and {defense.scheduler.name} chooses or weighs "
            "rows, or reads sets that were made to fit them, which the noise does not pay for. Set "
            "defense.scheduler to none, or leave privacy out",
        )
    repair = defense.perturbation
    if isinstance(repair, PerturbationOptions) and repair.mode == "joint":
        return Unsuited(
            "defense.perturbation",
            "with privacy the perturbation cannot be tuned jointly. Set defense.perturbation to "
            "post_hoc, which reads the finished adapter alone, or leave privacy out",
        )
    return None if model is None else _unsuited_model(model)


def _unsuited_model(model: BaseModelEntry) -> Unsuited | None:
    lora = model.lora
    if lora.gradient_checkpointing:
        return Unsuited(
            "model",
            f"{model.name} tunes with gradient checkpointing, which has no gradients of single "
            "rows. Choose another model, or set lora.gradient_checkpointing to false in the "
            "catalogue",
        )
    if lora.dropout > 0:
        return Unsuited(
            "model",
            f"{model.name} tunes with dropout, whose mask depends on a row's place among the "
            "others, so its gradient is not its own. Choose another model, or set lora.dropout to "
            "0 in the catalogue",
        )
    if model.processes > 1:
        return Unsuited(
            "model",
            f"{model.name} tunes in {model.processes} processes, and privacy is for one. Choose "
            "another model, or set processes to 1 in the catalogue",
        )
    return None
