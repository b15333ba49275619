"""Options of every defense that a job can name, with bounds.

Two places, each filled by one method: `scheduler` is what acts while the model tunes (the BDS data
scheduler or one of the methods it is compared with), `perturbation` is what acts on the finished
adapter (the Panacea perturbation or one of its competitors). Where a default differs from the
papers', the description names the release's value and docs/defenses.md the reason.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from jobspec.frozen import Frozen

Beta = Annotated[float, Field(ge=0, lt=1)]


class CanaryOptions(Frozen):
    """Rows whose kind is known, mixed into the scheduler's set but never learned by the model."""

    count: int = Field(
        20, ge=0, le=1000, description="known-harmful and known-benign rows each; 0: no check"
    )


class TrustedOptions(Frozen):
    """What every method that reads the alignment set needs to know."""

    alignment_coefficient: float = Field(
        1.0, ge=0, le=100, description="weight of the alignment loss beside the user's (release: 1)"
    )
    alignment_rows: int = Field(
        1000, ge=1, le=100_000, description="at most M rows of the alignment set (paper: 1000)"
    )


class SchedulerOptions(TrustedOptions):
    """Bayesian Data Scheduler (arXiv 2510.27172)."""

    name: Literal["bds"] = "bds"
    form: Literal["scalar", "neural"] = Field(
        "scalar", description="one logit a row, or a scorer f_phi that reads the row"
    )
    sampler: Literal["adam", "sgld"] = Field(
        "adam", description="how v (or phi) moves: the release's AdamW, or Langevin dynamics"
    )
    transform: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="sigma_i(v): N*softmax over the whole set, or 2*sigmoid"
    )
    learning_rate: float | None = Field(
        None,
        ge=1e-6,
        le=1,
        description="AdamW rate of v; None: 10 divided by the steps, at most 5e-2 (release: 5e-3 "
        "over 2000 steps); under rescore at most 0.5 divided by the steps of an epoch",
    )
    initial_logit: float | None = Field(
        None, ge=-20, le=20, description="start of v; None: 0.1 (softmax), -1e-4 (sigmoid)"
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW betas of v and phi")
    eps: float = Field(1e-8, gt=0, le=1e-2, description="AdamW epsilon of v and phi")
    clip: float = Field(
        10.0, gt=0, le=1e6, description="global-norm clip of the gradient of v or phi"
    )
    rescore: bool = Field(
        True,
        description="after every epoch, score all rows with the model as it is and estimate the "
        "logits anew from these losses (release: no)",
    )
    rescore_temperature: float = Field(
        0.2, ge=0.05, le=10, description="nats by which a loss lowers the logit by 1 at the end"
    )
    sgld_step: float = Field(2e-2, gt=0, le=1, description="step eta of the Langevin sampler")
    entropy_coefficient: float = Field(
        0.0, ge=0, le=1e3, description="c_H of the negative-entropy prior"
    )
    gaussian_coefficient: float = Field(
        0.0, ge=0, le=1e3, description="c_G of the Gaussian penalty on v"
    )
    coefficients: Literal["constant", "seal"] = Field(
        "constant",
        description="constant: c_a*a + weighted (release); seal: u*a + (1-u)*weighted, u falling "
        "from 1 by an equal amount every epoch",
    )
    scorer: Literal["tokens", "embedding", "causal_lm"] = Field(
        "embedding",
        description="neural form: a small network over token ids, a head over cached sentence "
        "embeddings, or a causal model with a linear head (paper)",
    )
    scorer_model: str | None = Field(
        None, max_length=256, description="catalogue name of the causal_lm scorer's backbone"
    )
    scorer_learning_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="AdamW rate of phi; None: 1e-3, or 5e-5 for a causal_lm (release: 5e-3)",
    )


class PlainOptions(Frozen):
    """Plain supervised tuning: no defense."""

    name: Literal["none"] = "none"


class MixOptions(TrustedOptions):
    """Alignment rows mixed in without weights (SafeInstruct, arXiv 2309.07875)."""

    name: Literal["mix"] = "mix"


