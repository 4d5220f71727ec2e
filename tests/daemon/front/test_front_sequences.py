"""Missing numbers against a plain reference: the set of numbers that arrived."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.front.sequences import REORDERED, Sequence, Sequences
from feeds.decimal9 import Fixed9
from feeds.messages import Heartbeat, Received, Trade

ONE = Fixed9(10**9)


def record(seq: int, symbol: str = "AAA", *, beats: bool = False) -> Received:
    if beats:
        return Heartbeat(venue="V", symbol=symbol, ts_event=1, ts_recv=1, seq=seq)
    return Trade(venue="V", symbol=symbol, ts_event=1, ts_recv=1, seq=seq, price=ONE, size=ONE)


@given(dropped=st.sets(st.integers(2, 60)), beats=st.sets(st.integers(1, 60)))
def test_every_number_that_did_not_arrive_is_missing_once(dropped: set[int], beats: set[int]) -> None:
    """Heartbeats after some numbers, whether these arrived or not; they are told at once then."""
    sequences, missing = Sequences("symbol"), 0
    for number in range(1, 61):
        if number not in dropped:
            missing += sequences.missing(record(number))
        if number in beats:
            missing += sequences.missing(record(number, beats=True))
            assert missing == len([each for each in dropped if each <= number])
    last = max([n for n in range(1, 61) if n not in dropped] + list(beats))
    assert missing == len([each for each in dropped if each <= last])


@pytest.mark.parametrize(("counts", "expected"), [("none", 0), ("symbol", 2), ("venue", 0)])
def test_what_the_numbers_count(counts: Sequence, expected: int) -> None:
    sequences = Sequences(counts)
    numbers = [(1, "AAA"), (2, "BBB"), (3, "AAA"), (4, "BBB")]
    assert sum(sequences.missing(record(*each)) for each in numbers) == expected


@pytest.mark.parametrize("seen", [[5, 5, 6], [5, 4, 6], [5, 0, 6], [REORDERED + 50, 5, 6, 7]])
def test_repeats_reordering_no_numbers_and_a_new_numbering_miss_nothing(
    seen: list[int],
) -> None:
    sequences = Sequences("venue")
    assert [sequences.missing(record(seq)) for seq in seen] == [0] * len(seen)
