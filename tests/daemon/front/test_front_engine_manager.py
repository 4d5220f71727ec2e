"""The engine's liveness as the systemd watchdog checks it."""

from __future__ import annotations

import asyncio

from daemon import protocol
from daemon.front.engine_client import OnEvent, OnGone
from daemon.front.engine_manager import EngineManager
from ingest.ring import Ring


class Silent:
    """An engine that emits only what the test sends."""

    emit: OnEvent

    async def start(self, on_event: OnEvent, on_gone: OnGone) -> None:
        self.emit = on_event

    def send(self, command: protocol.Command) -> None:
        pass

    async def close(self, timeout_s: float) -> None:
        pass


async def test_an_engine_is_alive_while_its_worker_makes_progress_or_is_idle():
    client = Silent()

    def connect(ring: Ring, wake_fd: int) -> Silent:
        return client

    engine = EngineManager(connect, 64, "pause")
    await engine.start()
    client.emit(protocol.Heartbeat(0, False))
    assert engine.is_alive(), "the first call has nothing to compare with"
    assert not engine.is_alive()
    client.emit(protocol.Heartbeat(1, False))
    assert engine.is_alive()
    assert not engine.is_alive()
    client.emit(protocol.Heartbeat(1, True))
    assert engine.is_alive()
    assert engine.is_alive()
    assert await engine.stop(0.1)


async def restarted_twice(steady_s: float) -> bool:
    """Whether a second restart follows the first without its long pause."""
    client = Silent()
    engine = EngineManager(lambda ring, wake_fd: client, 64, "pause", (0.0, 1000.0), steady_s=steady_s)
    await engine.start()
    ready = protocol.Ready("m", "r", True, "cpu", 1)
    client.emit(ready)
    try:
        for _ in range(2):
            engine.gone()
            restarting = asyncio.create_task(engine.restart())
            await asyncio.sleep(0.01)
            client.emit(ready)
            done, _ = await asyncio.wait([restarting], timeout=0.2)
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
