"""Tasks and threads that end unexpectedly are reported by name, and restarted where allowed."""

import asyncio
import threading

import pytest

from daemon.supervision import MAX_RESTARTS, Tasks, Threads
from tests.kit import until

Ended = list[tuple[str, str, bool]]


@pytest.fixture
def ended() -> Ended:
    return []


@pytest.fixture
def tasks(ended: Ended) -> Tasks:
    return Tasks(lambda *end: ended.append(end))


async def sleeping() -> None:
    await asyncio.sleep(3600)


async def returning() -> None:
    pass


async def raising() -> None:
    raise ValueError("no such thing")


def task_of(name: str) -> asyncio.Task[object]:
    return next(task for task in asyncio.all_tasks() if task.get_name() == name)


@pytest.mark.parametrize(
    ("work", "why"), [(returning, "it returned"), (raising, "ValueError: no such thing")]
)
async def test_an_unexpected_end_of_a_task_is_reported_with_the_reason(tasks, ended, work, why):
    tasks.start("query socket", work)
    await until(lambda: ended)
    assert ended == [("query socket", why, False)]
    assert tasks.ended == {"query socket": why}
    assert tasks.names() == []


async def test_a_task_cancelled_from_elsewhere_is_reported(tasks, ended):
    tasks.start("ingest", sleeping)
    task_of("ingest").cancel()
    await until(lambda: ended)
    assert ended == [("ingest", "it was cancelled", False)]


async def test_a_task_that_may_return_is_reported_only_when_it_raises(tasks, ended):
    tasks.start("ingest", returning, returns=True)
    await until(lambda: not tasks.names())
    assert ended == []
    tasks.start("ingest", raising, returns=True)
    await until(lambda: ended)
    assert tasks.ended == {"ingest": "ValueError: no such thing"}


async def test_an_expected_end_of_a_task_is_not_reported(tasks, ended):
    tasks.start("one", sleeping)
    tasks.start("two", sleeping)
    await tasks.stop("one", "never started")
    assert tasks.names() == ["two"]
    await tasks.stop()
    assert tasks.names() == []
    assert ended == []


async def test_a_restarted_task_is_missing_only_until_it_runs_again(tasks, ended):
    tasks.start("query socket", sleeping, restarts=True)
    task_of("query socket").cancel()
    await until(lambda: tasks.ended)
    assert ended == [("query socket", "it was cancelled", True)]
    await until(lambda: tasks.names() == ["query socket"])
    assert tasks.ended == {}
    await tasks.stop()


async def test_a_task_that_fails_again_and_again_is_given_up(tasks, ended):
    tasks.start("query socket", raising, restarts=True)
    await until(lambda: len(ended) == MAX_RESTARTS + 1)
    assert [restarted for _, _, restarted in ended] == [True] * MAX_RESTARTS + [False]
    assert tasks.ended == {"query socket": "ValueError: no such thing"}
    assert tasks.names() == []


def test_an_unexpected_end_of_a_thread_is_reported() -> None:
    ended: list[tuple[str, str]] = []
    threads = Threads(lambda *end: ended.append(end))

    def failing() -> None:
        raise SystemExit(3)

    for target, name in ((failing, "one"), (lambda: None, "two")):
        thread = threads.make(target, name)
        thread.start()
        thread.join()
    assert ended == [("one", "SystemExit: 3"), ("two", "it returned")]


def test_an_expected_end_of_a_thread_is_not_reported() -> None:
    ended: list[tuple[str, str]] = []
    threads, go_on = Threads(lambda *end: ended.append(end)), threading.Event()
    returning = threads.make(lambda: None, "one", returns=True)
    asked = threads.make(lambda: go_on.wait() and None, "two")
    for thread in (returning, asked):
        thread.start()
    returning.join()
    threads.expect_end()
    go_on.set()
    asked.join()
    assert ended == []


async def test_a_task_that_loses_its_cancellation_is_cancelled_again(
    tasks: Tasks, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a library that waits by `asyncio.wait_for`, before Python 3.12."""
    monkeypatch.setattr("daemon.supervision.CANCEL_AGAIN_S", 0.01)
    lost = 0

    async def losing() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    tasks.start("losing", losing)
    tasks.start("sleeping", sleeping)
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.stop(), 60)
    assert (lost, ended, tasks.names()) == (3, [], [])
