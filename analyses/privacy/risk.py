"""privacy.risk: bounds on an attack's success against a model that is already there."""

import math

import numpy as np
from numpy.typing import ArrayLike

from analyses.context import AnalysisContext, Chart, Outcome, Table
from analyses.privacy.accounting import certified_curve, dp_sgd_losses
from analyses.privacy.curve_chart import curve_chart
from analyses.privacy.older_bounds import (
    BISECTIONS,
    ORDERS,
    dp_sgd_rdp,
    two_sided_renyi_success,
    zcdp_success,
)
from analyses.privacy.spec import Risk, RiskRequest, RiskResult, Tightness, WorstCase
from analyses.privacy.tradeoff import (
    Array,
    GaussianCurve,
    OnePairCurve,
    SuccessCurve,
    binary_bayes_success,
    concave_points,
    worst_case,
)

LOOSE_PAIR = (
    "One (epsilon, delta) pair says little: the worst mechanism with it leaks far more than "
    "DP-SGD with it would. Give noise_multiplier, sampling_rate and steps if they are known."
)
OF_REPLACEMENT = (
    "The privacy given is taken to hold for replacing a row. If it holds for adding or removing "
    "one, these bounds are too low: replacing is two such changes."
)
# Below it 1 - x is 1 in float64.
LEAST_FIXED_POINT = 1e-17


class _ConcentratedCurve:
    """All mechanisms with rho-zCDP: a bound that holds for each of them."""

    def __init__(self, rho: float) -> None:
        self._rho = rho
        self._rdp_O = ORDERS * rho

    def success(self, baseline: ArrayLike) -> Array:
        values = [self._one(float(x)) for x in np.ravel(baseline)]
        return np.array(values).reshape(np.shape(baseline))

    def _one(self, x: float) -> float:
        if x <= 0 or x >= 1:
            return min(max(x, 0.0), 1.0)
        return min(two_sided_renyi_success(x, ORDERS, self._rdp_O), zcdp_success(x, self._rho))

    @property
    def advantage(self) -> float:
        """1 - 2 x* at the fixed point f(x*) = x* of the two-sided bound, which is symmetric; x* by
        bisection in its logarithm, rounded down, so that the advantage is on the safe side."""
        low, high = math.log(LEAST_FIXED_POINT), math.log(0.5)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            x = math.exp(middle)
            below = two_sided_renyi_success(x, ORDERS, self._rdp_O) < 1 - x
            low, high = (middle, high) if below else (low, middle)
        return 1 - 2 * math.exp(low)


def run(request: RiskRequest, context: AnalysisContext) -> Outcome:
    """The result of privacy.risk: P(kappa) = 1 - f(kappa) at each baseline, and the worst case.

    Guard: P(kappa) >= kappa holds for every curve and is checked.
    """
    context.progress("composing the privacy losses", 0, 2)
    curve, tightness, epsilon = _curve(request)
    context.check_stop()
    context.progress("bounding the attack", 1, 2)
    baselines = sorted(set(request.baselines))
    success = curve.success(np.array(baselines))
    if not (success >= np.array(baselines)).all():
        raise ArithmeticError("a success below its baseline: the accounting is damaged")
    pair = None if epsilon is None else OnePairCurve(epsilon, request.reported_delta)
    if request.epsilon is not None:
        pair = None
    renyi = _renyi(request)
    risks = tuple(
        Risk(
            baseline=baseline,
            max_success=float(best),
            advantage=float(best) - baseline,
            from_one_epsilon_delta=None if pair is None else float(pair.success(baseline)),
            from_renyi=None if renyi is None else two_sided_renyi_success(baseline, ORDERS, renyi),
        )
        for baseline, best in zip(baselines, success, strict=True)
    )
    where, advantage = worst_case(curve)
    prior = request.attribute_prior
    result = RiskResult(
        attack=request.attack,
        adjacency=request.neighbours,
        tightness=tightness,
        risks=risks,
        worst_case=WorstCase(baseline=where, advantage=advantage, max_success=(1 + advantage) / 2),
        epsilon=epsilon,
        reported_delta=request.reported_delta,
        secret_bit_success=None if prior is None else binary_bayes_success(curve, prior),
    )
    x = concave_points(baselines)
    y = curve.success(x)
    return Outcome(
        result,
        tables=(Table("curve", {"baseline": x.tolist(), "max_success": y.tolist()}),),
        charts=(
            Chart(
                "Success with the model by success without it",
                "The distance to the dotted line is the advantage; the mark is its largest value.",
                curve_chart(x, y, baselines, (where, (1 + advantage) / 2), pair),
            ),
        ),
        warnings=_warnings(request, tightness),
    )


def _warnings(request: RiskRequest, tightness: Tightness) -> tuple[str, ...]:
    found: tuple[str, ...] = (LOOSE_PAIR,) if tightness == "very_loose" else ()
    if request.neighbours == "replace_one" and not request.sgd_phases:
        found += (OF_REPLACEMENT,)
    return found


def _curve(request: RiskRequest) -> tuple[SuccessCurve, Tightness, float | None]:
    """The curve, how tight it is, and epsilon at the reported delta where it is known."""
    delta = request.reported_delta
    if phases := request.sgd_phases:
        losses = dp_sgd_losses(phases, request.neighbours)
        return certified_curve(losses), "exact", float(losses.get_epsilon_for_delta(delta))
    if request.mu is not None:
        curve = GaussianCurve(request.mu)
        return curve, "exact", gaussian_epsilon(curve, delta)
    if request.rho is not None:
        return _ConcentratedCurve(request.rho), "bound", None
    assert request.epsilon is not None
    assert request.delta is not None
    shown = request.epsilon if request.delta <= delta else None
    return OnePairCurve(request.epsilon, request.delta), "very_loose", shown


def gaussian_epsilon(curve: GaussianCurve, delta: float) -> float:
    """The epsilon of mu-GDP at this delta, by bisection; rounded to the safe side."""
    if curve.delta(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while curve.delta(high) > delta:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if curve.delta(middle) > delta else (low, middle)
    return high


def _renyi(request: RiskRequest) -> Array | None:
    """rdp(t) at ORDERS, where it is known for the neighbours that are asked for."""
    if request.mu is not None:
        return np.asarray(ORDERS * request.mu**2 / 2)
    if request.sgd_phases and request.neighbours == "add_or_remove_one":
        return dp_sgd_rdp(request.sgd_phases)
    return None
