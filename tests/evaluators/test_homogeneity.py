"""Several models against each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.diversity import homogeneity as module
from evaluators.diversity import mixing as mixing_module
from evaluators.diversity.homogeneity import QueryAnswers, homogeneity, principal_plane
from evaluators.diversity.mixing import top_n_mixing
from evaluators.diversity.paraphrase import paraphrase_consistency
from evaluators.diversity.similarity import intra_similarity


def units(n, width, seed):
    e_n_D = np.random.default_rng(seed).normal(size=(n, width))
    return e_n_D / np.linalg.norm(e_n_D, axis=1, keepdims=True)


def answers(n, width, seed, name="t"):
    return QueryAnswers([f"{name}{i}" for i in range(n)], units(n, width, seed))


def models(count, queries=4, n=3, width=5):
    return {
        f"m{m}": {f"q{q}": answers(n, width, 100 * m + q, f"m{m} q{q} ") for q in range(queries)}
        for m in range(count)
    }


def test_the_matrix_is_the_mean_of_all_cosines_and_its_diagonal_leaves_self_pairs_out():
    pools = models(3)
    found = homogeneity(pools)
    for a, left in enumerate(pools):
        for b, right in enumerate(pools):
            per_query = [
                intra_similarity(pools[left][q].e_n_D)
                if a == b
                else (pools[left][q].e_n_D @ pools[right][q].e_n_D.T).mean()
                for q in pools[left]
            ]
            assert found.matrix[a][b] == pytest.approx(np.mean(per_query), abs=1e-12)
            assert found.low[a][b] <= found.matrix[a][b] <= found.high[a][b]
    assert np.allclose(found.matrix, np.transpose(found.matrix))


def test_models_in_another_order_give_the_same_cells():
    pools = models(3)
    first = homogeneity(pools)
    second = homogeneity(dict(reversed(pools.items())))
    assert np.allclose(first.matrix, np.array(second.matrix)[::-1, ::-1])
    assert first.mixing == pytest.approx(second.mixing)


def test_a_cell_is_over_shared_queries_only():
    pools = models(2)
    del pools["m1"]["q0"], pools["m1"]["q1"]
    pools["m2"] = {"other": answers(3, 5, 9)}
    found = homogeneity(pools)
    shared = [(pools["m0"][q].e_n_D @ pools["m1"][q].e_n_D.T).mean() for q in ("q2", "q3")]
    assert found.matrix[0][1] == pytest.approx(np.mean(shared))
    assert found.matrix[0][2] is None
    assert found.matrix[2][2] is not None
    assert found.low[2][2] is None
    assert found.queries == 5


def test_empty_texts_and_single_answers_are_left_out():
    one = QueryAnswers(["x", "", " "], np.vstack([units(1, 4, 0), np.zeros((2, 4))]))
    two = answers(2, 4, 1)
    found = homogeneity({"a": {"q": one}, "b": {"q": two}})
    assert found.matrix[0][0] is None
    assert found.matrix[0][1] == pytest.approx((one.e_n_D[:1] @ two.e_n_D.T).mean())
    assert "" not in (found.similar_pairs[0].text, found.similar_pairs[0].other_text)


def test_no_model_or_no_query_is_an_empty_matrix():
    assert homogeneity({}).matrix == ()
    assert homogeneity({"a": {}}).matrix == ((None,),)
    assert homogeneity({"a": {}}).similar_pairs == ()


def test_the_closest_pair_of_each_query_is_shown_closest_first():
    same = units(1, 5, 77)[0]
    pools = models(3, queries=3)
    pools["m0"]["q1"].e_n_D[2] = same
    pools["m2"]["q1"].e_n_D[0] = same
    # A copy inside one model is no pair of two models.
    pools["m1"]["q2"].e_n_D[0] = pools["m1"]["q2"].e_n_D[1]
    pairs = homogeneity(pools, pairs=2).similar_pairs
    assert len(pairs) == 2
    first = pairs[0]
    assert first.similarity == pytest.approx(1)
    assert (first.query_id, first.text, first.other_text) == ("q1", "m0 q1 2", "m2 q1 0")
    assert (first.model, first.other_model) == ("m0", "m2")
    assert pairs[0].similarity >= pairs[1].similarity
    assert len({pair.query_id for pair in pairs}) == 2


def test_blocks_do_not_change_the_closest_pair_or_the_mixing(monkeypatch):
    pools = models(3, n=7)
    whole = homogeneity(pools, neighbours=(2, 5, 12))
    monkeypatch.setattr(module, "_PAIR_BLOCK", 3)
    monkeypatch.setattr(mixing_module, "_BLOCK_ROWS", 4)
    assert homogeneity(pools, neighbours=(2, 5, 12)) == whole


def brute_mixing(e_P_D, model_P, n):
    counts = []
    for anchor in range(len(e_P_D)):
        others = [i for i in range(len(e_P_D)) if i != anchor]
        cosines = {i: round(float(e_P_D[anchor] @ e_P_D[i]), 9) for i in others}
        nearest = sorted(others, key=lambda i: (-cosines[i], i))[: n - 1]
        counts.append(len({model_P[i] for i in [anchor, *nearest]}))
    return np.mean(counts)


@given(st.integers(0, 1000), st.integers(1, 9), st.booleans())
def test_mixing_equals_its_definition_with_ties_by_index(seed, n, with_copies):
    e_P_D = units(9, 3, seed)
    if with_copies:
        e_P_D = e_P_D[[0, 0, 0, 3, 3, 5, 6, 0, 3]]
    model_P = np.random.default_rng(seed).integers(0, 4, 9)
    assert top_n_mixing(e_P_D, model_P, (n,))[n] == pytest.approx(brute_mixing(e_P_D, model_P, n))


# Brief, section 6.9.
def test_models_that_share_nothing_mix_to_one():
    e_P_D = np.repeat(np.eye(5), 50, axis=0)
    assert top_n_mixing(e_P_D, np.repeat(np.arange(5), 50)) == {5: 1.0, 10: 1.0, 20: 1.0, 50: 1.0}


# Brief, section 6.9: M (1 - (1 - 1/M)^N) distinct models are expected where all answer alike.
def test_models_that_answer_alike_mix_as_random_draws():
    count, n = 5, 10
    e_P_D = units(500, 20, 4)
    model_P = np.random.default_rng(1).permutation(np.repeat(np.arange(count), 100))
    expected = count * (1 - (1 - 1 / count) ** n)
    assert top_n_mixing(e_P_D, model_P, (n,))[n] == pytest.approx(expected, abs=0.15)


def test_more_neighbours_than_answers_are_undefined():
    assert top_n_mixing(units(7, 3, 0), [0] * 7, (5, 10)) == {5: 1.0, 10: None}
    assert top_n_mixing(np.zeros((0, 3)), [], (5,)) == {5: None}
    assert homogeneity(models(2)).mixing[10] is None


@pytest.mark.parametrize(
    ("e_P_D", "model_P", "n"),
    [(units(3, 2, 0), [0, 1], 2), (units(3, 2, 0), [0] * 3, 0), (np.zeros((3, 2)), [0] * 3, 2)],
)
def test_a_pool_that_cannot_be_compared_is_refused(e_P_D, model_P, n):
    with pytest.raises(ValueError, match=r"models for|at least 1|zero vector"):
        top_n_mixing(e_P_D, model_P, (n,))


def test_texts_without_their_embeddings_are_refused():
    with pytest.raises(ValueError, match="2 texts for 3 embeddings"):
        homogeneity({"a": {"q": QueryAnswers(["x", "y"], units(3, 2, 0))}})


def test_the_plane_keeps_the_distances_of_flat_data():
    flat = np.random.default_rng(0).normal(size=(12, 2)) @ units(2, 6, 1) + 3
    plane = principal_plane(flat)
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    assert np.allclose(np.linalg.norm(plane[:, None] - plane[None], axis=2), distances)
    assert plane[np.abs(plane).argmax(0), [0, 1]].min() > 0
    assert principal_plane(units(1, 4, 0)).tolist() == [[0, 0]]


def test_the_same_answers_to_every_wording_have_no_gap():
    pool = np.repeat(units(1, 6, 2), 4, axis=0)
    found = paraphrase_consistency({"q": [pool, pool, pool], "r": [pool, pool]})
    assert found.within.value == pytest.approx(1)
    assert found.across.value == pytest.approx(1)
    assert found.gap.value == pytest.approx(0)


def test_wordings_that_are_answered_apart_have_a_negative_gap():
    pools = {f"q{i}": [np.repeat(np.eye(3)[[j]], 3, axis=0) for j in range(3)] for i in range(12)}
    found = paraphrase_consistency(pools)
    assert (found.within.value, found.across.value, found.gap.value) == pytest.approx((1, 0, -1))
    assert found.gap.n == 12
    assert found.gap.high < 0


def test_a_query_without_paraphrases_has_no_gap():
    found = paraphrase_consistency({"q": [units(3, 4, 0)], "r": []})
    assert found.within.n == 1
    assert found.gap.value is None
