"""A source that always has more: what a Kafka consumer behind its topic looks like, without the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from feeds.source import Incoming, Kind, Partition


class FloodSource:
    """Hands out ``first`` at once, then ``records`` as fast as they are taken, ``batch`` at a time.

    Both are (key, encoded record). The second part waits for `open`.
    """

    name = "flood"
    kind: Kind = "pausing"
    lost = 0

    def __init__(
        self, first: Sequence[tuple[str, bytes]], records: Sequence[tuple[str, bytes]], batch: int
    ) -> None:
        self._first, self._records = first, records
        self._batch = batch
        self._open = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self.given = 0

    def open(self) -> None:
        """Let the flood in."""
        self._open.set()

    @property
    def dry(self) -> bool:
        """The flood has been handed out: what is measured now is none."""
        return self.given >= len(self._records)

    async def start(self) -> None:
        """Nothing to connect to."""

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Batches until there is nothing left."""
        yield _incoming(self._first, 0)
        await self._open.wait()
        while not self.dry:
            await self._running.wait()
            taken = self._records[self.given : self.given + self._batch]
            offset = len(self._first) + self.given
            self.given += len(taken)
            yield _incoming(taken, offset)
            await asyncio.sleep(0)  # a consumer's fetch lets the others run too

    def pause(self) -> None:
        """Hold back until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Go on."""
        self._running.set()

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing to store."""

    async def stop(self) -> None:
        """End at the next batch."""
        self.given = len(self._records)
        self._open.set()
        self._running.set()


def _incoming(records: Sequence[tuple[str, bytes]], offset: int) -> list[Incoming]:
    now = time.time_ns()
    return [
        Incoming("flood", 0, offset + i, key.encode(), payload, ts_recv_ns=now)
        for i, (key, payload) in enumerate(records)
    ]
