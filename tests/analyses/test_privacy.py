"""Golden values are of the brief on privacy calibration, section 6, unless said otherwise."""

import dataclasses

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from analyses.privacy.accounting import certified_curve, dp_sgd_curve, dp_sgd_losses
from analyses.privacy.spec import Phase
from analyses.privacy.tradeoff import (
    CertifiedCurve,
    GaussianCurve,
    OnePairCurve,
    binary_bayes_success,
    worst_case,
)

BASELINES = [1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.5]
DP_SGD = {
    (1.0, 0.01, 1000): (
        [9.3676e-6, 5.4744e-4, 4.0685e-3, 0.0291392, 0.1110019, 0.1942017, 0.6585770],
        0.161018,
    ),
    (0.8, 0.02, 500): (
        [1.0258e-4, 2.9957e-3, 0.0154576, 0.0753090, 0.2144948, 0.3281123, 0.7924732],
        0.310140,
    ),
    (0.5, 0.002, 10000): (
        [9.6331e-4, 0.0134702, 0.0479079, 0.1605462, 0.3510317, 0.4784346, 0.8891410],
        0.441396,
    ),
    (0.5715066, 0.0038010957846441, 792): (
        [5.8460e-5, 1.4832e-3, 7.5035e-3, 0.0389955, 0.1256959, 0.2082505, 0.6605422],
        0.1610,
    ),
}
# Section 4: GPT-2 on SST-2, sigma -> advantage and epsilon at 1e-5.
SST2 = {
    0.5715066: (0.1610, 3.945),
    0.6071761: (0.1404, 3.196),
    0.6366483: (0.1266, 2.697),
    0.6945393: (0.1055, 1.948),
    0.7497660: (0.0907, 1.449),
}
CIFAR = {4: 0.4183, 5: 0.3420, 6: 0.2897, 8: 0.2238, 10: 0.1645}


def sgd(sigma: float, rate: float, steps: int) -> tuple[Phase, ...]:
    return (Phase(noise_multiplier=sigma, sampling_rate=rate, steps=steps),)


@pytest.mark.parametrize(
    ("mu", "baseline", "success"),
    [(1, 0.01, 0.0923622), (1, 0.1, 0.3891437), (1, 0.5, 0.8413447), (2, 0.01, 0.3720806)],
)
def test_gaussian_success_has_its_closed_form(mu: float, baseline: float, success: float) -> None:
    assert float(GaussianCurve(mu).success(baseline)) == pytest.approx(success, abs=1e-7)


@pytest.mark.parametrize(("mu", "eta"), [(1, 0.3829249), (2, 0.6826895), (0.5, 0.1974127)])
def test_gaussian_advantage_has_its_closed_form(mu: float, eta: float) -> None:
    assert GaussianCurve(mu).advantage == pytest.approx(eta, abs=1e-7)


def test_one_gaussian_release_equals_the_closed_form_from_the_safe_side() -> None:
    x = np.linspace(0, 1, 401)
    certified = dp_sgd_curve(sgd(1.0, 1.0, 1), "add_or_remove_one").success(x)
    above = certified - GaussianCurve(1.0).success(x)
    assert above.min() >= -1e-12
    assert above.max() <= 1e-7


@pytest.mark.parametrize("setting", DP_SGD)
def test_dp_sgd_success_at_each_baseline(setting: tuple[float, float, int]) -> None:
    success, eta = DP_SGD[setting]
    curve = dp_sgd_curve(sgd(*setting), "add_or_remove_one")
    assert curve.success(BASELINES) == pytest.approx(success, abs=1e-5)
    assert curve.advantage == pytest.approx(eta, abs=1e-4)


def test_a_coarse_grid_shifts_the_advantage_to_the_safe_side_by_little() -> None:
    fine = dp_sgd_curve(sgd(1.0, 0.01, 1000), "add_or_remove_one").advantage
    coarse = dp_sgd_curve(sgd(1.0, 0.01, 1000), "add_or_remove_one", 1e-3).advantage
    assert coarse - fine == pytest.approx(8e-5, abs=1e-5)


