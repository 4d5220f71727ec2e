"""Missing numbers against a plain reference: the set of numbers that arrived."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.sequence_gaps import CONFIRMED, Sequence, Sequences
from feeds.decimals import from_units
from feeds.market_data import Received, Trade, VenueHeartbeat

ONE = from_units(10**9)


def record(seq: int, symbol: str = "AAA", *, at: int = 1, beats: bool = False) -> Received:
    if beats:
        return VenueHeartbeat(venue="V", symbol=symbol, ts_event=at, ts_recv=at, seq=seq)
    return Trade(venue="V", symbol=symbol, ts_event=at, ts_recv=at, seq=seq, price=ONE, size=ONE)


def expected_missing(arrived: list[int]) -> int:
    """Numbers from the first on that had not come when a higher one came."""
    seen, counted = {arrived[0]}, set[int]()
    for number in arrived[1:]:
        counted |= set(range(arrived[0], number)) - seen
        seen.add(number)
    return len(counted)


@given(dropped=st.sets(st.integers(2, 60)), beats=st.sets(st.integers(1, 60)))
def test_every_number_that_did_not_arrive_is_missing_once(dropped: set[int], beats: set[int]) -> None:
    """Heartbeats after some numbers, whether these arrived or not; they are told at once then."""
    sequences, missing = Sequences("symbol"), 0
    for number in range(1, 61):
        if number not in dropped:
            missing += sequences.missing(record(number, at=number))
        if number in beats:
            missing += sequences.missing(record(number, at=number, beats=True))
            assert missing == len([each for each in dropped if each <= number])
    last = max([n for n in range(1, 61) if n not in dropped] + list(beats))
    assert missing == len([each for each in dropped if each <= last])


@given(
    dropped=st.sets(st.integers(2, 80), max_size=20),
    delays=st.lists(st.integers(0, 30), min_size=80, max_size=80),
    repeats=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60)), max_size=4),
    restarts=st.booleans(),
)
def test_late_and_repeated_records_miss_nothing_and_nothing_is_missing_twice(
    dropped: set[int], delays: list[int], repeats: list[tuple[int, int]], restarts: bool
) -> None:
    """Each record comes some places late; a reconnect sends the last records again, in order.

    Then the numbering may begin again at 1 with newer records, of which one in the middle is missing.
    """
    order = sorted((number + delays[number - 1], number) for number in range(1, 81))
    arrived = [number for _, number in order if number not in dropped]
    for at, length in repeats:
        before = arrived[:at]
        arrived[at:at] = sorted(set(before))[-length:]
    sequences = Sequences("symbol")
    found = sum(sequences.missing(record(number, at=number)) for number in arrived)
    assert found == expected_missing(arrived)
    if restarts:
        newer = [n for n in range(1, 60) if n != 30]
        assert sum(sequences.missing(record(n, at=100 + n)) for n in newer) == 1


@pytest.mark.parametrize(("counts", "expected"), [("none", 0), ("symbol", 2), ("venue", 0)])
def test_what_the_numbers_count(counts: Sequence, expected: int) -> None:
    sequences = Sequences(counts)
    numbers = [(1, "AAA"), (2, "BBB"), (3, "AAA"), (4, "BBB")]
    assert sum(sequences.missing(record(*each)) for each in numbers) == expected


@pytest.mark.parametrize("seen", [[5, 5, 6], [5, 4, 6], [5, 0, 6], [3000, 500, 3001], [3000, 1, 2, 3, 3001]])
def test_repeats_reordering_no_numbers_and_old_numbers_miss_nothing(seen: list[int]) -> None:
    sequences = Sequences("venue")
    assert [sequences.missing(record(seq)) for seq in seen] == [0] * len(seen)


@pytest.mark.parametrize("newest", [50, 5000])
def test_a_run_of_lower_numbers_of_newer_records_is_a_numbering_that_began_again(newest: int) -> None:
    sequences = Sequences("symbol")
    sequences.missing(record(newest, at=1))
    lows = [sequences.missing(record(n, at=2)) for n in range(1, CONFIRMED + 1)]
    assert lows == [0] * CONFIRMED
    assert sequences.missing(record(CONFIRMED + 3, at=3)) == 2


def test_a_record_missing_from_the_run_that_confirms_a_new_numbering_is_counted() -> None:
    sequences = Sequences("symbol")
    sequences.missing(record(5000, at=1))
    assert sum(sequences.missing(record(n, at=2)) for n in range(1, CONFIRMED + 2) if n != 4) == 1
