from hypothesis import given
from hypothesis import strategies as st

from workers.pipeline.stream import RowStream

sizes = st.integers(min_value=1, max_value=60)


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_one_pass_reads_every_row_once(rows: int, batch: int, seed: int, epoch: int):
    stream = RowStream("user", rows, batch, seed)
    seen = [row for step in range(stream.batches) for row in stream.batch(epoch, step)]
    assert sorted(seen) == list(range(rows))


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_batch_depends_on_its_position_only(rows: int, batch: int, seed: int):
    stream = RowStream("user", rows, batch, seed)
    forward = [stream.batch(epoch, step) for epoch in range(2) for step in range(5)]
    fresh = RowStream("user", rows, batch, seed)
    backward = [fresh.batch(epoch, step) for epoch in (1, 0) for step in reversed(range(5))]
    assert forward == list(reversed(backward))


def test_a_short_stream_restarts_with_a_new_order():
    stream = RowStream("alignment", 8, 4, 0)
    first = stream.batch(0, 0) + stream.batch(0, 1)
    second = stream.batch(0, 2) + stream.batch(0, 3)
    assert sorted(first) == sorted(second)
    assert first != second
