"""A source that always has more records, like a Kafka consumer with a backlog, but without a broker."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from feeds.codec import encode
from feeds.source import Incoming
from feeds.synthetic import Instrument, SyntheticTape
from lab.queued_source import QueuedSource

_TICK = 10_000_000
_LOT = 1_000_000
_START_S = 1_723_075_200

Records = Sequence[tuple[str, bytes]]
"""(key, encoded record); encoded in advance, so that it costs nothing during a measurement."""


def instruments(n: int, trades_per_second: int) -> list[Instrument]:
    """``n`` synthetic markets."""
    return [
        Instrument("BENCH", f"S{i:02d}", 200_000 + 1_000 * i, _TICK, _LOT, trades_per_second)
        for i in range(n)
    ]


def payloads(markets: list[Instrument], total: int, seed: int = 7) -> list[tuple[str, bytes]]:
    """About ``total`` trades as JSON, whole seconds of all markets, second by second."""
    tapes = [SyntheticTape(market, seed) for market in markets]
    a_second = sum(market.trades_per_second for market in markets)
    return [
        (trade.key, encode(trade))
        for second in range(-(-total // a_second))
        for tape in tapes
        for trade in tape.second((_START_S + second) * 1_000_000_000)
    ]


class FloodSource(QueuedSource):
    """Yields ``first`` at once; after `open` it yields ``records`` as fast as they are taken."""

    def __init__(self, first: Records, records: Records, batch: int) -> None:
        super().__init__("flood")
        self._first, self._records, self._batch = first, records, batch
        self._open, self._running = asyncio.Event(), asyncio.Event()
        self._running.set()
        self.given = 0

    def open(self) -> None:
        """Start the flood."""
        self._open.set()

    @property
    def dry(self) -> bool:
        """Whether the flood has ended: later measurements are without it."""
        return self.given >= len(self._records)

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Batches until no records are left."""
        yield incoming(self._first, 0)
        await self._open.wait()
        while not self.dry:
            await self._running.wait()
            taken = self._records[self.given : self.given + self._batch]
            offset = len(self._first) + self.given
            self.given += len(taken)
            yield incoming(taken, offset)
            await asyncio.sleep(0)  # yield to the event loop, as a consumer's fetch does

    def pause(self) -> None:
        """Pause until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Continue."""
        self._running.set()

    async def stop(self) -> None:
        """End at the next batch."""
        self.given = len(self._records)
        self._open.set()
        self._running.set()


def incoming(records: Records, offset: int) -> list[Incoming]:
    """The records as a source gives them, with consecutive offsets from ``offset``."""
    now = time.time_ns()
    return [
        Incoming("flood", 0, offset + i, key.encode(), payload, ts_recv_ns=now)
        for i, (key, payload) in enumerate(records)
    ]
