"""The daemon's decoder, data plane and engine in one thread, stepped by who feeds them.

Nothing else runs meanwhile, and the next bar waits until nothing is left to do for the one before, also in
the background. So equal records make equal versions, to the last bit of their KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from daemon import protocol
from daemon.config.schema import Config
from daemon.config.symbols import Names, numbered, routes
from daemon.engine.assembly import capture_one, graphs_of, wire_engine
from daemon.engine.build import Built
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.connectors import make_payloads
from daemon.gateway.record_decoder import RecordDecoder, RingTurns
from engine.step import Executor
from feeds.source import Incoming, Kind, Partition
from ingest import warm_up
from ingest.plane import BarConsumer, DataPlane
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore

_BATCH = 256
"""Messages that enter the ring between two looks at the engine."""
ONE = ""
"""Name of the only source."""

Batches = AsyncGenerator[tuple[str, Sequence[Incoming]], None]
"""Messages, by the name of their source."""


class SteppedEngine:
    """The sessions of ``config`` over one ring; use it as a context.

    ``emit`` gets the engine's events. ``name_stream`` hears of each stream before its first record. Of the
    standing questions those of ``asked`` are asked, by default all. ``executor`` replaces the engine's.
    Raises SettingError for a question that cannot be asked.
    """

    def __init__(
        self,
        config: Config,
        built: Built,
        emit: Callable[[protocol.EngineEvent], None],
        *,
        asked: Config | None = None,
        executor: Executor | None = None,
        name_stream: Callable[[protocol.NameStream], None] = lambda stream: None,
    ) -> None:
        self._config, self._built, self._name_stream = config, built, name_stream
        self.sources = [source for source, _ in config.feeds.values()] or [ONE]
        self.store = MetricStore.local(_labels(config, self.sources))
        self.ring = Ring.create(max(config.source.ring_capacity, 1 << 16))
        self.host = wire_engine(
            asked or config,
            built,
            self.ring,
            self.store,
            emit,
            executor=executor,
            credits=1,
        )
        self._graphs = graphs_of(built)
        self.host.input.partitions_assigned([session.name for session in config.sessions])

    def __enter__(self) -> SteppedEngine:
        warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.ring.close()
        self.ring.unlink()

    async def read(self, batches: Batches, step: Callable[[], bool]) -> AsyncGenerator[None, None]:
        """Decode (source, messages) to their end; it yields behind each ``step``, and may be closed there.

        ``step`` takes some of what is in the ring, and returns whether nothing is left. What it does must not
        depend on how much is there already: how much depends on the decoder.
        """
        config = self._config
        feeds = {source: _Given(source) for source in self.sources}
        table = routes(config.sessions, numbered(config.sessions))
        order = RingTurns()
        ingests = {
            source: RecordDecoder(
                given,
                self.ring,
                table,
                OffsetTracker(),
                self.store,
                lambda dead_letter: None,
                payloads=make_payloads(config, source),
                max_ahead_ns=config.source.max_ahead,
                names=Names(config.symbols),
                order=order,
                sequence=config.source.sequence,
                name_stream=self._name_stream,
            )
            for source, given in feeds.items()
        }
        async for named, messages in batches:
            source = named or self.sources[0]
            for at in range(0, len(messages), _BATCH):
                feeds[source].give(messages[at : at + _BATCH])
                async for _ in self._taken(ingests[source], step):
                    yield

    async def _taken(self, decoder: RecordDecoder, step: Callable[[], bool]) -> AsyncGenerator[None, None]:
        """Decode what was given. The ring may be too short for it: what is there is taken meanwhile."""
        pushing = asyncio.ensure_future(decoder.run())
        try:
            is_taken = False
            while not is_taken:
                await asyncio.sleep(0)
                was_pushed = pushing.done()
                is_taken = step() and was_pushed
                yield
            pushing.result()
        finally:
            pushing.cancel()

    def bars_only(self, name: str, consumer: BarConsumer) -> DataPlane:
        """A data plane over the ring in place of the engine's, of one session."""
        prompt = self._built.prompt
        tokeniser = Tokeniser(prompt.encode, prompt.without_special)
        specs = [self.host.input.spec(name)]
        return DataPlane(self.ring, self.sources[0], tokeniser, specs, consumer, self.store)

    def step(self) -> bool:
        """Take what is in the ring, and the next bar of each session; answer it, and do all that is left to
        do for it. Returns whether no bar waits.
        """
        self.host.input.plane.step()
        while self.host.scheduler.step() or capture_one(self._graphs):
            pass
        return self.host.input.settled

    def flush(self, until_ns: int = 0) -> None:
        """Close the open bars, and answer them. ``until_ns``: see `DataPlane.flush`."""
        self.host.input.plane.flush(until_ns)
        while not self.step():
            pass


class _Given:
    """A source with one batch at a time."""

    kind: Kind = "pausing"
    lost = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._batch: Sequence[Incoming] = []

    def give(self, batch: Sequence[Incoming]) -> None:
        """The next call of `batches` yields this one."""
        self._batch = batch

    async def start(self) -> None:
        """Nothing to connect."""

    async def batches(self) -> AsyncGenerator[Sequence[Incoming], None]:
        """The batch."""
        yield self._batch

    def pause(self) -> None:
        """The next batch waits anyway."""

    def resume(self) -> None:
        """See `pause`."""

    async def commit(self, offsets: Mapping[Partition, object]) -> None:
        """Nothing is stored."""

    async def stop(self) -> None:
        """Nothing to disconnect."""


def _labels(config: Config, sources: Sequence[str]) -> dict[str, Sequence[str]]:
    return {
        "session": [session.name for session in config.sessions],
        "source": sources,
        "sink": [],
        "policy": [config.scheduler.policy],
        "eviction": [config.scheduler.eviction],
    }
