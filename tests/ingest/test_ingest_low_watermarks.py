"""Low watermarks against the reference's ticks: nothing is done too early, and all at the end."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import SPANS
from ingest.bars import BarPolicy, Feeds
from ingest.plane import SessionSpec
from ingest.record import TRADE, RecordWriter
from tests.ingest.building import Consumer, batches, plane_on
from tests.ingest.reference_bars import ReferenceSession, Tick

Message = tuple[int, list[int]]
"""The number of its stream, and the event times of its records."""


def ticks_of(messages: Sequence[Message]) -> list[Tick]:
    """Each stream counts its messages."""
    ends, found = dict[int, int](), list[Tick]()
    for stream, moments in messages:
        offset = ends.get(stream, 10 * stream)
        ends[stream] = offset + 1
        found += [
            Tick(moment, 5, more=number < len(moments), stream=stream, offset=offset)
            for number, moment in enumerate(moments, 1)
        ]
    return found


def policies(streams: int) -> st.SearchStrategy[tuple[list[Message], BarPolicy]]:
    moments = st.lists(st.integers(1000, 1090), min_size=1, max_size=3)
    return st.tuples(
        st.lists(st.tuples(st.integers(1, streams), moments), min_size=1, max_size=30),
        st.builds(
            BarPolicy,
            st.just(10),
            lateness_ns=st.sampled_from([0, 15]),
            empty=st.sampled_from(["skip", "fill"]),
        ),
    )


@given(
    given=policies(SPANS) | policies(SPANS + 3),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    rooms=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
@settings(max_examples=300)
def test_records_below_a_low_watermark_are_on_the_tape_or_late(
    given: tuple[list[Message], BarPolicy], cuts: list[int], rooms: list[int]
) -> None:
    """In any batches, of messages with several records, with bars that wait for room."""
    messages, policy = given
    ticks, reference, consumer = ticks_of(messages), ReferenceSession(policy), Consumer()
    writer = RecordWriter(len(ticks))
    for tick in ticks:
        reference.tick(tick)
        values = tick.price, 1, 0, 0, 0
        writer.add(
            TRADE,
            0,
            tick.ts_event,
            tick.ts_event,
            values,
            stream=tick.stream,
            offset=tick.offset,
            more=tick.more,
        )
    reference.flush()
    with plane_on([SessionSpec("s", Feeds((0,), policy))], consumer) as (plane, ring, _):
        for number, batch in enumerate(batches(writer.records, cuts)):
            consumer.rooms["s"] = rooms[number % len(rooms)]
            ring.push(batch)
            plane.step()
        consumer.rooms["s"] = 10**6
        plane.flush()
    records = consumer.records("s")
    assert [record.bar.ts_open for record in records] == [bar[0] for bar in reference.closed]
    for number, record in enumerate(records, 1):
        lows = dict(record.low_watermarks)
        for tick in (tick for later in reference.ticks[number:] for tick in later):
            assert tick.offset >= lows.get(tick.stream, 0)
    streams = {tick.stream for tick in ticks}
    if records and len(streams) <= SPANS:
        ends = {tick.stream: tick.offset + 1 for tick in ticks}
        assert dict(records[-1].low_watermarks) == ends
