"""Every message has one outcome, its neighbours are unharmed, and a full ring waits or overwrites."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.ages import VenueClock
from daemon.config.symbols import SymbolRoute
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.record_decoder import RecordDecoder
from feeds.codec import REPLAY, encode
from feeds.decimals import from_units
from feeds.market_data import EVERY_SYMBOL, Bar, DeadLetter, Quote, Trade, VenueHeartbeat
from feeds.payloads.payload_decoder import WireDecoder
from feeds.source import CommitPoint, Fault, Incoming, Kind
from ingest.record import (
    BAR,
    FLAG_GAP,
    FLAG_REPLAY,
    FLAG_SKEWED,
    QUOTE,
    RECORD,
    REFUSAL,
    SIDE_SELL,
    TRADE,
    Records,
    stream_number,
)
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import SECOND, START, TOPIC, QueueSource, incoming, trade, until
from tests.kit.gateway import DecoderRig

STREAM = (TOPIC, 0)
SYMBOLS = ("V:AAA", "V:AAA", "V:BBB")


def limits() -> dict[str, Any]:
    return {"payloads": WireDecoder(1 << 20), "max_ahead_ns": 3600 * SECOND}


KAFKA_LIMIT = 1 << 20
"""A broker's default message limit, and so the limit of a DLQ record."""


class Rig(DecoderRig):
    """Of messages that are given."""

    source: QueueSource

    def popped(self, *, refusals: bool = False) -> Records:
        """The records in the ring; with ``refusals`` those that stand for refused ones instead."""
        found = self.records()
        return found[(found["kind"] == REFUSAL) == refusals]

    def count(self, name: str, **labels: str) -> float:
        return self.store.value(name, **labels)


class Opening:
    """Opens closed sessions with a pause; those that it ``refuses`` stay closed."""

    def __init__(self, *closed: str, refuses: Collection[str] = ()) -> None:
        self.left, self.refuses = set(closed), set(refuses)
        self.opened: list[set[str]] = []

    def closed(self, sessions: Iterable[str]) -> set[str]:
        return self.left.intersection(sessions)

    async def open(self, sessions: Collection[str]) -> set[str]:
        await asyncio.sleep(0.001)
        self.opened.append(set(sessions))
        self.left -= set(sessions) - self.refuses
        return self.closed(sessions)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    with ExitStack() as stack:

        def make(kind: Kind = "pausing", capacity: int = 64, opener: Opening | None = None) -> Rig:
            made = Rig(QueueSource(kind), "aaa", "bbb", capacity=capacity, opener=opener)
            stack.callback(made.close)
            return made

        yield make


def good(n: int, symbol: str = "V:AAA") -> bytes:
    return trade(symbol, START + n * SECOND, price=f"{100 + n}.5", size="2", seq=n, side="sell")


async def test_a_record_crosses_exactly(rig):
    r = rig()
    await r.run([incoming(good(1), 40), incoming(good(2, "V:BBB"), 41)])
    first, second = r.popped()
    assert (first["kind"], first["symbol"], second["symbol"]) == (TRADE, 0, 1)
    assert (first["a"], first["b"], first["x"]) == (101_500_000_000, 2_000_000_000, SIDE_SELL)
    assert (first["ts_event"], first["ts_recv"]) == (START + SECOND, START + SECOND)
    assert (first["seq"], first["offset"], second["offset"]) == (1, 40, 41)
    assert first["stream"] == second["stream"] == stream_number("test", TOPIC, 0)
    r.tracker.acknowledge("aaa", STREAM, 41)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(41)}
    assert r.count("foretick_records_total", source="test") == 2


