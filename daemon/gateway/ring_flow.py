"""Flow control of one source: packed records go into the ring; a source that can wait is paused meanwhile."""

import asyncio
import time
from collections.abc import Awaitable

from feeds.quality.silence import SilenceMonitor
from feeds.source import Source
from ingest.record import Records, RecordWriter
from ingest.ring import Ring
from metrics.store import MetricStore

RETRY_S = 0.005
SLICE = 1024
"""Records to decode, pack and push before yielding to the event loop: a millisecond if all are plain."""
COLUMNS_SLICE = 1 << 12
"""The same of records that come as columns."""


class RingFlow:
    """``writer``: packed records until `flush`, few at a time. ``gate``: set while the source is read.

    ``silence`` learns of what is flushed.
    """

    def __init__(
        self,
        source: Source,
        ring: Ring,
        store: MetricStore,
        gate: asyncio.Event | None,
        silence: SilenceMonitor | None = None,
    ) -> None:
        self.writer = RecordWriter(COLUMNS_SLICE)
        self.paused = False
        """The source is not read: the ring is full, or the gate closed."""
        self.ring = ring
        self._source, self._store = source, store
        self._gate, self.silence = gate, silence

    async def make_room(self, records: int = 1) -> None:
        """Flush unless this many more can be packed."""
        if len(self.writer) + records > COLUMNS_SLICE:
            await self.flush()

    async def flush(self) -> None:
        """Push what is packed; returns once all of it is in the ring."""
        if len(self.writer):
            records = self.writer.records
            if self.silence is not None:
                self.silence.learn(records, time.monotonic_ns())
            done = self.ring.push(records)
            if done < len(records):
                await self._pause(self._push(records[done:]))
        self.writer.clear()

    async def _push(self, records: Records) -> None:
        while len(records):
            await asyncio.sleep(RETRY_S)
            records = records[self.ring.push(records) :]

    async def wait_for_gate(self) -> None:
        """Return once the gate is set; at once for a source that cannot wait."""
        # with one that can wait, the others leave records in their sockets, which drop and count them
        waits = self._source.kind == "pausing" or self.ring.mode == "pause"
        if waits and self._gate is not None and not self._gate.is_set():
            await self._pause(self._gate.wait())

    @property
    def held(self) -> bool:
        """Whether reading waits for the gate, or will as soon as the ring has room."""
        return self.paused and self._gate is not None and not self._gate.is_set()

    async def _pause(self, until: Awaitable[object]) -> None:
        self._store.inc("foretick_ring_pauses_total", source=self._source.name)
        self._source.pause()
        self.paused = True
        try:
            await until
        finally:
            self.paused = False
            self._source.resume()