class LisaOptions(TrustedOptions):
    """Lisa (arXiv 2405.18641): alternate alignment and user steps with a proximal pull."""

    name: Literal["lisa"] = "lisa"
    alignment_steps: int = Field(
        2, ge=1, le=1000, description="K1, alignment steps in a row (release: 100)"
    )
    user_steps: int = Field(
        18, ge=1, le=10_000, description="K2, user steps in a row (release: 900)"
    )
    proximal: float = Field(1.0, ge=0, le=1000, description="rho of the proximal term (release: 1)")
    warmup_share: float = Field(
        0.1, ge=0, le=1, description="share of the steps before the proximal term (release: 0.1)"
    )

    @model_validator(mode="after")
    def _reads_the_user(self) -> "LisaOptions":
        if self.alignment_steps > 10 * self.user_steps:
            raise ValueError("alignment_steps must be at most ten times user_steps")
        return self


class ConstrainedOptions(Frozen):
    """Constrained SFT (arXiv 2406.05946): the first response tokens may change least."""

    name: Literal["constrained_sft"] = "constrained_sft"
    beta_first: float = Field(0.5, gt=0, le=100, description="beta of the first response token")
    beta_next: float = Field(2.0, gt=0, le=100, description="beta of response tokens 2 to 5")
    beta_rest: float = Field(0.1, gt=0, le=100, description="beta of all later tokens")
    floor: float = Field(1e-3, ge=0, le=1, description="least weight of a token")


class SealOptions(TrustedOptions):
    """SEAL (arXiv 2410.07471): learn row weights first, then tune anew on the best share."""

    name: Literal["seal"] = "seal"
    keep_share: float = Field(0.8, gt=0, le=1, description="share of the rows kept for tuning")
    learning_rate: float | None = Field(
        None, ge=1e-6, le=1, description="AdamW rate of v while selecting; None: as of bds"
    )


class PrefilterOptions(Frozen):
    """Drop the rows that the harmfulness scorer flags, then tune plainly."""

    name: Literal["prefilter"] = "prefilter"


class CustomOptions(TrustedOptions):
    """A method of another package, found by its entry point `tunegate.defenses`."""

    name: Literal["custom"] = "custom"
    method: str = Field(min_length=1, max_length=128, description="name of the entry point")
    options: dict[str, Any] = Field({}, description="passed to the method as it is")


def _tuning_tag(value: Any) -> str:
    name = value.get("name", "bds") if isinstance(value, Mapping) else getattr(value, "name", "bds")
    return str(name)


TuningOptions = Annotated[
    Annotated[SchedulerOptions, Tag("bds")]
    | Annotated[PlainOptions, Tag("none")]
    | Annotated[MixOptions, Tag("mix")]
    | Annotated[LisaOptions, Tag("lisa")]
    | Annotated[ConstrainedOptions, Tag("constrained_sft")]
    | Annotated[SealOptions, Tag("seal")]
    | Annotated[PrefilterOptions, Tag("prefilter")]
    | Annotated[CustomOptions, Tag("custom")],
    Discriminator(_tuning_tag),
]


LARGEST_SCALE = 4.0
# Under `released` a clamped step descends the harmful loss with weight lambda.
LARGEST_RELEASED_STRENGTH = 1e-2


class RepairOptions(Frozen):
    """What every change of the finished adapter shares: it is scaled to the least that passes."""

    scales: tuple[float, ...] = Field(
        (0.0, 0.1, 0.25, 0.5, 0.75, 1.0),
        max_length=32,
        description="scales of the change, 0 to 4, tried in ascending order",
    )
    utility_budget: float = Field(
        0.02, ge=0, le=1, description="largest loss of utility that a scale may cost (fraction)"
    )

    @model_validator(mode="after")
    def _scales_ascend(self) -> "RepairOptions":
        if not self.scales or list(self.scales) != sorted(set(self.scales)):
            raise ValueError("scales must be a non-empty ascending list without repeats")
        if self.scales[0] < 0 or self.scales[-1] > LARGEST_SCALE:
            raise ValueError(f"scales must lie between 0 and {LARGEST_SCALE:g}")
        return self


