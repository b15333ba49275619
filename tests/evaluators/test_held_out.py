import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.harmfulness.fit_data import LabelledSet
from evaluators.harmfulness.held_out import (
    Rows,
    auroc_interval,
    leave_one_group_out,
    weighted_auroc,
)
from evaluators.harmfulness.models import LogisticModel

metrics = pytest.importorskip("sklearn.metrics", reason="compared with scikit-learn (extra: dev)")


@given(
    st.lists(
        st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.integers(0, 1), st.integers(1, 3)),
        min_size=2,
        max_size=30,
    ).filter(lambda rows: len({y for _, y, _ in rows}) == 2)
)
def test_auroc_with_ties_and_weights_is_that_of_scikit_learn(rows):
    p_N, y_N, weight_N = (np.array(column) for column in zip(*rows, strict=True))
    expected = metrics.roc_auc_score(y_N, p_N, sample_weight=weight_N)
    assert weighted_auroc(p_N, y_N, weight_N.astype(float)) == pytest.approx(expected, abs=1e-12)


def test_answers_to_one_prompt_do_not_narrow_the_interval():
    generator = np.random.default_rng(0)
    y_N = generator.integers(0, 2, 80)
    p_N = np.clip(0.3 * y_N + generator.uniform(0, 0.7, 80), 0, 1)
    prompts = [str(row) for row in range(80)]
    low, high = auroc_interval(p_N, y_N, prompts, seed=1)
    repeated = auroc_interval(np.tile(p_N, 4), np.tile(y_N, 4), prompts * 4, seed=1)
    assert repeated == pytest.approx((low, high), abs=0.01)
    assert low < weighted_auroc(p_N, y_N, np.ones(80)) < high


def test_every_group_is_scored_by_a_fit_without_it():
    labels = np.array([0, 1, 0, 1, 0, 1])
    groups = ("a", "a", "b", "b", "c", "c")
    data = LabelledSet("x", ("",) * 6, labels, groups, ("",) * 6)
    x_N_F = np.arange(6.0)[:, None]
    seen = []

    def fit(x_M_F, y_M):
        seen.append(x_M_F[:, 0].tolist())
        return LogisticModel(np.zeros(1), np.ones(1), np.zeros(1), float(len(y_M)))

    found = leave_one_group_out(Rows(data, ("",) * 6, x_N_F), fit, 0.5)
    assert seen == [[2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3]]
    assert (found["n"], found["recall"], found["precision"]) == (6, 1.0, 0.5)
