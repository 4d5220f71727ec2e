"""From a source's messages to ring records: decode, find the sessions, number, push.

Every message ends in the ring, or is counted and, if malformed, sent to the dead letters. A full ring pauses
a source that can wait. Other sources are never paused: their ring overwrites.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import msgspec

from daemon.ages import VenueClock
from daemon.config.symbols import Route
from daemon.front.offsets import OffsetTracker
from feeds.codec import REPLAY, MalformedRecord, decode_record, header_encoding
from feeds.frames import elements
from feeds.messages import AnyRecord, Bar, DeadLetter, Quote, Trade
from feeds.source import Incoming, Source
from ingest.record import BAR, QUOTE, SIDE_BUY, SIDE_SELL, SIDE_UNKNOWN, TRADE, Records, RecordWriter
from ingest.ring import Ring
from metrics.store import MetricStore

log = logging.getLogger(__name__)

RETRY_S = 0.005
SLICE = 128
"""Records to decode, pack and push before yielding to the event loop: about a millisecond."""
LETTER_BYTES = 1 << 18
"""Bytes of a payload that a dead letter keeps: its base64 still fits a broker's message limit."""
_SIDES = {"unknown": SIDE_UNKNOWN, "buy": SIDE_BUY, "sell": SIDE_SELL}


