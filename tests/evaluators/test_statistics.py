import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.statistics import (
    bootstrap_mean_interval,
    mcnemar_exact,
    mean_metric,
    paired_change,
    proportion_metric,
    wilson_interval,
    wilson_lower,
    wilson_upper,
)


# Closed-form values, computed independently with z = 1.959964.
@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 100, 0.0, 0.03699),
        (5, 100, 0.02154, 0.11175),
        (15, 100, 0.09306, 0.23284),
        (150, 1000, 0.12921, 0.17347),
    ],
)
def test_wilson_interval_gives_the_known_values(k, n, low, high):
    assert wilson_interval(k, n) == pytest.approx((low, high), abs=5e-6)


def test_one_sided_upper_bound_gives_the_known_value():
    assert wilson_upper(5, 100) == pytest.approx(0.09916, abs=5e-6)


# Largest count whose one-sided upper bound stays within the limit, computed independently.
@pytest.mark.parametrize(
    ("limit", "n", "k"),
    [
        (0.10, 100, 5),
        (0.10, 200, 13),
        (0.10, 500, 38),
        (0.10, 1000, 84),
        (0.05, 200, 4),
        (0.05, 1000, 38),
    ],
)
def test_largest_passing_count_matches_the_known_table(limit, n, k):
    assert wilson_upper(k, n) <= limit < wilson_upper(k + 1, n)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_enclose_the_rate_and_mirror_each_other(counts):
    k, n = counts
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    assert wilson_lower(k, n) == pytest.approx(1 - wilson_upper(n - k, n), abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(-1, 10), (11, 10), (0, 0)])
def test_wilson_refuses_impossible_counts(k, n):
    with pytest.raises(ValueError, match="k="):
        wilson_interval(k, n)


# Exact binomial tails, computed independently.
@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (1, 8, 0.03906),
        (2, 10, 0.03857),
        (3, 12, 0.03516),
        (10, 22, 0.0501),
        (0, 0, 1.0),
        (0, 38, 7.3e-12),
    ],
)
def test_mcnemar_gives_the_known_values(b, c, p):
    assert mcnemar_exact(b, c) == pytest.approx(p, rel=5e-3 if p < 1e-6 else 0, abs=5e-6)


def test_mcnemar_is_symmetric_and_survives_large_counts():
    assert mcnemar_exact(600, 900) == mcnemar_exact(900, 600)
    assert 0 < mcnemar_exact(900, 1100) < 1e-4


def test_the_bootstrap_interval_is_close_to_the_normal_one_for_a_large_sample():
    x_N = np.random.default_rng(1).normal(size=400)
    half = 1.96 * x_N.std() / math.sqrt(400)
    low, high = bootstrap_mean_interval(x_N, seed=0)
    assert low == pytest.approx(x_N.mean() - half, abs=0.02)
    assert high == pytest.approx(x_N.mean() + half, abs=0.02)


def test_the_bootstrap_repeats_itself_for_one_seed():
    values = [0.0, 1.0, 1.0, 0.5]
    assert bootstrap_mean_interval(values, seed=9) == bootstrap_mean_interval(values, seed=9)


def test_the_bootstrap_of_a_constant_is_that_constant():
    assert bootstrap_mean_interval([0.25] * 7, seed=0) == (0.25, 0.25)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_the_bootstrap_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="bootstrap"):
        bootstrap_mean_interval(values, seed=0)


def test_paired_change_counts_discordant_prompts():
    base = [True] + [False] * 9
    tuned = [False, True, True, True] + [False] * 6
    result = paired_change(base, tuned, seed=0)
    assert (result.only_base, result.only_tuned, result.n) == (1, 3, 10)
    assert result.change == pytest.approx(0.2)
    assert result.low <= 0.2 <= result.high
    assert result.p_value == mcnemar_exact(1, 3)


def test_equal_flags_change_nothing():
    result = paired_change([True, False], [True, False], seed=0)
    assert (result.change, result.p_value) == (0.0, 1.0)
    assert result.low == pytest.approx(-result.high)


def test_paired_change_refuses_unequal_lists():
    with pytest.raises(ValueError, match="equal"):
        paired_change([True], [True, False], seed=0)


def test_a_rate_of_nothing_is_undefined_not_zero():
    assert proportion_metric(0, 0).value is None
    assert mean_metric([], seed=0).value is None


def test_a_rate_carries_its_interval():
    metric = proportion_metric(5, 100)
    assert (metric.value, metric.n) == (0.05, 100)
    assert (metric.low, metric.high) == wilson_interval(5, 100)
