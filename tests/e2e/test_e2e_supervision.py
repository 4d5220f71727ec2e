"""Tasks, threads and engines, killed in turn: service resumes or the daemon says why."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

import pytest

from daemon.config.schema import ProcessConfig
from daemon.gateway.engine_processes import EngineProcesses
from daemon.gateway.notify import Notifier
from daemon.supervision import TaskEnded
from daemon.tenants import LOCAL, Client
from feeds.durations import Duration
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import RunningDaemon, running

ENGINE = (sys.executable, str(Path(__file__).with_name("idle_engine.py")))
TASKS = [
    "commit loop",
    "engine events",
    "engine process",
    "engine watch",
    "http server",
    "ingest",
    "kept versions",
    "publish DLQ records to test",
    "publish aaa to test",
    "query leases",
    "query socket",
    "watchdog",
]
RESTARTED = {"kept versions", "query leases", "query socket"}
THREADS = ["data-plane", "device-worker", "heartbeat"]


def supervised(mode: Literal["inproc", "two"]) -> AbstractAsyncContextManager[RunningDaemon]:
    """In mode "two" the engine process has no model and does nothing."""
    environment = {"NOTIFY_SOCKET": "@foretick-nobody", "WATCHDOG_USEC": "1000000"}
    config = inproc_config(process=ProcessConfig(mode=mode, drain=Duration(SECOND)))
    processes = EngineProcesses(config, None, command=ENGINE)
    return running(config, notifier=Notifier(environment), processes=processes)


def kill_task(name: str) -> None:
    next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()


def kill_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in the thread, as soon as it runs Python again."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


async def not_ready(daemon: RunningDaemon) -> list[str]:
    """What /readyz reports; without HTTP, what it would report."""
    if "http server" in daemon.gateway.tasks.ended:
        return list(daemon.gateway.status.not_ready())
    reasons: list[str] = (await daemon.http("GET", "/readyz")).json["reasons"]
    return reasons


async def test_the_names_here_are_all_there_are():
    async with supervised("two") as daemon:
        assert sorted(daemon.gateway.tasks.names()) == TASKS
    async with supervised("inproc") as daemon:
        assert sorted({*daemon.gateway.tasks.names()} - {*TASKS}) == []
        assert sorted(daemon.host.threads.all) == THREADS


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TASKS)
async def test_a_task_that_ends_is_restarted_or_ends_the_daemon_with_its_name(name):
    async with supervised("two") as daemon:
        gateway = daemon.gateway
        assert await not_ready(daemon) == []
        kill_task(name)
        reason = f"{name} ended: it was cancelled"
        if name not in RESTARTED:
            with pytest.raises(TaskEnded, match=reason):
                await asyncio.wait_for(gateway.run(asyncio.Event()), 60)
            assert reason in await not_ready(daemon)
            assert daemon.count("tasks_ended", outcome="failed") == 1
            return
        await until(lambda: daemon.count("tasks_ended", outcome="restarted") == 1)
        assert reason in gateway.status.not_ready()
        await until(lambda: gateway.status.not_ready() == [])
        assert [session.name for session in (await daemon.call("sessions")).sessions] == ["aaa"]
        assert not gateway.failed.done()


@pytest.mark.parametrize("name", THREADS)
async def test_a_thread_of_the_engine_that_ends_ends_the_daemon_with_its_name(name):
    async with supervised("inproc") as daemon:
        kill_thread(next(thread for thread in threading.enumerate() if thread.name == name))
        daemon.host.scheduler.interrupt()  # the worker may be asleep
        with pytest.raises(TaskEnded, match=f"{name} ended: SystemExit"):
            await asyncio.wait_for(daemon.gateway.run(asyncio.Event()), 60)
        assert f"{name} ended: SystemExit" in await not_ready(daemon)
        assert daemon.count("tasks_ended", outcome="failed") == 1


def engines(parent: str = "self") -> set[int]:
    """Engine processes that another one has started."""
    children = (each / "children" for each in Path(f"/proc/{parent}/task").iterdir())
    pids = {int(child) for each in children for child in each.read_text().split()}
    return {pid for pid in pids if b"daemon.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", ["engine", "spare"])
async def test_a_killed_engine_is_replaced_by_another_fork_of_the_spare(killed: str) -> None:
    """Which has loaded the model. Without the spare, its fork ends, too, and both are started again."""
    config = inproc_config(process=ProcessConfig(mode="two", spare_engine=True, drain=Duration(5 * SECOND)))
    async with running(config, restart_after_s=(0.0,)) as daemon:
        (spare,) = engines()
        (first,) = engines(str(spare))
        assert daemon.gateway.status.health(Client(LOCAL, "test")).spare
        daemon.feed(4)
        await until(daemon.answers, 60.0)
        os.kill(first if killed == "engine" else spare, signal.SIGKILL)
        await until(lambda: daemon.count("engine_restarts") == 1, 30.0)
        await until(lambda: not daemon.gateway.status.not_ready(), 180.0)
        (waits,) = engines()
        assert (waits == spare) == (killed == "engine")
        assert first not in engines(str(waits))
        before = len(daemon.answers())
        daemon.feed(8)
        await until(lambda: len(daemon.answers()) > before, 60.0)
        await daemon.gateway.stop()
    assert engines() == set()
