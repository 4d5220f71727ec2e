"""Tasks of the gateway and threads of the engine, killed in turn: service resumes or the daemon says why."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon.api.client import QueryClient
from daemon.config.schema import ProcessConfig
from daemon.gateway.gateway import Gateway
from daemon.gateway.notify import Notifier
from daemon.gateway.wiring import make_gateway
from daemon.supervision import TaskEnded
from feeds.connector import SinkRoute
from feeds.durations import Duration
from tests.kit import SECOND, MemorySink, QueueSource, inproc_config, until

ENGINE = (sys.executable, str(Path(__file__).with_name("idle_engine.py")))
TASKS = [
    "commit loop",
    "engine events",
    "engine process",
    "engine watch",
    "http server",
    "ingest",
    "publish DLQ records to test",
    "publish aaa to test",
    "query leases",
    "query socket",
    "watchdog",
]
RESTARTED = {"query leases", "query socket"}
THREADS = ["data-plane", "device-worker", "heartbeat"]


@contextlib.asynccontextmanager
async def running(mode: str) -> AsyncIterator[Gateway]:
    """In mode "two" the engine process has no model and does nothing."""
    environment = {"NOTIFY_SOCKET": "@foretick-nobody", "WATCHDOG_USEC": "1000000"}
    gateway = make_gateway(
        inproc_config(process=ProcessConfig(mode=mode, drain=Duration(SECOND))),
        source=QueueSource(),
        routes=[SinkRoute(MemorySink(), "answers.v1", dead_letters="dlq.v1")],
        notifier=Notifier(environment),
        engine_command=ENGINE,
    )
    try:
        await asyncio.wait_for(gateway.start(), 180)
        yield gateway
    finally:
        await asyncio.wait_for(gateway.stop(), 30)


def kill_task(name: str) -> None:
    next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()


def kill_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in the thread, as soon as it runs Python again."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


async def not_ready(gateway: Gateway) -> list[str]:
    """What /readyz reports; without HTTP, what it would report."""

    def get() -> list[str]:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{gateway.http.port}/readyz", timeout=5).close()
            return []
        return list(gateway.status.not_ready())

    return (
        gateway.status.not_ready() if "http server" in gateway.tasks.ended else await asyncio.to_thread(get)
    )


def counted(gateway: Gateway, outcome: str) -> float:
    return gateway.store.value("foretick_tasks_ended_total", outcome=outcome)


async def test_the_names_here_are_all_there_are():
    async with running("two") as gateway:
        assert sorted(gateway.tasks.names()) == TASKS
    async with running("inproc") as gateway:
        assert sorted({*gateway.tasks.names()} - {*TASKS}) == []
        host = gateway.engine._client._host  # type: ignore[union-attr]  # in this process
        assert sorted(host.threads.all) == THREADS


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_that_ends_is_restarted_or_ends_the_daemon_with_its_name(name):
    async with running("two") as gateway:
        assert await not_ready(gateway) == []
        kill_task(name)
        reason = f"{name} ended: it was cancelled"
        if name not in RESTARTED:
            with pytest.raises(TaskEnded, match=reason):
                await asyncio.wait_for(gateway.run(asyncio.Event()), 10)
            assert reason in await not_ready(gateway)
            assert counted(gateway, "failed") == 1
            return
        await until(lambda: counted(gateway, "restarted") == 1)
        assert reason in gateway.status.not_ready()
        await until(lambda: gateway.status.not_ready() == [])
        assert gateway.query is not None
        with QueryClient(gateway.query.endpoint, 5.0) as client:
            listed = await asyncio.to_thread(client.sessions)
        assert [session.name for session in listed.sessions] == ["aaa"]
        assert not gateway.failed.done()


@pytest.mark.parametrize("name", THREADS)
async def test_a_thread_of_the_engine_that_ends_ends_the_daemon_with_its_name(name):
    async with running("inproc") as gateway:
        kill_thread(next(thread for thread in threading.enumerate() if thread.name == name))
        gateway.engine._client._host.scheduler.interrupt()  # type: ignore[union-attr]  # the worker may be asleep
        with pytest.raises(TaskEnded, match=f"{name} ended: SystemExit"):
            await asyncio.wait_for(gateway.run(asyncio.Event()), 10)
        assert f"{name} ended: SystemExit" in await not_ready(gateway)
        assert counted(gateway, "failed") == 1