@pytest.mark.parametrize("sigma", SST2)
def test_the_papers_text_runs(sigma: float) -> None:
    losses = dp_sgd_losses(sgd(sigma, 0.0038010957846441, 792), "add_or_remove_one", 1e-3)
    eta, epsilon = SST2[sigma]
    assert certified_curve(losses).advantage == pytest.approx(eta, abs=3e-4)
    assert losses.get_epsilon_for_delta(1e-5) == pytest.approx(epsilon, abs=5e-3)


@pytest.mark.parametrize("sigma", CIFAR)
def test_the_papers_image_runs_compose_with_two_more_releases(sigma: int) -> None:
    phases = (
        Phase(
            noise_multiplier=sigma, sampling_rate=8192 / 50000, steps=525 if sigma == 10 else 693
        ),
        Phase(noise_multiplier=8, sampling_rate=1, steps=2),
    )
    eta = dp_sgd_curve(phases, "add_or_remove_one", 1e-3).advantage
    assert eta == pytest.approx(CIFAR[sigma], abs=3e-4)


def test_replacing_a_row_is_harder_to_hide_than_adding_one() -> None:
    added = dp_sgd_losses(sgd(1.0, 0.01, 1000), "add_or_remove_one")
    replaced = dp_sgd_losses(sgd(1.0, 0.01, 1000), "replace_one")
    assert certified_curve(added).advantage == pytest.approx(0.16102, abs=1e-5)
    assert certified_curve(replaced).advantage == pytest.approx(0.26435, abs=1e-5)
    assert added.get_epsilon_for_delta(1e-5) == pytest.approx(1.82824, abs=1e-4)
    assert replaced.get_epsilon_for_delta(1e-5) == pytest.approx(2.84345, abs=1e-4)


@pytest.mark.parametrize(("fold", "eta"), [(1, 0.0952), (5, 0.1778), (15, 0.2947)])
def test_laplace_releases_compose(fold: int, eta: float) -> None:
    one = loss_distribution.from_laplace_mechanism(5.0, value_discretization_interval=1e-4)
    curve = certified_curve(one.self_compose(fold))
    assert curve.advantage == pytest.approx(eta, abs=1e-4)


def test_the_state_level_of_the_census_release() -> None:
    one = loss_distribution.from_discrete_gaussian_mechanism(sigma=2.236)
    losses = one.self_compose(10)
    # The brief has 0.5213. On the lattice of the ten sums the total variation is 0.5194, which
    # the grid rounds up to 0.5199; the brief's value is looser still.
    assert certified_curve(losses).advantage == pytest.approx(0.5213, abs=2e-3)
    assert certified_curve(losses).advantage == pytest.approx(0.5199, abs=2e-4)
    assert losses.get_epsilon_for_delta(1e-10) == pytest.approx(9.610, abs=1e-2)
    rare = 1 / 582_328
    success = float(certified_curve(losses).success(rare))
    assert success - rare == pytest.approx(6.2e-4, abs=1e-5)


def test_small_baselines_are_safe_where_pairing_the_discretisations_is_not() -> None:
    """riskcal 1.5.1 answers less than the baseline itself here: section 5."""
    from riskcal.analysis import get_beta_from_pld

    losses = dp_sgd_losses(sgd(0.5, 0.002, 10000), "add_or_remove_one")
    paired = 1 - float(get_beta_from_pld(losses, alpha=1e-4))
    assert paired < 1e-4
    assert float(certified_curve(losses).success(1e-4)) == pytest.approx(1.347e-2, abs=1e-5)


def test_the_worst_case_is_the_fixed_point_of_the_trade_off() -> None:
    curve = dp_sgd_curve(sgd(1.0, 0.01, 1000), "add_or_remove_one")
    baseline, eta = worst_case(curve)
    assert float(curve.success(baseline)) == pytest.approx((1 + eta) / 2, abs=1e-6)
    x = np.linspace(0, 1, 2001)
    assert (curve.success(x) - x).max() == pytest.approx(eta, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    sigma=st.floats(0.6, 8.0),
    rate=st.floats(0.001, 1.0),
    steps=st.integers(1, 400),
    low=st.floats(1e-6, 1.0),
    high=st.floats(1e-6, 1.0),
)
def test_success_is_a_concave_increasing_curve_above_its_baseline(
    sigma: float, rate: float, steps: int, low: float, high: float
) -> None:
    curve = dp_sgd_curve(sgd(sigma, rate, steps), "add_or_remove_one", 1e-2)
    low, high = min(low, high), max(low, high)
    middle = (low + high) / 2
    at_low, at_middle, at_high = curve.success([low, middle, high])
    assert at_low >= low
    assert at_low <= at_high + 1e-12
    assert at_middle >= (at_low + at_high) / 2 - 1e-9
    assert curve.success([1.0])[0] == 1.0
    # f is symmetric: f(f(x)) = x wherever f has not reached 0.
    f = 1 - at_middle
    if f > 1e-6:
        assert 1 - curve.success([f])[0] <= middle + 1e-6


