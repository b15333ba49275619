"""Wording, classes and the taxonomy. Golden values marked "brief" are of an independent script."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.diversity.breakdown import taxonomy_metrics
from evaluators.diversity.classes import (
    cosine_classes,
    greedy_classes,
    novelty_classes,
    quality_of_reward,
    semantic_clusters,
    semantic_entropy,
    short_texts_agree,
    utility_k,
)
from evaluators.diversity.intra import diversity_metrics
from evaluators.diversity.lexical import (
    compression_ratio,
    distinct_k,
    expectation_adjusted_distinct,
    repetition_share,
)
from evaluators.diversity.self_bleu import self_bleu, tokenize_13a
from evaluators.diversity.taxonomy import LEAVES, TOP_LEVELS, UnknownLeafError, members, top_of
from evaluators.prompts import load_prompts


# Brief, section 6.6: 6 distinct of 9 words, 5 distinct of 6 word pairs.
def test_distinct_k_counts_unique_n_grams_within_texts():
    texts = ["the cat sat", "the cat ran", "a dog ran"]
    assert distinct_k(texts, 1) == pytest.approx(6 / 9)
    assert distinct_k(texts, 2) == pytest.approx(5 / 6)
    assert distinct_k(["one"], 2) is None


def test_expectation_adjusted_distinct_is_about_one_for_uniform_draws():
    draws = np.random.default_rng(0).integers(0, 200, size=(50, 40))
    texts = [" ".join(map(str, row)) for row in draws]
    assert expectation_adjusted_distinct(texts, 200) == pytest.approx(1, abs=0.02)
    assert distinct_k(texts, 1) < 0.11


def test_expectation_adjusted_distinct_of_a_hand_count():
    # U = 6, C = 9, V = 10: 6 / (10 (1 - 0.9^9)).
    texts = ["the cat sat", "the cat ran", "a dog ran"]
    assert expectation_adjusted_distinct(texts, 10) == pytest.approx(6 / (10 * (1 - 0.9**9)))
    assert expectation_adjusted_distinct(["a a"], 1) == 1
    assert expectation_adjusted_distinct([" "], 10) is None
    with pytest.raises(ValueError, match="vocabulary of 5"):
        expectation_adjusted_distinct(texts, 5)


def test_repeated_text_compresses_better():
    generator = np.random.default_rng(1)
    texts = [" ".join(map(str, generator.integers(0, 10**6, 40))) for _ in range(20)]
    assert compression_ratio(texts[:1] * 20) > 5 * compression_ratio(texts)
    assert compression_ratio(["", " "]) is None
    assert compression_ratio(["\ud800"]) < 1


def test_repetition_is_counted_inside_one_text():
    assert repetition_share("a b c a b c") == pytest.approx(1 / 4)
    assert repetition_share("a b") is None


# Computed with sacrebleu 2.6.0: BLEU(effective_order=True) of each text against the others,
# averaged and divided by 100 (signature nrefs:n-1|case:mixed|eff:yes|tok:13a|smooth:exp).
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ["the cat sat on the mat", "the cat sat on a mat", "a dog ran in the park"],
            0.3987168799587142,
        ),
        (["Yes.", "Yes, indeed.", "No."], 0.46568856753314863),
        (
            [
                'Well, it\'s 3.5-4 times "better" & cheaper!',
                "It is 3.5 times better, and cheaper.",
                "It's 4 times better; it is cheap.",
            ],
            0.11810664040909642,
        ),
        (["one two three four five"] * 3, 1.0),
        (["alpha beta", "gamma delta", "epsilon"], 0.0),
        (["a a a a b", "a a b b c", "b a a a a a"], 0.5919389151830036),
    ],
)
def test_self_bleu_is_sacrebleus(texts, expected):
    assert self_bleu(texts) == pytest.approx(expected, abs=1e-12)


WORDS = st.sampled_from(["a", "b", "c,", "d-1", "1-d", "x.y", "é", "&amp;", "3,4", "<skipped>"])
TEXTS = st.lists(st.lists(WORDS, min_size=1, max_size=9).map(" ".join), min_size=2, max_size=5)


@pytest.fixture(scope="module")
def sacrebleu():
    return pytest.importorskip("sacrebleu.metrics").BLEU(effective_order=True)


@given(TEXTS)
def test_self_bleu_equals_sacrebleu_where_it_is_installed(sacrebleu, texts):
    loop = [
        sacrebleu.sentence_score(text, [*texts[:i], *texts[i + 1 :]]).score / 100
        for i, text in enumerate(texts)
    ]
    assert self_bleu(texts) == pytest.approx(np.mean(loop), abs=1e-12)


@given(TEXTS, st.randoms(use_true_random=False))
def test_self_bleu_lies_between_0_and_1_in_any_order(texts, random):
    found = self_bleu(texts)
    assert 0 <= found <= 1
    mixed = list(texts)
    random.shuffle(mixed)
    assert self_bleu(mixed) == pytest.approx(found, abs=1e-12)


def test_one_text_has_no_self_bleu():
    assert self_bleu(["a b"]) is None


def test_the_tokenizer_parts_punctuation_but_not_numbers():
    assert tokenize_13a("It's 3.5-fold (&quot;more&quot;), ok.\n") == [
        "It's", "3.5", "-", "fold", "(", '"', "more", '"', ")", ",", "ok", ".",
    ]  # fmt: skip


def test_a_response_joins_the_first_class_whose_first_member_it_matches():
    # 2 matches 1, which is no head; so it matches only through head 0, and does not.
    same = {(1, 0), (2, 1), (3, 2), (4, 0), (4, 2)}
    assert greedy_classes(5, lambda i, j: (i, j) in same) == [0, 0, 1, 1, 0]


# NoveltyBench's rule in words: at most 5 words each, twice the shared words at least the longer.
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("Blue", "blue ", True),
        ("Blue", "Red", False),
        ("a deep blue", "blue", False),
        ("deep blue", "blue", True),
        ("one two three four five", "one two six", False),
        ("one two three four five", "one two three", True),
        ("one two three four five six", "one two three four five six", None),
        ("one", "one two three four five six", None),
    ],
)
def test_short_texts_are_compared_by_shared_words(left, right, expected):
    assert short_texts_agree(left, right) is expected
    assert short_texts_agree(right, left) is expected


def test_long_texts_are_compared_by_cosine():
    long = ["a b c d e f", "g h i j k l", "red", "blue"]
    e_n_D = np.array([[1.0, 0], [0.8, 0.6], [0.0, 1.0], [0.0, 1.0]])
    assert cosine_classes(e_n_D, 0.7) == [0, 0, 1, 1]
    assert cosine_classes(e_n_D, 0.9) == [0, 1, 2, 2]
    assert novelty_classes(long, e_n_D, 0.7) == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="3 texts"):
        novelty_classes(long[:3], e_n_D, 0.7)


# Brief, section 6.6.
def test_utility_counts_new_classes_only():
    assert utility_k([0, 1, 0], [5, 7, 9], 0.8) == pytest.approx(4.344262, abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "quality", "p"), [([], [], 0.8), ([0], [1, 2], 0.8), ([0], [1], 1.0)]
)
def test_utility_of_nothing_is_refused(classes, quality, p):
    with pytest.raises(ValueError, match=r"classes|patience"):
        utility_k(classes, quality, p)


# The bounds are NoveltyBench's; a reward on a bound has the lower quality (bisect_left).
@pytest.mark.parametrize(
    ("reward", "quality"), [(-100.0, 1), (-7.71875, 1), (-7.7, 2), (-5.6, 5), (-2.0, 10)]
)
def test_rewards_are_binned_to_ten_qualities(reward, quality):
    assert quality_of_reward(reward) == quality


def test_clusters_need_entailment_in_both_directions():
    entails = {(1, 0), (0, 1), (2, 0)}
    assert semantic_clusters(3, lambda i, j: (i, j) in entails) == [0, 0, 1]


def test_semantic_entropy_of_shares_and_of_probabilities():
    assert semantic_entropy([0, 0, 1, 1]) == pytest.approx(math.log(2))
    assert semantic_entropy([0, 0, 0]) == 0.0
    # p = 0.6, 0.2, 0.2; clusters 0.8 and 0.2.
    log_p = [math.log(x) - 700 for x in (0.6, 0.2, 0.2)]
    expected = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert semantic_entropy([0, 0, 1], log_p) == pytest.approx(expected)
    with pytest.raises(ValueError, match="2 probabilities for 1"):
        semantic_entropy([0], [0.1, 0.2])
    with pytest.raises(ValueError, match="at least one"):
        semantic_entropy([])


# Artificial Hivemind, arXiv 2510.22954, section 2: 6 top levels, 17 leaves, shares of 264.3 %.
def test_the_taxonomy_has_6_top_levels_and_17_leaves():
    assert len(TOP_LEVELS) == 6
    assert len(LEAVES) == 17
    assert sum(share for _, share in LEAVES.values()) == pytest.approx(264.3)
    assert sorted(Counter(top for top, _ in LEAVES.values()).values()) == [1, 1, 2, 2, 5, 6]


def test_every_shipped_open_question_has_a_leaf():
    groups = Counter(prompt.group for prompt in load_prompts("open_ended_prompts").prompts)
    assert set(groups) == set(LEAVES)


def test_a_question_with_several_leaves_counts_in_each_and_once_in_their_top_level():
    labels = {
        "q1": ["Problem Solving", "Recommendations"],
        "q2": ["Writing Genres", "Problem Solving"],
        "q3": ["Brainstorm & Ideation"],
        "q4": [],
    }
    assert members(labels) == {
        "Brainstorm & Ideation": ["q3"],
        "Alternative Styles": ["q2"],
        "Information-Seeking": ["q1", "q2"],
        "Writing Genres": ["q2"],
        "Problem Solving": ["q1", "q2"],
        "Recommendations": ["q1"],
    }


def test_an_unknown_leaf_is_named():
    with pytest.raises(UnknownLeafError, match="'Poetry'"):
        top_of("Poetry")
    with pytest.raises(UnknownLeafError, match="'Poetry'"):
        members({"q": ["Poetry"]})


def test_metrics_by_kind_are_of_that_kinds_questions(table_embedder):
    table = table_embedder({"x": [1.0, 0.0], "y": [0.0, 1.0]})
    tuned = {"q1": ["x", "x"], "q2": ["x", "y"], "q3": ["x", "x"]}
    base = {"q1": ["x", "y"], "q2": ["x", "y"]}
    labels = {"q1": ["Problem Solving"], "q2": ["Recommendations", "Problem Solving"]}
    found = taxonomy_metrics(diversity_metrics(tuned, table, base), labels)
    similarity, change = found["diversity.intra_similarity"], found["diversity.change_vs_base"]
    assert set(similarity) == {"Information-Seeking", "Problem Solving", "Recommendations"}
    assert (similarity["Problem Solving"].value, similarity["Problem Solving"].n) == (0.5, 2)
    assert (similarity["Recommendations"].value, similarity["Recommendations"].low) == (0, None)
    assert change["Information-Seeking"].value == pytest.approx(0.5)
    assert found["diversity.distinct_classes"]["Recommendations"].value == 2


def test_without_a_base_there_is_no_change_by_kind(table_embedder):
    table = table_embedder({"x": [1.0, 0.0]})
    result = diversity_metrics({"q": ["x", "x"]}, table)
    found = taxonomy_metrics(result, {"q": ["Problem Solving"]})
    assert "diversity.change_vs_base" not in found


def test_the_published_questions_are_all_in_the_taxonomy(shared_data):
    import json

    path = shared_data / "diversity/infinity_chat_published_queries.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert all(top_of(row["leaf"]) == row["top"] for row in rows)
    assert set(members({row["id"]: [row["leaf"]] for row in rows})) == {*LEAVES, *TOP_LEVELS}
