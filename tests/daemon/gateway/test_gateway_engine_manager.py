"""The engine's liveness as the systemd watchdog checks it."""

import asyncio

import pytest

from daemon import protocol
from daemon.api.generation import ModelEntry
from daemon.gateway.engine_client import OnEvent, OnGone
from daemon.gateway.engine_manager import EngineManager
from tests.kit import until

READY = protocol.EngineReady((ModelEntry("tape", "1"),))


def ignore(what: object) -> None:
    pass


class Silent:
    """An engine that emits only what the test sends, and stops when it is asked to."""

    emit: OnEvent

    def __init__(self, *, ends: bool = True, drains: bool = True) -> None:
        self.ends, self.ended, self.drains = ends, 0, drains
        self.started = asyncio.Event()

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        self.emit = on_event
        self.started.set()

    def send(self, command: protocol.Command) -> None:
        if isinstance(command, protocol.StopEngine):
            self.emit(protocol.EngineStopped(self.drains))

    async def end(self) -> bool:
        self.ended += 1
        return self.ends

    async def close(self, timeout_s: float) -> None:
        pass


async def test_an_engine_is_alive_while_its_worker_makes_progress_or_is_idle():
    client = Silent()

    engine = EngineManager(64, "pause")
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(protocol.EngineHeartbeat(0, False))
    assert engine.liveness.is_alive(), "the first call has nothing to compare with"
    assert not engine.liveness.is_alive()
    client.emit(protocol.EngineHeartbeat(1, False))
    assert engine.liveness.is_alive()
    assert not engine.liveness.is_alive()
    client.emit(protocol.EngineHeartbeat(1, True))
    assert engine.liveness.is_alive()
    assert engine.liveness.is_alive()
    assert await engine.stop(0.1)


async def test_nothing_is_sent_to_an_engine_that_has_stopped() -> None:
    client = Silent()
    engine = EngineManager(64, "pause")
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(READY)
    assert engine.connected() is client
    assert await engine.stop(0.1)
    assert engine.connected() is None


async def test_a_stop_that_a_forward_pass_outlasts_is_not_clean(caplog: pytest.LogCaptureFixture) -> None:
    client = Silent(drains=False)
    engine = EngineManager(64, "pause")
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(READY)
    assert not await engine.stop(0.1)
    assert "no last snapshots" in caplog.text


class Hours:
    """A clock that the test advances, s."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_an_engine_is_stuck_once_its_worker_is_busy_for_long_without_progress() -> None:
    client, clock = Silent(), Hours()
    engine = EngineManager(64, "pause", clock=clock)
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(protocol.EngineHeartbeat(7, False))
    clock.now += 20
    client.emit(protocol.EngineHeartbeat(7, False))
    assert not engine.liveness.is_stuck()
    clock.now += 1
    assert engine.liveness.is_stuck()
    assert engine.hung() == "", "its heartbeats come"
    client.emit(protocol.EngineHeartbeat(8, False))
    assert not engine.liveness.is_stuck()
    clock.now += 21
    client.emit(protocol.EngineHeartbeat(8, True))
    assert not engine.liveness.is_stuck(), "it waits for work"
    client.emit(protocol.EngineHeartbeat(8, False))
    clock.now += 21
    assert engine.liveness.is_stuck()
    engine.gone()
    assert not engine.liveness.is_stuck(), "another one is started"
    assert await engine.stop(0.1)


async def test_a_silent_engine_counts_as_hung_while_it_loads_again_too() -> None:
    """Not in the pause before it is started; nor while it loads with heartbeats, for ten minutes."""
    client, clock = Silent(), Hours()
    engine = EngineManager(64, "pause", (0.0,), clock=clock)
    clock.now = 100.0
    assert engine.hung() == "", "none was started"
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    clock.now += 31
    assert engine.hung() == "the engine has been silent for 30 s"
    client.emit(READY)
    assert engine.hung() == ""
    clock.now += 31
    assert engine.hung() == "the engine has been silent for 30 s"
    assert not engine.liveness.is_alive()
    engine.gone()
    client.started.clear()
    assert engine.liveness.is_alive()
    clock.now += 31
    assert engine.hung() == ""
    restarting = asyncio.create_task(engine.restart())
    await asyncio.wait_for(client.started.wait(), 60)
    clock.now += 29
    assert engine.hung() == ""
    clock.now += 2
    assert engine.hung() == "the engine has been silent for 30 s"
    with pytest.raises(RuntimeError, match="30 s"):
        await asyncio.wait_for(engine.watch(), 60)
    assert not client.ended, "it was not ready"
    for _ in range(28):
        client.emit(protocol.EngineHeartbeat(0, idle=True))
        assert engine.hung() == ""
        clock.now += 20
    clock.now += 20
    client.emit(protocol.EngineHeartbeat(0, idle=True))
    assert engine.hung() == "the engine was not ready within 600 s"
    client.emit(READY)
    await restarting
    assert engine.hung() == ""
    await engine.stop(0.1)


async def restarted_twice(steady_s: float) -> bool:
    """Whether a second restart follows the first without its long pause."""
    client = Silent()
    engine = EngineManager(64, "pause", (0.0, 1000.0), steady_s=steady_s)
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(READY)
    try:
        for _ in range(2):
            engine.gone()
            restarting = asyncio.create_task(engine.restart())
            await asyncio.sleep(0.01)
            client.emit(READY)
            done, _ = await asyncio.wait([restarting], timeout=2.0)
            if not done:
                restarting.cancel()
                await asyncio.gather(restarting, return_exceptions=True)
                return False
        return True
    finally:
        await engine.stop(0.1)


async def test_only_engines_that_fail_again_soon_wait_longer_each_time() -> None:
    assert await restarted_twice(steady_s=-1.0)  # each was steady
    assert not await restarted_twice(steady_s=1000.0)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_hung_engine_that_was_ready_is_ended_where_it_can_be(ends: bool) -> None:
    client, clock = Silent(ends=ends), Hours()
    engine = EngineManager(64, "pause", clock=clock)
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(READY)
    watch = asyncio.create_task(engine.watch())
    clock.now = 31.0
    await until(lambda: client.ended > 0, 30)
    if ends:
        engine.gone()
        watch.cancel()
    with pytest.raises(asyncio.CancelledError if ends else RuntimeError):
        await watch
    assert await engine.stop(0.1)


async def test_events_that_wait_for_a_gateway_that_was_stopped_save_the_engine() -> None:
    client, clock = Silent(), Hours()
    engine = EngineManager(64, "pause", clock=clock)
    await engine.start(lambda ring, wake_fd: client, engine.note, ignore)
    client.emit(READY)
    watch = asyncio.create_task(engine.watch())
    clock.now = 31.0
    await asyncio.sleep(1.5)
    client.emit(protocol.EngineHeartbeat(1, idle=True))
    await asyncio.sleep(1.0)
    assert not client.ended
    watch.cancel()
    assert await engine.stop(0.1)
