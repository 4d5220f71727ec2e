"""The life of a daemon: start up, serve, drain. `daemon.gateway.wiring` constructs its parts.

Start: sockets, sinks, what the source has committed, engine, source; ready when model and feeds are up. Stop:
input ends, the engine drains, answers are published and acknowledged, offsets committed, and everything
closed, within the configured time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from daemon import protocol
from daemon.api.auth import Access
from daemon.api.events import Events
from daemon.api.generation import Begun, Delta, Failed, Finished, PromptViewed, TokensCounted
from daemon.api.http_server import HttpServer
from daemon.api.messages import LabelReply
from daemon.api.zmq import QueryServer
from daemon.config.errors import ConfigError
from daemon.config.schema import Config
from daemon.config.tenants_file import read_tenants
from daemon.cores import Cores, pin
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.publisher import Publisher
from daemon.gateway.dead_letters import refused
from daemon.gateway.engine_manager import Connect, EngineManager
from daemon.gateway.generations import Generations
from daemon.gateway.inputs import COMMIT, Inputs
from daemon.gateway.load_shedder import LoadShedder
from daemon.gateway.notify import Notifier
from daemon.gateway.originals import Originals
from daemon.gateway.past_files import PastFiles
from daemon.gateway.peer_events import PEER_EVENTS
from daemon.gateway.peers import Peers
from daemon.gateway.pending import PendingCommands
from daemon.gateway.prompts import Prompts
from daemon.gateway.reconfigure import LiveSessions
from daemon.gateway.status import Status
from daemon.supervision import Job, Tasks
from feeds import columns
from feeds.connector import SettingError, SinkRoute
from feeds.market_data import InputRange
from ingest import warm_up
from ingest.record import ReadRange
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.traces.trace_exporter import TraceExporter

log = logging.getLogger(__name__)

_HANDS_OVER = 0.5
"""Of the time to stop, for others to take over; the rest is for answers that are under way."""
RESTART, ENGINE_WATCH, WATCHDOG, AGENTS = "engine restart", "engine watch", "watchdog", "http agents"
EXPORT = "trace export"
FREQUENT = "frequent questions"
PAST = "kept versions"
_FLUSH_S = 1.0
"""Longest time that the last traces take at the end."""


@dataclass(eq=False)
class Gateway:
    """One daemon. ``failed`` holds the first fatal exception."""

    live: LiveSessions
    cores: Cores | None
    store: MetricStore
    tasks: Tasks
    failed: asyncio.Future[None]
    notifier: Notifier
    routes: Sequence[SinkRoute]
    engine: EngineManager
    connect: Connect
    input: Inputs
    status: Status
    sessions: Sessions
    shedder: LoadShedder
    pending: PendingCommands
    publisher: Publisher
    originals: Originals
    prompts: Prompts
    generations: Generations
    peers: Peers
    http: HttpServer
    query: QueryServer | None
    access: Access
    events: Events
    exporter: TraceExporter | None = None
    """Sends traces to a collector, where there is one."""
    frequent: Job | None = None
    """Lets questions stand that are asked often, where `flash.standing_after` is set."""
    past: PastFiles | None = None
    """What sessions keep of their versions, over restarts, where anything is stored."""
    agents: Job | None = None
    """Serves MCP clients, where `http.mcp` is on."""
    peer_events: Job | None = None
    """Follows the group's other daemons, where there may be some."""
    stopping: bool = False
    input_done: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Start; returns when ready. Raises SettingError, or OSError for an address that cannot be bound."""
        if self.cores is not None:
            pin(self.cores.gateway)
            log.info("%s", self.cores)
        if self.exporter is not None:
            self.tasks.start(EXPORT, self.exporter.run, restarts=True)
        if self.agents is not None:
            self.tasks.start(AGENTS, self.agents, returns=True)
        await self.http.start(self.tasks)
        if self.query is not None:
            await self.query.start(self.tasks)
            self.publisher.progress.serve_at(self.query.endpoint)
        if self.peer_events is not None:
            self.tasks.start(PEER_EVENTS, self.peer_events, restarts=True)
        self.notifier.starting("connecting sinks")
        await self._or_failure(asyncio.gather(*(route.sink.start() for route in self.routes)))
        self.publisher.outbox.delivery.start(self.tasks)
        self.input.start_transactions()
        if self.past is not None:
            self.past.restore()
        self.notifier.starting("loading the model")
        await self._or_failure(self.input.recover())
        await self.engine.start(self.connect, self._on_event, self._on_engine_gone)
        self.tasks.start(ENGINE_WATCH, self.engine.watch)
        # compile the gateway's kernels (it writes the ring) while the engine process loads the model
        await self._or_failure(asyncio.to_thread(warm_up))
        await self._or_failure(asyncio.to_thread(columns.warm_up))
        await self._or_failure(self.engine.ready.wait())
        self.notifier.starting("connecting the source")
        assert self.engine.ring is not None  # it is up
        await self._or_failure(self.input.start(self.engine.ring))
        self.tasks.start(COMMIT, self.input.commit_periodically, returns=True)
        if self.frequent is not None:
            self.tasks.start(FREQUENT, self.frequent, restarts=True)
        if self.past is not None:
            self.tasks.start(PAST, self.past.run, restarts=True)
        if self.notifier.watchdog_s is not None:
            self.tasks.start(WATCHDOG, partial(self.notifier.keep_watchdog, self.engine.liveness.is_alive))
        self.notifier.ready(self._serving())
        log.info("ready: %d sessions, http port %d", len(self.config.sessions), self.http.port)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Raises the first fatal exception."""
        await self._or_failure(stop.wait())

    async def finish(self) -> None:
        """Serve until the source ends and all of it is answered. Raises the first fatal exception."""
        await self._or_failure(self.input.exhausted.wait())
        self.pending.send(protocol.EndInput())
        await self._or_failure(self.input_done.wait())

    @property
    def config(self) -> Config:
        """As it is now."""
        return self.live.config

    async def reload(self, read_again: Callable[[], Config]) -> None:
        """Read the configuration again, and do as it says. A bad one is refused whole."""
        with self.notifier.reloading(self._serving):
            await self._reload(read_again)

    def _serving(self) -> str:
        """What the service manager shows."""
        return f"{len(self.config.sessions)} sessions"

    async def _reload(self, read_again: Callable[[], Config]) -> None:
        self._reload_tenants()
        try:
            done = await self.live.reload(read_again())
        except ConfigError as error:
            log.error("the configuration was not read again: %s", error)
            self.store.inc("foretick_config_reloads_total", outcome="refused")
        else:
            self.store.inc("foretick_config_reloads_total", outcome="done" if done else "partly")

    def _reload_tenants(self) -> None:
        """Read the tenants file again. Who has no key any more is refused from now on."""
        if not self.config.tenants.file:
            return
        try:
            self.access.tenants.replace(read_tenants(self.config.tenants.file))
        except ConfigError as error:
            log.error("the tenants file was not read again: %s", error)
            self.store.inc("foretick_tenants_reloads_total", outcome="refused")
            return
        self.events.dismiss(self.access.holds)
        log.info("%d tenants from now on", len(self.access.tenants.names))
        self.store.inc("foretick_tenants_reloads_total", outcome="done")

    async def stop(self) -> bool:
        """Drain and close within about the configured time; True if nothing was left behind."""
        self.stopping = True
        self.notifier.stopping("draining")
        drain_s = self.config.process.drain / 1e9
        deadline = time.monotonic() + drain_s
        await self.tasks.stop(RESTART, ENGINE_WATCH, WATCHDOG)
        if not self.failed.done():
            await self.input.drain(drain_s * _HANDS_OVER)
        await self.input.stop_reading()
        if self.query is not None:
            await self.query.drain(min(1.0, drain_s))
        await self.tasks.stop(PEER_EVENTS, FREQUENT, PAST)
        await self.peers.stop()
        clean = await self.engine.stop(max(0.5, deadline - time.monotonic()))
        self.pending.engine_gone("the daemon stopped")
        outgoing = self.publisher.outbox.delivery
        await outgoing.stop(max(0.5, deadline - time.monotonic()))
        if self.past is not None:
            await self.past.save()
        await self.input.close(deadline)
        left = outgoing.waiting
        for route in self.routes:
            await route.sink.stop()
        if self.query is not None:
            await self.query.stop()
        await self.http.stop()
        if self.exporter is not None:
            await self.tasks.stop(EXPORT)
            await self.exporter.flush(_FLUSH_S)
        self.store.unlink()
        self.store.close()
        self.notifier.close()
        if self.cores is not None:
            pin(self.cores.gateway | self.cores.engine)
        if left:
            log.error("%d messages were left unpublished; their inputs will be read again", left)
        return clean and not left

    def fail(self, error: BaseException) -> None:
        """Record a fatal exception; the first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _on_event(self, event: protocol.EngineEvent) -> None:
        self.engine.note(event)
        session = protocol.session_of(event)
        if session is not None and session not in self.sessions.states:
            return  # it was removed
        match event:
            case protocol.Committed():
                self.sessions.committed(event)
                self.shedder.committed(event)
                self.publisher.committed(event)
            case protocol.Answered():
                self.publisher.answered(event)
            case protocol.Repeated():
                self.publisher.repeated(event)
            case protocol.ReadyLogits():
                self.generations.exits.on_ready(event)
            case protocol.AnswerFailed():
                self.publisher.failed(event)
            case protocol.TextsAsked():
                self.publisher.texts_asked(event)
            case protocol.NotDue():
                self.publisher.not_due(event)
            case protocol.RecordRefused():
                self._refused(event)
            case protocol.QuestionsSet():
                self.publisher.questions_set(event)
                self.pending.on_event(event)
            case protocol.SessionHalted():
                self.sessions.halt(event.session, event.halted)
            case protocol.WindowRebuilt():
                self.sessions.states[event.session].invalidate()
            case protocol.Labelled():
                self.sessions.labelled(event)
            case protocol.SessionAdded():
                self.publisher.streams.name(*event.streams)
                self.pending.on_event(event)
            case protocol.Done() | LabelReply() | Begun() | Delta() | Finished() | Failed():
                self.pending.on_event(event)
            case TokensCounted() | PromptViewed():
                self.pending.on_event(event)
            case protocol.EngineReady():
                self.sessions.engine_ready(event.halted)
                self.publisher.streams.name(*event.streams)
                self.input.engine_ready(event.positions)
                self.store.set("foretick_engine_up", 1)
            case protocol.EngineLoads():
                self.notifier.starting(event.doing)
            case protocol.InputDone():
                self.input_done.set()
            case protocol.ThreadEnded():
                self.tasks.note_end(event.name, event.why)
            case protocol.Fatal():
                self.fail(SettingError(event.key, event.message))

    def _refused(self, event: protocol.RecordRefused) -> None:
        """To the DLQ.

        One that was read again as history had its record when it was read first.
        """
        read = ReadRange(event.stream, event.offset, event.offset)
        if self.publisher.is_stored(read):
            return
        state, streams = self.sessions.states[event.session], self.publisher.streams
        symbol = (state.symbol, *state.more_symbols)[event.leg]
        place = next(iter(streams.ranges([read])), InputRange("", 0, -1, -1))
        original = self.originals.find(streams.find(event.stream), event.offset, event.part)
        dead_letter = refused(event, symbol, place, original)
        self.publisher.record_refused(dead_letter, event.session, (event.stream, event.offset))

    def _on_engine_gone(self, message: str) -> None:
        self.store.set("foretick_engine_up", 0)
        self.pending.engine_gone(message)
        was_ready = self.engine.gone()
        if self.stopping or self.failed.done():
            return
        if not was_ready:
            self.fail(RuntimeError(f"{message} before it was ready"))
            return
        log.error("%s; starting it again", message)
        self.tasks.start(RESTART, partial(self._restart, self.tasks.expect_end(RESTART)), returns=True)

    async def _restart(self, earlier: asyncio.Task[None] | None) -> None:
        """Start a new engine over a new ring, and read the source again from the committed offsets.

        While the new engine loads, answers of the old one are still acknowledged. The source, which commits
        their offsets, is therefore closed as late as possible, unless a standby may wait for its partitions.
        An ``earlier`` restart whose engine died before the source was open again must end first: two restarts
        never open the same source.
        """
        if earlier is not None:
            try:
                await asyncio.wait([earlier])
            finally:
                earlier.cancel()
        self.store.inc("foretick_engine_restarts_total")
        await self.input.stop_reading()
        await self.live.pause_unreadable()
        # a broker that is away keeps no client from asking the next engine
        await asyncio.gather(self.input.hand_over(self.publisher.forget), self.engine.restart())
        assert self.engine.ring is not None  # it is up
        await self.input.reopen(self.engine.ring, self.publisher.forget)

    async def _or_failure(self, work: Awaitable[Any]) -> None:
        """Run ``work`` to its end, unless the daemon fails first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.failed], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.failed.result()
        task.result()
