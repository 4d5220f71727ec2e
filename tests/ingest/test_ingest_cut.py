"""A session that is cut and restored anywhere goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.backlog import TapeWindow
from ingest.bar_kernel import BAR, GAP
from ingest.bars import BarPolicy, Feeds
from ingest.compact import CompactSpec, Restart
from ingest.events import events_code
from ingest.lines import LineSpec
from ingest.plane import DataPlane, SessionSpec, TapeRecord
from ingest.plane_state import PlaneState, Rows
from ingest.record import BAR as READY
from ingest.record import (
    HALT,
    HEARTBEAT,
    QUOTE,
    RESUME,
    STATUS,
    TEXT,
    TRADE,
    WORDS,
    RecordWriter,
    stream_number,
)  # fmt: skip
from ingest.ring import Ring
from ingest.words import chunks_of, number_of
from metrics.catalogue import EVENTS
from metrics.store import MetricStore
from tests.ingest.building import Consumer, plane_on

UNIT = 10**9
LINES = LineSpec(0, 0, ("A", "B"))
LEGS = [stream_number("kafka", "ticks", leg) for leg in (0, 1)]
"""Their streams."""
KINDS = {"trade": TRADE, "quote": QUOTE, "bar": READY, "heartbeat": HEARTBEAT, "text": TEXT, "halt": STATUS}


@dataclass
class Plane:
    """A plane of one session; the test gives its engine room."""

    plane: DataPlane
    ring: Ring
    metrics: MetricStore
    consumer: Consumer

    @property
    def seen(self) -> list[TapeRecord | Restart]:
        return [each for _, each in self.consumer.seen]

    def take(self, items: list[Item], room: int = 10**6) -> None:
        self.consumer.rooms["s"] = room
        if items:
            self.ring.push(packed(items))
        for _ in range(2):  # while bars wait, the first one reads nothing
            self.plane.step()


@dataclass(frozen=True)
class Item:
    """A record of one leg: where it is in its stream, and how many seconds after the one before it."""

    kind: str
    leg: int
    message: int
    part: int
    more: bool
    second: int
    price: int

    @property
    def at(self) -> tuple[int, int]:
        return self.message, self.part


def packed(items: list[Item]) -> np.ndarray:
    writer = RecordWriter(3 * len(items))
    for item in items:
        moment, price = item.second * UNIT, item.price * UNIT
        words = f"a text of more than 48 bytes, about {item.price} things"
        values = {
            "trade": (price, UNIT, 0, 0, 0),
            "quote": (price, price + 2, UNIT, UNIT, 0),
            "bar": (price, price, price, price, UNIT),
            "heartbeat": (0, 0, 0, 0, 0),
            "text": (
                0,
                0,
                0,
                number_of(words := f"a text of more than 48 bytes, about {item.price} things"),
                0,
            ),
            "halt": (0, 0, 0, 0, 0),
        }[item.kind]
        for number, chunk in enumerate(chunks_of(words) if item.kind == "text" else ()):
            writer.add(
                WORDS, item.leg, moment, moment, chunk[:5], x=chunk[5], seq=number_of(words), part=number
            )
        x = (HALT, RESUME)[item.price % 2] if item.kind == "halt" else UNIT
        writer.add(
            KINDS[item.kind], item.leg, moment, moment, values, ts_source=moment, x=x,
            stream=LEGS[item.leg], offset=item.message,
            part=item.part, more=item.more,
        )  # fmt: skip
    return writer.records


@contextmanager
def opened(
    policy: BarPolicy,
    line: LineSpec | CompactSpec = LINES,
    window: TapeWindow = TapeWindow(),  # noqa: B008  # frozen
    now: Sequence[int] = (7,),
) -> Iterator[Plane]:
    symbols = (0, 1) if isinstance(line, LineSpec) else (0,)
    consumer = Consumer({"s": 0})
    with plane_on([SessionSpec("s", Feeds(symbols, policy), line, window)], consumer, lambda: now[0]) as made:
        yield Plane(*made, consumer)


def shown(seen: list[TapeRecord | Restart]) -> list[object]:
    """What a tape gets to see of them."""
    return [
        each
        if isinstance(each, Restart)
        else (each.tokens, each.ts_last_event, each.flags, each.bar, each.anchor, each.rounded)
        for each in seen
    ]


@st.composite
def streams(draw: st.DrawFn, legs: int, kind: str) -> list[Item]:
    """Records of each leg's stream, interleaved; some in one message, and heartbeats and events."""
    items, messages, now = list[Item](), [0] * legs, 1000
    for _ in range(draw(st.integers(1, 40))):
        leg, size = draw(st.integers(0, legs - 1)), draw(st.sampled_from([1, 1, 1, 2, 3]))
        for part in range(size):
            now += draw(st.integers(-3, 6))
            other = draw(st.sampled_from([kind] * 8 + ["heartbeat", "text", "halt"]))
            own = kind if other == "heartbeat" and kind == "bar" else other
            price = draw(st.integers(90, 110)) * draw(st.sampled_from([1, 1, 1, 1, 9]))
            items.append(Item(own, leg, messages[leg], part, part + 1 < size, now, price))
        messages[leg] += 1
    return items


