"""Engine processes: the spare takes over, is replaced, and ends with the daemon."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon.config.schema import Config
from daemon.engine.spec import EngineSpec
from daemon.gateway.engine_processes import SPARE, EngineProcesses
from tests.kit import until

CODE = """
import pickle, sys
try:
    while True:
        open(sys.argv[1], "a").write(type(pickle.load(sys.stdin.buffer)).__name__ + "\\n")
except EOFError:
    open(sys.argv[1], "a").write("end\\n")
"""


class Rig:
    """Engines that write down what they are told."""

    def __init__(self, folder: Path, *, spare: bool = True) -> None:
        self.told = folder / "told"
        self.wake_fd = os.eventfd(0)
        command = (sys.executable, "-c", CODE, str(self.told))
        cpus = frozenset({0})
        self.processes = EngineProcesses(Config(), cpus, command=command, spare=spare, after_s=0.0)
        self.spec = EngineSpec(Config(), "ring", self.wake_fd, [], "", "", {}, {}, cpus)
        self.started: list[asyncio.subprocess.Process] = []

    async def start(self) -> asyncio.subprocess.Process:
        self.started.append(await self.processes.start(self.spec))
        return self.started[-1]

    async def on_event(self, *messages: str) -> None:
        await until(lambda: self.told.exists() and self.told.read_text().split() == list(messages))

    async def close(self) -> None:
        await self.processes.close()
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        os.close(self.wake_fd)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


async def test_the_spare_is_told_first_what_to_load_and_then_takes_over(rig: Rig) -> None:
    first = await rig.start()
    await rig.on_event("EngineSpec")
    rig.processes.prepare(rig.wake_fd)
    rig.processes.prepare(rig.wake_fd)  # there is never more than one
    await rig.on_event("EngineSpec", "Spare")
    first.kill()
    second = await rig.start()
    await rig.on_event("EngineSpec", "Spare", "EngineSpec")
    assert second.pid != first.pid
    rig.processes.prepare(rig.wake_fd)
    await rig.on_event("EngineSpec", "Spare", "EngineSpec", "Spare")


async def test_a_spare_that_has_died_is_not_used(rig: Rig) -> None:
    await rig.start()
    await rig.on_event("EngineSpec")
    rig.processes.prepare(rig.wake_fd)
    await rig.on_event("EngineSpec", "Spare")
    spare = rig.processes._spare
    assert spare is not None
    os.kill(spare.pid, signal.SIGKILL)
    await spare.wait()
    second = await rig.start()
    assert second.pid != spare.pid
    await rig.on_event("EngineSpec", "Spare", "EngineSpec")


async def test_the_spare_ends_with_the_daemon(rig: Rig) -> None:
    rig.processes.prepare(rig.wake_fd)
    await rig.on_event("Spare")
    await rig.processes.close()
    await rig.on_event("Spare", "end")
    assert SPARE not in rig.processes._tasks.names()
    await rig.processes.close()


async def test_without_a_spare_none_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spare=False)
    rig.processes.prepare(rig.wake_fd)
    assert SPARE not in rig.processes._tasks.names()
    await rig.start()
    await rig.on_event("EngineSpec")
    await rig.close()
