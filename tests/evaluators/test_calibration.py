"""Disagreement, subsets and correlations. Golden values marked "brief" are of an independent
script."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.calibration import correlation as module
from evaluators.calibration.chance import chance_subsets, restricted_pearson
from evaluators.calibration.correlation import (
    correlations,
    fisher_interval,
    kendall,
    midranks,
    pearson,
    spearman,
)
from evaluators.calibration.disagreement import (
    entropy,
    fleiss_kappa,
    fleiss_single,
    gini,
    grouped,
    mean_preference,
    mean_rating,
    minority,
    p_disagree,
    pairwise_disagreement,
    similar_share,
)
from evaluators.calibration.scores import judge_score, perplexity_score
from evaluators.calibration.subsets import highest, paper_subsets
from evaluators.calibration.windows import (
    SELECTORS,
    grown_from_median,
    grown_from_smallest_gap,
    least_distance,
    least_range,
    least_variance,
    tukey_fences,
    tukey_then_least_range,
    within_queries,
)

MIXED = np.array([[1, 2, 4, 8, 10]])


# Brief, section 6.3.
@pytest.mark.parametrize(
    ("counts", "expected"),
    [((5, 5, 5, 5, 5), 2.321928), ((25, 0, 0, 0, 0), 0.0), ((1, 2, 4, 8, 10), 1.955085)],
)
def test_entropy_is_in_bits(counts, expected):
    assert entropy(np.array([counts]))[0] == pytest.approx(expected, abs=1e-6)


# Brief, section 6.3: grouped counts (3, 4, 18).
def test_grouped_entropy_merges_strong_and_slight_votes():
    assert grouped(MIXED).tolist() == [[3, 4, 18]]
    assert entropy(grouped(MIXED))[0] == pytest.approx(1.131315, abs=1e-6)


# Brief, section 6.4.
@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (gini, 0.704),
        (pairwise_disagreement, 0.733333),
        (minority, 0.6),
        (fleiss_single, 0.083333),
        (p_disagree, 0.2),
    ],
)
def test_measures_of_one_item(measure, expected):
    assert measure(MIXED)[0] == pytest.approx(expected, abs=1e-6)


# Brief, section 6.4: 0.48, all ties 0.5, unanimous 0.
@pytest.mark.parametrize(
    ("counts", "expected"),
    [((12, 0, 0, 0, 13), 0.48), ((0, 0, 25, 0, 0), 0.5), ((0, 25, 0, 0, 0), 0.0)],
)
def test_p_disagree_counts_a_tie_as_half_a_vote(counts, expected):
    assert p_disagree(np.array([counts]))[0] == pytest.approx(expected)


def test_raters_who_all_see_a_tie_agree_by_grouped_entropy():
    assert entropy(grouped(np.array([[0, 0, 25, 0, 0]])))[0] == 0


def test_the_order_of_labels_does_not_change_an_entropy():
    both = np.array([[1, 2, 4, 8, 10], [10, 4, 1, 2, 8]])
    assert entropy(both)[0] == entropy(both)[1]


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=6))
def test_disagreement_between_raters_is_gini_without_replacement(rows):
    counts = np.array(rows) + 1
    n = counts.sum(1)
    assert pairwise_disagreement(counts) == pytest.approx(gini(counts) * n / (n - 1))


# Fleiss, Psychological Bulletin 76 (1971), the worked example: 10 subjects, 14 raters, 5
# categories; kappa 0.210.
FLEISS = np.array(
    [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]
)  # fmt: skip


def test_fleiss_kappa_of_the_published_example():
    assert fleiss_kappa(FLEISS) == pytest.approx(0.210, abs=0.0005)


def test_agreement_beyond_chance_is_undefined_where_all_votes_are_alike():
    same = np.array([[5, 0], [4, 0]])
    assert np.isnan(fleiss_single(same)).all()
    assert fleiss_kappa(same) is None


def test_one_rater_has_no_pair():
    assert np.isnan(pairwise_disagreement(np.array([[1, 0], [2, 2]]))).tolist() == [True, False]


def test_human_scores_are_means():
    assert mean_rating(np.array([[1, 0, 0, 0, 3]]))[0] == 4
    assert mean_preference(np.array([[1, 0, 0, 1, 2]]))[0] == pytest.approx((2 - 1 - 4) / 4)
    assert similar_share(np.array([[1, 0, 3, 0, 0]]))[0] == 0.75


@pytest.mark.parametrize("counts", [[[0, 0, 0]], [[-1, 2, 3]], [[math.nan, 1, 1]], [[3]], [1, 2]])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(ValueError, match=r"counts|rating"):
        entropy(np.array(counts, dtype=float))


def test_pairwise_measures_need_five_options():
    with pytest.raises(ValueError, match="five options"):
        p_disagree(np.array([[1, 2, 3]]))


def test_a_likelier_response_has_a_larger_score():
    assert perplexity_score([math.log(0.5)] * 3) == pytest.approx(-2)
    assert perplexity_score([-1.0]) > perplexity_score([-2.0])
    assert perplexity_score([-1e6]) == -math.inf
    for bad in ([], [math.nan]):
        with pytest.raises(ValueError, match="finite"):
            perplexity_score(bad)


def test_a_judges_overall_score_wins_over_its_three_parts():
    parts = {"Helpfulness": 5, "Harmlessness": 3, "Honesty": 1}
    assert judge_score(parts) == 3
    assert judge_score({**parts, "Overall Quality": 4}) == 4
    with pytest.raises(ValueError, match="honesty"):
        judge_score({"helpfulness": 1, "harmlessness": 2})


# Quartiles of 1..9 by linear interpolation: 3 and 7.
def test_tukey_keeps_what_lies_within_the_fences():
    scores = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 30.0])
    assert tukey_fences(scores, 1.5).tolist() == list(range(9))
    assert tukey_fences(scores, 10).tolist() == list(range(10))
    assert tukey_fences(np.arange(1.0, 10), 0).tolist() == [2, 3, 4, 5, 6]
    assert tukey_fences(np.ones(4), 0.5).tolist() == [0, 1, 2, 3]


def sum_of_distances(x):
    return sum(abs(a - b) for a, b in itertools.combinations(x, 2))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 8))
def test_window_scans_equal_a_search_over_all_subsets(values, size):
    scores, size = np.array(values, dtype=float), min(size, len(values))
    for select, cost in (
        (least_range, np.ptp),
        (least_variance, np.var),
        (least_distance, sum_of_distances),
    ):
        best = min(cost(scores[list(c)]) for c in itertools.combinations(range(len(values)), size))
        chosen = select(scores, size)
        assert len(chosen) == size
        assert cost(scores[chosen]) == pytest.approx(best, abs=1e-9)


@given(
    st.lists(st.floats(-9, 9), min_size=2, max_size=12),
    st.integers(1, 12),
    st.sampled_from(sorted(SELECTORS)),
)
def test_every_selector_returns_that_many_places_ascending(values, size, name):
    scores, size = np.array(values), min(size, len(values))
    chosen = SELECTORS[name](scores, size).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert set(chosen) <= set(range(len(values)))


def test_growth_crosses_the_smaller_gap():
    scores = np.array([0, 10, 11, 13, 20, 20.5])
    assert grown_from_median(scores, 3).tolist() == [1, 2, 3]
    assert grown_from_smallest_gap(scores, 3).tolist() == [3, 4, 5]
    assert grown_from_median(np.array([1.0, 2, 3]), 2).tolist() == [0, 1]


def test_outliers_are_left_out_before_the_window_is_chosen():
    scores = np.array([0, 1, 1.2, 2, 3, 4, 5, 6, 7, 8, 50, 50.1])
    assert least_range(scores, 2).tolist() == [10, 11]
    assert tukey_then_least_range(scores, 2).tolist() == [1, 2]
    assert tukey_then_least_range(scores, 12).tolist() == list(range(12))


def test_selection_within_queries_takes_its_share_of_each():
    scores = np.array([1, 9, 2, 3, 30, 31, 99.0])
    queries = ["a", "a", "a", "a", "b", "b", "b"]
    assert within_queries(least_range, scores, queries, 0.75).tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 4])
def test_more_than_there_are_cannot_be_chosen(size):
    with pytest.raises(ValueError, match=f"choose {size} of 3"):
        least_range(np.arange(3.0), size)


# Artificial Hivemind, arXiv 2510.22954, Table 20: N of 750 absolute items, and of 500 pairwise.
def test_the_papers_subset_sizes():
    generator = np.random.default_rng(0)
    counts = generator.multinomial(25, [0.2] * 5, 750)
    queries = [f"q{i % 50}" for i in range(750)]
    found = paper_subsets("absolute", counts, mean_rating(counts), queries)
    assert len(found[0].places) == 750
    tukey = [s for s in found if s.name == "Tukey fences"]
    assert [s.parameter for s in tukey] == [3.0, 2.5, 2.0, 1.5, 1.0, 0.5]
    assert all(a >= b for a, b in itertools.pairwise(len(s.places) for s in tukey))
    disagreed = [s for s in found if s.family == "disagreed"]
    least = [120, 105, 90, 75, 60, 45, 30, 15]
    assert all(len(s.places) >= n for s, n in zip(disagreed, least, strict=True))
    assert {len(s.places) for s in found if s.family == "alternative"} == {600}
    pairs = generator.multinomial(25, [0.2] * 5, 500)
    found = paper_subsets("pairwise", pairs, mean_preference(pairs), queries[:500])
    sizes = [475, 450, 425, 400, 375, 350, 325, 300]
    assert [len(s.places) for s in found] == [500, *sizes, *sizes]


def test_ties_with_the_last_one_are_kept_where_asked():
    values = np.array([3, 1, 2, 2, 2, 0.0])
    assert highest(values, 1 / 3, keep_ties=True).tolist() == [0, 2, 3, 4]
    assert highest(values, 1 / 3).tolist() == [0, 2]
    assert highest(values, 0.01).tolist() == [0]


NUMBERS = st.lists(
    st.tuples(st.integers(-5, 5), st.floats(-1e3, 1e3)), min_size=3, max_size=40
).filter(lambda pairs: len({x for x, _ in pairs}) > 1 and np.ptp([y for _, y in pairs]) > 1e-6)


@pytest.fixture(scope="module")
def stats():
    return pytest.importorskip("scipy.stats")


@given(NUMBERS)
def test_correlations_equal_scipys(stats, pairs):
    x, y = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
    assert kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-9)
    assert midranks(x).tolist() == stats.rankdata(x).tolist()


# Hand counts: ranks (1, 2.5, 2.5, 4) against (1, 3, 2, 4); 5 concordant, 0 discordant, 1 tie.
def test_correlations_of_a_hand_count():
    x, y = [1.0, 2, 2, 3], [1.0, 3, 2, 4]
    assert midranks(np.array(x)).tolist() == [1, 2.5, 2.5, 4]
    assert spearman(x, y) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert kendall(x, y) == pytest.approx(5 / math.sqrt(5 * 6))


def test_a_constant_side_has_no_correlation():
    for measure in (pearson, spearman, kendall):
        assert measure([1, 1, 1], [1, 2, 3]) is None
        assert measure([1], [2]) is None
    found = correlations([1, 1, 1, 1], [1, 2, 3, 4])
    assert found.pearson.value is None
    assert found.kendall.low is None


def test_very_large_numbers_do_not_overflow():
    x = np.array([1e200, 2e200, 3e200, 5e200])
    assert pearson(x, -x) == pytest.approx(-1)
    assert correlations(x, -x).pearson.value == pytest.approx(-1)


@pytest.mark.parametrize("bad", [([1, 2], [1, 2, 3]), ([1, math.nan], [1, 2])])
def test_lists_that_do_not_pair_are_refused(bad):
    with pytest.raises(ValueError, match="correlation needs"):
        pearson(*bad)


# Brief, section 5: r = 0.1 at N = 17 is about -0.40 to 0.55.
def test_seventeen_items_say_nothing_about_a_correlation():
    low, high = fisher_interval(0.1, 17)
    assert (low, high) == (pytest.approx(-0.40, abs=0.005), pytest.approx(0.55, abs=0.005))
    with pytest.raises(ValueError, match="n > 3"):
        fisher_interval(0.1, 3)


def test_resampled_correlations_are_those_of_the_drawn_items():
    """The weighted forms against drawing the items themselves."""
    generator = np.random.default_rng(5)
    x, y = generator.integers(0, 5, 30).astype(float), generator.normal(size=30)
    w_B_N = generator.multinomial(30, np.full(30, 1 / 30), 20).astype(float)
    drawn = [np.repeat(np.arange(30), row.astype(int)) for row in w_B_N]
    for weighted, plain in (
        (module.weighted_pearson(w_B_N, x, y), pearson),
        (module.weighted_spearman(w_B_N, x, y), spearman),
        (module.weighted_kendall(w_B_N, *module.pair_signs(x, y)), kendall),
    ):
        assert weighted.tolist() == pytest.approx([plain(x[i], y[i]) for i in drawn], abs=1e-9)


def test_the_interval_is_that_of_normal_items_in_a_large_sample():
    generator = np.random.default_rng(2)
    x = generator.normal(size=400)
    y = 0.5 * x + generator.normal(size=400)
    found = correlations(x, y, seed=3).pearson
    low, high = fisher_interval(found.value, 400)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))


def test_items_of_one_query_are_drawn_together():
    generator = np.random.default_rng(2)
    level = np.repeat(generator.normal(size=(2, 20)), 10, axis=1)
    x, y = level + 0.1 * generator.normal(size=(2, 200))
    queries = [f"q{i // 10}" for i in range(200)]
    alone, together = correlations(x, y).spearman, correlations(x, y, queries).spearman
    assert together.high - together.low > 2 * (alone.high - alone.low)
    few = correlations(x, y, ["a", "b"] * 100)
    assert few.spearman == alone


def test_the_same_seed_gives_the_same_interval_whatever_the_block(monkeypatch):
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(2, 50))
    first = correlations(x, y, seed=4, rounds=200)
    assert correlations(x, y, seed=4, rounds=200) == first
    assert correlations(x, y, seed=5, rounds=200) != first


def test_kendalls_interval_is_left_out_where_it_would_take_minutes(monkeypatch):
    monkeypatch.setattr("evaluators.calibration.correlation.KENDALL_INTERVAL_ITEMS", 10)
    found = correlations(np.arange(11.0), np.arange(11.0) ** 2)
    assert (found.kendall.value, found.kendall.low) == (1, None)
    assert found.spearman.low == pytest.approx(1)


# Thorndike, case 2, by hand: 0.6 * 0.5 / sqrt(1 - 0.36 + 0.36 * 0.25).
def test_a_smaller_range_lowers_a_correlation():
    assert restricted_pearson(0.6, 0.5) == pytest.approx(0.3 / math.sqrt(0.73))
    assert restricted_pearson(0.6, 1) == pytest.approx(0.6)
    assert restricted_pearson(1, 0) == 0
    with pytest.raises(ValueError, match="u >= 0"):
        restricted_pearson(0.5, -1)


def test_random_subsets_reach_the_variance_and_show_what_it_costs():
    generator = np.random.default_rng(0)
    human = generator.normal(size=900)
    model = human + generator.normal(size=900)
    found = chance_subsets(human, model, 0.3, 0.0, 300, seed=1)
    assert found.variance == pytest.approx(0.3, rel=0.1)
    expected = restricted_pearson(pearson(human, model), math.sqrt(0.3))
    assert found.pearson == pytest.approx(expected, abs=0.05)
    assert found.pearson_low < found.pearson < found.pearson_high < pearson(human, model)
    assert found == chance_subsets(human, model, 0.3, 0.0, 300, seed=1)


def test_subsets_too_small_or_out_of_reach_are_none():
    human = np.linspace(0, 1, 27)
    assert chance_subsets(human, human, 0.01, 0.5, 20, seed=0) is None
    human = np.linspace(0, 1, 90)
    assert chance_subsets(human, human, 10.0, 0.5, 20, seed=0) is None
    assert chance_subsets(np.ones(90), human, 0.1, 1.0, 20, seed=0) is None
