"""The front: feeds in and out, query socket, HTTP, and the engine it starts, watches and drains.

Start: sinks, engine, sockets, source; ready when model and feeds are up. Stop: no more input, the engine
drains, answers are published and acknowledged, offsets committed, everything closed, within the stated time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from daemon import protocol as seam
from daemon.api.http import HttpServer
from daemon.api.http_prompts import PromptRoutes
from daemon.api.messages import Ask, Request
from daemon.api.zmq import QueryServer
from daemon.config.schema import Config
from daemon.engine.spec import SettingError
from daemon.front.connectors import make_routes, make_source
from daemon.front.delivery import Route
from daemon.front.engine_client import InprocLink, Link, ProcessLink
from daemon.front.ingest import Intake
from daemon.front.notify import Notifier
from daemon.front.offsets import OffsetTracker
from daemon.front.prompts import OpenPrompts
from daemon.front.publish import Publisher
from daemon.front.sessions import Board
from daemon.supervision import TaskEnded, Tasks
from feeds.source import CommitFailed, Source
from ingest import warm_up
from ingest.ring import Ring
from metrics.export import exposition
from metrics.store import MetricStore

log = logging.getLogger(__name__)

COMMIT_EVERY_S = 1.0
ENGINE_SILENT_S = 30.0
"""Without an event for so long the engine counts as hanging (its heartbeat comes every second)."""
RESTART_AFTER_S = (0.5, 2.0, 10.0)
CLOSE_S = 5.0
INGEST, RESTART = "ingest", "engine restart"


class Front:
    """One daemon. ``source`` and ``routes`` replace the configured ones (tests, demo)."""

    def __init__(
        self,
        config: Config,
        *,
        source: Source | None = None,
        routes: Sequence[Route] | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self.config = config
        self.source = source or make_source(config)
        self.routes = make_routes(config) if routes is None else list(routes)
        self.labels: dict[str, list[str]] = {
            "session": [session.name for session in config.sessions],
            "source": [self.source.name if self.source else "none"],
            "sink": [route.sink.name for route in self.routes],
            "policy": [config.scheduler.policy],
            "eviction": [config.scheduler.eviction],
        }
        self.store = MetricStore.create(self.labels)
        self.store.set(
            "foretick_scheduler_info", 1, policy=config.scheduler.policy, eviction=config.scheduler.eviction
        )
        self.tasks = Tasks(self._task_ended)
        self.tracker = OffsetTracker()
        self.board = Board(config, self.store, self._send)
        lossless = self.source is None or self.source.kind == "pausing"
        self.publisher = Publisher(
            config, self.routes, self.tracker, self.board, self.store, lossless=lossless
        )
        max_wait_s = config.query.max_wait / 1e9
        self.prompts = OpenPrompts(config.query.max_prompts, config.query.max_prompts_each, self._send)
        self.http = HttpServer(
            self._metrics,
            self._not_ready,
            config.http.host,
            config.http.port,
            PromptRoutes(self.prompts, max_wait_s).routes,
        )
        self.query = (
            QueryServer(
                self.board,
                self.prompts,
                config.query.endpoint,
                max_wait_s=max_wait_s,
                observe=self._observe_query,
            )
            if config.query.endpoint
            else None
        )
        self.exhausted = asyncio.Event()
        """The source came to its end (a replayed file)."""
        self._input_done = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the exception that makes going on impossible."""
        self._notifier = notifier or Notifier()
        self._sessions = {s.symbol: (i, s.name) for i, s in enumerate(config.sessions)}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._link: Link | None = None
        self._ring: Ring | None = None
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._feeds_up = self.source is None
        self._stopping = False
        self._restarts = 0
        self._heard = time.monotonic()
        self._progress, self._idle = 0, True
        self._seen_progress = -1
        self._retries = {route.sink.name: 0 for route in self.routes}
        self._committing = asyncio.Lock()
        """Whoever closes the source waits for a commit under way."""

    async def start(self) -> None:
        """Come up; returns when ready. Raises SettingError, OSError (an address that cannot be bound)."""
        await self.http.start(self.tasks)
        if self.query is not None:
            await self.query.start(self.tasks)
        self._notifier.status("starting: connecting sinks")
        await self._or_failure(self._start_sinks())
        self.publisher.delivery.start(self.tasks)
        self._notifier.status("starting: loading the model")
        await self._start_engine()
        # the front's own kernels (it writes the ring) compile while the engine process loads the model
        await self._or_failure(asyncio.to_thread(warm_up))
        await self._or_failure(self._ready.wait())
        self._notifier.status("starting: connecting the source")
        await self._or_failure(self._start_source())
        self.tasks.start("commit loop", self._commit_for_ever)
        if self._notifier.watchdog_s is not None:
            self.tasks.start("watchdog", partial(self._notifier.keep_watchdog, self._alive))
        self._notifier.ready(f"{len(self.config.sessions)} sessions")
        log.info("ready: %d sessions, http port %d", len(self.config.sessions), self.http.port)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Raises what made going on impossible."""
        await self._or_failure(stop.wait())

    async def finish(self) -> None:
        """Serve until the source ends and all it gave is answered. Raises what made going on impossible."""
        await self._or_failure(self.exhausted.wait())
        self._send(seam.EndInput())
        await self._or_failure(self._input_done.wait())

    async def stop(self) -> bool:
        """Drain and close within about the configured time; True if nothing was left behind."""
        self._stopping = True
        self._notifier.stopping("draining")
        drain_s = self.config.process.drain / 1e9
        deadline = time.monotonic() + drain_s
        await self._stop_intake()
        if self.query is not None:
            await self.query.stop(min(1.0, drain_s))
        clean = await self._drain_engine(drain_s)
        left = await self.publisher.delivery.stop(max(0.5, deadline - time.monotonic()))
        await self._commit()
        await self.tasks.stop("commit loop", "watchdog", RESTART)
        if self.source is not None and self._feeds_up:
            await self.source.stop()
        for route in self.routes:
            await route.sink.stop()
        await self.http.stop()
        self.store.unlink()
        self.store.close()
        self._notifier.close()
        os.close(self._wake_fd)
        if left:
            log.error("%d messages were left unpublished; their inputs will be read again", left)
        return clean and not left

    # Engine.

    async def _start_engine(self) -> None:
        dropping = self.source is not None and self.source.kind == "dropping"
        self._ring = Ring.create(
            self.config.source.ring_capacity,
            "overwrite" if dropping else "pause",
            wake_fd=self._wake_fd,
        )
        versions = {name: state.version for name, state in self.board.states.items()}
        if self.config.process.mode == "two":
            self._link = ProcessLink(
                self.config, self._ring, self.store, self.labels, versions, self._wake_fd, self.tasks
            )
        else:
            self._link = InprocLink(self.config, self._ring, self.store, self.labels["source"][0], versions)
        self._heard = time.monotonic()
        await self._link.start(self._on_event, self._on_gone)

    async def _drain_engine(self, drain_s: float) -> bool:
        if self._link is None:
            return True
        clean = True
        if self._ready.is_set():
            self._link.send(seam.StopEngine(drain_s))
            try:
                await asyncio.wait_for(self._stopped.wait(), drain_s + CLOSE_S)
            except TimeoutError:
                clean = False
                log.error("the engine did not drain within %.1f s", drain_s + CLOSE_S)
            await self._link.close(CLOSE_S)
        else:
            await self._link.close(0.1)
        self.board.engine_gone("the daemon stopped")
        self.prompts.engine_gone("the daemon stopped")
        if self._ring is not None:
            self._ring.unlink()
            self._ring.close()
        return clean

    def _on_event(self, event: seam.EngineEvent) -> None:
        self._heard = time.monotonic()
        match event:
            case seam.Committed():
                self.board.committed(event)
                self.publisher.committed(event)
            case seam.Answered():
                self.publisher.answered(event)
            case seam.AnswerFailed():
                self.publisher.failed(event)
            case seam.AskDone() | seam.AskFailed():
                self.board.asked(event)
            case seam.PromptTaken() | seam.PromptDone() | seam.PromptFailed():
                self.prompts.heard(event)
            case seam.Heartbeat():
                self._progress, self._idle = event.progress, event.idle
            case seam.Ready():
                self.publisher.model, self.publisher.revision = event.model, event.revision
                untrained = event.untrained
                self.publisher.untrained = self.board.untrained = self.prompts.untrained = untrained
                self.store.set("foretick_engine_up", 1)
                self._ready.set()
            case seam.InputDone():
                self._input_done.set()
            case seam.ThreadEnded():
                self.tasks.note_end(event.name, event.why)
            case seam.Stopped():
                self._stopped.set()
            case seam.Fatal():
                self._fail(SettingError(event.key, event.message))

    def _on_gone(self, message: str) -> None:
        self.store.set("foretick_engine_up", 0)
        self.board.engine_gone(message)
        self.prompts.engine_gone(message)
        if self._stopping or self.failed.done():
            self._stopped.set()
            return
        if not self._ready.is_set():
            self._fail(RuntimeError(f"{message} before it was ready"))
            return
        log.error("%s; starting it again", message)
        self.tasks.start(RESTART, self._restart, returns=True)

    async def _restart(self) -> None:
        """A new engine over a new ring; the source is read again from what was committed.

        While the new one loads, answers of the old one are still acknowledged. So the source, which the
        offsets are committed by, is closed and the books are cleared as late as can be.
        """
        self._ready.clear()
        self.store.inc("foretick_engine_restarts_total")
        await self._stop_intake()
        if self._link is not None:
            await self._link.close(0.1)
        if self._ring is not None:
            self._ring.unlink()
            self._ring.close()
        await asyncio.sleep(RESTART_AFTER_S[min(self._restarts, len(RESTART_AFTER_S) - 1)])
        self._restarts += 1
        await self._start_engine()
        await self._ready.wait()
        await self._commit()
        if self.source is not None:
            await self.source.stop()
        self.publisher.forget()
        self.tracker.clear()
        await self._start_source()

    def _send(self, command: seam.Command) -> None:
        if self._link is None or not self._ready.is_set():
            if isinstance(command, seam.AskEngine):
                self.board.asked(seam.AskFailed(command.id, "engine", "the engine is not up"))
            elif isinstance(command, seam.PromptCommand):
                self.prompts.heard(seam.PromptFailed(command.prompt, "engine", "the engine is not up"))
            return
        self._link.send(command)

    # Feeds.

    async def _start_sinks(self) -> None:
        await asyncio.gather(*(route.sink.start() for route in self.routes))

    async def _start_source(self) -> None:
        if self.source is None:
            return
        assert self._ring is not None  # the engine is up
        await self.source.start()
        intake = Intake(
            self.source,
            self._ring,
            self._sessions,
            self.tracker,
            self.store,
            self.publisher.dead_letter,
            max_bytes=self.config.source.max_message_bytes,
            max_ahead_ns=self.config.source.max_ahead,
        )
        self.publisher.delivery.gate = intake.gate
        self.tasks.start(INGEST, partial(self._take_in, intake), returns=True)
        self._feeds_up = True

    async def _take_in(self, intake: Intake) -> None:
        await intake.run()
        self.exhausted.set()

    async def _stop_intake(self) -> None:
        await self.tasks.stop(INGEST)

    async def _commit_for_ever(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self._commit()
            if self._ready.is_set() and time.monotonic() - self._heard > ENGINE_SILENT_S:
                self._fail(RuntimeError(f"the engine has been silent for {ENGINE_SILENT_S:.0f} s"))

    async def _commit(self) -> None:
        if self.source is None or not self._feeds_up:
            return
        async with self._committing:
            offsets = self.tracker.to_commit()
            if not offsets:
                return
            try:
                await self.source.commit(offsets)
            except CommitFailed as error:
                self.tracker.not_committed(offsets)
                log.warning("offsets were not committed, trying again: %s", error)

    # Observation.

    def _metrics(self) -> bytes:
        for name, state in self.board.states.items():
            self.store.set("foretick_staleness_seconds", state.staleness_ns() / 1e9, session=name)
        for route in self.routes:
            retries = int(getattr(route.sink, "retries", 0)) - self._retries[route.sink.name]
            self._retries[route.sink.name] += retries
            self.store.inc("foretick_publish_retries_total", retries, sink=route.sink.name)
        return exposition(self.store)

    def _not_ready(self) -> list[str]:
        reasons = [] if self._ready.is_set() else ["the engine is not up"]
        if not self._feeds_up:
            reasons.append("the source is not connected")
        return reasons + [f"{name} ended: {why}" for name, why in self.tasks.ended.items()]

    def _observe_query(self, request: Request, outcome: str, latency_ns: int) -> None:
        if isinstance(request, Ask):
            self.store.observe("foretick_stage_seconds", latency_ns, stage="ask")
            if outcome != "ok":
                self.store.inc("foretick_asks_total", outcome=outcome)

    def _alive(self) -> bool:
        """The engine is heard from, and its worker is idle or made progress since the last look."""
        moved, self._seen_progress = self._progress != self._seen_progress, self._progress
        return (moved or self._idle) and time.monotonic() - self._heard < ENGINE_SILENT_S

    # Tasks.

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _task_ended(self, name: str, why: str, restarted: bool) -> None:
        task, outcome = name.partition(" ")[0], "restarted" if restarted else "failed"
        self.store.inc("foretick_tasks_ended_total", task=task, outcome=outcome)
        if not restarted:
            self._fail(TaskEnded(name, why))

    async def _or_failure(self, work: Coroutine[Any, Any, Any]) -> None:
        """``work`` to its end, unless the daemon fails before."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.failed], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.failed.result()
        task.result()
