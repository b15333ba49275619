"""One model's diversity. Golden values marked "brief" were computed by an independent script."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.diversity.coherence import CoherenceFloor, coherence_hint
from evaluators.diversity.intra import diversity_metrics
from evaluators.diversity.paired import paired_difference, sign_test
from evaluators.diversity.similarity import (
    cross_similarity,
    histogram,
    intra_similarity,
    pair_spread,
    unrelated_similarity,
)
from evaluators.diversity.vendi import vendi_score, vendi_scores

SHIPPED = {
    "diversity.intra_similarity",
    "diversity.change_vs_base",
    "diversity.vendi",
    "diversity.vendi_ratio",
    "diversity.distinct_classes",
    "diversity.self_bleu",
}


def random_units(n, width, seed):
    e_n_D = np.random.default_rng(seed).normal(size=(n, width))
    return e_n_D / np.linalg.norm(e_n_D, axis=1, keepdims=True)


def constant_similarity(n, s):
    """n unit vectors whose pairs all have cosine s."""
    return np.linalg.cholesky(np.full((n, n), s) + (1 - s) * np.eye(n))


@given(st.integers(2, 30), st.integers(1, 20), st.integers(0, 10_000))
def test_the_sum_vector_identity_equals_the_pair_loop(n, width, seed):
    e_n_D = random_units(n, width, seed)
    loop = np.mean([e_n_D[i] @ e_n_D[j] for i in range(n) for j in range(i)])
    assert intra_similarity(e_n_D) == pytest.approx(loop, abs=1e-12)


def test_a_toy_pool_has_similarity_one_third():
    assert intra_similarity(np.array([[1.0, 0], [0, 1], [1, 0]])) == pytest.approx(1 / 3)


def test_equal_responses_have_similarity_one_and_count_as_one():
    e_n_D = np.repeat(random_units(1, 8, 0), 5, axis=0)
    assert intra_similarity(e_n_D) == pytest.approx(1, abs=1e-6)
    assert vendi_score(e_n_D) == pytest.approx(1, abs=1e-6)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_the_cross_identity_equals_the_mean_of_all_cosines(n, m, seed):
    e_n_D, f_m_D = random_units(n, 7, seed), random_units(m, 7, seed + 1)
    assert cross_similarity(e_n_D, f_m_D) == pytest.approx((e_n_D @ f_m_D.T).mean(), abs=1e-6)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 10_000))
def test_the_unrelated_baseline_is_the_mean_over_pairs_of_two_queries(sizes, seed):
    pools = [random_units(size, 6, seed + i) for i, size in enumerate(sizes)]
    pairs = [
        float(x @ y)
        for a, left in enumerate(pools)
        for b, right in enumerate(pools)
        if a != b
        for x in left
        for y in right
    ]
    assert unrelated_similarity(pools) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_one_query_has_no_unrelated_baseline():
    assert unrelated_similarity([random_units(3, 4, 0)]) is None
    assert unrelated_similarity([random_units(3, 4, 0), np.zeros((2, 4))]) is None


def test_the_spread_shows_a_verbatim_copy():
    e_n_D = np.vstack([constant_similarity(20, 0.3), constant_similarity(20, 0.3)[:1]])
    spread = pair_spread(e_n_D)
    assert spread.low == pytest.approx(0.3)
    assert spread.p95 == pytest.approx(0.3)
    assert spread.high == pytest.approx(1)
    assert pair_spread(e_n_D[:1]) is None


# Brief, section 6.5: four orthogonal vectors, and e0, e0, e1, e2 for the orders.
@pytest.mark.parametrize(("q", "expected"), [(1.0, 2.828427), (2.0, 2.666667), (math.inf, 2.0)])
def test_vendi_of_a_repeated_direction(q, expected):
    e_n_D = np.eye(3)[[0, 0, 1, 2]]
    assert vendi_score(e_n_D, q) == pytest.approx(expected, abs=1e-6)


def test_vendi_of_orthogonal_vectors_is_their_number():
    assert vendi_score(np.eye(4)) == pytest.approx(4)


# Brief, section 6.5; closed form: lambda_1 = (1 + (n-1)s)/n, others (1-s)/n.
@pytest.mark.parametrize(("q", "expected"), [(1.0, 3.516984), (2.0, 1.545117)])
def test_vendi_of_constant_similarity(q, expected):
    n, s = 50, 0.8
    eigenvalues = np.array([(1 + (n - 1) * s) / n] + [(1 - s) / n] * (n - 1))
    closed = (
        np.exp(-(eigenvalues * np.log(eigenvalues)).sum())
        if q == 1
        else (eigenvalues**q).sum() ** (1 / (1 - q))
    )
    found = vendi_score(constant_similarity(n, s), q)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found == pytest.approx(closed, rel=1e-9)


def test_several_orders_come_from_one_decomposition():
    e_n_D = random_units(9, 5, 2)
    orders = (0.5, 1.0, 2.0, math.inf)
    assert vendi_scores(e_n_D, orders) == [vendi_score(e_n_D, q) for q in orders]


def test_vendi_is_the_same_from_either_gram_matrix():
    e_n_D = random_units(30, 8, 5)
    padded = np.hstack([e_n_D, np.zeros((30, 40))])
    assert vendi_score(e_n_D) == pytest.approx(vendi_score(padded), rel=1e-9)


def test_vendi_refuses_an_order_that_is_not_positive():
    with pytest.raises(ValueError, match="order"):
        vendi_score(np.eye(2), 0.0)


@given(st.integers(0, 10_000))
def test_the_order_of_responses_does_not_matter(seed):
    e_n_D = random_units(6, 5, seed)
    mixed = e_n_D[np.random.default_rng(seed).permutation(6)]
    assert intra_similarity(mixed) == pytest.approx(intra_similarity(e_n_D), abs=1e-12)
    assert vendi_score(mixed) == pytest.approx(vendi_score(e_n_D), rel=1e-9)


def test_duplicating_the_pool_raises_similarity_and_leaves_vendi():
    e_n_D = random_units(6, 10, 3)
    doubled = np.vstack([e_n_D, e_n_D])
    assert intra_similarity(doubled) > intra_similarity(e_n_D)
    assert vendi_score(doubled) == pytest.approx(vendi_score(e_n_D), rel=1e-9)


@pytest.mark.parametrize("measure", [intra_similarity, vendi_score])
def test_fewer_than_two_vectors_are_undefined(measure):
    assert measure(np.array([[1.0, 0.0]])) is None
    assert measure(np.array([[1.0, 0.0], [0.0, 0.0]])) is None


def test_zero_vectors_are_left_out():
    e_n_D = random_units(4, 6, 0)
    with_empty = np.vstack([e_n_D, np.zeros((2, 6))])
    assert intra_similarity(with_empty) == pytest.approx(intra_similarity(e_n_D))


# Artificial Hivemind, arXiv 2510.22954, Table 6, row "mean over all models" in percent from
# 0.9-1 down to 0-0.1; it sums to 100.01, the first two bins to 70.12.
TABLE_6 = (33.65, 36.47, 16.29, 7.46, 3.00, 1.54, 1.13, 0.43, 0.04, 0.0)


def test_the_histogram_reproduces_a_row_of_the_papers_table():
    assert sum(TABLE_6) == pytest.approx(100.01)
    counts = [round(100 * percent) for percent in reversed(TABLE_6)]
    values = [0.05 + place / 10 for place, count in enumerate(counts) for _ in range(count)]
    found = histogram(values)
    assert found == pytest.approx([count / 100.01 for count in counts])
    assert found[8] + found[9] == pytest.approx(70.12 / 1.0001)


def test_a_bins_lower_edge_belongs_to_it_and_the_last_bin_is_closed():
    edges = [i / 10 for i in range(11)]
    assert histogram(edges) == pytest.approx([100 / 11] * 9 + [200 / 11])
    assert histogram([-0.2, 1.0000001]) == (50.0, *(0.0,) * 8, 50.0)
    assert histogram([]) == (0.0,) * 10


@pytest.fixture
def table(table_embedder):
    return table_embedder({"x": [1.0, 0.0], "y": [0.0, 1.0], "no": [1.0, 0.0]})


def test_metrics_are_paired_by_query_and_skip_what_is_undefined(table):
    tuned = {"q1": ["x", "x"], "q2": ["x", "y"], "q3": ["x", " "]}
    base = {"q2": ["x", "y"], "q1": ["x", "y"], "q3": ["x", "x"]}
    result = diversity_metrics(tuned, table, base)
    assert set(result.metrics) == SHIPPED
    assert result.metrics["diversity.intra_similarity"].value == pytest.approx(0.5)
    assert result.metrics["diversity.vendi"].value == pytest.approx(1.5)
    assert result.metrics["diversity.vendi_ratio"].value == pytest.approx(0.75)
    assert result.metrics["diversity.change_vs_base"].value == pytest.approx(0.5)
    assert result.metrics["diversity.change_vs_base"].n == 2
    assert [(row.n, row.empty) for row in result.queries] == [(2, 0), (2, 0), (1, 1)]
    assert [(row.n, row.empty) for row in result.base_queries] == [(2, 0)] * 3


def test_without_a_base_the_changes_are_undefined(table):
    metrics = diversity_metrics({"q": ["x", "x"]}, table).metrics
    for name in ("diversity.change_vs_base", "diversity.vendi_ratio"):
        assert metrics[name].value is None
        assert "base model" in metrics[name].note


def test_one_response_per_query_leaves_every_metric_undefined(table):
    metrics = diversity_metrics({"q": ["x"]}, table, {"q": ["x"]}).metrics
    assert all(metric.value is None and metric.n == 0 for metric in metrics.values())


def test_no_query_at_all_is_undefined(table):
    result = diversity_metrics({}, table, {})
    assert all(metric.value is None for metric in result.metrics.values())
    assert result.histogram == (0.0,) * 10


def test_one_query_has_a_value_without_an_interval(table):
    metrics = diversity_metrics({"q": ["x", "y"]}, table, {"q": ["x", "x"]}).metrics
    for name in ("diversity.intra_similarity", "diversity.change_vs_base", "diversity.vendi_ratio"):
        assert metrics[name].n == 1
        assert metrics[name].value is not None
        assert (metrics[name].low, metrics[name].high) == (None, None)


def test_the_vendi_ratio_compares_equally_many_answers(table):
    tuned, base = {"q": ["x", "y", "x", "y"]}, {"q": ["x", "y", " ", ""]}
    assert diversity_metrics(tuned, table, base).metrics["diversity.vendi_ratio"].value == 1.0


def test_classes_of_queries_that_all_collapse_keep_an_interval(table):
    metric = diversity_metrics({f"q{i}": ["x", "x", "x"] for i in range(12)}, table).metrics[
        "diversity.distinct_classes"
    ]
    assert metric.value == metric.low == 1.0
    assert 1.0 < metric.high < 2.0


def test_refusals_are_counted_and_a_second_set_of_metrics_leaves_them_out(table):
    tuned = {"q": ["no", "no", "x", "y"]}
    flags = {"q": [True, True, False, False]}
    result = diversity_metrics(tuned, table, {"q": ["x", "y"]}, refused=flags,
                               base_refused={"q": [False, False]},
                               truncated={"q": [False, False, False, True]})  # fmt: skip
    assert (result.queries[0].refused, result.queries[0].truncated) == (2, 1)
    assert result.metrics["diversity.change_vs_base"].value == pytest.approx(0.5)
    assert result.answered_metrics["diversity.intra_similarity"].value == pytest.approx(0)
    assert result.answered_metrics["diversity.change_vs_base"].value == pytest.approx(0)


def test_without_flags_nothing_is_said_about_refusals(table):
    result = diversity_metrics({"q": ["x", "y"]}, table)
    assert result.answered_metrics == {}
    assert (result.queries[0].refused, result.queries[0].truncated) == (None, None)


def test_flags_that_do_not_fit_are_refused(table):
    with pytest.raises(ValueError, match="1 flags in refused for 2 responses to query 'q'"):
        diversity_metrics({"q": ["x", "y"]}, table, refused={"q": [True]})


def test_the_result_states_the_embedders_scale(table):
    result = diversity_metrics({"a": ["x", "x"], "b": ["y", "y"]}, table)
    assert result.unrelated == pytest.approx(0)
    assert not result.scale.calibrated
    assert result.scale.alarm == pytest.approx((0.80 - 0.078) / (1 - 0.078))
    assert "alarm 0.78" in result.metrics["diversity.intra_similarity"].note
    assert "not calibrated" in result.metrics["diversity.intra_similarity"].note


def test_shares_above_the_alarms_are_of_queries(table):
    tuned = {"q1": ["x", "x"], "q2": ["x", "y"], "q3": ["y", "y"], "q4": ["x", "y"]}
    shares = diversity_metrics(tuned, table).shares
    assert {name: metric.value for name, metric in shares.items()} == {
        "0.8": 0.5, "0.9": 0.5, "alarm": 0.5,
    }  # fmt: skip
    assert 0 < shares["0.8"].low < 0.5 < shares["0.8"].high < 1


def test_a_copied_answer_shows_in_every_number_of_its_query(table_embedder):
    same, other = "one two three four", "five six seven eight"
    table = table_embedder({same: [1.0, 0.0], other: [0.0, 1.0]})
    row, apart = diversity_metrics({"q": [same, same], "r": [same, other]}, table).queries
    assert (row.similarity, row.vendi, row.distinct_classes) == pytest.approx((1, 1, 1))
    assert (row.self_bleu, row.semantic_entropy, row.distinct_1) == pytest.approx((1, 0, 0.5))
    assert (apart.similarity, apart.vendi, apart.distinct_classes) == pytest.approx((0, 2, 2))
    assert (apart.self_bleu, apart.semantic_entropy) == pytest.approx((0, math.log(2)))
    assert (apart.distinct_1, apart.least_similarity, apart.vendi_2) == pytest.approx((1, 0, 2))


def test_queries_in_another_order_give_the_same_values(table):
    tuned = {"q1": ["x", "x"], "q2": ["x", "y"], "q3": ["y", "x"]}
    base = {"q1": ["x", "y"], "q2": ["y", "y"], "q3": ["y", "x"]}
    first = diversity_metrics(tuned, table, base).metrics
    second = diversity_metrics(dict(reversed(tuned.items())), table, base).metrics
    for name in SHIPPED:
        assert first[name].value == pytest.approx(second[name].value)


def test_differences_hold_an_interval_and_a_sign_test(table):
    tuned = {f"q{i}": ["x", "x"] for i in range(12)}
    base = {f"q{i}": ["x", "y"] if i < 11 else ["x", "x"] for i in range(12)}
    found = diversity_metrics(tuned, table, base, seed=1).differences["similarity"]
    assert found.mean == pytest.approx(11 / 12)
    assert 0.5 < found.low < found.mean < found.high <= 1
    assert (found.higher, found.lower) == (11, 0)
    assert found.sign_p == pytest.approx(2 / 2**11)


def test_few_queries_tell_the_sign_test_in_the_metrics_note(table):
    tuned = {f"q{i}": ["x", "x"] for i in range(5)}
    base = {f"q{i}": ["x", "y"] for i in range(5)}
    metric = diversity_metrics(tuned, table, base).metrics["diversity.change_vs_base"]
    assert "5 rose and 0 fell, sign test p = 0.0625" in metric.note


def test_the_sign_test_leaves_ties_out():
    assert sign_test([1, 2, 3, 0, 0, -1]) == pytest.approx(2 * (1 + 4) / 2**4)
    assert sign_test([0, 0]) == 1


def test_no_shared_query_has_no_difference():
    assert paired_difference([1.0, None], [None, 2.0], 0) is None


def test_unlikely_text_fails_the_coherence_floor():
    hint = coherence_hint(["a b c"], ["d e f"], nll=[5.0, 6.0, 7.0], base_nll=[1.5, 1.6])
    assert (hint.nll, hint.base_nll, hint.holds) == (6.0, pytest.approx(1.55), False)
    assert "6.00" in hint.reason


def test_likely_text_holds():
    assert coherence_hint(["a"], ["b"], nll=[2.0], base_nll=[1.5]).holds is True
    floor = CoherenceFloor(nll_rise=0.1)
    assert coherence_hint(["a"], ["b"], nll=[2.0], base_nll=[1.5], floor=floor).holds is False


def test_without_likelihoods_only_repetition_can_fail():
    fine, loop = "one two three four five six", "go on go on go on go on go on"
    assert coherence_hint([fine], [fine]).holds is None
    hint = coherence_hint([loop], [fine])
    assert hint.holds is False
    assert "repeats" in hint.reason
