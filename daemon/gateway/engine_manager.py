"""Runs the gateway's engine: starts it over its own ring, watches, drains and restarts it."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence

from daemon import protocol
from daemon.gateway.engine_client import EngineClient, OnEvent, OnGone
from ingest.ring import Mode, Ring

log = logging.getLogger(__name__)

Connect = Callable[[Ring, int], EngineClient]
"""An engine for a ring, woken through a file descriptor."""

SILENT_S = 30.0
"""After so long without an event the engine counts as hung (its heartbeat comes every second)."""
STUCK_S = 20.0
"""A worker that is busy for so long without progress is stuck, though its engine sends heartbeats."""
RESTART_AFTER_S = (0.0, 0.5, 2.0, 10.0)
STEADY_S = 60.0
"""An engine that was ready for so long is no failed start: the next one starts after the shortest pause."""
CLOSE_S = 5.0


def stuck_after_s(max_wait_ns: int) -> float:
    """Seconds after which a busy worker is stuck: `STUCK_S`, or most of the time that clients wait for a
    reply if that is more.
    """
    return max(STUCK_S, max_wait_ns / 1.5e9)


class Liveness:
    """Whether an engine lives, by its events. ``clock``: monotonic, seconds.

    ``max_loading_s``: one that is not ready after so long counts as hung, though it sends heartbeats.
    ``stuck_s``: see `is_stuck`.
    """

    def __init__(self, clock: Callable[[], float], max_loading_s: float, stuck_s: float = STUCK_S) -> None:
        self._clock, self._max_loading_s, self._stuck_s = clock, max_loading_s, stuck_s
        self._started: float | None = None
        """When, unless it is gone."""
        self._last_seen = clock()
        self._progress, self._idle = 0, True
        self._seen_progress = -1
        self._moved = clock()
        """When the worker was last seen idle, or with new progress."""

    def starts(self) -> None:
        """An engine begins to load."""
        self._started = self._last_seen = self._moved = self._clock()

    def ends(self) -> None:
        """The engine is gone."""
        self._started, self._last_seen = None, self._clock()

    def on_event(self, event: protocol.EngineEvent) -> None:
        """The engine has sent this."""
        self._last_seen = self._clock()
        if isinstance(event, protocol.EngineHeartbeat):
            if event.idle or event.progress != self._progress:
                self._moved = self._last_seen
            self._progress, self._idle = event.progress, event.idle

    def is_alive(self) -> bool:
        """Whether events arrive, and the worker is idle or made progress since the last call."""
        moved, self._seen_progress = self._progress != self._seen_progress, self._progress
        return (moved or self._idle) and not self._is_silent()

    def is_stuck(self) -> bool:
        """Whether the engine is up and its worker has made no progress for so long, though it is busy."""
        return self._started is not None and not self._idle and self._clock() - self._moved > self._stuck_s

    def hung(self, *, loading: bool) -> str:
        """Why the engine counts as hung, ``loading`` or ready; empty if it does not, or before one starts."""
        if self._started is None:
            return ""
        if self._is_silent():
            return f"the engine has been silent for {SILENT_S:.0f} s"
        too_long = loading and self._clock() - self._started > self._max_loading_s
        return f"the engine was not ready within {self._max_loading_s:.0f} s" if too_long else ""

    def _is_silent(self) -> bool:
        return self._clock() - self._last_seen > SILENT_S


class EngineManager:
    """One engine at a time. ``close`` is called at the end, when no engine follows.

    ``wake_fd``: an eventfd by which the ring wakes it, which is closed at the end; by default a new one.
    """

    def __init__(
        self,
        capacity: int,
        overflow: Mode,
        restart_after_s: Sequence[float] = RESTART_AFTER_S,
        close: Callable[[], Awaitable[None]] | None = None,
        *,
        steady_s: float = STEADY_S,
        max_loading_s: float = 600.0,
        stuck_s: float = STUCK_S,
        wake_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity, self._overflow, self._close = capacity, overflow, close
        self._restart_after_s, self._steady_s, self._clock = restart_after_s, steady_s, clock
        self.liveness = Liveness(clock, max_loading_s, stuck_s)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if wake_fd is None else wake_fd
        self._client: EngineClient | None = None
        self._stopped, self._drained = asyncio.Event(), True
        self._restarts = 0
        self._ready_at = 0.0
        self.model: protocol.EngineReady | None = None
        """Of the newest engine that was ready."""
        self.ring: Ring | None = None
        self.ready = asyncio.Event()

    async def start(self, connect: Connect, on_event: OnEvent, on_gone: OnGone) -> None:
        """Start an engine over a new ring. `EngineReady` or `Fatal` follows as an event.

        ``on_event`` calls `note` with each event.
        """
        self._connect, self._on_event, self._on_gone = connect, on_event, on_gone
        await self._start()

    async def _start(self) -> None:
        self.ring = Ring.create(self._capacity, self._overflow, wake_fd=self._wake_fd)
        self._client = self._connect(self.ring, self._wake_fd)
        self.liveness.starts()
        await self._client.start(self._on_event, self._on_gone)

    async def restart(self) -> None:
        """Start another engine after one ended, after a pause that grows with every restart."""
        if self._client is not None:
            await self._client.close(0.1)
        self._close_ring()
        self._stopped.clear()
        if self._clock() - self._ready_at > self._steady_s:
            self._restarts = 0
        await asyncio.sleep(self._restart_after_s[min(self._restarts, len(self._restart_after_s) - 1)])
        self._restarts += 1
        await self._start()
        await self.ready.wait()

    def connected(self) -> EngineClient | None:
        """The engine that is up, if one is."""
        return self._client if self.ready.is_set() else None

    async def stop(self, drain_s: float) -> bool:
        """Let the engine finish what is queued; False if it took too long or was not up."""
        clean = True
        if self._client is not None:
            if (connected := self.connected()) is not None:
                connected.send(protocol.StopEngine(drain_s))
                try:
                    async with asyncio.timeout(drain_s + CLOSE_S):
                        await self._stopped.wait()
                except TimeoutError:
                    clean = False
                    log.error("the engine did not drain within %.1f s", drain_s + CLOSE_S)
                if not self._drained:
                    log.error("a forward pass did not return: there are no last snapshots")
                clean = clean and self._drained
                self.ready.clear()  # nothing is sent to one that has stopped
                await self._client.close(CLOSE_S)
            else:
                await self._client.close(0.1)
        if self._close is not None:
            await self._close()
        self._close_ring()
        os.close(self._wake_fd)
        return clean

    def gone(self) -> bool:
        """Note that the engine is gone; returns whether it had been ready."""
        was_ready = self.ready.is_set()
        self.ready.clear()
        self.liveness.ends()
        self._stopped.set()
        return was_ready

    async def watch(self) -> None:
        """Until cancelled, end an engine that is `hung` and was ready: another one follows.

        Raises RuntimeError when it was not ready yet, or runs in this process.
        """
        while True:
            await asyncio.sleep(1.0)
            if not self.hung():
                continue
            await asyncio.sleep(1.0)  # this process may have been stopped, too, and has its events to read
            if why := self.hung():
                up = self.connected()
                if up is None or not await up.end():
                    raise RuntimeError(why)
                log.error("%s, and was ended", why)

    def hung(self) -> str:
        """See `Liveness.hung`."""
        return self.liveness.hung(loading=not self.ready.is_set())

    def note(self, event: protocol.EngineEvent) -> None:
        """The engine has sent this."""
        self.liveness.on_event(event)
        match event:
            case protocol.EngineReady():
                self.model, self._ready_at = event, self._clock()
                self.ready.set()
            case protocol.EngineStopped(drained):
                self._drained = drained
                self._stopped.set()

    def _close_ring(self) -> None:
        if self.ring is not None:
            self.ring.unlink()
            self.ring.close()
            self.ring = None
