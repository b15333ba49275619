"""privacy.calibrate: the least noise of DP-SGD that keeps an attack below a target."""

import math
from collections.abc import Callable

from scipy.optimize import brentq

from analyses.context import AnalysisContext, AnalysisError, Outcome
from analyses.privacy.accounting import COARSE_GRID, FINE_GRID, certified_curve, dp_sgd_losses
from analyses.privacy.risk import run as report
from analyses.privacy.spec import (
    CalibrateRequest,
    CalibrateResult,
    Phase,
    RiskRequest,
    WorstCase,
)
from analyses.privacy.tradeoff import worst_case

LEAST_SIGMA, MOST_SIGMA = 0.05, 1000.0
FIRST_BRACKET = (0.3, 10.0)
LOG_TOLERANCE = 1e-4
SAFE_STEP = 1.0005
SLOPE_STEP = 1e-2
DIGITS = 1e4


def run(request: CalibrateRequest, context: AnalysisContext) -> Outcome:
    """The result of privacy.calibrate.

    g(sigma) = P(kappa; sigma, q, T) - s falls with sigma. Its zero is bracketed by doubling and
    halving, found by Brent's method in ln sigma on the coarse grid, corrected for the fine one,
    rounded up to four decimals and moved to the safe side; all that is reported is of that sigma on
    the fine grid. For a target on the advantage, g = delta(0) - eta. Source: the brief, 2.6. Raises
    AnalysisError where the target is met without noise or out of reach.
    """
    evaluations = 0

    def excess(sigma: float, grid: float) -> float:
        nonlocal evaluations
        evaluations += 1
        context.check_stop()
        context.progress("looking for the noise", evaluations, max(evaluations + 1, 16))
        curve = certified_curve(dp_sgd_losses((_phase(request, sigma),), request.neighbours, grid))
        if request.baseline is None:
            assert request.advantage is not None
            return curve.advantage - request.advantage
        assert request.max_success is not None
        return float(curve.success(request.baseline)) - request.max_success

    low, high = _bracket(lambda sigma: excess(sigma, COARSE_GRID), request)
    found = math.exp(
        brentq(
            lambda logarithm: excess(math.exp(logarithm), COARSE_GRID),
            math.log(low),
            math.log(high),
            xtol=LOG_TOLERANCE,
        )
    )
    sigma = _rounded_up(_on_fine_grid(excess, found))
    while excess(sigma, FINE_GRID) > 0:
        sigma = _rounded_up(sigma * SAFE_STEP)
    curve = certified_curve(dp_sgd_losses((_phase(request, sigma),), request.neighbours))
    where, advantage = worst_case(curve)
    baseline = where if request.baseline is None else request.baseline
    shown = report(
        RiskRequest(
            noise_multiplier=sigma,
            sampling_rate=request.sampling_rate,
            steps=request.steps,
            attack=request.attack,
            adjacency=request.adjacency,
            baselines=(baseline,),
            reported_delta=request.reported_delta,
        ),
        context,
    )
    epsilon = getattr(shown.result, "epsilon", None)
    assert epsilon is not None
    result = CalibrateResult(
        noise_multiplier=sigma,
        max_success=float(curve.success(baseline)),
        baseline=baseline,
        attack=request.attack,
        adjacency=request.neighbours,
        worst_case=WorstCase(baseline=where, advantage=advantage, max_success=(1 + advantage) / 2),
        epsilon=epsilon,
        reported_delta=request.reported_delta,
        evaluations=evaluations,
    )
    return Outcome(result, tables=shown.tables, charts=shown.charts)


def _phase(request: CalibrateRequest, sigma: float) -> Phase:
    return Phase(noise_multiplier=sigma, sampling_rate=request.sampling_rate, steps=request.steps)


def _bracket(excess: Callable[[float], float], request: CalibrateRequest) -> tuple[float, float]:
    """(low, high) with excess(low) > 0 >= excess(high). Raises AnalysisError."""
    low, high = FIRST_BRACKET
    where = "advantage" if request.baseline is None else "max_success"
    while excess(high) > 0:
        if high == MOST_SIGMA:
            raise AnalysisError(
                f"{where}: out of reach with sampling_rate {request.sampling_rate:g} and "
                f"{request.steps} steps, even with a noise multiplier of {MOST_SIGMA:g}; take "
                "fewer steps, a smaller rate, or a higher target",
                where,
            )
        low, high = high, min(high * 2, MOST_SIGMA)
    if low != FIRST_BRACKET[0]:
        return low, high
    while excess(low) <= 0:
        if low == LEAST_SIGMA:
            raise AnalysisError(
                f"{where}: met already with a noise multiplier of {LEAST_SIGMA:g}: this target "
                "asks for no noise, so it guarantees nothing worth having; lower it",
                where,
            )
        low, high = max(low / 2, LEAST_SIGMA), low
    return low, high


def _on_fine_grid(excess: Callable[[float, float], float], sigma: float) -> float:
    """The zero on the fine grid near the coarse grid's: Newton steps with the coarse slope."""
    ahead = excess(sigma * math.exp(SLOPE_STEP), COARSE_GRID) - excess(sigma, COARSE_GRID)
    for _ in range(2):
        sigma *= math.exp(-excess(sigma, FINE_GRID) * SLOPE_STEP / ahead)
        sigma = min(max(sigma, LEAST_SIGMA), MOST_SIGMA)
    return sigma


def _rounded_up(sigma: float) -> float:
    return math.ceil(sigma * DIGITS - 1e-9) / DIGITS
