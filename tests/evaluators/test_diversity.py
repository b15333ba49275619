import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.diversity.intra import (
    cross_similarity,
    distinct_k,
    diversity_metrics,
    intra_similarity,
    vendi_score,
)


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


def test_cross_similarity_equals_the_mean_of_all_cross_cosines():
    e_n_D, f_m_D = random_units(7, 16, 1), random_units(4, 16, 2)
    assert cross_similarity(e_n_D, f_m_D) == pytest.approx((e_n_D @ f_m_D.T).mean(), abs=1e-6)


# Closed forms: identical 1, orthogonal n; e0, e0, e1, e2 has eigenvalues 1/2, 1/4, 1/4.
@pytest.mark.parametrize(("q", "expected"), [(1.0, 2.828427), (2.0, 2.666667), (math.inf, 2.0)])
def test_vendi_of_one_repeated_answer_among_four(q, expected):
    assert vendi_score(np.eye(3)[[0, 0, 1, 2]], q) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0, math.inf])
def test_vendi_of_orthogonal_answers_is_their_number(q):
    assert vendi_score(np.eye(4), q) == pytest.approx(4)


# lambda_1 = (1 + (n-1) s)/n, the others (1-s)/n, with n = 50 and s = 0.8.
@pytest.mark.parametrize(("q", "expected"), [(1.0, 3.516984), (2.0, 1.545117)])
def test_vendi_of_constant_similarity_has_its_closed_form(q, expected):
    assert vendi_score(constant_similarity(50, 0.8), q) == pytest.approx(expected, abs=1e-6)


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


# Hand count: 6 distinct of 9 words, 5 distinct of 6 word pairs.
def test_distinct_k_counts_unique_n_grams_within_texts():
    texts = ["the cat sat", "the cat ran", "a dog ran"]
    assert distinct_k(texts, 1) == pytest.approx(6 / 9)
    assert distinct_k(texts, 2) == pytest.approx(5 / 6)
    assert distinct_k(["one"], 2) is None


def test_metrics_are_paired_by_query_and_skip_what_is_undefined(table_embedder):
    table = table_embedder({"x": [1.0, 0.0], "y": [0.0, 1.0]})
    tuned = {"q1": ["x", "x"], "q2": ["x", "y"], "q3": ["x", " "]}
    base = {"q2": ["x", "y"], "q1": ["x", "y"], "q3": ["x", "x"]}
    result = diversity_metrics(tuned, table, base)
    assert result.metrics["diversity.intra_similarity"].value == pytest.approx(0.5)
    assert result.metrics["diversity.vendi"].value == pytest.approx(1.5)
    assert result.metrics["diversity.change_vs_base"].value == pytest.approx(0.5)
    assert result.metrics["diversity.change_vs_base"].n == 2
    assert [(row.n, row.empty) for row in result.queries] == [(2, 0), (2, 0), (1, 1)]


def test_without_a_base_the_change_is_undefined(table_embedder):
    table = table_embedder({"x": [1.0, 0.0]})
    result = diversity_metrics({"q": ["x", "x"]}, table)
    assert result.metrics["diversity.change_vs_base"].value is None


def test_one_response_per_query_leaves_every_metric_undefined(table_embedder):
    table = table_embedder({"x": [1.0, 0.0]})
    metrics = diversity_metrics({"q": ["x"]}, table, {"q": ["x"]}).metrics
    assert all(metric.value is None and metric.n == 0 for metric in metrics.values())
