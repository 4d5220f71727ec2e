"""From a source's messages to ring records: decode, find the session, number, push.

Every message has one outcome: into the ring, or counted and, if it is malformed, to the dead letters. A
full ring pauses a source that can wait; a source that cannot is never held up, because its ring overwrites.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

from daemon.offsets import OffsetTracker
from feeds.codec import MalformedRecord, decode_record, header_encoding
from feeds.messages import AnyRecord, DeadLetter, Quote, Trade
from feeds.source import Incoming, Source
from ingest.record import BAR, QUOTE, SIDE_BUY, SIDE_SELL, SIDE_UNKNOWN, TRADE, Records, RecordWriter
from ingest.ring import Ring
from metrics.store import MetricStore

log = logging.getLogger(__name__)

RETRY_S = 0.005
SLICE = 4096
"""Records packed and pushed at a time."""
_SIDES = {"unknown": SIDE_UNKNOWN, "buy": SIDE_BUY, "sell": SIDE_SELL}


class Intake:
    """Feeds one source into one ring.

    ``sessions``: symbol key (VENUE:SYMBOL) to (index, name). ``dead_letter`` gets malformed messages.
    """

    def __init__(
        self,
        source: Source,
        ring: Ring,
        sessions: Mapping[str, tuple[int, str]],
        tracker: OffsetTracker,
        store: MetricStore,
        dead_letter: Callable[[DeadLetter], None],
        *,
        max_bytes: int,
        max_ahead_ns: int,
    ) -> None:
        self._source = source
        self._ring = ring
        self._sessions = sessions
        self._tracker = tracker
        self._store = store
        self._dead_letter = dead_letter
        self._max_bytes = max_bytes
        self._max_ahead_ns = max_ahead_ns
        self._writer = RecordWriter(SLICE)
        self._numbers = count(1)
        self._lost = 0
        self._gate = asyncio.Event()
        self._gate.set()

    async def run(self) -> None:
        """Until the source ends."""
        async for batch in self._source.batches():
            self._store.inc("foretick_records_total", len(batch), source=self._source.name)
            gap = self._upstream_loss()
            for start in range(0, len(batch), SLICE):
                self._writer.clear()
                for message in batch[start : start + SLICE]:
                    gap &= not self._pack(message, gap)
                if len(self._writer):
                    await self._push(self._writer.records)
            if self._source.kind == "pausing" and not self._gate.is_set():
                await self._paused(self._gate.wait())

    def gate(self, is_open: bool) -> None:
        """Closed by whoever cannot take more; a source that can wait then waits."""
        if is_open:
            self._gate.set()
        else:
            self._gate.clear()

    def _pack(self, message: Incoming, gap: bool) -> bool:
        """Pack one message if it is usable, else account for it; True if it was packed."""
        stream = (message.topic, message.partition)
        if self._source.kind == "pausing" and self._tracker.repeats(stream, message.offset):
            self._store.inc("foretick_records_repeated_total", source=self._source.name)
            return False
        try:
            record = decode_record(message.payload, header_encoding(message.headers), self._max_bytes)
            self._check_clock(record, message)
        except MalformedRecord as error:
            self._refuse(message, error)
            self._tracker.disposed(stream, message.offset)
            return False
        session = self._sessions.get(record.key)
        if session is None:
            self._store.inc("foretick_records_unknown_symbol_total")
            self._tracker.disposed(stream, message.offset)
            return False
        index, name = session
        number = next(self._numbers)
        self._tracker.passed_on(name, number, stream, message.offset)
        if record.skewed:
            self._store.inc("foretick_clock_skew_records_total", source=self._source.name)
        kind, values, x = _fields(record)
        self._writer.add(
            kind, index, record.ts_event, record.ts_recv, values, x=x, seq=record.seq, offset=number, gap=gap
        )
        return True

    def _check_clock(self, record: AnyRecord, message: Incoming) -> None:
        ahead = record.ts_event - message.ts_recv_ns
        if ahead > self._max_ahead_ns:
            raise MalformedRecord(
                "clock", f"ts_event is {ahead / 1e9:.0f} s ahead of this machine's clock (source.max_ahead)"
            )

    def _upstream_loss(self) -> bool:
        lost, self._lost = self._source.lost - self._lost, self._source.lost
        if lost:
            self._store.inc("foretick_records_lost_upstream_total", lost, source=self._source.name)
        return lost > 0

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
                payload=message.payload[: self._max_bytes],
            )
        )

    async def _push(self, records: Records) -> None:
        done = self._ring.push(records)
        self._store.set("foretick_ring_fill_ratio", self._ring.fill, source=self._source.name)
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


def _fields(record: AnyRecord) -> tuple[int, tuple[int, int, int, int, int], int]:
    """Kind, `a` to `e` and `x` of `ingest.record`."""
    if isinstance(record, Trade):
        return TRADE, (record.price, record.size, 0, 0, 0), _SIDES[record.side]
    if isinstance(record, Quote):
        return QUOTE, (record.bid, record.ask, record.bid_size, record.ask_size, 0), 0
    return BAR, (record.open, record.high, record.low, record.close, record.volume), record.interval_ns
