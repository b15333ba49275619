"""Bounds beside the exact curve; golden values of the brief on privacy calibration, 6.6 and 4."""

import numpy as np
import pytest

from analyses.privacy.older_bounds import (
    ORDERS,
    dp_sgd_rdp,
    renyi_advantage,
    renyi_success,
    two_sided_renyi_success,
    zcdp_advantage,
    zcdp_success,
)
from analyses.privacy.risk import gaussian_epsilon
from analyses.privacy.spec import Phase
from analyses.privacy.tradeoff import GaussianCurve, OnePairCurve

# baseline: exact, Zhu et al., zCDP, order 2, one (eps, 1e-5) of the Gaussian mechanism with sigma 1
SIGMA_1 = {
    0.01: (0.09236, 0.12460, 0.12615, 0.16487, 0.79614),
    0.1: (0.38914, 0.48373, 0.51860, 0.52137, 0.98870),
    0.30854: (0.69146, 0.77791, 0.86732, 0.91580, 0.99131),
}


@pytest.mark.parametrize("baseline", SIGMA_1)
def test_the_older_bounds_of_a_gaussian_release(baseline: float) -> None:
    exact, zhu, zcdp, order_2, pair = SIGMA_1[baseline]
    curve = GaussianCurve(1.0)
    assert float(curve.success(baseline)) == pytest.approx(exact, abs=1e-5)
    assert two_sided_renyi_success(baseline, ORDERS, ORDERS / 2) == pytest.approx(zhu, abs=2e-4)
    assert zcdp_success(baseline, 0.5) == pytest.approx(zcdp, abs=1e-5)
    assert renyi_success(baseline, np.array([2.0]), np.array([1.0])) == pytest.approx(
        order_2, abs=1e-5
    )
    epsilon = gaussian_epsilon(curve, 1e-5)
    assert float(OnePairCurve(epsilon, 1e-5).success(baseline)) == pytest.approx(pair, abs=1e-4)
    assert exact <= zhu <= zcdp <= order_2


def test_the_two_sided_bound_is_never_below_the_exact_curve() -> None:
    for mu in (0.3, 1.0, 2.5):
        for baseline in (1e-4, 0.01, 0.2, 0.7):
            bound = two_sided_renyi_success(baseline, ORDERS, ORDERS * mu**2 / 2)
            assert bound >= float(GaussianCurve(mu).success(baseline))


def test_zero_concentrated_privacy_has_the_best_order_in_closed_form() -> None:
    orders = np.linspace(1.0001, 128, 200_000)
    for baseline, rho in ((0.01, 0.5), (0.1, 0.05), (0.3, 1.0)):
        assert zcdp_success(baseline, rho) == pytest.approx(
            renyi_success(baseline, orders, orders * rho), abs=1e-6
        )
    assert zcdp_success(0.5, 1.0) == 1.0


def test_the_census_state_level_by_zero_concentrated_privacy() -> None:
    """The brief compares at the worst case of the exact curve, whose advantage is 0.5213."""
    baseline = (1 - 0.5213) / 2
    assert zcdp_success(baseline, 1.0001) - baseline == pytest.approx(0.7231, abs=2e-4)
    assert zcdp_advantage(1.0001) == pytest.approx(0.7304, abs=1e-3)


@pytest.mark.parametrize(
    ("sigma", "advantage"), [(0.5715066, 0.3026), (0.6945393, 0.1840), (0.7497660, 0.1530)]
)
def test_the_papers_text_runs_by_renyi_divergences(sigma: float, advantage: float) -> None:
    phase = Phase(noise_multiplier=sigma, sampling_rate=0.0038010957846441, steps=792)
    found = renyi_advantage(ORDERS, dp_sgd_rdp((phase,)))
    assert found == pytest.approx(advantage, abs=2e-3)


@pytest.mark.parametrize(
    ("epsilon", "mu"), [(1, 0.26805), (2, 0.50155), (4, 0.92493), (8, 1.66603)]
)
def test_the_gaussian_mechanism_with_a_pair(epsilon: float, mu: float) -> None:
    assert gaussian_epsilon(GaussianCurve(mu), 1e-5) == pytest.approx(epsilon, abs=1e-3)
