"""sd_notify against a fake service manager: a datagram socket, on a path and in the abstract namespace."""

import asyncio
import os
import secrets
import time
from collections.abc import Iterator

import pytest

from daemon.gateway.notify import Notifier
from tests.kit import inproc_config, until
from tests.kit.fakes import ServiceManager
from tests.kit.inproc import running


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path) -> Iterator[ServiceManager]:
    abstract = request.param == "abstract"
    fake = ServiceManager(f"@foretick-test-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify"))
    yield fake
    fake.close()


@pytest.fixture
def notifier(manager) -> Iterator[Notifier]:
    made = Notifier(
        {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())}
    )
    yield made
    made.close()


def test_states_arrive_as_systemd_spells_them(manager, notifier):
    assert notifier.starting("two\nlines")
    assert notifier.ready("3 sessions")
    assert not notifier.starting("another engine")
    assert notifier.alive()
    assert notifier.stopping()
    assert not notifier.starting("another engine")
    assert manager.received() == [
        "STATUS=starting: two lines",
        "READY=1\nSTATUS=3 sessions",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


async def test_what_takes_an_engine_long_is_told_before_ready(manager):
    """Passes and captures of a start are of a GPU; what every engine measures is reported alike."""
    async with running(inproc_config(standing="none"), notifier=Notifier({"NOTIFY_SOCKET": manager.name})):
        told = manager.received()
        assert told.index("STATUS=starting: measuring memory and costs") < told.index(
            "READY=1\nSTATUS=1 sessions"
        )


def test_a_reload_is_told_between_ready_and_stopping_only(manager, notifier):
    with notifier.reloading(lambda: "early"):
        pass
    assert manager.received() == []
    notifier.ready("3 sessions")
    manager.received()
    now = time.monotonic_ns() // 1000
    told = []

    def fails() -> None:
        with notifier.reloading(lambda: "4 sessions"):
            told.extend(manager.received())
            raise ValueError("the file is wrong")

    with pytest.raises(ValueError, match="the file is wrong"):
        fails()
    state, _, at = told[0].partition("\nMONOTONIC_USEC=")
    assert state == "RELOADING=1"
    assert now <= int(at) <= time.monotonic_ns() // 1000
    assert manager.received() == ["READY=1\nSTATUS=4 sessions"]
    with notifier.reloading(lambda: "late"):
        manager.received()
        notifier.stopping("draining")
    assert manager.received() == ["STOPPING=1\nSTATUS=draining"]


async def test_the_watchdog_beats_at_half_its_interval_and_only_while_there_is_progress(manager, notifier):
    progressing = True
    asked = 0

    def progress() -> bool:
        nonlocal asked
        asked += 1
        return progressing

    task = asyncio.create_task(notifier.keep_watchdog(progress))
    began, beats = time.monotonic(), list[str]()
    await until(lambda: beats.extend(manager.received()) or len(beats) > 7)
    assert time.monotonic() - began > 7 * 0.02, "they are 20 ms apart"
    assert set(beats) == {"WATCHDOG=1"}
    progressing = False
    await asyncio.sleep(0)
    manager.received()
    before = asked
    await until(lambda: asked > before)
    assert manager.received() == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "environment",
    [
        {"NOTIFY_SOCKET": "@none"},
        {"NOTIFY_SOCKET": "@none", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "@none", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "@none", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "1000000"},
    ],
)
async def test_no_watchdog_unless_it_is_meant_for_this_process(environment):
    notifier = Notifier(environment)
    assert notifier.watchdog_s is None
    await asyncio.wait_for(notifier.keep_watchdog(lambda: True), 60)
    notifier.close()


def test_without_a_service_manager_nothing_is_sent():
    notifier = Notifier({})
    assert not notifier.ready()
    notifier.close()


def test_a_service_manager_that_is_gone_never_stops_the_daemon(tmp_path):
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert not notifier.ready()
    notifier.close()
    assert not notifier.alive()
