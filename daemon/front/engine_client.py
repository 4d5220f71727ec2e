"""The front's end of the seam: an engine in its own process, or in this one."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import zmq
import zmq.asyncio

from daemon import protocol as seam
from daemon.config.schema import Config
from daemon.engine.spec import EngineSpec, SettingError
from daemon.supervision import Tasks
from ingest.ring import Ring
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.engine.host import EngineHost

OnEvent = Callable[[seam.EngineEvent], None]
OnGone = Callable[[str], None]
EVENTS, PROCESS = "engine events", "engine process"


class Link(Protocol):
    """An engine to talk to. Events arrive on the event loop."""

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Start the engine; `Ready` or `Fatal` follows as an event. ``on_gone``: it ended unasked."""
        ...

    def send(self, command: seam.Command) -> None:
        """Hand over one command."""
        ...

    async def close(self, timeout_s: float) -> None:
        """After `Stopped`, or to end the engine whatever it does."""
        ...


class ProcessLink:
    """The engine in a child process; commands and results over ZeroMQ ipc."""

    def __init__(
        self,
        config: Config,
        ring: Ring,
        store: MetricStore,
        labels: dict[str, list[str]],
        versions: dict[str, int],
        wake_fd: int,
        tasks: Tasks,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="foretick-"))
        self._wake_fd = wake_fd
        self._spec = EngineSpec(
            config,
            ring.name,
            wake_fd,
            store.name,
            labels,
            f"ipc://{self._directory}/commands",
            f"ipc://{self._directory}/events",
            versions,
        )
        self._context = zmq.asyncio.Context()
        self._tasks = tasks
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Spawn the engine."""
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set_hwm(0)
        self._commands.linger = 0
        self._commands.bind(self._spec.commands)
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(0)
        self._events.bind(self._spec.events)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "daemon.engine.process",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(self._wake_fd,),
        )
        assert self._process.stdin is not None  # asked for above
        self._process.stdin.write(pickle.dumps(self._spec))
        await self._process.stdin.drain()
        self._tasks.start(EVENTS, partial(self._receive, on_event))
        self._tasks.start(PROCESS, partial(self._watch, self._process, on_gone), returns=True)

    def send(self, command: seam.Command) -> None:
        """Hand over one command."""
        # the high-water mark is off, so sending completes at once
        self._commands.send(seam.encode(command), zmq.NOBLOCK)

    async def close(self, timeout_s: float) -> None:
        """Wait for the child's end, then end it."""
        self._closing = True
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._tasks.stop(EVENTS, PROCESS)
        self._commands.close()
        self._events.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._process is None else self._process.pid

    async def _receive(self, on_event: OnEvent) -> None:
        while True:
            on_event(seam.decode_event(await self._events.recv()))

    async def _watch(self, process: asyncio.subprocess.Process, on_gone: OnGone) -> None:
        status = await process.wait()
        if not self._closing:
            on_gone(f"the engine process ended with status {status}")


class InprocLink:
    """The engine in this process, for tests and embedding: the same host, the same structs."""

    def __init__(
        self, config: Config, ring: Ring, store: MetricStore, source: str, versions: dict[str, int]
    ) -> None:
        self._config = config
        self._source = source
        self._ring = ring
        self._store = store
        self._versions = versions
        self._host: EngineHost | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        """Build the engine in a thread and start it."""
        # here, because a front whose engine is another process does without torch
        from daemon.engine.build import build
        from daemon.engine.host import EngineHost

        loop = asyncio.get_running_loop()

        def emit(event: seam.EngineEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop closed: nobody listens any more
                loop.call_soon_threadsafe(on_event, event)

        def start() -> EngineHost:
            built = build(self._config, self._versions)
            host = EngineHost(self._config, built, self._ring, self._store, emit, source=self._source)
            host.start()
            return host

        try:
            self._host = await asyncio.to_thread(start)
        except SettingError as error:
            on_event(seam.Fatal(error.key, error.message))

    def send(self, command: seam.Command) -> None:
        """Hand over one command."""
        if self._host is None:
            return
        if isinstance(command, seam.StopEngine):  # it blocks until drained
            self._stopping = asyncio.create_task(asyncio.to_thread(self._host.handle, command))
        else:
            self._host.handle(command)

    async def close(self, timeout_s: float) -> None:
        """Wait for the host's end."""
        if self._stopping is not None:
            await asyncio.wait_for(self._stopping, timeout_s)
        elif self._host is not None:
            await asyncio.to_thread(self._host.stop, 0.0)
