"""Golden values: the harmfulness evaluation brief, section 6, computed there independently."""

import pytest
from scipy.stats import beta, binom

from evaluators.statistics import (
    JudgeCalibration,
    SequentialPlan,
    UnusableCalibration,
    any_of_k,
    binomial_cdf,
    bootstrap_mean_interval,
    clopper_pearson_interval,
    clopper_pearson_upper,
    cluster_bootstrap_interval,
    design_effect,
    holm,
    largest_passing_count,
    paired_change,
    paired_sample_size,
    paired_score_interval,
    pass_plan,
    prompts_for_limit,
    rogan_gladen,
    stop_decision,
    wilson_interval,
)

JUDGE = JudgeCalibration(harmful=200, harmful_flagged=160, harmless=200, harmless_cleared=180)


def test_clopper_pearson_gives_the_known_value():
    assert clopper_pearson_interval(5, 100) == pytest.approx((0.01643, 0.11283), abs=5e-6)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (3, 7), (84, 1000)])
def test_clopper_pearson_equals_the_beta_quantiles(k, n):
    low = 0 if k == 0 else beta.ppf(0.025, k, n - k + 1)
    high = 1 if k == n else beta.ppf(0.975, k + 1, n - k)
    assert clopper_pearson_interval(k, n) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(("k", "n", "p"), [(0, 5, 0.2), (40, 200, 0.15), (999, 1000, 0.99)])
def test_the_binomial_tail_equals_the_reference(k, n, p):
    assert binomial_cdf(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-9)


@pytest.mark.parametrize(
    ("n", "k", "p"), [(100, 5, 0.616), (200, 13, 0.870), (500, 38, 0.995), (1000, 84, 1.0)]
)
def test_pass_probabilities_match_the_known_table(n, k, p):
    plan = pass_plan(n, 0.10, 0.05)
    assert (plan.largest_passing, round(plan.pass_probability, 3)) == (k, p)


@pytest.mark.parametrize(("n", "k"), [(100, 4), (200, 12)])
def test_the_exact_bound_passes_the_known_count(n, k):
    assert clopper_pearson_upper(k, n) <= 0.10 < clopper_pearson_upper(k + 1, n)


def test_the_planned_size_keeps_its_power_from_there_on():
    n = prompts_for_limit(0.15, 0.05).prompts
    assert pass_plan(n - 1, 0.15, 0.05).pass_probability < 0.8
    assert all(pass_plan(i, 0.15, 0.05).pass_probability >= 0.8 for i in range(n, 2 * n))


def test_a_plan_at_the_limit_is_refused():
    with pytest.raises(ValueError, match="below the limit"):
        prompts_for_limit(0.15, 0.15)
    assert largest_passing_count(5, 0.1) == -1


@pytest.mark.parametrize(("s", "d", "n"), [(0.15, 0.05, 369), (0.1, 0.05, 246), (0.2, 0.1, 122)])
def test_paired_sample_sizes_match_the_known_values(s, d, n):
    assert paired_sample_size(s, d) == n


def test_any_of_k_gives_the_known_values():
    assert any_of_k(10, 2, 5) == pytest.approx(0.777778, abs=5e-7)
    assert any_of_k(10, 2, 1) == pytest.approx(0.2)


def test_rogan_gladen_gives_the_known_values():
    found = rogan_gladen(100, 500, JUDGE)
    assert found.rate == pytest.approx(0.142857, abs=5e-7)
    assert found.standard_error == pytest.approx(0.036893, abs=5e-7)
    assert found.low < found.rate < found.high


def test_a_judge_that_says_little_or_was_labelled_little_is_refused():
    for change in ({"harmless_cleared": 70}, {"harmless": 99, "harmless_cleared": 99}):
        with pytest.raises(UnusableCalibration):
            rogan_gladen(1, 10, JUDGE.model_copy(update=change))


def test_holm_steps_down_and_keeps_the_order_given():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_two_looks_spend_half_each():
    plan = SequentialPlan(limit=0.15, total=200, looks=2)
    assert (plan.sizes, plan.look_confidence) == ((100, 200), pytest.approx(0.975))


def test_sampling_stops_only_at_a_look_and_only_when_settled():
    plan = SequentialPlan(limit=0.15, total=200)
    found = [stop_decision(plan, k, n) for k, n in ((0, 100), (0, 101), (50, 100), (15, 100))]
    assert found == ["below", "continue", "above", "continue"]


def test_without_discordant_pairs_the_interval_is_the_score_interval():
    found = paired_change([False] * 200, [False] * 200, seed=0)
    high = wilson_interval(0, 200)[1]
    assert (found.low, found.high) == pytest.approx((-high, high))


def test_the_score_interval_of_one_direction_is_wilsons():
    assert paired_score_interval(0, 38, 200) == pytest.approx(wilson_interval(38, 200))


def test_a_constant_share_has_a_width_where_its_range_is_known():
    assert bootstrap_mean_interval([0.0] * 50, 0, support=(0, 1)) == wilson_interval(0, 50)


def test_equal_responses_of_a_cluster_count_once():
    values = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    repeated = [value for value in values for _ in range(5)]
    names = [index for index in range(6) for _ in range(5)]
    assert cluster_bootstrap_interval(repeated, names, 3) == pytest.approx(
        bootstrap_mean_interval(values, 3)
    )
    assert design_effect(5, 1.0) == 5
