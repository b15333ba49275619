"""Before private tuning: how many steps, at which rate, with how much noise. After it: what is
guaranteed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from analyses.context import AnalysisContext, AnalysisError
from analyses.context import Stopped as AnalysisStopped
from analyses.privacy.accounting import certified_curve, dp_sgd_losses
from analyses.privacy.calibrate import run as calibrate
from analyses.privacy.spec import (
    ADJACENCY,
    LIMITS,
    Adjacency,
    CalibrateRequest,
    CalibrateResult,
    Phase,
)
from analyses.privacy.tradeoff import CertifiedCurve, worst_case
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.privacy import PrivacyAttack, PrivacyOptions
from jobspec.spec import JobSpec
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.private_noise import secret
from workers.pipeline.tuning_inputs import PrivatePlan

SHOWN_BASELINES = (0.01, 0.1)
DOES = {
    "reconstruction": "reconstruct that row",
    "reidentification": "single out that row",
    "attribute_inference": "guess a secret attribute of that row",
}
OWN_LIMITS = (
    "It is about the adapter. The report, the losses in the job's log and the gate's decision are "
    "for the owner of the rows and are not covered.",
    "It is about single rows of the training file as the model reads them: equal rows were read as "
    "one, but rows that say the same in other words, or that are about one person, count "
    "separately. Rows of the validation file are not covered.",
    "The number of rows is taken to be known.",
)
PARENT_LIMIT = (
    "The job continues from a tuned model. What that model learned is not covered, and for rows "
    "that both jobs read the two losses of privacy add up."
)


def plan_privacy(
    spec: JobSpec,
    rows: int,
    hyper: ResolvedHyperparameters,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> PrivatePlan | None:
    """The plan of a private job; None for another. `rows`: N, without copies.

    q = B/N and T = n_epochs ceil(N/B). Where a target is given, sigma is the least that keeps it
    over all T steps, and an event tells it. Raises PipelineFailure(invalid_spec) for a target that
    no noise keeps, or that needs none, and for noise that cannot be accounted for; and Stopped.
    """
    options = spec.privacy
    if options is None:
        return None
    if options.delta >= 1 / rows:
        raise PipelineFailure(
            "invalid_spec",
            f"privacy.delta is {options.delta:g}; with {rows} rows it must be below {1 / rows:g}, "
            "or a mechanism that publishes one row at random would count as private.",
            param="privacy.delta",
        )
    rate = hyper.batch_size / rows
    steps = hyper.n_epochs * -(-rows // hyper.batch_size)
    sigma = options.noise_multiplier
    if sigma is None:
        sigma = _calibrated(options, rate, steps, work, emit, stop)
    else:
        _check_accountable(Phase(noise_multiplier=sigma, sampling_rate=rate, steps=steps))
    return PrivatePlan(sigma, rate, steps, options.clip, secret)


def _check_accountable(phase: Phase) -> None:
    """Account for the whole run before its first step: what cannot be accounted for is not tuned.
    The report finds the losses in the accountant's cache."""
    try:
        for adjacency in get_args(Adjacency):
            dp_sgd_losses((phase,), adjacency)
    except AnalysisError as error:
        raise PipelineFailure(
            "invalid_spec",
            f"privacy.noise_multiplier: {error}.",
            param="privacy.noise_multiplier",
        ) from error


