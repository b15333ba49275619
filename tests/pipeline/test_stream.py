from collections.abc import Callable

import pytest
import torch
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


def lengths_of(rows: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (16 + 200 * torch.rand(rows, generator=generator)).long().tolist()


def padded(stream: RowStream, lengths: list[int]) -> int:
    batches = [stream.batch(0, step) for step in range(stream.batches)]
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99), window=st.integers(1, 9))
def test_one_pass_by_length_reads_every_row_once(rows: int, batch: int, seed: int, window: int):
    lengths = lengths_of(rows, seed)
    stream = RowStream("user", rows, batch, seed, lengths=lengths, window=window)
    seen = [row for step in range(stream.batches) for row in stream.batch(2, step)]
    assert sorted(seen) == list(range(rows))


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99), window=st.integers(1, 9))
def test_only_the_last_batch_of_a_pass_by_length_is_smaller(
    rows: int, batch: int, seed: int, window: int
):
    lengths = lengths_of(rows, seed)
    stream = RowStream("user", rows, batch, seed, lengths=lengths, window=window)
    counts = [len(stream.batch(0, step)) for step in range(stream.batches)]
    assert counts[:-1] == [batch] * (stream.batches - 1)


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_batch_by_length_depends_on_its_position_only(rows: int, batch: int, seed: int):
    lengths = lengths_of(rows, seed)
    stream = RowStream("user", rows, batch, seed, lengths=lengths, window=3)
    forward = [stream.batch(epoch, step) for epoch in range(2) for step in range(5)]
    fresh = RowStream("user", rows, batch, seed, lengths=lengths, window=3)
    backward = [fresh.batch(epoch, step) for epoch in (1, 0) for step in reversed(range(5))]
    assert forward == list(reversed(backward))


def test_the_plain_order_is_the_one_of_earlier_checkpoints():
    # Origin: the stream of version 0.1.0.
    stream = RowStream("user", 10, 4, 7)
    assert [stream.batch(1, step) for step in range(3)] == [[1, 4, 9, 3], [0, 5, 2, 6], [7, 8]]


def test_batches_by_length_need_far_less_padding():
    lengths = lengths_of(512, 1)
    plain = RowStream("user", 512, 8, 0)
    grouped = RowStream("user", 512, 8, 0, lengths=lengths)
    assert padded(grouped, lengths) < 0.75 * padded(plain, lengths)


def test_batches_of_a_window_are_not_read_in_order_of_length():
    lengths = lengths_of(512, 1)
    stream = RowStream("user", 512, 8, 0, lengths=lengths, window=64)
    longest = [stream.longest(0, step) for step in range(64)]
    assert longest != sorted(longest)


def test_a_follower_puts_its_long_batches_beside_the_leaders_long_ones():
    lengths = lengths_of(512, 1)
    user = RowStream("user", 512, 8, 0, lengths=lengths)
    follower = RowStream(
        "alignment", 256, 8, 0, lengths=lengths_of(256, 2), leader=user_longest(user)
    )
    ranks = [
        sorted(range(8), key=lambda step: stream(first + step))
        for first in (0, 32, 56)
        for stream in (lambda s: user_longest(user)(0, s), lambda s: follower.longest(0, s))
    ]
    assert ranks[0::2] == ranks[1::2]


@given(rows=sizes, batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_follower_reads_every_row_once_a_pass(rows: int, batch: int, seed: int):
    user = RowStream("user", 37, batch, seed, lengths=lengths_of(37, seed))
    follower = RowStream(
        "alignment", rows, batch, seed, lengths=lengths_of(rows, seed), leader=user_longest(user)
    )
    steps = range(2 * follower.batches, 3 * follower.batches)
    assert sorted(row for step in steps for row in follower.batch(0, step)) == list(range(rows))


def test_lengths_of_another_set_are_refused():
    with pytest.raises(ValueError, match="9 lengths for 10 rows"):
        RowStream("user", 10, 4, 0, lengths=[1] * 9)


def test_a_leader_without_lengths_is_refused():
    with pytest.raises(ValueError, match="needs the lengths"):
        RowStream("alignment", 10, 4, 0, leader=lambda epoch, step: 1)


def user_longest(user: RowStream) -> Callable[[int, int], int]:
    return lambda _epoch, step: user.longest(*divmod(step, user.batches))
