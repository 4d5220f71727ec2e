"""The records of the past: of Kafka's partitions from one offset to another, or of a recorded file."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing

import msgspec

from daemon.audit.broker import Broker, any_sources
from daemon.audit.file_log import FileLog, played
from daemon.audit.snapshot_reader import Stream
from daemon.audit.stepped_engine import Batches
from daemon.config.schema import Config
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.connectors.replay import ReplayConnector
from feeds.kafka_range import KafkaRange, OffsetsGone
from feeds.source import Incoming

Of = Callable[[str], Broker | FileLog]
"""What keeps the records of a source, by its name."""


class _Partition:
    """What is left of one partition; ``number``: by it those go whose records have the same time."""

    def __init__(self, source: str, number: int, batches: AsyncGenerator[list[Incoming], None]) -> None:
        self.source, self._number, self._batches = source, number, batches
        self._left: list[Incoming] = []
        self._newest = 0

    async def fill(self) -> bool:
        """Whether there is something left."""
        if not self._left:
            self._left = (await anext(self._batches, []))[::-1]
        return bool(self._left)

    @property
    def place(self) -> tuple[int, int]:
        """By Kafka's time of its next record; one whose time is unknown stays behind the one before it."""
        return self._left[-1].ts_source_ns or self._newest, self._number

    def take(self, until: tuple[int, int] | None) -> list[Incoming]:
        """Its next records before that place; at least one."""
        taken: list[Incoming] = []
        while self._left and not (taken and until is not None and self.place > until):
            self._newest = self.place[0]
            taken.append(self._left.pop())
        return taken


async def of_partitions(of: Of, spans: Mapping[Stream, range]) -> Batches:
    """Messages by source, in batches; several partitions are merged by Kafka's times.

    Raises OffsetsGone and BrokerError.
    """
    async with AsyncExitStack() as stack:
        partitions: list[_Partition] = []
        for number, ((source, partition), span) in enumerate(spans.items()):
            reader: KafkaRange | FileLog = await stack.enter_async_context(of(source).reader())
            batches = await stack.enter_async_context(aclosing(reader.read(partition, span)))
            partitions.append(_Partition(source, number, batches))
        left = [each for each in partitions if await each.fill()]
        while left:
            first = min(left, key=lambda each: each.place)
            others = (each.place for each in left if each is not first)
            yield first.source, list(map(_received, first.take(min(others, default=None))))
            if not await first.fill():
                left.remove(first)


def _received(message: Incoming) -> Incoming:
    """As if it was received when Kafka had it: what came too far ahead of the clock is refused again."""
    return msgspec.structs.replace(message, ts_recv_ns=message.ts_source_ns or message.ts_recv_ns)


def is_file(config: Config) -> bool:
    """Whether the records are in a recorded file, which ends, and not in Kafka. Raises SettingError."""
    connectors = [connector for _, connector in config.feeds.values()]
    if len(connectors) == 1 and isinstance(connectors[0], ReplayConnector):
        return True
    if connectors and all(isinstance(each, KafkaSourceConnector) for each in connectors):
        return False
    why = "a history is read from Kafka, or from one recorded file ([source.replay], or --file and --format)"
    raise SettingError("source", why)


async def of_config(config: Config, begin_ns: int | None) -> Batches:
    """All records of the configuration's sources, or those from ``begin_ns`` on; 0: all that are left.

    Raises SettingError, OSError and FormatError of a file; BrokerError, and OffsetsGone where a topic's
    retention has deleted its first records, and ``begin_ns`` does not say to begin behind them.
    """
    batches = _of_file(config, begin_ns) if is_file(config) else await _of_topics(config, begin_ns)
    async with aclosing(batches):
        async for batch in batches:
            yield batch


async def _of_topics(config: Config, begin_ns: int | None) -> Batches:
    brokers, spans = any_sources(config), dict[Stream, range]()
    for name, connector in config.feeds.values():
        assert isinstance(connector, KafkaSourceConnector)  # `is_file`
        async with brokers[name].reader() as reader:
            for partition, span in (await reader.spans(connector.topics)).items():
                first = await reader.offset_at(partition, begin_ns) if begin_ns else span.start
                if begin_ns is None and first:
                    raise OffsetsGone(partition, 0, span.start)
                if first is not None:
                    spans[name, partition] = range(first, span.stop)
    return of_partitions(brokers.__getitem__, spans)


async def _of_file(config: Config, begin_ns: int | None) -> Batches:
    ((name, connector),) = config.feeds.values()
    assert isinstance(connector, ReplayConnector)  # `is_file`
    begins = max(filter(None, (begin_ns, connector.from_)), default=None)
    async with aclosing(played(msgspec.structs.replace(connector, from_=begins), name)) as batches:
        async for batch in batches:
            yield name, batch
