"""Requests and results of the privacy analyses."""

from typing import Literal, Self

from pydantic import Field, model_validator

from analyses.kind import Cost, Kind
from jobspec.frozen import Frozen

Attack = Literal["reconstruction", "reidentification", "attribute_inference", "membership"]
Adjacency = Literal["add_or_remove_one", "replace_one"]
Tightness = Literal["exact", "bound", "very_loose"]

# Which neighbours an attack compares: the brief, 2.2.
ADJACENCY: dict[str, Adjacency] = {
    "reconstruction": "add_or_remove_one",
    "membership": "add_or_remove_one",
    "reidentification": "replace_one",
    "attribute_inference": "replace_one",
}
PAPER = (
    "Unifying Re-Identification, Attribute Inference, and Data Reconstruction Risks in "
    "Differential Privacy (arXiv 2507.06969)"
)
MAX_STEPS = 10_000_000
LIMITS = (
    "A guarantee against an attacker who knows everything but the target: an upper bound, never "
    "the probability of a leak.",
    "Holds for Poisson sampling and one run; trying hyper-parameters on the same data costs "
    "privacy that is not in these numbers.",
    "The baseline must come from what is known without the training set; never derive it from the "
    "set itself.",
)


class Phase(Frozen):
    """A stretch of DP-SGD with one setting."""

    noise_multiplier: float = Field(ge=0.05, le=1000, description="sigma, noise over clipping norm")
    sampling_rate: float = Field(gt=0, le=1, description="q, chance of a row to be in a step")
    steps: int = Field(ge=1, le=MAX_STEPS, description="T, optimiser steps")


class RiskRequest(Frozen):
    """How the model was tuned, and which attacks to bound. Give one description of the privacy."""

    noise_multiplier: float | None = Field(
        None, ge=0.05, le=1000, description="sigma of DP-SGD, with sampling_rate and steps"
    )
    sampling_rate: float | None = Field(None, gt=0, le=1, description="q of DP-SGD")
    steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="T of DP-SGD")
    phases: tuple[Phase, ...] = Field(
        (), max_length=1000, description="phases of DP-SGD with different settings, which compose"
    )
    epsilon: float | None = Field(None, ge=0, le=500, description="of one (epsilon, delta), nats")
    delta: float | None = Field(None, ge=0, lt=1, description="of one (epsilon, delta)")
    rho: float | None = Field(None, gt=0, le=1000, description="of zero-concentrated DP")
    mu: float | None = Field(None, gt=0, le=100, description="of Gaussian DP")
    attack: Attack = Field("reconstruction", description="what the attacker is after")
    adjacency: Adjacency | None = Field(
        None, description="neighbouring data sets; None: those that the attack compares"
    )
    baselines: tuple[float, ...] = Field(
        (0.01, 0.1),
        min_length=1,
        max_length=1000,
        description="chances of success without the model, each within (0, 1)",
    )
    attribute_prior: float | None = Field(
        None, gt=0, lt=1, description="prior of a secret bit: adds the tighter bound for a bit"
    )
    reported_delta: float = Field(
        1e-5, gt=0, lt=1, description="delta at which epsilon is shown beside"
    )

    @model_validator(mode="after")
    def _one_description(self) -> Self:
        sgd = (self.noise_multiplier, self.sampling_rate, self.steps)
        if any(value is not None for value in sgd) and None in sgd:
            raise ValueError("DP-SGD needs noise_multiplier, sampling_rate and steps together")
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta belong together")
        given = {
            "noise_multiplier, sampling_rate, steps": sgd[0] is not None,
            "phases": bool(self.phases),
            "epsilon, delta": self.epsilon is not None,
            "rho": self.rho is not None,
            "mu": self.mu is not None,
        }
        if sum(given.values()) != 1:
            chosen = [name for name, there in given.items() if there]
            raise ValueError(
                f"give exactly one of {'; '.join(given)} (got {'; '.join(chosen) or 'none'})"
            )
        for baseline in self.baselines:
            if not 0 < baseline < 1:
                raise ValueError(f"a baseline lies within (0, 1), got {baseline}")
        if self.attribute_prior is not None and self.attack != "attribute_inference":
            raise ValueError(
                "attribute_prior is of a secret bit, which only the attack attribute_inference "
                f"guesses; the attack is {self.attack}"
            )
        return self

    @property
    def sgd_phases(self) -> tuple[Phase, ...]:
        """The phases of DP-SGD; empty where the privacy is described otherwise."""
        if self.noise_multiplier is None:
            return self.phases
        assert self.sampling_rate is not None
        assert self.steps is not None
        return (
            Phase(
                noise_multiplier=self.noise_multiplier,
                sampling_rate=self.sampling_rate,
                steps=self.steps,
            ),
        )

    @property
    def neighbours(self) -> Adjacency:
        return self.adjacency or ADJACENCY[self.attack]


