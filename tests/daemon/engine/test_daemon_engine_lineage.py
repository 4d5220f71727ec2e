"""What a window and a state were made of, against a plain list of all bars."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.provenance import BarOrigin, ProvenanceLog
from ingest.record import ReadRange
from regions.tape import KVState


def bar(stream: int, first: int, last: int, *, gap: bool = False) -> BarOrigin:
    return BarOrigin((ReadRange(stream, first, last),), gap)


Version = tuple[list[set[int]], int, bool, bool]


@given(
    st.lists(
        st.tuples(
            st.lists(st.sets(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=3),
            st.integers(1, 8),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_window_and_state_are_the_records_of_their_bars(versions: list[Version], overlap: bool) -> None:
    """By version: streams of each of its bars, most bars of the window, and whether it was prefilled before.

    Then whether a snapshot was restored. With ``overlap`` bars begin before the ones before them end.
    """
    lineage, bars, at = ProvenanceLog(), list[BarOrigin](), dict.fromkeys((1, 2, 3), 5)
    live = state = number = 0
    for streams, most, fresh, restored in versions:
        if restored:
            packed = msgspec.msgpack.encode(lineage.copied())
            lineage = msgspec.msgpack.decode(packed, type=ProvenanceLog)
        if fresh:
            number, state = number + 1, live
        new = []
        for of_bar in streams:
            reads = []
            for stream in sorted(of_bar):
                at[stream] += 2
                first = at[stream] - (4 if overlap and at[stream] % 3 == 0 else 0)
                reads.append(ReadRange(stream, first, at[stream] + 1))
            new.append(BarOrigin(tuple(reads)))
        live = min(live + len(new), max(most, len(new)))
        state = max(state + len(new), live)
        bars += new
        made = lineage.committed(new, live, KVState(number, state))

        assert by_stream(made.window) == ranges(bars, live)
        assert by_stream(made.state) == ranges(bars, state)
        assert (made.state_bars, made.left, made.known) == (state, False, True)


def test_a_gap_is_told_as_long_as_the_state_depends_on_it() -> None:
    lineage = ProvenanceLog()
    assert lineage.committed([bar(1, 0, 1), bar(1, 2, 3)], 2, KVState(0, 2)).since_gap == 0
    assert lineage.committed([bar(1, 90, 91, gap=True)], 3, KVState(0, 3)).since_gap == 1
    lineage = lineage.copied()
    assert lineage.committed([bar(1, 92, 93)], 3, KVState(0, 4)).since_gap == 2
    assert lineage.committed([bar(1, 94, 95)], 2, KVState(1, 2)).since_gap == 0


def ranges(bars: list[BarOrigin], count: int) -> list[ReadRange]:
    """Of the newest ``count`` bars."""
    every = [read for bar in bars for read in bar.reads]
    own = [read for bar in bars[-count:] for read in bar.reads]
    return [
        ReadRange(
            stream,
            min(each.first for each in own if each.stream == stream),
            max(each.last for each in every if each.stream == stream),
        )
        for stream in sorted({each.stream for each in own})
    ]


def by_stream(found: tuple[ReadRange, ...]) -> list[ReadRange]:
    return sorted(found, key=lambda each: each.stream)


def test_bars_of_an_unknown_stream_make_the_state_unknown_while_it_has_them() -> None:
    lineage = ProvenanceLog()
    lineage.committed([bar(1, 4, 6)], 1, KVState(0, 1))
    made = lineage.committed([BarOrigin(())], 2, KVState(0, 2))
    assert (made.state, made.window, made.known) == ((), (ReadRange(1, 0, 6),), False)
    made = lineage.committed([bar(1, 9, 11)], 1, KVState(1, 1))
    assert made.state == made.window == (ReadRange(1, 9, 11),)
    assert made.known


def test_nothing_is_known_of_bars_before_a_snapshot_without_a_log() -> None:
    lineage = ProvenanceLog(state_first=None)
    made = lineage.committed([bar(1, 7, 9)], 5, KVState(0, 40))
    assert (made.state, made.window, made.known) == ((), (ReadRange(1, 0, 9),), False)
    made = lineage.committed([bar(1, 10, 12)], 2, KVState(1, 2))
    assert made.state == made.window == (ReadRange(1, 7, 12),)
    assert lineage.committed([bar(1, 13, 15)], 1, KVState(2, 9)).state == ()


def test_bars_that_left_while_a_window_was_prefilled_are_told() -> None:
    lineage = ProvenanceLog()
    assert lineage.committed([bar(1, 0, 0)], 1, KVState(1, 1, True)).left
    assert lineage.committed([bar(1, 1, 1)], 2, KVState(1, 2, True)).left
