"""Answers with embeddings, kept beside a model."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluators.diversity.homogeneity import homogeneity
from evaluators.diversity.store import AnswersDamagedError, read_answers, write_answers

RESPONSES = {"q1": ["one", "two", ""], "q2": ["three \ud83d", "four"]}


class Random:
    id, dimension = "random/mean/8", 24

    def embed(self, texts):
        e_N_D = np.random.default_rng(len(texts)).normal(size=(len(texts), self.dimension))
        e_N_D /= np.linalg.norm(e_N_D, axis=1, keepdims=True)
        e_N_D[[not text.strip() for text in texts]] = 0
        return e_N_D.astype(np.float32)


def stored(responses=RESPONSES, refused=None):
    buffer = io.BytesIO()
    write_answers(buffer, responses, Random(), refused)
    return buffer.getvalue()


def test_what_was_written_is_read_back():
    found = read_answers(stored())
    assert (found.embedder_id, found.width, found.refused) == ("random/mean/8", 24, None)
    assert {query: pool.texts for query, pool in found.answers.items()} == {
        "q1": ["one", "two", ""], "q2": ["three ?", "four"],
    }  # fmt: skip
    e_N_D = np.concatenate([pool.e_n_D for pool in found.answers.values()])
    exact = Random().embed([text for texts in RESPONSES.values() for text in texts])
    assert np.abs(e_N_D @ e_N_D.T - exact @ exact.T).max() < 0.001
    assert np.linalg.norm(e_N_D, axis=1) == pytest.approx([1, 1, 0, 1, 1], abs=1e-6)


def test_refusals_can_be_left_out():
    found = read_answers(stored(refused={"q1": [False, True, False], "q2": [True, True]}))
    left = found.answered()
    assert {query: list(pool.texts) for query, pool in left.items()} == {
        "q1": ["one", ""], "q2": [],
    }  # fmt: skip
    assert left["q1"].e_n_D.shape == (2, 24)
    assert homogeneity({"m": left}).queries == 2


def test_without_flags_all_answers_count_as_answered():
    found = read_answers(stored())
    assert found.answered() is found.answers


def test_no_answer_is_a_file_too():
    assert read_answers(stored({})).answers == {}


def test_flags_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 refusal flags for 5"):
        stored(refused={"q1": [True]})


def parquet(**columns):
    table = pa.table(columns).replace_schema_metadata({"embedder": "x"})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def columns(**changes):
    vectors = pa.array([[1.0, 0.0]], pa.list_(pa.float32(), 2))
    return {
        "query_id": pa.array(["q"]), "sample": pa.array([0]), "text": pa.array(["t"]),
        "refused": pa.array([None], pa.bool_()), "embedding": vectors, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Parquet"),
        (b"PAR1PAR1", "Parquet"),
        (stored()[:-9], "Parquet"),
        (parquet(query_id=["q"]), "no column sample"),
        (parquet(**columns(text=pa.array([1]))), "column text is not of type string"),
        (parquet(**columns(embedding=pa.array([[1.0]]))), "not lists of one width"),
        (parquet(**columns(text=pa.array([None], pa.string()))), "lacks"),
        (
            parquet(**columns(embedding=pa.array([[np.nan, 1]], pa.list_(pa.float32(), 2)))),
            "not finite",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(content, problem):
    with pytest.raises(AnswersDamagedError, match=problem):
        read_answers(content)


def test_a_file_without_the_embedders_name_is_refused():
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns()), buffer)
    with pytest.raises(AnswersDamagedError, match="no embedder"):
        read_answers(buffer.getvalue())


def test_any_width_of_float_is_read():
    vectors = pa.array([[3, 4]], pa.list_(pa.float16(), 2))
    found = read_answers(parquet(**columns(embedding=vectors)))
    assert found.answers["q"].e_n_D[0].tolist() == pytest.approx([0.6, 0.8])