POLICIES = st.builds(
    BarPolicy,
    st.just(2 * UNIT),
    lateness_ns=st.sampled_from([0, 3 * UNIT]),
    empty=st.sampled_from(["skip", "fill"]),
    max_fill=st.just(3),
    late=st.sampled_from(["drop", "amend"]),
    price_jump=st.sampled_from([0.0, 3.0]),
    refuse_jumps=st.booleans(),
)
WINDOWS = st.sampled_from(
    [TapeWindow(10**6), TapeWindow(150), TapeWindow(10**6, 3), TapeWindow(10**6, 0, 8 * UNIT)]
)


@given(data=st.data(), policy=POLICIES, window=WINDOWS, compact=st.booleans())
@settings(max_examples=150)
def test_a_cut_session_goes_on_as_if_it_had_not_been(
    data: st.DataObject, policy: BarPolicy, window: TapeWindow, compact: bool
) -> None:
    line: LineSpec | CompactSpec = LINES
    if compact:
        line = CompactSpec(0, 0, window.tokens, window.records, window.span_ns)
        events = events_code(dict.fromkeys(EVENTS, "flag"))
        policy = BarPolicy(
            policy.interval_ns, policy.lateness_ns, policy.empty, policy.max_fill, events=events
        )
    kind = data.draw(st.sampled_from(["trade", "quote", "bar"]))
    items = data.draw(streams(1 if compact else 2, kind))
    at, room = data.draw(st.integers(0, len(items))), data.draw(st.sampled_from([0, 1, 10**6]))
    with opened(policy, line, window) as whole:
        whole.take(items)
        whole.plane.flush()
        expected = shown(whole.seen)
        made = [each for each in whole.seen if isinstance(each, TapeRecord)]
    with opened(policy, line, window) as first, opened(policy, line, window) as second:
        first.take(items[:at], room)
        found = first.plane.cut("s")
        assert found is not None
        cut, taken = found
        cut = msgspec.msgpack.decode(msgspec.msgpack.encode(cut), type=PlaneState)
        second.plane.restore("s", cut, [True] * len(taken))
        # each leg is read again from some message at or before the next one, perhaps from far before
        back = data.draw(st.integers(0, 3))
        for leg, newest in enumerate(taken):
            own = [item for item in items[:at] if item.leg == leg and item.kind != "heartbeat"]
            assert (newest.offset, newest.part) == own[-1].at if own else newest.stream == 0
        begins = [
            (newest.offset if newest.more else newest.offset + 1) - back if newest.stream else 0
            for newest in taken
        ]
        again = [
            item
            for number, item in enumerate(items)
            # heartbeats change nothing when they are heard again, but not before what they closed
            if number >= at or (item.message >= begins[item.leg] and item.kind != "heartbeat")
        ]
        if data.draw(st.booleans()):
            second.plane.go_on(["s"])
            second.take([])
            for record in (each for each in second.seen if isinstance(each, TapeRecord)):
                for stream, low in record.low_watermarks:
                    assert low <= begins[LEGS.index(stream)] + back
        second.take(again)
        second.plane.flush()
        assert shown(first.seen) + shown(second.seen) == expected
        restored = [each for each in second.seen if isinstance(each, TapeRecord)]
        for was, now in zip(made[len(made) - len(restored) :], restored, strict=True):
            assert now.reads == was.reads
            lows = dict(was.low_watermarks)
            assert all(low <= lows[stream] for stream, low in now.low_watermarks)
        repeated = second.metrics.value("foretick_records_in_snapshot_total", session="s")
        assert repeated == len(again) - len(items[at:])


def test_a_stream_that_is_not_read_again_leaves_a_gap() -> None:
    with opened(BarPolicy(UNIT)) as first:
        first.take([Item("trade", 0, n, 0, False, 1000 + n, 100) for n in range(3)])
        cut, taken = first.plane.cut("s") or pytest.fail("no cut")
    assert [each.stream != 0 for each in taken] == [True, False]
    with opened(BarPolicy(UNIT)) as second:
        second.plane.restore("s", cut, [False, False])
        # its numbers begin again: nothing is taken for what it had
        second.take([Item("trade", leg, 0, 0, False, 1010, 100) for leg in (0, 1)])
        second.plane.flush()
        flags = [each.flags & GAP for each in second.seen if isinstance(each, TapeRecord)]
        assert flags == [GAP, GAP, 0]