async def test_quotes_and_bars_cross_exactly(rig):
    one = 10**9
    common = {"venue": "V", "symbol": "AAA", "ts_event": START, "ts_recv": START}
    prices = {"bid": from_units(one), "ask": from_units(2 * one)}
    quote = Quote(**common, **prices, bid_size=from_units(3), ask_size=from_units(4))
    bar = Bar(
        **common,
        open=from_units(2 * one),
        high=from_units(4 * one),
        low=from_units(one),
        close=from_units(3 * one),
        volume=from_units(5),
        interval_ns=60 * SECOND,
    )
    r = rig()
    await r.run([incoming(encode(quote), 0), incoming(encode(bar), 1)])
    crossed = r.popped()
    assert crossed["kind"].tolist() == [QUOTE, BAR]
    assert [crossed[0][name] for name in "abcde"] == [one, 2 * one, 3, 4, 0]
    assert [crossed[1][name] for name in "abcdex"] == [2 * one, 4 * one, one, 3 * one, 5, 60 * SECOND]


def with_bytes(**fields: object) -> bytes:
    return trade("V:AAA", START, **fields)


BAD = {
    "malformed JSON": (b'{"type":"trade",', "json"),
    "not UTF-8": (b'{"type":"trade","venue":"\xff"}', "json"),
    "missing field": (
        b'{"type":"trade","venue":"V","symbol":"AAA","ts_event":1,"ts_recv":1}',
        "missing_field",
    ),
    "negative price": (with_bytes(price="-1"), "price"),
    "price of zero": (with_bytes(price="0"), "price"),
    "price beyond the ring": (with_bytes(price="10000000000"), "price"),
    "price finer than the ring": (with_bytes(price="0.0000000001"), "price"),
    "size of too many digits": (with_bytes(size="10000000000.0000000001"), "size"),
    "price beyond any number": (with_bytes(price="9" * 40), "price"),
    "price as a list": (with_bytes(price=[1]), "price"),
    "negative size": (with_bytes(size="-1"), "size"),
    "milliseconds": (trade("V:AAA", START // 10**6), "timestamp_unit"),
    "seconds": (trade("V:AAA", START // SECOND), "timestamp_unit"),
    "10 MB": (b'{"type":"trade","pad":"' + b"x" * 10_000_000 + b'"}', "oversize"),
    "a day ahead of the clock": (trade("V:AAA", time.time_ns() + 86_400 * SECOND), "clock"),
    "symbol with a blank": (trade("V:A A", START), "symbol"),
    "negative sequence number": (with_bytes(seq=-1), None),
    "sequence number of 65 bits": (with_bytes(seq=2**64), None),
    "bar of 2^63 ns": (
        encode(
            Bar(
                venue="V",
                symbol="AAA",
                ts_event=START,
                ts_recv=START,
                open=from_units(1),
                high=from_units(1),
                low=from_units(1),
                close=from_units(1),
                volume=from_units(1),
                interval_ns=2**63,
            )
        ),
        None,
    ),
}
"""Payload, and the reason it is counted under (None: any)."""


@pytest.mark.parametrize("name", BAD)
async def test_a_message_that_cannot_be_used_is_counted_put_aside_and_harms_no_neighbour(rig, name):
    payload, reason = BAD[name]
    r = rig()
    await r.run([incoming(good(1), 0), incoming(payload, 1), incoming(good(2), 2)])
    assert r.popped()["a"].tolist() == [101_500_000_000, 102_500_000_000]
    (dead_letter,) = r.dead_letters
    assert reason in (None, dead_letter.reason)
    assert r.count("foretick_records_malformed_total", reason=dead_letter.reason) == 1
    assert r.count("foretick_records_total", source="test") == 3
    assert (dead_letter.topic, dead_letter.partition, dead_letter.offset) == (TOPIC, 0, 1)
    assert dead_letter.error
    assert payload.startswith(dead_letter.payload)
    assert len(dead_letter.payload) == len(payload) or len(dead_letter.payload) > 1000
    assert len(encode(dead_letter)) < KAFKA_LIMIT, "a DLQ record must fit a broker's message limit"
    # Its offset is done: once the neighbours are answered, the position is after all three.
    r.tracker.acknowledge("aaa", STREAM, 3)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(3)}


REFUSED = {
    "its members": (trade("V:AAA", START, price="-1"), None, [(0, START)]),
    "a member of a wrong type": (trade("V:BBB", START, size=[]), None, [(1, START)]),
    "a wrong time": (trade("V:AAA", START // 1000), None, [(0, 0)]),
    "an array of two": (
        b"[" + trade("V:AAA", START, price="x") + b"," + trade("V:BBB", START) + b"]", None, [(0, START)],
    ),
    "cut off": (good(1)[:-5], None, [(0, START + SECOND)]),
    "an array that is cut off": (b"[" + good(1) + b"," + good(2, "V:BBB")[:-5], None, [(0, 0), (1, 0)]),
    "the key": (b"\x00\x01", b"V:BBB", [(1, 0)]),
    "another symbol": (trade("V:ZZZ", START, price="-1"), b"V:ZZZ", []),
    "nothing": (b"?", None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("others", [1, 40])
async def test_a_refused_record_of_a_known_symbol_leaves_a_mark(rig, name: str, others: int) -> None:
    payload, key, expected = REFUSED[name]
    r = rig(capacity=256)
    refused = msgspec.structs.replace(incoming(payload, others), key=key)
    after = incoming(good(90), others + 1)
    await r.run([*(incoming(good(n), n) for n in range(others)), refused, after])
    out = np.zeros(256, RECORD)
    found = out[: r.ring.pop(out)]
    marks = found[found["kind"] == REFUSAL]
    assert [(int(m["symbol"]), int(m["ts_event"])) for m in marks] == expected
    assert set(marks["offset"].tolist()) <= {others}
    assert found["kind"][-1] == TRADE, "what comes after it stays behind it"


async def test_lines_that_are_no_records_leave_a_mark_and_no_dead_letter(rig) -> None:
    r = rig()
    known = Fault("price", "no", is_line=True, ts_event=START)
    lines = [Incoming("f", 0, -1, key, b"", {}, START, fault=known) for key in (b"V:AAA", None, b"V:ZZZ")]
    await r.run([*lines, incoming(good(1), 0)])
    assert [(int(m["symbol"]), int(m["ts_event"])) for m in r.popped(refusals=True)] == [(0, START)]
    assert r.dead_letters == []
    assert r.count("foretick_records_malformed_total", reason="price") == 3


async def test_the_wrong_encoding_is_refused_by_name(rig):
    r = rig()
    message = Incoming(TOPIC, 0, 0, None, good(1), {"encoding": b"avro"})
    await r.run([message])
    assert [dead_letter.reason for dead_letter in r.dead_letters] == ["encoding"]


async def test_an_unknown_symbol_is_counted_and_acknowledged_but_not_malformed(rig):
    r = rig()
    await r.run([incoming(good(1), 0), incoming(good(1, "V:ZZZ"), 1)])
    assert r.count("foretick_records_unknown_symbol_total") == 1
    assert (len(r.popped()), r.dead_letters) == (1, [])
    r.tracker.acknowledge("aaa", STREAM, 1)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(2)}


async def test_the_broker_s_time_and_a_replay_go_into_the_ring(rig):
    """Without a broker's time it is that of arrival."""
    r = rig()
    kafka = Incoming(TOPIC, 0, 0, None, good(1), {}, START + 9, START + 5)
    replayed = Incoming(TOPIC, 0, 1, None, good(2), {REPLAY: b"1"}, START + 9)
    await r.run([kafka, replayed])
    records = r.popped()
    assert records["ts_source"].tolist() == [START + 5, START + 9]
    assert records["flags"].tolist() == [0, FLAG_REPLAY]


async def test_a_venue_s_clock_is_measured_by_live_records_with_its_time(rig):
    r = rig()
    clock = VenueClock()
    ahead = trade("V:AAA", START + 300, ts_recv=START + 400)
    received = msgspec.json.encode(msgspec.json.decode(ahead) | {"clock": "receive"})
    r.source.put(
        [
            Incoming(TOPIC, 0, 0, None, ahead, {}, START + 100),
            Incoming(TOPIC, 0, 1, None, ahead, {REPLAY: b"1"}, START + 50),
            Incoming(TOPIC, 0, 2, None, received, {}, START + 60),
        ]
    )
    r.source.end()
    clocks = {"aaa": clock, "bbb": VenueClock()}
    sessions = {"V:AAA": SymbolRoute(0, ("aaa",))}
    ingest = RecordDecoder(
        r.source, r.ring, sessions, r.tracker, r.store, r.dead_letters.append, **limits(), clocks=clocks
    )
    await asyncio.wait_for(ingest.run(), 20)
    assert clock.ahead_ns == 200
    assert {venue: each.delay_ns(START) for venue, each in ingest.venues.items()} == {"V": -200}
    assert r.dead_letters == []


async def test_receive_time_before_exchange_time_is_kept_and_flagged(rig):
    r = rig()
    late = trade("V:AAA", START, ts_recv=START - 1_272_000_000)
    await r.run([incoming(late, 0), incoming(good(1), 1)])
    assert r.popped()["flags"].tolist() == [FLAG_SKEWED, 0]
    assert r.count("foretick_clock_skew_records_total", source="test") == 1


async def test_what_a_pausing_source_gives_twice_is_read_once(rig):
    r = rig()
    again = [incoming(good(n), n) for n in (1, 2)]
    await r.run(
        [incoming(good(n), n) for n in range(3)],
        [*again, incoming(good(3), 3), incoming(good(9), 0, partition=1)],
    )
    assert r.popped()["seq"].tolist() == [0, 1, 2, 3, 9]
    assert r.count("foretick_records_repeated_total", source="test") == 2


async def test_a_full_ring_pauses_the_source_which_resumes_where_it_stopped(rig):
    r = rig(capacity=8)
    r.source.put([incoming(good(n), n) for n in range(20)], [incoming(good(20), 20)])
    r.source.end()
    running = asyncio.create_task(r.ingest.run())
    await until(lambda: r.source.paused)
    seen: list[int] = []
    assert r.ring.fill == 1.0
    await asyncio.sleep(0.03)  # several tries: still paused, nothing lost
    assert r.source.paused

    def drained() -> bool:
        seen.extend(r.popped()["seq"].tolist())
        return running.done()

    await until(drained)
    await running
    assert seen == list(range(21))
    assert not r.source.paused
    assert r.count("foretick_ring_pauses_total", source="test") == r.source.pauses == 1
    assert r.ring.lost == 0


async def test_a_ring_that_overwrites_never_holds_the_source_up(rig):
    r = rig("dropping", capacity=8)
    await r.run(*([incoming(good(n), n)] for n in range(100)))
    kept = r.popped()["seq"].tolist()
    assert kept == list(range(100))[-len(kept) :]
    assert r.ring.lost + len(kept) == 100
    assert (r.source.pauses, r.count("foretick_ring_pauses_total", source="test")) == (0, 0)


async def test_loss_upstream_flags_the_next_record_of_every_session_once(rig):
    """The feed's numbering does not say whose records are missing."""
    r = rig("dropping")
    running = asyncio.create_task(r.ingest.run())
    r.source.put([incoming(good(1), 0)])
    await until(lambda: r.ring.fill)
    assert r.popped()["flags"].tolist() == [0]
    r.source.lost = 3
    # The batch that reports the loss has no usable record: the flag waits.
    r.source.put([incoming(b"{", 1)], [incoming(good(n, s), n) for n, s in enumerate(SYMBOLS, 2)])
    r.source.end()
    await asyncio.wait_for(running, 20)
    assert r.popped()["flags"].tolist() == [FLAG_GAP, 0, FLAG_GAP]
    assert r.count("foretick_records_lost_upstream_total", source="test") == 3


async def test_what_was_lost_before_this_intake_is_not_counted_again(rig):
    r = rig("dropping")
    r.source.lost = 5
    routes = {"V:AAA": SymbolRoute(0, ("aaa",))}
    again = RecordDecoder(r.source, r.ring, routes, r.tracker, r.store, r.dead_letters.append, **limits())
    r.source.put([incoming(good(1), 0)])
    r.source.end()
    await asyncio.wait_for(again.run(), 20)
    assert r.count("foretick_records_lost_upstream_total", source="test") == 0


@pytest.mark.parametrize("kind", ["pausing", "dropping"])
async def test_a_closed_gate_holds_a_source_up_that_can_wait_and_no_other(rig, kind):
    r = rig(kind)
    r.gate.clear()
    r.source.put([incoming(good(1), 0)], [incoming(good(2), 1)])
    r.source.end()
    running = asyncio.create_task(r.ingest.run())
    if kind == "dropping":
        await asyncio.wait_for(running, 20)
        assert r.source.pauses == 0
    else:
        await until(lambda: r.source.paused)
        assert len(r.popped()) == 1
        r.gate.set()
        await asyncio.wait_for(running, 20)
        assert not r.source.paused
    assert r.popped()["seq"].tolist()[-1] == 2


async def test_a_record_that_never_reached_the_ring_is_not_committed(rig):
    """Stopped while the ring was full: the waiting records are read again."""
    r = rig(capacity=8)
    r.source.put([incoming(good(n), n) for n in range(12)])
    running = asyncio.create_task(r.ingest.run())
    await until(lambda: r.source.paused)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not r.source.paused
    offsets = r.popped()["offset"]
    r.tracker.acknowledge("aaa", STREAM, int(offsets.max()) + 1)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(8)}


async def test_msgpack_is_read_where_the_header_says_so(rig):
    r = rig()
    record = Trade(
        venue="V", symbol="BBB", ts_event=START, ts_recv=START, price=from_units(7), size=from_units(0)
    )
    now = time.time_ns()
    await r.run([Incoming(TOPIC, 0, 0, None, encode(record, "msgpack"), {"encoding": b"msgpack"}, now)])
    assert (r.popped()[0]["a"], r.dead_letters) == (7, [])


async def test_a_symbol_of_several_sessions_crosses_once_and_waits_for_all(rig):
    r = rig()
    r.ingest.reroute({"V:AAA": SymbolRoute(7, ("aaa", "bbb"))})
    await r.run([incoming(good(1), 40), incoming(good(2, "V:BBB"), 41)])
    (record,) = r.popped()
    assert record["symbol"] == 7
    r.tracker.acknowledge("aaa", STREAM, 41)
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(40)}
    r.tracker.acknowledge("bbb", STREAM, 41)
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(42)}


async def test_symbols_that_nobody_reads_are_counted_and_take_no_memory(rig):
    import tracemalloc

    r = rig()

    def batch(first: int) -> list[Incoming]:
        return [incoming(good(1, f"V:X{first + n}"), first + n) for n in range(2000)]

    await r.run(batch(0))
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for n in range(1, 5):
        await r.run(batch(2000 * n))
    grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    tracemalloc.stop()
    assert sum(each.size_diff for each in grown if "/daemon/" in each.traceback[0].filename) < 100_000
    assert r.count("foretick_records_unknown_symbol_total") == 10_000
    assert len(r.popped()) == 0


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_an_array_of_records_in_one_message_crosses_record_by_record(
    rig: Callable[..., Rig], encoding: str
) -> None:
    """One of them is malformed, and there are more than one slice of them; the offset is theirs together."""
    it = rig(capacity=512)
    parts = [good(n) for n in range(200)]
    parts[3] = trade("V:AAA", START, price="-1")
    packed = b"[" + b",".join(parts) + b"]"
    if encoding == "msgpack":
        packed = msgspec.msgpack.encode([msgspec.json.decode(part) for part in parts])
    message = msgspec.structs.replace(incoming(packed, 0), headers={"encoding": encoding.encode()})
    await it.run([message, message, incoming(b"[]", 1), incoming(b"[{", 2), incoming(good(200), 3)])
    found = it.popped()
    assert found["seq"].tolist() == [n for n in range(201) if n != 3]
    assert [(dead_letter.reason, dead_letter.offset) for dead_letter in it.dead_letters] == [
        ("price", 0),
        ("json", 2),
    ]
    assert it.count("foretick_records_repeated_total", source="test") == 1
    assert it.tracker.to_commit() == {STREAM: CommitPoint(0)}
    it.tracker.acknowledge("aaa", STREAM, 3)  # all but the last record, which came by itself
    assert it.tracker.to_commit() == {STREAM: CommitPoint(3)}


async def test_an_array_newest_first_is_read_by_time(rig: Callable[..., Rig]) -> None:
    it = rig()
    newest_first = [trade("V:AAA", START + n // 2 * SECOND, seq=n) for n in range(9, 0, -1)]
    await it.run([incoming(b"[" + b",".join(newest_first) + b"]", 0)])
    assert it.popped()["seq"].tolist() == list(range(1, 10))


def damaged(n: int) -> bytes:
    return good(n)[:-5]


def unusual(n: int) -> bytes:
    """A member that nobody knows is right, but not decoded as columns."""
    return good(n)[:-1] + b',"extra":1}'


@given(
    st.lists(
        st.tuples(
            st.sampled_from([good, good, good, good, damaged, unusual]),
            st.sampled_from(["V:AAA", "V:BBB", "V:ZZZ"]),
            st.integers(-1, 3),  # steps of offsets: some repeat
            st.sampled_from([0, 0, 0, 1]),
            st.sampled_from([{}, {}, {}, {REPLAY: b"1"}, {"encoding": b"msgpack"}]),
        ),
        min_size=40,
        max_size=90,
    ),
    st.integers(0, 1),
)
@settings(max_examples=60)
def test_many_at_a_time_have_the_outcome_of_one_by_one(given_messages, gaps):
    """The same records, counts, DLQ records, clocks and offsets, whatever stands next to what."""
    messages, at = [], [0, 0]
    for n, (make, symbol, step, partition, headers) in enumerate(given_messages):
        at[partition] = max(0, at[partition] + step)
        payload = make(n) if make is not good else good(n, symbol)
        messages.append(
            Incoming(TOPIC, partition, at[partition], None, payload, headers, START + n * SECOND // 2, n % 3)
        )

    def outcome(size: int):
        ring = Ring.create(128)
        tracker, dead_letters = OffsetTracker(), list[DeadLetter]()
        store = MetricStore.local({"session": ["aaa", "bbb"], "source": ["test"], "sink": []})
        clocks = {"aaa": VenueClock(), "bbb": VenueClock()}
        routes = {"V:AAA": SymbolRoute(0, ("aaa",)), "V:BBB": SymbolRoute(1, ("bbb",))}
        source = QueueSource()
        ingest = RecordDecoder(
            source, ring, routes, tracker, store, dead_letters.append,
            payloads=WireDecoder(1 << 20), max_ahead_ns=20 * SECOND, clocks=clocks,
        )  # fmt: skip
        try:
            source.lost = gaps
            source.put(*(messages[i : i + size] for i in range(0, len(messages), size)))
            source.end()
            asyncio.run(asyncio.wait_for(ingest.run(), 20))
            out = np.zeros(128, RECORD)
            records = out[: ring.pop(out)].copy()
            records["ts_ring"] = 0
            counts = [
                store.value(name, **labels)
                for name, labels in (
                    ("foretick_records_unknown_symbol_total", {}),
                    ("foretick_records_repeated_total", {"source": "test"}),
                    ("foretick_clock_skew_records_total", {"source": "test"}),
                )
            ]
            ahead = [clock.delay_ns(START) for clock in (*clocks.values(), ingest.venues["V"])]
            return (
                records.tobytes(),
                counts,
                dead_letters,
                ahead,
                tracker.outstanding(),
                tracker.to_commit(),
            )
        finally:
            ring.close()
            ring.unlink()

    assert outcome(len(messages)) == outcome(1)


@pytest.mark.parametrize("size", [1, 64], ids=["one by one", "many"])
@pytest.mark.parametrize(
    ("total", "metric"),
    [
        ("skipped", "foretick_records_skipped_total"),
        ("deleted", "foretick_records_lost_upstream_total"),
    ],
)
async def test_a_jump_flags_each_session_s_next_record_of_that_partition_and_is_counted(
    rig, size, total, metric
):
    """A session that reads another partition has no gap; one that never comes again has none to show."""
    r = rig(capacity=256)

    class Jumping(QueueSource):
        skipped: ClassVar[dict[tuple[str, int], int]] = {STREAM: 7}
        deleted: ClassVar[dict[tuple[str, int], int]] = {STREAM: 7}
        moved = 2

        def set_retention(self, span_ns: int, skips: bool) -> None: ...

    source = Jumping()
    ingest = RecordDecoder(
        source,
        r.ring,
        {"V:AAA": SymbolRoute(0, ("aaa",)), "V:BBB": SymbolRoute(1, ("bbb",))},
        r.tracker,
        r.store,
        r.dead_letters.append,
        **limits(),
    )
    setattr(source, total, {STREAM: 5007})
    source.moved = 3
    messages = [incoming(good(n), n, partition=0) for n in range(32)]
    others = [incoming(good(n, "V:BBB"), n, partition=1) for n in range(32)]
    both = [*messages, *others]
    source.put(*(both[i : i + size] for i in range(0, len(both), size)))
    source.end()
    await asyncio.wait_for(ingest.run(), 20)
    assert np.flatnonzero(r.popped()["flags"] & FLAG_GAP).tolist() == [0]
    both_metrics = ("foretick_records_skipped_total", "foretick_records_lost_upstream_total")
    counted = {each: r.count(each, source="test") for each in both_metrics}
    assert counted == {**dict.fromkeys(both_metrics, 0), metric: 5000}
    assert r.count("foretick_partitions_moved_total", source="test") == 1


@pytest.mark.parametrize("size", [1, 30], ids=["one by one", "as columns"])
async def test_a_closed_session_is_opened_before_its_first_record_goes_on(rig, size: int) -> None:
    opener = Opening("aaa", "bbb")
    r = rig(capacity=256, opener=opener)
    batches = [[incoming(good(n), n) for n in range(first, first + size)] for first in (0, size)]
    await r.run(*batches)
    assert opener.opened == [{"aaa"}]
    assert opener.left == {"bbb"}
    assert r.popped()["offset"].tolist() == list(range(2 * size))


@pytest.mark.parametrize("size", [1, 30], ids=["one by one", "as columns"])
async def test_a_session_that_cannot_be_opened_loses_nothing_and_has_a_gap_later(rig, size: int) -> None:
    """Its offsets are not committed. Once it is open, its first record says that some are missing."""
    opener = Opening("aaa", refuses=["aaa"])
    r = rig(capacity=256, opener=opener)
    r.source.put([incoming(good(n), n) for n in range(size)])
    running = asyncio.create_task(r.ingest.run())
    await until(lambda: len(opener.opened) > 0)
    await until(lambda: r.count("foretick_records_total", source="test") == size)
    r.records()
    opener.refuses.clear()
    r.source.put([incoming(good(n), n) for n in range(size, 2 * size)])
    r.source.end()
    await running
    later = r.popped()
    assert (later["flags"] & FLAG_GAP != 0).tolist() == [True] + [False] * (size - 1)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}


async def test_a_heartbeat_opens_no_session_and_a_refused_record_opens_its_own(rig) -> None:
    """The bar that lacks the record shall say so."""
    opener = Opening("aaa", "bbb")
    r = rig(opener=opener)
    beat = encode(VenueHeartbeat(venue="V", symbol=EVERY_SYMBOL, ts_event=START, ts_recv=START))
    await r.run([incoming(beat, 0), incoming(with_bytes(price="-1"), 1)])
    assert opener.opened == [{"aaa"}]
    assert r.popped(refusals=True)["symbol"].tolist() == [0]