class PerturbationOptions(RepairOptions):
    """Panacea (arXiv 2501.18100): joint is the paper's objective, post_hoc a named ablation."""

    mode: Literal["joint", "post_hoc", "none"] = Field(
        "post_hoc", description="joint: optimised while tuning; post_hoc: one step after; or none"
    )
    rho: float | None = Field(
        None,
        gt=0,
        le=100,
        description="global L2 radius of eps (release: 1); None: 3 % of the adapter's norm",
    )
    strength: float = Field(1e-3, ge=0, le=10, description="lambda of the objective")
    clamp: float = Field(
        5.0, ge=1, le=1000, description="the perturbed harmful loss counts up to this (nats)"
    )
    on_clamp: Literal["drop_term", "released"] = Field(
        "drop_term", description="beyond the clamp: drop the lambda term, or do as the release does"
    )
    eps_source: Literal["last_step", "full_set"] = Field(
        "last_step",
        description="joint: eps of the last step (paper), or of the whole harmful set at the end",
    )
    batch_size: int = Field(
        10,
        ge=1,
        le=256,
        description="harmful rows a gradient of post_hoc and full_set; joint reads as many as the "
        "job's batch (release: 10 of each)",
    )

    @model_validator(mode="after")
    def _does_not_teach(self) -> "PerturbationOptions":
        if self.on_clamp == "released" and self.strength > LARGEST_RELEASED_STRENGTH:
            raise ValueError(
                "on_clamp: released learns the harmful rows in clamped steps; keep strength at "
                f"{LARGEST_RELEASED_STRENGTH:g} or below, or use drop_term"
            )
        return self


class RandomNoiseOptions(RepairOptions):
    """The paper's control: Gaussian noise of a given norm in the place of eps."""

    mode: Literal["random_noise"] = "random_noise"
    rho: float | None = Field(
        None, gt=0, le=1000, description="global L2 norm; None: 3 % of the adapter's norm"
    )


class SafeLoraOptions(RepairOptions):
    """Safe LoRA (arXiv 2405.16833): project drifted modules on the alignment subspace."""

    mode: Literal["safe_lora"] = "safe_lora"
    threshold: float = Field(0.5, ge=-1, le=1, description="tau: project where the cosine is below")
    modules: int | None = Field(
        None, ge=1, description="project the k modules of lowest cosine instead (release: 10)"
    )


class AntidoteOptions(RepairOptions):
    """Antidote (arXiv 2408.09600): prune the weights that matter most for harmful rows."""

    mode: Literal["antidote"] = "antidote"
    share: float = Field(0.1, gt=0, le=1, description="share of each row's weights that is zeroed")
    batch_size: int = Field(10, ge=1, le=256, description="harmful rows a forward pass")


def _repair_tag(value: Any) -> str:
    mode = value.get("mode") if isinstance(value, Mapping) else getattr(value, "mode", None)
    return str(mode) if mode in ("random_noise", "safe_lora", "antidote") else "panacea"


AfterOptions = Annotated[
    Annotated[PerturbationOptions, Tag("panacea")]
    | Annotated[RandomNoiseOptions, Tag("random_noise")]
    | Annotated[SafeLoraOptions, Tag("safe_lora")]
    | Annotated[AntidoteOptions, Tag("antidote")],
    Discriminator(_repair_tag),
]


class DefenseOptions(Frozen):
    """How a job is defended while it tunes and after it."""

    scheduler: TuningOptions = SchedulerOptions()
    perturbation: AfterOptions = PerturbationOptions()
    canaries: CanaryOptions = CanaryOptions()


SchedulerName = Literal["bds", "none", "mix", "lisa", "constrained_sft", "seal", "prefilter"]
PerturbationName = Literal["joint", "post_hoc", "none", "random_noise", "safe_lora", "antidote"]

_TUNING = {
    "bds": SchedulerOptions,
    "none": PlainOptions,
    "mix": MixOptions,
    "lisa": LisaOptions,
    "constrained_sft": ConstrainedOptions,
    "seal": SealOptions,
    "prefilter": PrefilterOptions,
}
_AFTER = {
    "random_noise": RandomNoiseOptions,
    "safe_lora": SafeLoraOptions,
    "antidote": AntidoteOptions,
}


class DefenseRequest(Frozen):
    """The `defense` object of a job request: names choose the methods, the rest tunes them.

    Fields left out keep the defaults of the method's options.
    """

    scheduler: SchedulerName | TuningOptions = Field(
        "bds", description="what acts while the model tunes: a name, or its options"
    )
    perturbation: PerturbationName | AfterOptions = Field(
        "post_hoc", description="what acts on the finished adapter: a name, or its options"
    )
    canaries: CanaryOptions = CanaryOptions()

    def resolve(self) -> DefenseOptions:
        """The full options, with every default written out."""
        scheduler, perturbation = self.scheduler, self.perturbation
        if isinstance(scheduler, str):
            scheduler = _TUNING[scheduler]()
        if isinstance(perturbation, str):
            made = _AFTER.get(perturbation)
            perturbation = PerturbationOptions(mode=perturbation) if made is None else made()
        return DefenseOptions(
            scheduler=scheduler, perturbation=perturbation, canaries=self.canaries
        )