def test_a_restored_session_waits_until_it_is_read() -> None:
    """Another daemon may answer its bars until then, or have done so."""
    policy = BarPolicy(UNIT, idle_close_ns=50)
    with opened(policy) as first:
        first.take([Item("trade", 0, n, 0, False, 1000 + n, 100) for n in range(3)], room=0)
        cut, _ = first.plane.cut("s") or pytest.fail("no cut")
    for begins in (True, False):
        with opened(policy, now=(now := [7])) as second:
            second.consumer.rooms["s"] = 100
            second.plane.restore("s", cut, [True, True])
            now[0] += 1000
            second.plane.step()
            assert not second.seen, "neither those that wait nor the open one, which would be idle"
            assert second.plane.waits("s")
            if begins:
                second.plane.go_on(["other"])
                second.plane.step()
                assert not second.seen
                second.plane.go_on(["s"])
                second.plane.step()
                assert len(second.seen) == 2
                now[0] += 49
                second.plane.step()
                assert len(second.seen) == 2, "its time is counted again"
                now[0] += 1
                second.plane.step()
                assert len(second.seen) == 3
            else:
                second.take([Item("trade", 0, 2, 0, False, 1002, 100)], room=100)
                assert not second.seen, "it had this one"
                second.take([Item("trade", 0, 3, 0, False, 1003, 100)], room=100)
                assert len(second.seen) == 3


def test_no_cut_of_a_session_whose_bars_are_on_their_way_or_that_is_unknown() -> None:
    with opened(BarPolicy(UNIT)) as plane:
        plane.take([Item("trade", 0, 0, 0, False, 1000, 100)])
        assert plane.plane.cut("s", lambda: False) is None
        assert plane.plane.cut("other") is None
        assert plane.plane.cut("s") is not None


def test_rows_of_another_layout_and_another_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="another layout"):
        Rows.of(np.zeros(2, BAR)).array(np.int64)
    with pytest.raises(ValueError, match="another layout"):
        Rows.of(np.zeros((2, 3), np.int64)).array(np.int64, 2)
    with opened(BarPolicy(UNIT)) as first:
        cut, _ = first.plane.cut("s") or pytest.fail("no cut")
    with (
        opened(BarPolicy(2 * UNIT)) as second,
        pytest.raises(ValueError, match="another policy"),
    ):
        second.plane.restore("s", cut, [True, True])
    with (
        opened(BarPolicy(UNIT), CompactSpec()) as third,
        pytest.raises(ValueError, match="other symbols"),
    ):
        third.plane.restore("s", cut, [True])


def test_each_stream_of_a_symbol_is_read_on_where_it_ended() -> None:
    """Prices come in one topic and headlines in another: none of either is taken twice, none is left out."""
    streams = {TRADE: LEGS[0], STATUS: LEGS[1]}
    log = [(TRADE, 0), (STATUS, 0), (TRADE, 1), (STATUS, 1), (TRADE, 2), (TRADE, 3), (STATUS, 2), (TRADE, 4)]

    def push(plane: Plane, found: list[tuple[int, int, int]]) -> None:
        writer = RecordWriter(len(found))
        for kind, offset, moment in found:
            values = (UNIT, UNIT, 0, 0, 0) if kind == TRADE else (0, 0, 0, 0, 0)
            x = RESUME if kind == STATUS else 0
            writer.add(kind, 0, moment, moment, values, x=x, stream=streams[kind], offset=offset)
        plane.ring.push(writer.records)
        plane.consumer.rooms["s"] = 10**6
        plane.plane.step()

    items = [(kind, offset, (1000 + n) * UNIT) for n, (kind, offset) in enumerate(log)]
    with opened(BarPolicy(UNIT)) as whole:
        push(whole, items)
        expected = shown(whole.seen)
    for at in range(len(items) + 1):
        with opened(BarPolicy(UNIT)) as first, opened(BarPolicy(UNIT)) as second:
            push(first, items[:at])
            cut, taken = first.plane.cut("s") or pytest.fail("no cut")
            newest = {taken[0].stream: taken[0].offset} | dict(taken[0].others)
            had = [(streams[kind], offset) for kind, offset, _ in items[:at]]
            assert (
                newest.items() >= {stream: max(o for s, o in had if s == stream) for stream, _ in had}.items()
            )
            second.plane.restore("s", cut, [True, True])
            push(second, items[max(0, at - 3) :])
            assert shown(first.seen) + shown(second.seen) == expected
