"""A recorded file of `[source.replay]` as a log: its records are read again by their numbers."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from feeds.connectors.replay import ReplayConnector
from feeds.source import Incoming, Partition, Source
from feeds.timestamps import Instant


@dataclass(frozen=True)
class FileLog:
    """The file, or all files of a folder, as one partition whose offsets are the numbers of records."""

    settings: ReplayConnector

    def reader(self) -> nullcontext[Self]:
        """Itself: nothing is held open."""
        return nullcontext(self)

    async def spans(self, topics: Iterable[str]) -> dict[Partition, range]:
        """The offsets of its only partition; where it ends shows when it is read."""
        return {(topic, 0): range(0, 1 << 62) for topic in topics}

    async def offset_at(self, partition: Partition, time_ns: int) -> int | None:
        """Of the first record of this event time or later; None without one."""
        later = msgspec.structs.replace(self.settings, from_=Instant(time_ns))
        async for batch in _messages(later):
            return batch[0].offset
        return None

    async def read(self, partition: Partition, span: range) -> AsyncGenerator[list[Incoming], None]:
        """The records of ``span``, in order, in batches."""
        async for batch in _messages(self.settings):
            if found := [each for each in batch if each.offset in span]:
                yield found
            if batch[-1].offset >= span.stop:
                return


async def played(settings: ReplayConnector, name: str) -> AsyncGenerator[Sequence[Incoming], None]:
    """All that the file holds, as the source of this name reads it, as fast as it can."""
    source: Source = msgspec.structs.replace(settings, speed=0.0).open(name, 0.0)
    await source.start()
    async with aclosing(source.batches()) as batches:
        async for batch in batches:
            yield batch
    await source.stop()


async def _messages(settings: ReplayConnector) -> AsyncGenerator[list[Incoming], None]:
    """What the file holds, without lines that could not be used."""
    async for batch in played(settings, Path(settings.file).name):
        if found := [each for each in batch if each.fault is None]:
            yield found
