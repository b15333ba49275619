import numpy as np
import pytest

from benchmarks.diversity import all_ways, answers, pair_loop, pools, reference_counts
from evaluators.diversity.self_bleu import tokenize_13a
from evaluators.diversity.similarity import intra_similarity


def test_both_ways_to_the_mean_similarity_give_the_same_number():
    for e_n_D in pools(3, 8, 16):
        assert pair_loop(e_n_D) == pytest.approx(intra_similarity(e_n_D), abs=1e-5)
        assert 0.5 < pair_loop(e_n_D) < 0.95


def test_the_counted_references_are_the_highest_over_the_other_texts():
    found = reference_counts(["a a b", "a c", "b b b"])
    assert (found[0][("a",)], found[0][("b",)], found[1][("a",)]) == (1, 3, 2)
    assert tokenize_13a("a a b") == ["a", "a", "b"]


def test_the_texts_have_frequent_and_rare_words():
    words = " ".join(answers(4, 20, 30)[0]).split()
    assert len(words) == 600
    assert np.unique(words, return_counts=True)[1].max() > 30


def test_every_way_runs():
    for way in all_ways(queries=2, samples=3, width=8, words=5).values():
        way()
