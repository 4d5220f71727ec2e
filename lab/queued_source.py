"""A source that yields what it is given: for plans and benchmarks, which make their own records."""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from feeds.source import CommitPoint, Incoming, Kind, Partition


class QueuedSource:
    """Yields the batches it is given, until `stop`. It stores no offsets and cannot pause."""

    lost = 0

    def __init__(self, name: str, kind: Kind = "pausing") -> None:
        self.name = name
        self.kind: Kind = kind
        self._queue: asyncio.Queue[list[Incoming] | None] = asyncio.Queue()

    def put(self, batch: list[Incoming]) -> None:
        """Yield this batch after those before it."""
        self._queue.put_nowait(batch)

    async def start(self) -> None:
        """Nothing to connect to."""

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Batches until `stop`."""
        while (batch := await self._queue.get()) is not None:
            yield batch

    def pause(self) -> None:
        """Batches are small: the ring takes them all."""

    def resume(self) -> None:
        """See `pause`."""

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Nothing to store."""

    async def stop(self) -> None:
        """End the batches."""
        self._queue.put_nowait(None)
