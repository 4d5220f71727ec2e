"""Engine processes: the spare takes over, is replaced, and ends with the daemon."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon.config.schema import Config
from daemon.cores import Cores
from daemon.engine.spec import EngineSpec
from daemon.gateway.engine_processes import SPARE, EngineProcesses, RunningEngine
from tests.kit import until

CODE = """
import json, os, pickle, signal, sys

def note(text):
    with open(sys.argv[1], "a") as told:
        told.write(text + "\\n")

def report(kind, **found):
    print(json.dumps({"type": kind, **found}), flush=True)

try:
    while True:
        told = type(pickle.load(sys.stdin.buffer)).__name__
        note(told)
        if told == "EngineSpec" and sys.argv[2] == "fork":
            if not (pid := os.fork()):
                os.close(1)
                signal.pause()
            report("Serving", pid=pid, spare=True, why="")
            report("Ended", status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        elif told == "EngineSpec":
            report("Serving", pid=os.getpid(), spare=sys.argv[2] == "second", why="")
except EOFError:
    note("end")
"""
"""Writes down what it is told, and serves: by a `fork`, or itself, with a `second` process or `alone`."""


class Rig:
    """Engine processes of a kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.told = folder / "told"
        command = (sys.executable, "-c", CODE, str(self.told), kind)
        cores = Cores(frozenset({1}), frozenset({0}))
        self.processes = EngineProcesses(Config(), cores, command=command, after_s=0.0)
        self.wake_fd = self.processes.wake_fd
        self.spec = EngineSpec(Config(), "ring", self.wake_fd, [], "", "", {}, {})
        self.started: list[RunningEngine] = []

    async def start(self) -> RunningEngine:
        """Start an engine, and a spare as it wants one; what they were told is in the file."""
        engine = await self.processes.start(self.spec)
        self.started.append(engine)
        assert await engine.serving is not None
        self.processes.prepare()
        self.processes.prepare()  # there is never more than one
        return engine

    def loaded_pid(self) -> int:
        assert self.processes._loaded is not None
        return self.processes._loaded.process.pid

    async def on_event(self, *messages: str) -> None:
        await until(lambda: self.told.exists() and self.told.read_text().split() == list(messages))

    async def close(self) -> None:
        for engine in self.started:
            if not engine.has_ended:
                engine.kill()
            await engine.wait()
        await self.processes.close()
        os.close(self.wake_fd)


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, request.param)
    yield made
    await made.close()


forking = pytest.mark.parametrize("rig", ["fork"], indirect=True)


@forking
async def test_the_process_that_has_loaded_waits_and_forks_again(rig: Rig) -> None:
    first = await rig.start()
    await rig.on_event("Spare", "EngineSpec")
    assert rig.processes.has_spare
    first.kill()
    assert await first.wait() == -signal.SIGKILL
    second = await rig.start()
    await rig.on_event("Spare", "EngineSpec", "EngineSpec")
    assert second.pid != first.pid
    assert rig.processes.has_spare


@pytest.mark.parametrize("rig", ["second"], indirect=True)
async def test_beside_one_that_serves_itself_another_one_loads_and_takes_over(rig: Rig) -> None:
    first = await rig.start()
    await rig.on_event("Spare", "EngineSpec", "Spare")
    await until(lambda: rig.processes.has_spare)
    first.kill()
    assert await first.wait() == -signal.SIGKILL
    second = await rig.start()
    assert second.pid != first.pid
    await rig.on_event("Spare", "EngineSpec", "Spare", "EngineSpec", "Spare")


@pytest.mark.parametrize("rig", ["alone"], indirect=True)
async def test_without_room_for_a_spare_none_is_made(rig: Rig) -> None:
    first = await rig.start()
    await until(lambda: SPARE not in rig.processes._tasks.names())
    assert not rig.processes.has_spare
    first.kill()
    await first.wait()
    await rig.start()
    await rig.on_event("Spare", "EngineSpec", "Spare", "EngineSpec")


@forking
async def test_a_fork_counts_as_gone_with_the_spare_and_both_are_started_again(rig: Rig) -> None:
    first = await rig.start()
    loaded = rig.processes._loaded
    assert loaded is not None
    os.kill(loaded.process.pid, signal.SIGKILL)
    assert await first.wait() == -signal.SIGKILL
    assert not rig.processes.has_spare
    await until(lambda: not Path(f"/proc/{first.pid}/fd/0").exists())
    second = await rig.start()
    assert second.pid != first.pid
    await rig.on_event("Spare", "EngineSpec", "Spare", "EngineSpec")


@pytest.mark.parametrize(("rig", "loaded"), [("fork", 1), ("second", 2)], indirect=["rig"])
async def test_the_spare_ends_with_the_daemon(rig: Rig, loaded: int) -> None:
    engine = await rig.start()
    await until(lambda: rig.told.read_text().split().count("Spare") == loaded)
    assert rig.processes.has_spare
    engine.kill()
    await engine.wait()
    await rig.processes.close()
    assert rig.told.read_text().split()[-1] == "end"
    assert SPARE not in rig.processes._tasks.names()
    assert not rig.processes.has_spare
    await rig.processes.close()


async def test_one_that_cannot_read_its_orders_has_ended(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit(5)")
    processes = EngineProcesses(Config(), None, command=command)
    engine = await processes.start(EngineSpec(Config(), "ring", processes.wake_fd, [], "", "", {}, {}))
    async with asyncio.timeout(60):
        assert await engine.wait() in (0, 5)
        assert await engine.serving is None
    await processes.close()
    os.close(processes.wake_fd)


@forking
async def test_what_loads_before_there_is_anything_to_serve_is_the_first_engine(rig: Rig) -> None:
    await rig.processes.load()
    await rig.on_event("Spare")
    first = await rig.start()
    await rig.on_event("Spare", "EngineSpec")
    assert first.pid != rig.loaded_pid()
    assert rig.processes.has_spare


@forking
async def test_what_loads_ends_where_there_will_be_nothing_to_serve(rig: Rig) -> None:
    await rig.processes.load()
    await rig.on_event("Spare")
    rig.processes.abandon()
    loaded = rig.processes._loaded
    assert loaded is not None
    assert await loaded.process.wait() == -signal.SIGKILL
