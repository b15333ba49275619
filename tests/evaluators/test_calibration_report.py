"""From rows to the calibration report."""

import io
import json

import numpy as np
import pytest

from evaluators.calibration.report import calibrate, item_rows
from evaluators.calibration.summary import COLUMNS, as_markdown, subset_cells
from evaluators.calibration.table import TableError, read_table, table_of


def rating_rows(count=120, noise=1.0, seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        quality = generator.normal()
        votes = np.clip(np.rint(3 + quality + generator.normal(size=9)), 1, 5).astype(int)
        score = float(quality + noise * generator.normal())
        rows.append({"query": f"q{i % 20}", "labels": votes.tolist(), "score": score})
    return rows


def preference_rows(count=60, seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        p = generator.dirichlet(np.ones(5))
        counts = generator.multinomial(25, p)
        score = float(counts @ [2, 1, 0, -1, -2] / 25 + generator.normal())
        rows.append({"query": f"q{i % 12}", "label_counts": counts.tolist(), "score": score})
    return rows


def jsonl(rows):
    return io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.fixture(scope="module")
def report():
    return calibrate(table_of(rating_rows(), "absolute"), rounds=200)


def by_name(report, name, parameter=None):
    return next(s for s in report.subsets if s.name == name and s.parameter == parameter)


def test_labels_may_be_a_list_an_object_or_a_vector_of_counts():
    rows = [
        {"query": "a", "labels": [1, 5, 5], "score": 1},
        {"query": "b", "labels": {"1": 1, "5": 2}, "score": 1.5},
        {"query": "c", "label_counts": [1, 0, 0, 0, 2], "score": -2},
        {"query": "d", "labels": ["1", "5", 5], "score": 0},
    ]
    table = read_table(jsonl(rows), "absolute")
    assert table.counts_N_L.tolist() == [[1, 0, 0, 0, 2]] * 4
    assert table.score_N.tolist() == [1, 1.5, -2, 0]
    assert table.lines == (1, 2, 3, 4)


def test_preferences_may_be_named_or_numbered_and_scores_may_be_two():
    rows = [
        {"query": "a", "labels": ["strongly_1", "similar", "slightly_2"], "score": 1},
        {"query": "a", "labels": [2, 0, -1], "score_1": 3, "score_2": 2},
        {"query": "a", "labels": {"2": 1, "similar": 1, "-1": 1}, "score": 1},
        {"query": "a", "label_counts": [1, 0, 1, 1, 0], "score": 1},
    ]
    table = read_table(jsonl(rows), "pairwise")
    assert table.counts_N_L.tolist() == [[1, 0, 1, 1, 0]] * 4
    assert table.score_N.tolist() == [1] * 4


def test_another_number_of_levels_can_be_chosen():
    rows = [{"query": "a", "labels": [7, 1], "score": i} for i in range(4)]
    assert table_of(rows, "absolute", levels=7).counts_N_L.shape == (4, 7)
    with pytest.raises(TableError, match="labels are 1 to 5"):
        table_of(rows, "absolute")


SOUND = {"query": "a", "labels": [1, 2], "score": 1}


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"query": " "}, "query", "question"),
        ({"score": None}, "score", "finite number"),
        ({"score": "5"}, "score", "finite number"),
        ({"score": True}, "score", "finite number"),
        ({"score": 10**400}, "score", "finite number"),
        ({"labels": [1, 6]}, "labels", "Unknown label 6"),
        ({"labels": [1, 2.5]}, "labels", "Unknown label 2.5"),
        ({"labels": [1, True]}, "labels", "Unknown label True"),
        ({"labels": {"good": 3}}, "labels", "Unknown label good"),
        ({"labels": {"1": -1, "2": 9}}, "labels", "whole number"),
        ({"labels": 3}, "labels", "list"),
        ({"labels": [3]}, "labels", "2 to 10,000 ratings, this one has 1"),
        ({"label_counts": [1, 1, 1, 1, 1]}, "label_counts", "either labels or label_counts"),
        ({"rating": 3}, "rating", "Unknown field"),
        ({"score_1": 3}, "score_1", "Unknown field"),
    ],
)
def test_a_wrong_item_is_named_with_line_and_field(change, field, problem):
    rows = [SOUND, SOUND, {**SOUND, **change}, SOUND]
    with pytest.raises(TableError, match=problem) as caught:
        table_of(rows, "absolute")
    assert (caught.value.line, caught.value.field) == (3, field)
    assert "Line 3" in str(caught.value)


