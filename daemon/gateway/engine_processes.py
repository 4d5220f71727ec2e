"""Starts engine processes, the next one ahead of time, so that one that ends is replaced at once."""

import asyncio
import logging
import pickle
import sys
from collections.abc import Sequence
from functools import partial

from daemon.config.schema import Config
from daemon.engine.spec import EngineSpec, Spare
from daemon.supervision import Tasks

log = logging.getLogger(__name__)

ENGINE = (sys.executable, "-m", "daemon.engine.process")
SPARE = "engine spare"
SPARE_AFTER_S = 10.0
"""From a running engine to the start of its spare, whose imports would delay the first answers."""
_CLOSE_S = 5.0

Process = asyncio.subprocess.Process


class EngineProcesses:
    """Runs ``command`` as the engine. With ``spare``, another one waits ready, with the model loaded.

    ``config``: what the spare loads the model by. ``cpus``: those of all engines.
    """

    def __init__(
        self,
        config: Config,
        cpus: frozenset[int],
        *,
        command: Sequence[str] = ENGINE,
        spare: bool = False,
        after_s: float = SPARE_AFTER_S,
    ) -> None:
        self._config, self.cpus, self._command = config, cpus, command
        self._tasks = Tasks()  # without a spare the daemon still runs
        self._wants_spare, self._after_s = spare, after_s
        self._spare: Process | None = None

    async def start(self, spec: EngineSpec) -> Process:
        """An engine of this spec: the spare, if it waits, or a new process."""
        await self._tasks.stop(SPARE)
        spare, self._spare = self._spare, None
        if spare is not None and await _told(spare, spec):
            log.info("the spare engine takes over, process %d", spare.pid)
            return spare
        process = await self._spawn(spec.wake_fd)
        await _told(process, spec)
        return process

    def prepare(self, wake_fd: int) -> None:
        """An engine runs: have a spare from some seconds on."""
        if self._wants_spare and self._spare is None and SPARE not in self._tasks.names():
            self._tasks.start(SPARE, partial(self._prepare, wake_fd), returns=True)

    async def close(self) -> None:
        """End the spare."""
        await self._tasks.stop(SPARE)
        spare, self._spare = self._spare, None
        if spare is None:
            return
        assert spare.stdin is not None  # asked for
        spare.stdin.close()  # its signal to end
        try:
            async with asyncio.timeout(_CLOSE_S):
                await spare.wait()
        except TimeoutError:
            spare.kill()
            await spare.wait()

    async def _prepare(self, wake_fd: int) -> None:
        await asyncio.sleep(self._after_s)
        self._spare = await self._spawn(wake_fd)
        await _told(self._spare, Spare(self._config, self.cpus))

    async def _spawn(self, wake_fd: int) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=(wake_fd,)
        )


async def _told(process: Process, message: EngineSpec | Spare) -> bool:
    """Write to the process; whether it still ran."""
    assert process.stdin is not None  # asked for
    if process.returncode is not None:
        return False
    try:
        process.stdin.write(pickle.dumps(message))
        await process.stdin.drain()
    except ConnectionError:
        return False
    return True
