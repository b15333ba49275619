"""The scale of the packaged embedder, on NoveltyBench's released answers of Gemini 1.5 Pro.

Expected values: brief, section 6.10, computed by an independent script; +-0.02 covers versions of
torch and transformers.
"""

import json

import numpy as np
import pytest

from evaluators.diversity.classes import cosine_classes, novelty_classes
from evaluators.diversity.scale import KNOWN_SCALES, calibrate_scale, scale_of
from evaluators.diversity.similarity import histogram, intra_similarity, unrelated_similarity
from evaluators.diversity.vendi import vendi_score

EXACT = 0.02


@pytest.fixture(scope="module")
def rows(shared_data):
    path = shared_data / "diversity/noveltybench_gemini15pro_generations.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def pools(rows, embedder):
    e_N_D = embedder.embed([text for row in rows for text in row["generations"]])
    return [e_N_D[10 * i : 10 * i + 10] for i in range(len(rows))]


@pytest.fixture(scope="module")
def similarities(pools):
    return [intra_similarity(pool) for pool in pools]


def rank_agreement(x, y):
    stats = pytest.importorskip("scipy.stats")
    return float(stats.spearmanr(x, y).statistic)


def test_the_mean_similarity_and_its_shares(similarities):
    assert np.mean(similarities) == pytest.approx(0.837, abs=EXACT)
    assert np.mean(np.array(similarities) > 0.8) == pytest.approx(0.68, abs=EXACT)
    assert np.mean(np.array(similarities) > 0.9) == pytest.approx(0.43, abs=EXACT)


# The brief prints 38 for the last bin, but 43 % above 0.9 just before it, which sums to 100.
def test_the_histogram(similarities):
    expected = [0, 0, 1, 0, 2, 9, 7, 13, 25, 43]
    assert histogram(similarities) == pytest.approx(expected, abs=2)


def test_the_stated_scale_is_the_measured_one(pools, rows, embedder):
    found = calibrate_scale(embedder.id, pools, [row["partition"] for row in rows])
    stated = scale_of(embedder.id, None)
    assert stated is KNOWN_SCALES[embedder.id]
    assert found.auroc == pytest.approx(0.868, abs=EXACT)
    assert found.labelled_classes == pytest.approx(1.83)
    assert found.found_classes == pytest.approx(1.85, abs=0.05)
    assert found.scale.unrelated == pytest.approx(stated.unrelated, abs=EXACT)
    assert found.scale.unrelated_low == pytest.approx(stated.unrelated_low, abs=0.04)
    assert found.scale.unrelated_high == pytest.approx(stated.unrelated_high, abs=0.04)
    assert found.scale.alarm == pytest.approx(stated.alarm, abs=EXACT)
    assert found.scale.class_threshold == stated.class_threshold == 0.70


def test_classes_by_cosine_count_as_released(pools, rows):
    found = [len(set(cosine_classes(pool, 0.70))) for pool in pools]
    labelled = [len(set(row["partition"])) for row in rows]
    assert np.mean(found) == pytest.approx(1.85, abs=0.05)
    assert np.mean(np.equal(found, labelled)) == pytest.approx(0.62, abs=0.03)
    loose = [len(set(cosine_classes(pool, 0.85))) for pool in pools]
    assert np.mean(loose) == pytest.approx(2.98, abs=0.05)
    assert rank_agreement(loose, labelled) == pytest.approx(0.739, abs=0.03)


def test_the_rule_for_short_texts_moves_the_count_little(pools, rows):
    found = [
        len(set(novelty_classes(row["generations"], pool, 0.70)))
        for row, pool in zip(rows, pools, strict=True)
    ]
    assert 1.75 < np.mean(found) < 2.1


def test_vendi_ranks_as_classes_and_similarity_do(pools, rows, similarities):
    vendi = [vendi_score(pool) for pool in pools]
    labelled = [len(set(row["partition"])) for row in rows]
    assert rank_agreement(vendi, labelled) == pytest.approx(0.714, abs=EXACT)
    assert rank_agreement(vendi, similarities) == pytest.approx(-0.959, abs=EXACT)


def test_the_baseline_of_unrelated_answers(pools):
    assert unrelated_similarity(pools) == pytest.approx(0.078, abs=EXACT)


def test_an_unknown_embedders_alarm_follows_from_its_baseline():
    scale = scale_of("other", 0.4)
    assert not scale.calibrated
    assert scale.alarm == pytest.approx(0.4 + 0.6 * (0.80 - 0.078) / (1 - 0.078))
    assert scale.class_threshold == pytest.approx(0.4 + 0.6 * (0.70 - 0.078) / (1 - 0.078))
    assert scale_of("other", None).alarm == pytest.approx((0.80 - 0.078) / (1 - 0.078))


# The paper's 0.8 is of its own embedder: the carried-over rule is near it there.
def test_the_papers_alarm_is_stated_for_its_embedder():
    stated = KNOWN_SCALES["text-embedding-3-small"]
    assert stated.alarm == 0.80
    assert scale_of("x", stated.unrelated).alarm == pytest.approx(stated.alarm, abs=0.02)


def test_separated_classes_are_found_with_auroc_one():
    generator = np.random.default_rng(0)
    pools, classes = [], []
    for _ in range(6):
        centres = np.linalg.qr(generator.normal(size=(30, 3)))[0].T
        labels = [0, 0, 1, 1, 2, 2]
        e_n_D = centres[labels] + 0.1 * generator.normal(size=(6, 30))
        pools.append(e_n_D / np.linalg.norm(e_n_D, axis=1, keepdims=True))
        classes.append(labels)
    found = calibrate_scale("x", pools, classes)
    assert (found.auroc, found.labelled_classes, found.found_classes) == (1.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("pools", "classes"),
    [
        ([np.eye(2)], [[0, 1]]),
        ([np.eye(2), np.eye(2)], [[0, 1], [0]]),
        ([np.eye(2), np.zeros((2, 2))], [[0, 1], [0, 1]]),
    ],
)
def test_pools_that_cannot_calibrate_are_refused(pools, classes):
    with pytest.raises(ValueError, match=r"queries|class and an embedding"):
        calibrate_scale("x", pools, classes)