class Order:
    """The order in which records of all sources enter the ring: a turn at a time, numbered from 1."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.restart()

    def restart(self) -> None:
        """Number from 1 again."""
        self.numbers = count(1)


class Ingest:
    """Feeds one source into one ring, to which others may write in turn (``order``).

    ``routes``: by symbol (VENUE:SYMBOL); `reroute` replaces them. ``clocks``: of the venues, by session.
    ``dead_letter`` gets malformed messages.
    """

    def __init__(
        self,
        source: Source,
        ring: Ring,
        routes: Mapping[str, Route],
        tracker: OffsetTracker,
        store: MetricStore,
        dead_letter: Callable[[DeadLetter], None],
        *,
        max_bytes: int,
        max_ahead_ns: int,
        clocks: Mapping[str, VenueClock] | None = None,
        order: Order | None = None,
    ) -> None:
        self._source = source
        self._ring = ring
        self._routes = routes
        self._tracker = tracker
        self._store = store
        self._dead_letter = dead_letter
        self._max_bytes = max_bytes
        self._max_ahead_ns = max_ahead_ns
        self._clocks = defaultdict(VenueClock) if clocks is None else clocks
        self._skewed = store.counter("foretick_clock_skew_records_total", source=source.name)
        self._writer = RecordWriter(SLICE)
        self._order = order or Order()
        # continue from an earlier count
        self._lost = store.growth("foretick_records_lost_upstream_total", source.lost, source=source.name)
        self._shapeless = store.growth(
            "foretick_records_malformed_total", getattr(source, "malformed", 0), reason="other"
        )
        self._passed_over = store.growth(
            "foretick_lines_passed_over_total", self._lines_passed_over(), source=source.name
        )
        self._gaps: set[int] = set()
        self._gate = asyncio.Event()
        self._gate.set()

    async def run(self) -> None:
        """Until the source ends."""
        async for batch in self._source.batches():
            self._store.inc("foretick_records_total", len(batch), source=self._source.name)
            self._note_loss()
            for start in range(0, len(batch), SLICE):
                async with self._order.turn:
                    for message in batch[start : start + SLICE]:
                        for record in self._records(message):
                            if len(self._writer) == SLICE:  # a message of many records
                                await self._flush()
                            self._pack(record)
                    await self._flush()
                await asyncio.sleep(0)
            # with one that can wait, the others leave records in their sockets, which drop and count them
            waits = self._source.kind == "pausing" or self._ring.mode == "pause"
            if waits and not self._gate.is_set():
                await self._paused(self._gate.wait())
        self._note_loss()

    def reroute(self, routes: Mapping[str, Route]) -> None:
        """Other sessions read the records from now on."""
        self._routes = routes

    def gate(self, is_open: bool) -> None:
        """Open or close the gate; a source that can wait is paused while it is closed."""
        if is_open:
            self._gate.set()
        else:
            self._gate.clear()

    def _records(self, message: Incoming) -> list[Incoming]:
        """A message for each record in it; none if it was read before."""
        stream = (message.topic, message.partition)
        if self._source.kind == "pausing" and self._tracker.repeats(stream, message.offset):
            self._store.inc("foretick_records_repeated_total", source=self._source.name)
            return []
        try:
            found = elements(message.payload, header_encoding(message.headers), self._max_bytes)
        except MalformedRecord as error:
            self._refuse(message, error)
            found = []
        if not found:
            self._tracker.skipped(stream, message.offset)
        if len(found) == 1 and found[0] is message.payload:
            return [message]
        return [msgspec.structs.replace(message, payload=payload) for payload in found]

    def _pack(self, message: Incoming) -> None:
        """Pack one record if it is usable, else count it."""
        stream = (message.topic, message.partition)
        try:
            record = decode_record(message.payload, header_encoding(message.headers), self._max_bytes)
            self._check_clock(record, message)
            _check_width(record)
        except MalformedRecord as error:
            self._refuse(message, error)
            self._tracker.skipped(stream, message.offset)
            return
        route = self._routes.get(record.key)
        if route is None:
            self._store.inc("foretick_records_unknown_symbol_total")
            self._tracker.skipped(stream, message.offset)
            return
        number = next(self._order.numbers)
        for name in route.sessions:
            self._tracker.passed_on(name, number, stream, message.offset)
        if record.skewed:
            self._skewed.inc()
        gap = route.number in self._gaps
        self._gaps.discard(route.number)
        replay = REPLAY in message.headers
        if not replay and record.clock == "exchange":
            for name in route.sessions:
                self._clocks[name].observe(record.ts_event, message.ts_recv_ns)
        kind, values, x = _fields(record)
        self._writer.add(
            kind,
            route.number,
            record.ts_event,
            record.ts_recv,
            values,
            x=x,
            seq=record.seq,
            offset=number,
            gap=gap,
            ts_source=message.ts_source_ns or message.ts_recv_ns,
            replay=replay,
        )

    def _check_clock(self, record: AnyRecord, message: Incoming) -> None:
        ahead = record.ts_event - message.ts_recv_ns
        if ahead > self._max_ahead_ns:
            raise MalformedRecord(
                "clock", f"ts_event is {ahead / 1e9:.0f} s ahead of this machine's clock (source.max_ahead)"
            )

    def _note_loss(self) -> None:
        """Count records missing upstream. Their symbols are unknown: flag every symbol's next record."""
        if self._lost.update(self._source.lost):
            self._gaps.update(route.number for route in self._routes.values())
        # input that the source could not turn into a message
        self._shapeless.update(getattr(self._source, "malformed", 0))
        self._passed_over.update(self._lines_passed_over())

    def _lines_passed_over(self) -> int:
        found: Mapping[str, int] = getattr(self._source, "passed_over", {})
        return sum(found.values())

    def _refuse(self, message: Incoming, error: MalformedRecord) -> None:
        self._store.inc("foretick_records_malformed_total", reason=error.reason)
        log.warning(
            "%s/%d offset %d is malformed: %s", message.topic, message.partition, message.offset, error
        )
        self._dead_letter(
            DeadLetter(
                error=str(error),
                reason=error.reason,
                topic=message.topic,
                partition=message.partition,
                offset=message.offset,
                payload=message.payload[:LETTER_BYTES],
            )
        )

    async def _flush(self) -> None:
        if len(self._writer):
            await self._push(self._writer.records)
        self._writer.clear()

    async def _push(self, records: Records) -> None:
        done = self._ring.push(records)
        if done < len(records):
            await self._paused(self._push_rest(records[done:]))

    async def _push_rest(self, records: Records) -> None:
        while len(records):
            await asyncio.sleep(RETRY_S)
            records = records[self._ring.push(records) :]

    async def _paused(self, until: Awaitable[object]) -> None:
        self._store.inc("foretick_ring_pauses_total", source=self._source.name)
        self._source.pause()
        try:
            await until
        finally:
            self._source.resume()


def _check_width(record: AnyRecord) -> None:
    """Check that integers fit the ring's 64 bits; those of JSON are unbounded."""
    if not 0 <= record.seq < 1 << 64:
        raise MalformedRecord("type", f"seq must be an unsigned 64-bit integer, got {record.seq}")
    if isinstance(record, Bar) and record.interval_ns >= 1 << 62:
        raise MalformedRecord("type", f"interval_ns is longer than 146 years: {record.interval_ns}")


def _fields(record: AnyRecord) -> tuple[int, tuple[int, int, int, int, int], int]:
    """Kind, `a` to `e` and `x` of `ingest.record`."""
    if isinstance(record, Trade):
        return TRADE, (record.price, record.size, 0, 0, 0), _SIDES[record.side]
    if isinstance(record, Quote):
        return QUOTE, (record.bid, record.ask, record.bid_size, record.ask_size, 0), 0
    return BAR, (record.open, record.high, record.low, record.close, record.volume), record.interval_ns
