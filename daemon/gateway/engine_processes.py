"""Starts engine processes, so that one that ends is replaced at once: by a spare, where there is one."""

import asyncio
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from daemon.config.schema import Config
from daemon.cores import Cores
from daemon.engine.spec import Ended, EngineSpec, Report, Serving, Spare
from daemon.supervision import Tasks

log = logging.getLogger(__name__)

ENGINE = (sys.executable, "-m", "daemon.engine.process")
SPARE = "engine spare"
SPARE_AFTER_S = 10.0
"""From a running engine to the start of a spare of its own imports, which would delay the first answers."""
_CLOSE_S = 5.0
_KILLED_S = 5.0
"""How long the end of an engine that was killed may take to be reported."""

Process = asyncio.subprocess.Process
_decode = msgspec.json.Decoder(Report).decode


class RunningEngine:
    """An engine that was started: the ``process`` itself, or a fork of it."""

    def __init__(self, process: Process) -> None:
        self._process, self._fork = process, -1
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.serving: asyncio.Future[Serving | None] = asyncio.get_running_loop().create_future()
        """What it has reported; None: it ended before."""

    @property
    def report(self) -> Serving | None:
        """What it has reported so far."""
        return self.serving.result() if self.serving.done() else None

    @property
    def pid(self) -> int:
        """Of the process that serves, as far as is known."""
        return self._process.pid if self.report is None else self.report.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._status.done()

    async def wait(self) -> int:
        """Its exit status."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        """End it by force."""
        with suppress(ProcessLookupError):
            if self._fork < 0:
                self._process.kill()
            else:
                signal.pidfd_send_signal(self._fork, signal.SIGKILL)

    async def end(self) -> None:
        """End it by force, and with it the process that loaded where that hangs, too, and reports no end."""
        self.kill()
        try:
            async with asyncio.timeout(_KILLED_S):
                await self.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self.wait()

    def note(self, report: Report) -> None:
        """The process has reported this."""
        if isinstance(report, Ended):
            self.ended(report.status)
        elif not self.serving.done():
            self.serving.set_result(report)
            if report.pid != self._process.pid:
                # its parent, which has not reported its end yet, keeps the number from being used again
                with suppress(OSError):
                    self._fork = os.pidfd_open(report.pid)

    def ended(self, status: int) -> None:
        """It is gone."""
        if self._fork >= 0:
            os.close(self._fork)
            self._fork = -1
        if not self.serving.done():
            self.serving.set_result(None)
        if not self._status.done():
            self._status.set_result(status)


class _Loaded:
    """A process that loads what an engine needs, and then serves, itself or by one fork after another."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.engine: RunningEngine | None = None
        """The newest."""
        self._reading = asyncio.create_task(self._read())

    @property
    def waits(self) -> bool:
        """Whether another engine can be had of it."""
        if self.process.returncode is not None or self.process.stdin is None:
            return False
        if self.engine is None:
            return True
        return self.engine.report is not None and self.engine.pid != self.process.pid

    async def serve(self, spec: EngineSpec) -> RunningEngine:
        """An engine of this spec, which has ended if the process is gone."""
        engine = self.engine = RunningEngine(self.process)
        if not await self.tell(spec):
            engine.ended(self.process.returncode or 0)
        return engine

    async def tell(self, message: EngineSpec | Spare) -> bool:
        """Write to the process; whether it still ran."""
        assert self.process.stdin is not None  # asked for
        if self.process.returncode is not None:
            return False
        try:
            self.process.stdin.write(pickle.dumps(message))
            await self.process.stdin.drain()
        except ConnectionError:
            return False
        return True

    def kill(self) -> None:
        """End it by force."""
        with suppress(ProcessLookupError):
            self.process.kill()

    async def close(self) -> None:
        """Let it end, or end it by force."""
        assert self.process.stdin is not None  # asked for
        self.process.stdin.close()  # its signal to end
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        """Note reports until the process ends; its fork ends with it."""
        assert self.process.stdout is not None  # asked for
        async for line in self.process.stdout:
            try:
                report = _decode(line)
            except msgspec.DecodeError:  # a package that prints as it is imported
                log.warning("the engine's process printed %r", line[:200])
                continue
            if self.engine is not None:
                self.engine.note(report)
        status = await self.process.wait()
        if self.engine is not None and not self.engine.has_ended:
            self.engine.kill()
            self.engine.ended(status)


class EngineProcesses:
    """Runs ``command`` as the engine. A spare waits, with the model loaded, where the engine reports so.

    ``config``: what the model is loaded by. ``cores``: of the engines. ``wake_fd``: an eventfd, by which
    rings wake them.
    """

    def __init__(
        self,
        config: Config,
        cores: Cores | None,
        *,
        command: Sequence[str] = ENGINE,
        after_s: float = SPARE_AFTER_S,
    ) -> None:
        self._config, self._command = config, command
        self._cpus: frozenset[int] = frozenset() if cores is None else cores.engine
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks = Tasks()  # without a spare the daemon still runs
        self._after_s = after_s
        self._loaded: _Loaded | None = None
        """Where the next engine comes from."""
        self._started = False

    @property
    def has_spare(self) -> bool:
        """Whether an engine waits for the present one's end."""
        return self._loaded is not None and self._loaded.waits

    async def load(self) -> None:
        """Begin to load what the first engine needs, while the gateway is still being made."""
        self._loaded = await self._load()

    def abandon(self) -> None:
        """End by force what loads: there will be no engine."""
        if self._loaded is not None:
            self._loaded.kill()

    async def start(self, spec: EngineSpec) -> RunningEngine:
        """An engine of this spec: of the spare, if it waits, or of a new process."""
        await self._tasks.stop(SPARE)
        is_first, self._started = not self._started, True
        if self._loaded is not None and self._loaded.waits:
            engine = await self._loaded.serve(spec)
            if not engine.has_ended:
                if not is_first:
                    log.info("the spare engine takes over, process %d", self._loaded.process.pid)
                return engine
        self._loaded = await self._load()
        return await self._loaded.serve(spec)

    def prepare(self) -> None:
        """An engine runs: have a spare from some seconds on, where it says so."""
        if SPARE not in self._tasks.names():
            self._tasks.start(SPARE, self._prepare, returns=True)

    async def close(self) -> None:
        """End the spare."""
        await self._tasks.stop(SPARE)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await loaded.close()

    async def _prepare(self) -> None:
        loaded = self._loaded
        if loaded is None or loaded.engine is None:
            return
        report = await asyncio.shield(loaded.engine.serving)
        if report is None:
            return
        log.info("%s", report.why)
        if report.spare and report.pid == loaded.process.pid:
            await asyncio.sleep(self._after_s)
            self._loaded = await self._load()

    async def _load(self) -> _Loaded:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self.wake_fd,),
        )
        loaded = _Loaded(process)
        await loaded.tell(Spare(self._config, self._cpus))
        return loaded