def test_success_rises_with_steps_and_rate_and_falls_with_noise() -> None:
    def at(sigma: float, rate: float, steps: int) -> float:
        curve = dp_sgd_curve(sgd(sigma, rate, steps), "add_or_remove_one", 1e-3)
        return float(curve.success(0.01))

    middle = at(1.0, 0.01, 200)
    assert at(1.2, 0.01, 200) < middle < at(1.0, 0.01, 400)
    assert middle < at(1.0, 0.02, 200)
    assert at(500.0, 0.01, 200) == pytest.approx(0.01, abs=1e-4)


def test_the_envelope_is_the_largest_of_all_lines() -> None:
    losses = dp_sgd_losses(sgd(0.9, 0.05, 50), "add_or_remove_one", 1e-2)
    epsilon = np.arange(0, 400) * 1e-2
    delta = np.asarray(losses.get_delta_for_epsilon(epsilon))
    x = np.linspace(0, 1, 301)
    steep = (1 - delta[:, None] - np.exp(epsilon)[:, None] * x).max(0)
    flat = (np.exp(-epsilon)[:, None] * (1 - delta[:, None] - x)).max(0)
    slow = 1 - np.clip(np.maximum(steep, flat), 0, 1 - x)
    assert CertifiedCurve(epsilon, delta).success(x) == pytest.approx(slow, abs=1e-12)
    assert certified_curve(losses).success(x) == pytest.approx(slow, abs=2e-3)


@pytest.mark.parametrize(
    ("epsilon", "delta", "eta"), [(1, 1e-5, 0.46212), (4, 1e-5, 0.96403), (8, 1e-5, 0.9993)]
)
def test_one_pair_says_little(epsilon: float, delta: float, eta: float) -> None:
    curve = OnePairCurve(epsilon, delta)
    assert curve.advantage == pytest.approx(eta, abs=5e-5)
    baseline = (1 - curve.advantage) / 2
    assert float(curve.success(baseline)) - baseline == pytest.approx(curve.advantage, abs=1e-9)


@pytest.mark.parametrize(
    ("prior", "bayes", "unified"),
    [(0.5, 0.6305587, 0.7475075), (0.7, 0.7142382, 0.8831864), (0.9, 0.9000246, 0.9743056)],
)
def test_a_secret_bit_has_a_tighter_bound(prior: float, bayes: float, unified: float) -> None:
    curve = GaussianCurve(2 / 3)
    assert binary_bayes_success(curve, prior) == pytest.approx(bayes, abs=1e-7)
    assert float(curve.success(max(prior, 1 - prior))) == pytest.approx(unified, abs=1e-7)


@pytest.mark.parametrize("baseline", [-0.1, 1.1, float("nan")])
def test_a_baseline_is_a_probability(baseline: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        GaussianCurve(1.0).success(baseline)


def test_a_kind_says_all_about_itself_without_its_method() -> None:
    from analyses.registry import find

    for name in ("privacy.risk", "privacy.calibrate"):
        described = find(name).describe()
        assert described["kind"] == name
        assert described["cost_of_example"]["seconds"] > 0
        assert "properties" in described["request_schema"]
        assert dataclasses.is_dataclass(find(name))


@pytest.mark.filterwarnings("error")
def test_losses_that_overflow_an_exponential_still_have_a_curve() -> None:
    """Ten releases with sigma 0.05 are one with mu = 20 sqrt(10), losses about 2000 nats."""
    curve = dp_sgd_curve(sgd(0.05, 1.0, 10), "add_or_remove_one", grid=0.1)
    assert curve.success([1e-9, 0.01]).tolist() == [1.0, 1.0]
    where, advantage = worst_case(curve)
    assert where >= 0
    assert advantage == pytest.approx(1.0, abs=1e-9)
    assert advantage <= 1