def _calibrated(
    options: PrivacyOptions,
    rate: float,
    steps: int,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> float:
    target = options.target
    assert target is not None
    request = CalibrateRequest(
        sampling_rate=rate,
        steps=steps,
        baseline=target.baseline,
        max_success=target.max_success,
        attack=target.attack,
        reported_delta=options.delta,
    )
    try:
        found = calibrate(request, AnalysisContext(work=work, cache_dir=work, stop=stop)).result
    except AnalysisStopped as error:
        raise Stopped from error
    except AnalysisError as error:
        raise PipelineFailure(
            "invalid_spec", f"privacy.target.{error}.", param="privacy.target"
        ) from error
    assert isinstance(found, CalibrateResult)
    emit(
        "message",
        level="info",
        message=f"Private tuning: noise multiplier {found.noise_multiplier:g} keeps "
        f"{target.attack} at {found.max_success:.4g} or below where it is {target.baseline:g} "
        f"without the model ({steps} steps at rate {rate:.4g}; epsilon {found.epsilon:.3g} at "
        f"delta {options.delta:g}).",
        data=found.model_dump(mode="json"),
    )
    return found.noise_multiplier


def privacy_report(
    spec: JobSpec, plan: PrivatePlan | None, spent: Sequence[tuple[float, float, int]], rows: int
) -> dict[str, Any]:
    """The report's block `privacy`, in a mapping of its own; empty for a job without privacy.

    Every number is of what was really spent. Raises PipelineFailure(internal_error) where that is
    not what was planned, or the target is missed.
    """
    options = spec.privacy
    if options is None:
        return {}
    assert plan is not None
    phases = tuple(
        Phase(noise_multiplier=sigma, sampling_rate=rate, steps=steps)
        for sigma, rate, steps in spent
    )
    planned = Phase(
        noise_multiplier=plan.noise_multiplier, sampling_rate=plan.sampling_rate, steps=plan.steps
    )
    if phases != (planned,):
        raise PipelineFailure(
            "internal_error",
            f"The account of the privacy spent, {list(spent)}, is not what was planned, "
            f"{planned.noise_multiplier:g} at rate {planned.sampling_rate:g} for {planned.steps} "
            "steps; nothing is guaranteed. Create the job again.",
        )
    losses = {adjacency: dp_sgd_losses(phases, adjacency) for adjacency in get_args(Adjacency)}
    curves = {adjacency: certified_curve(found) for adjacency, found in losses.items()}
    epsilon = {
        adjacency: float(found.get_epsilon_for_delta(options.delta))
        for adjacency, found in losses.items()
    }
    target = options.target
    told: PrivacyAttack = "reconstruction" if target is None else target.attack
    baseline = SHOWN_BASELINES[0] if target is None else target.baseline
    reached = float(curves[ADJACENCY[told]].success(baseline))
    if target is not None and reached > target.max_success:
        raise PipelineFailure(
            "internal_error",
            f"The target {target.max_success:g} is missed with {reached:g}. Create the job again.",
        )
    block = {
        "mechanism": "DP-SGD on the adapter: Poisson samples, flat clipping, secret randomness",
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "steps": plan.steps,
        "clip": plan.clip,
        "rows": rows,
        "target": None if target is None else target.model_dump(mode="json"),
        "delta": options.delta,
        "epsilon": epsilon["add_or_remove_one"],
        "epsilon_replace_one": epsilon["replace_one"],
        "risks": {attack: _risks(attack, curves, baseline) for attack in get_args(PrivacyAttack)},
        "history": [
            {"noise_multiplier": sigma, "sampling_rate": rate, "steps": steps}
            for sigma, rate, steps in spent
        ],
        "statement": _statement(told, baseline, reached, curves[ADJACENCY[told]]),
        "limits": [*LIMITS, *OWN_LIMITS, *([PARENT_LIMIT] if spec.lineage else [])],
    }
    return {"privacy": block}


def _risks(
    attack: PrivacyAttack, curves: Mapping[Adjacency, CertifiedCurve], baseline: float
) -> dict[str, Any]:
    """Bounds of one attack at the usual baselines, the target's, and the worst one."""
    curve = curves[ADJACENCY[attack]]
    where, advantage = worst_case(curve)
    return {
        "adjacency": ADJACENCY[attack],
        "risks": [
            {"baseline": x, "max_success": p, "advantage": p - x}
            for x in sorted({*SHOWN_BASELINES, baseline})
            for p in [float(curve.success(x))]
        ],
        "worst_case": {
            "baseline": where,
            "max_success": (1 + advantage) / 2,
            "advantage": advantage,
        },
    }


def _statement(
    attack: PrivacyAttack, baseline: float, reached: float, curve: CertifiedCurve
) -> str:
    """The guarantee in one sentence."""
    where, advantage = worst_case(curve)
    before, after = f"{100 * baseline:.3g} %", f"{100 * reached:.3g} %"
    if attack == "membership":
        told = (
            "and whose test of whether that row was in the file is wrong with a chance of "
            f"{before} where it was not, is right with a chance of at most {after} where it was"
        )
    else:
        told = (
            f"and would {DOES[attack]} with a chance of {before} without the adapter, does so "
            f"with a chance of at most {after} with it"
        )
    return (
        "The adapter was tuned with differential privacy. An attacker who knows every training "
        f"row but one, {told}; where the advantage is largest, {100 * where:.3g} % become at most "
        f"{50 * (1 + advantage):.3g} %. This is an upper bound over all attacks, not the "
        "probability of a leak."
    )
