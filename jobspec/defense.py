"""Options of the two defenses, with bounds: the BDS data scheduler and the Panacea perturbation.

Where a default differs from the papers', the description names the release's value and
docs/defenses.md the reason.
"""

from typing import Literal

from pydantic import Field, model_validator

from jobspec.frozen import Frozen


class SchedulerOptions(Frozen):
    """Bayesian Data Scheduler (arXiv 2510.27172), scalar form: one logit v_i per training row."""

    name: Literal["bds", "none"] = Field("bds", description="bds, or none for plain tuning")
    transform: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="sigma_i(v): N*softmax over the whole set, or 2*sigmoid"
    )
    learning_rate: float = Field(
        5e-2, gt=0, le=1, description="AdamW rate of v (release: 5e-3 over 2000 steps)"
    )
    initial_logit: float | None = Field(
        None, ge=-20, le=20, description="start of v; None: 0.1 (softmax), -1e-4 (sigmoid)"
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas of v")
    eps: float = Field(1e-8, gt=0, le=1e-2, description="AdamW epsilon of v")
    clip: float = Field(10.0, gt=0, description="global-norm clip of the gradient of v")
    entropy_coefficient: float = Field(0.0, ge=0, description="c_H of the negative-entropy prior")
    gaussian_coefficient: float = Field(0.0, ge=0, description="c_G of the Gaussian penalty on v")
    alignment_coefficient: float = Field(
        1.0, ge=0, le=100, description="weight of the alignment loss beside the user's (release: 1)"
    )
    alignment_rows: int = Field(
        1000, ge=1, le=100_000, description="at most M rows of the alignment set (paper: 1000)"
    )


class PerturbationOptions(Frozen):
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
        5.0, gt=0, description="the perturbed harmful loss counts up to this (nats)"
    )
    on_clamp: Literal["drop_term", "released"] = Field(
        "drop_term", description="beyond the clamp: drop the lambda term, or do as the release does"
    )
    scales: tuple[float, ...] = Field(
        (0.0, 0.1, 0.25, 0.5, 0.75, 1.0), description="scales of eps tried in ascending order"
    )
    batch_size: int = Field(10, ge=1, le=256, description="harmful rows a gradient (release: 10)")
    utility_budget: float = Field(
        0.02, ge=0, le=1, description="largest loss of utility that a scale may cost (fraction)"
    )

    @model_validator(mode="after")
    def _scales_ascend(self) -> "PerturbationOptions":
        if not self.scales or list(self.scales) != sorted(set(self.scales)):
            raise ValueError("scales must be a non-empty ascending list without repeats")
        if self.scales[0] < 0:
            raise ValueError("scales must not be negative")
        return self


class DefenseOptions(Frozen):
    """How a job is defended while it tunes and after it."""

    scheduler: SchedulerOptions = SchedulerOptions()
    perturbation: PerturbationOptions = PerturbationOptions()


SchedulerName = Literal["bds", "none"]
PerturbationName = Literal["joint", "post_hoc", "none"]


class DefenseRequest(Frozen):
    """The `defense` object of a job request: names choose the method, the rest tunes it.

    Fields left out keep the defaults of SchedulerOptions and PerturbationOptions.
    """

    scheduler: SchedulerName | SchedulerOptions = Field("bds", description="bds or none")
    perturbation: PerturbationName | PerturbationOptions = Field(
        "post_hoc", description="joint, post_hoc or none"
    )

    def resolve(self) -> DefenseOptions:
        """The full options, with every default written out."""
        scheduler = (
            SchedulerOptions(name=self.scheduler)
            if isinstance(self.scheduler, str)
            else self.scheduler
        )
        perturbation = (
            PerturbationOptions(mode=self.perturbation)
            if isinstance(self.perturbation, str)
            else self.perturbation
        )
        return DefenseOptions(scheduler=scheduler, perturbation=perturbation)
