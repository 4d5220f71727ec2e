"""The daemon's source: read into the engine's ring; offsets are committed to it."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from daemon import protocol
from daemon.ages import VenueClock
from daemon.config.schema import Config, SessionConfig
from daemon.config.symbols import Names, SymbolRoute
from daemon.gateway.checkpoint.checkpoint import Checkpoint
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.connectors import make_payloads
from daemon.gateway.group_member import GroupMember, SessionCommands
from daemon.gateway.record_decoder import RecordDecoder, RingTurns
from daemon.gateway.ring_flow import RingFlow
from daemon.gateway.standby import Standby
from daemon.gateway.start_positions import StartPositions
from daemon.gateway.stream_names import StreamNames
from feeds.kafka_transactions import KafkaTransactions
from feeds.market_data import DeadLetter
from feeds.payloads.payload_decoder import PayloadDecoder
from feeds.quality.gap_file import GapFile
from feeds.quality.silence import SilenceMonitor
from feeds.source import CatchesUp, ConnectionState, Lag, Partition, PartitionedSource, Source
from ingest.ring import Ring
from metrics.feed_faults import SILENT
from metrics.store import GrowthHandle, MetricStore

log = logging.getLogger(__name__)

COMMIT_EVERY_S = 1.0
REOPEN_COMMIT_S = 10.0
"""How long a failing commit is retried before the source is opened again."""
CLOSE_COMMIT_S = 1.0
"""The same before it is closed."""
LEVEL = 0.05
"""Of the ring: so much may wait there in a daemon that is level with the one that it follows."""
EMPTY = 0.002
"""The same of a ring of which all was taken but what came just now."""
NOTIFY_S = 0.5
"""How often the engine learns up to when the source was read."""
_HELD_UP_S = 2 * NOTIFY_S
"""Between two looks at what is silent: after a longer time this process did not run, so nothing is known."""


class SourceRunner:
    """Connects one source, reads it into the ring, and commits to it while it is connected.

    ``clocks``: of the venues, by session. A source that can wait is paused while the outbox's gate is not
    set. ``silence`` watches the source, ``gaps`` is the file
    of what it learns. ``sink``, ``send``: see `Checkpoint`.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        tracker: OffsetTracker,
        store: MetricStore,
        outbox: Outbox,
        sessions: SessionCommands,
        *,
        progress: ProgressStore,
        send: Callable[[protocol.Command], None],
        standby: Standby,
        streams: StreamNames,
        order: RingTurns,
        clocks: Mapping[str, VenueClock],
        gaps: GapFile | None = None,
        silence: SilenceMonitor | None = None,
        sink: KafkaTransactions | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
    ) -> None:
        self.source, self.tracker, self.connected = source, tracker, False
        self.exhausted = asyncio.Event()
        """The source has ended (a replayed file)."""
        self._store, self._order, self._standby, self._sessions = store, order, standby, sessions
        self._outbox, self._streams, self._send, self._commit_every_s = outbox, streams, send, commit_every_s
        self._starts = StartPositions(config, source.name, tracker, progress)
        given = source, tracker, progress, outbox, standby, store, send
        self.checkpoint = Checkpoint(
            *given,
            sink=sink,
            on_revoked=lambda partitions: self.group.on_revoked(partitions),
            is_held=self.is_held,
        )
        parts = source, tracker, progress, self._starts, self.checkpoint, standby, sessions, config.recovery
        opens_all = not config.opens_by_partition
        self.group = GroupMember(*parts, self.is_level, self._are_warm, opens_all=opens_all)
        payloads = make_payloads(config, source.name)
        self._gaps = gaps
        self._new_decoder = partial(
            RecordDecoder,
            source,
            tracker=tracker,
            store=store,
            dead_letter=self._hold,
            payloads=payloads,
            max_ahead_ns=config.source.max_ahead,
            clocks=clocks,
            order=order,
            sequence=config.source.sequence,
            name_stream=self._name_stream,
            opener=None if opens_all and not config.patterns else sessions,
            discoverer=sessions if config.patterns else None,
            gate=outbox.delivery.gate,
            silence=silence,
        )
        self._decoder: RecordDecoder | None = None
        self._failures = _failures_of(source, payloads, store)

    def _hold(self, record: DeadLetter) -> None:
        held = self.tracker.hold((record.topic, record.partition), record.offset)
        self._outbox.dead_letter(msgspec.structs.replace(record, source=self.tracker.source), held)

    def _name_stream(self, stream: protocol.NameStream) -> None:
        self._streams.name(stream)
        self._send(stream)

    def begin(self, ring: Ring) -> None:
        """From now on no session is idle before the source was read: see `RingTurns.has_read`."""
        self._order.has_read(self.source.name, time.monotonic_ns(), ring)

    async def connect(self, ring: Ring, by_symbol: Mapping[str, SymbolRoute], names: Names) -> None:
        """Connect; `read` then reads into ``ring``."""
        await self.source.start()
        self._decoder = self._new_decoder(ring=ring, routes=by_symbol, names=names)
        self.connected = True
        if self.group.log is None:
            self._sessions.partitions_assigned(self._starts.unrestored)  # the others are read from a log

    def change(
        self, sessions: Sequence[SessionConfig], by_symbol: Mapping[str, SymbolRoute], names: Names
    ) -> None:
        """Let these sessions read the records from now on."""
        self._starts.change(sessions)
        if self._decoder is not None:
            self._decoder.reroute(by_symbol, names)

    def extend(self, sessions: Sequence[SessionConfig], more: Mapping[str, SymbolRoute]) -> None:
        """Let these read records, too; ``more``: the routes of their symbols, which had none."""
        self._starts.extend(sessions)
        if self._decoder is not None:
            self._decoder.extend(more)

    def unread(self) -> list[str]:
        """What of the source cannot be read now, or was not yet."""
        source: object = self.source
        return source.unread() if isinstance(source, PartitionedSource) and self.connected else []

    def note(self) -> None:
        """Bring metrics of the connection up to date."""
        for growth, total in self._failures:
            growth.update(total())
        connection = getattr(self.source, "connection", None)
        up = self.connected and (connection is None or connection.state is ConnectionState.UP)
        self._store.set("foretick_source_up", float(up), source=self.source.name)
        self._store.set("foretick_partitions_warming", len(self.group.behind), source=self.source.name)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Gauges of a Kafka source's partitions, and of the venues that it brings."""
        lags: Mapping[Partition, Lag] = getattr(self.source, "lags", {})
        named = {f"{topic}/{number}": lag for (topic, number), lag in lags.items()}
        behind = self.group.behind
        venues = {} if self._decoder is None else self._decoder.venues
        now = time.time_ns()
        delays = {venue: clock.delay_ns(now) for venue, clock in venues.items()}
        return {
            "foretick_venue_delay_seconds": {
                venue: delay / 1e9 for venue, delay in delays.items() if delay is not None
            },
            "foretick_standby_lag_records": {f"{p}/{n}": float(each) for (p, n), each in behind.items()},
            "foretick_consumer_lag_records": {name: float(lag.records) for name, lag in named.items()},
            "foretick_consumer_lag_seconds": {name: lag.age_ns / 1e9 for name, lag in named.items()},
        }

    def is_level(self) -> bool:
        """Whether the engine has taken all that was read, but for a little."""
        return self._decoder is None or self._decoder.flow.ring.fill <= LEVEL

    def _are_warm(self, sessions: Collection[str]) -> bool:
        """Whether what was read of these sessions is in their windows, but for a bar of each."""
        is_taken = self._decoder is None or self._decoder.flow.ring.fill <= EMPTY
        waiting = partial(self._store.value, "foretick_bars_waiting")
        return is_taken and all(waiting(session=name) <= 1 for name in sessions)

    def is_held(self) -> bool:
        """Whether the source is not read because the gate is closed."""
        return self._decoder is not None and self._decoder.flow.held

    async def read(self) -> None:
        """Read until the source ends."""
        assert self._decoder is not None
        flow = self._decoder.flow
        notifying = asyncio.create_task(self._notify_read(flow))
        try:
            await self._decoder.run()
        finally:
            notifying.cancel()
        self._order.has_read(self.source.name, None, flow.ring)
        self.exhausted.set()

    async def _notify_read(self, flow: RingFlow) -> None:
        """Tell the engine up to when the source was read."""
        source: object = self.source
        saving: asyncio.Task[None] | None = None  # beside: a slow disk must not hold this up
        looked = time.monotonic()
        while True:
            if isinstance(source, CatchesUp):
                self._order.has_read(self.source.name, source.read_until_ns, flow.ring)
            elif not flow.paused:  # all that was sent meanwhile has come
                self._order.has_read(self.source.name, time.monotonic_ns(), flow.ring)
            # a process that was held up has not read yet what came meanwhile
            before, looked = looked, time.monotonic()
            if looked - before < _HELD_UP_S:
                self._note_silence(flow)
            is_free = saving is None or saving.done()
            if self._gaps is not None and is_free and self._gaps.is_due(time.monotonic_ns()):
                saving = asyncio.create_task(asyncio.to_thread(self._gaps.save))
            await asyncio.sleep(NOTIFY_S)

    def _note_silence(self, flow: RingFlow) -> None:
        if flow.silence is None or self._decoder is None:
            return
        now, wall = time.monotonic_ns(), time.time_ns()
        for symbol in flow.silence.newly_silent(now, wall, self._decoder.is_read):
            self._store.inc("foretick_feed_faults_total", source=self.source.name, kind=SILENT.name)
            log.warning("source %s: nothing came of %s for unusually long", self.source.name, symbol)
        self._store.set("foretick_symbols_silent", flow.silence.silent, source=self.source.name)

    async def commit_periodically(self) -> None:
        """Commit every second, and look at what others have committed."""
        while True:
            await asyncio.sleep(self._commit_every_s)
            if self.connected:
                await self.checkpoint.commit()
                await self.group.look_around()

    async def leave(self) -> None:
        """Commit, and disconnect unless the source can read again as it is."""
        if self.connected:
            await self.checkpoint.commit_before_leaving(REOPEN_COMMIT_S)
        if self.group.log is None or not self.group.log.stays:
            await self.source.stop()

    async def close(self, deadline: float) -> None:
        """Commit, a transaction until ``deadline`` (monotonic, seconds), and disconnect."""
        if self.checkpoint.exactly_once:
            await self.checkpoint.stop(max(0.5, deadline - time.monotonic()))
        elif self.connected:
            await self.checkpoint.commit_within(CLOSE_COMMIT_S)
        if self.connected:
            await self.source.stop()
        if self._gaps is not None:
            await asyncio.to_thread(self._gaps.save)

    async def fail(self) -> None:
        """Disconnect after an error."""
        self.connected = False
        with suppress(Exception):
            await self.source.stop()


def _failures_of(
    source: Source, payloads: PayloadDecoder, store: MetricStore
) -> list[tuple[GrowthHandle, Callable[[], int]]]:
    """What counts failures of a source, and how many there were so far."""
    handshakes = store.growth("foretick_source_handshakes_failed_total", source=source.name)
    schemas = store.growth("foretick_schema_requests_failed_total", source=source.name)
    return [
        (handshakes, lambda: int(getattr(source, "handshakes_failed", 0))),
        (schemas, lambda: payloads.failed),
    ]
