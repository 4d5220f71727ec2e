"""The engine's liveness as the systemd watchdog checks it."""

from __future__ import annotations

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