class Risk(Frozen):
    """One baseline's bound, with older bounds of the same mechanism beside it."""

    baseline: float = Field(description="chance of success without the model")
    max_success: float = Field(description="P(baseline), largest chance with the model")
    advantage: float = Field(description="max_success - baseline")
    from_one_epsilon_delta: float | None = Field(
        None, description="the same from one (epsilon, delta) pair alone"
    )
    from_renyi: float | None = Field(None, description="the same by Renyi divergences, best order")


class WorstCase(Frozen):
    """The baseline at which the advantage is largest."""

    baseline: float
    advantage: float
    max_success: float = Field(
        description="(1 + advantage)/2; also the best accuracy of balanced membership inference"
    )


class RiskResult(Frozen):
    """Bounds on an attack's success."""

    attack: Attack
    adjacency: Adjacency
    tightness: Tightness = Field(
        description="exact: of the mechanism itself, up to the loss grid; bound: of all mechanisms "
        "with this rho; very_loose: of all with one (epsilon, delta)"
    )
    risks: tuple[Risk, ...]
    worst_case: WorstCase
    epsilon: float | None = Field(None, description="at reported_delta, nats")
    reported_delta: float
    secret_bit_success: float | None = Field(
        None, description="bound on guessing a secret bit with the prior that was given"
    )


class CalibrateRequest(Frozen):
    """A target for an attack and the length of the run; sigma is looked for."""

    sampling_rate: float = Field(gt=0, le=1, description="q, chance of a row to be in a step")
    steps: int = Field(ge=1, le=MAX_STEPS, description="T, optimiser steps planned")
    baseline: float | None = Field(
        None, gt=0, lt=1, description="chance of success without the model"
    )
    max_success: float | None = Field(
        None, gt=0, lt=1, description="largest chance allowed with the model, at that baseline"
    )
    advantage: float | None = Field(
        None, gt=0, lt=1, description="largest advantage allowed at any baseline, instead"
    )
    attack: Attack = Field("reconstruction", description="what the attacker is after")
    adjacency: Adjacency | None = Field(
        None, description="neighbouring data sets; None: those that the attack compares"
    )
    reported_delta: float = Field(1e-5, gt=0, lt=1, description="delta for the epsilon shown")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        pair = (self.baseline, self.max_success)
        if self.advantage is not None and pair != (None, None):
            raise ValueError("give baseline and max_success, or advantage alone")
        if self.advantage is None and None in pair:
            raise ValueError("give baseline and max_success together, or advantage")
        if None not in pair and self.max_success <= self.baseline:  # type: ignore[operator]
            raise ValueError(
                f"max_success {self.max_success:g} is not above the baseline {self.baseline:g}: "
                "no noise can make an attack do worse than its chance without the model"
            )
        return self

    @property
    def neighbours(self) -> Adjacency:
        return self.adjacency or ADJACENCY[self.attack]


class CalibrateResult(Frozen):
    """The least noise that keeps the target; every number is of this very sigma."""

    noise_multiplier: float = Field(description="sigma, rounded up to four decimals")
    max_success: float = Field(description="certified success at the target's baseline")
    baseline: float = Field(description="the target's, or the worst case's")
    attack: Attack
    adjacency: Adjacency
    worst_case: WorstCase
    epsilon: float = Field(description="at reported_delta, nats")
    reported_delta: float
    evaluations: int = Field(description="curves computed in the search")


def _curve_cost(request: RiskRequest) -> Cost:
    phases = max(len(request.sgd_phases), 1)
    return Cost(
        seconds=3.0 + 1.5 * phases,
        memory_bytes=400_000_000,
        basis="loading of the accounting library, and one loss distribution a phase",
    )


def _search_cost(request: CalibrateRequest) -> Cost:
    return Cost(
        seconds=10.0,
        memory_bytes=500_000_000,
        basis="about twelve loss distributions on the coarse grid and three on the fine one",
    )


RISK = Kind(
    name="privacy.risk",
    title="Privacy risk of a tuned model",
    question="How well can an attacker do with this model, who without it succeeds with a given "
    "probability?",
    request=RiskRequest,
    result=RiskResult,
    method="analyses.privacy.risk:run",
    paper=PAPER,
    fidelity="faithful",
    backed_by=("tests/analyses/test_privacy.py", "tests/analyses/test_privacy_bounds.py"),
    limits=LIMITS,
    example={
        "noise_multiplier": 1.0,
        "sampling_rate": 0.01,
        "steps": 1000,
        "baselines": [0.0001, 0.01, 0.1],
        "attack": "reconstruction",
    },
    cost=_curve_cost,
    quick=False,
)
CALIBRATE = Kind(
    name="privacy.calibrate",
    title="Noise for a privacy target",
    question="Which noise keeps an attack's success below a target?",
    request=CalibrateRequest,
    result=CalibrateResult,
    method="analyses.privacy.calibrate:run",
    paper=PAPER,
    fidelity="faithful",
    backed_by=("tests/analyses/test_privacy_calibration.py",),
    limits=LIMITS,
    example={
        "sampling_rate": 0.01,
        "steps": 1000,
        "baseline": 0.01,
        "max_success": 0.05,
        "attack": "reconstruction",
    },
    cost=_search_cost,
)