def test_a_vector_of_the_wrong_length_is_refused():
    rows = [{"query": "a", "label_counts": [1, 2, 3], "score": 1}] * 4
    with pytest.raises(TableError, match="Give 5 whole numbers"):
        table_of(rows, "pairwise")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]\n", b'{"query": "a"\n', b"\xff\n"])
def test_a_file_that_is_no_table_is_refused(content):
    with pytest.raises(TableError):
        read_table(io.BytesIO(content), "absolute")


def test_three_items_are_too_few():
    with pytest.raises(TableError, match="at least 4") as caught:
        table_of([SOUND] * 3, "absolute")
    assert caught.value.line is None


def test_a_good_scorer_agrees_and_every_subset_has_its_number(report):
    full = report.subsets[0]
    assert (report.items, report.queries, full.n) == (120, 20, 120)
    assert full.pearson.low > 0.4
    assert full.pearson.low < full.pearson.value < full.pearson.high
    assert full.variance_ratio == 1
    assert [s.family for s in report.subsets].count("similar_quality") == 6
    assert [s.family for s in report.subsets].count("disagreed") == 8
    assert [s.family for s in report.subsets].count("alternative") == 12


def test_a_restricted_range_is_warned_about_and_compared_with_chance(report):
    narrow = by_name(report, "least_range", 0.8)
    assert narrow.variance_ratio < 0.9
    assert narrow.chance.variance == pytest.approx(narrow.human_variance, rel=0.1)
    assert narrow.restricted_pearson < report.subsets[0].pearson.value
    assert any("random subsets of equal variance" in warning for warning in narrow.warnings)
    assert report.subsets[0].chance is None
    assert report.subsets[0].warnings == ()


def test_a_tiny_subset_is_warned_about(report):
    tiny = by_name(report, "entropy", 0.02)
    assert tiny.n < 50
    assert any("items" in warning for warning in tiny.warnings)


def test_a_scorer_that_says_one_number_has_no_correlation():
    rows = [{**row, "score": 1.0} for row in rating_rows(30)]
    found = calibrate(table_of(rows, "absolute"), rounds=50)
    assert all(subset.spearman.value is None for subset in found.subsets)
    assert any("equal" in warning for warning in found.subsets[0].warnings)
    assert "| all items | 30 | 100% | - |" in as_markdown(found)


def test_raters_who_all_agree_leave_the_ratio_undefined():
    rows = [{"query": "a", "labels": [3, 3], "score": i} for i in range(8)]
    found = calibrate(table_of(rows, "absolute"), rounds=50)
    assert found.subsets[0].variance_ratio is None
    assert found.fleiss_kappa is None
    assert found.disagreement["entropy"] == 0


def test_pairwise_items_have_grouped_entropy_and_p_disagree():
    table = table_of(preference_rows(), "pairwise")
    found = calibrate(table, rounds=50)
    assert found.disagreement["grouped_entropy"] > 0
    assert 0 < found.disagreement["p_disagree"] < 0.5
    assert [s.n for s in found.subsets[1:9]] == [57, 54, 51, 48, 45, 42, 39, 36]
    rows = item_rows(table)
    assert len(rows) == 60
    assert rows[0].p_disagree is not None
    assert rows[0].raters == 25


def test_items_keep_their_line_and_measures():
    table = table_of([SOUND, SOUND, {**SOUND, "labels": [5, 5, 5]}, SOUND], "absolute")
    rows = item_rows(table)
    assert [row.line for row in rows] == [1, 2, 3, 4]
    assert (rows[2].human_score, rows[2].entropy, rows[2].minority) == (5, 0, 0)
    assert rows[0].pairwise_disagreement == 1
    assert rows[0].p_disagree is None


def test_the_order_of_items_does_not_change_a_correlation():
    rows = rating_rows(60)
    first = calibrate(table_of(rows, "absolute"), rounds=20).subsets[0]
    second = calibrate(table_of(rows[::-1], "absolute"), rounds=20).subsets[0]
    for name in ("pearson", "spearman", "kendall"):
        assert getattr(first, name).value == pytest.approx(getattr(second, name).value)


def test_the_summary_has_a_row_a_subset_and_no_text_of_the_table(report):
    text = as_markdown(report)
    assert text.count("\n| ") == len(report.subsets) + 1
    assert "q1" not in text
    assert all(len(subset_cells(subset)) == len(COLUMNS) for subset in report.subsets)
    assert "Warnings:" in text
