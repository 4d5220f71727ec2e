"""The gateway's end of the protocol: an engine in its own process, or in this one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import zmq
import zmq.asyncio

from daemon import protocol
from daemon.config.schema import Config
from daemon.engine.spec import EngineSpec
from daemon.gateway.engine_processes import EngineProcesses, RunningEngine
from daemon.gateway.ipc_dir import SocketDirectory
from daemon.progress import Progress
from daemon.supervision import Tasks
from feeds.connector import SettingError
from ingest.ring import Ring
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.engine.service import EngineHost

OnEvent = Callable[[protocol.EngineEvent], None]
OnGone = Callable[[str], None]
EVENTS, PROCESS = "engine events", "engine process"


class EngineClient(Protocol):
    """A connection to an engine. Events arrive on the event loop."""

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Start the engine; `Ready` or `Fatal` follows as an event. ``on_gone``: it ended unexpectedly."""

    def send(self, command: protocol.Command) -> None:
        """Send one command."""

    async def end(self) -> bool:
        """End the engine by force, so that ``on_gone`` follows; False where it runs in this process."""

    async def close(self, timeout_s: float) -> None:
        """Close after `Stopped`, or end the engine by force."""


class ProcessEngine:
    """The engine in a child process; commands and events over ZeroMQ IPC."""

    def __init__(
        self,
        config: Config,
        ring: Ring,
        store: MetricStore,
        progress: dict[str, Progress],
        symbols: dict[str, int],
        wake_fd: int,
        tasks: Tasks,
        processes: EngineProcesses,
    ) -> None:
        self._directory = SocketDirectory()
        self._processes = processes
        self._tasks = tasks
        self._spec = EngineSpec(
            config=config,
            ring=ring.name,
            wake_fd=wake_fd,
            store=store.blocks,
            commands=f"ipc://{self._directory.path}/commands",
            events=f"ipc://{self._directory.path}/events",
            progress=progress,
            symbols=symbols,
        )
        self._context = zmq.asyncio.Context()
        self._process: RunningEngine | None = None
        self._closing = False

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Spawn the engine."""
        self._commands = self._bound(zmq.PUSH, self._spec.commands)
        self._events = self._bound(zmq.PULL, self._spec.events)
        self._process = await self._processes.start(self._spec)
        self._tasks.start(EVENTS, partial(self._receive, on_event))
        self._tasks.start(PROCESS, partial(self._watch, self._process, on_gone), returns=True)

    def send(self, command: protocol.Command) -> None:
        """Send one command; to an engine that is gone, which ``on_gone`` tells, or has stopped it is lost."""
        # done at once: there is no high-water mark, so sending never blocks
        sent = self._commands.send(protocol.encode(command), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        sent.exception()

    async def end(self) -> bool:
        """See `EngineClient.end`."""
        if self._process is not None:
            await self._process.end()
        return self._process is not None

    async def close(self, timeout_s: float) -> None:
        """Wait for the child to end; kill it after the time limit."""
        self._closing = True
        if self._process is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                await self._process.end()
        await self._tasks.stop(EVENTS, PROCESS)
        self._commands.close()
        self._events.close()
        self._context.term()
        self._directory.close()

    def _bound(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        return socket

    async def _receive(self, on_event: OnEvent) -> None:
        while True:
            event = protocol.decode_event(await self._events.recv())
            if isinstance(event, protocol.EngineReady):
                self._processes.prepare()
            on_event(event)

    async def _watch(self, process: RunningEngine, on_gone: OnGone) -> None:
        status = await process.wait()
        if not self._closing:
            on_gone(f"the engine process ended with status {status}")


class InprocEngine:
    """The engine in this process, for tests and embedding: the same host, the same structs.

    ``make_host``, called in a thread, builds a host that emits to the given function.
    """

    def __init__(self, make_host: Callable[[OnEvent], EngineHost]) -> None:
        self._make_host = make_host
        self._host: EngineHost | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Build the engine in a thread and start it."""
        loop = asyncio.get_running_loop()

        def emit(event: protocol.EngineEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: drop the event
                loop.call_soon_threadsafe(on_event, event)

        def start() -> EngineHost:
            host = self._make_host(emit)
            host.start()
            return host

        try:
            self._host = await asyncio.to_thread(start)
        except SettingError as error:
            on_event(protocol.Fatal(error.key, error.message))

    def send(self, command: protocol.Command) -> None:
        """Carry out one command."""
        if self._host is None:
            return
        if isinstance(command, protocol.StopEngine):  # blocks until drained
            self._stopping = asyncio.create_task(asyncio.to_thread(self._host.handle, command))
        else:
            self._host.handle(command)

    async def end(self) -> bool:
        """See `EngineClient.end`."""
        return False

    async def close(self, timeout_s: float) -> None:
        """Wait for the host to end."""
        if self._stopping is not None:
            async with asyncio.timeout(timeout_s):
                await self._stopping
        elif self._host is not None:
            await asyncio.to_thread(self._host.stop, 0.0)
