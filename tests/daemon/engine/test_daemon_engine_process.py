"""The engine's process."""

from __future__ import annotations

import threading

import pytest

from daemon import protocol
from daemon.engine.process import beating


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_sends_heartbeats_while_it_loads_and_none_of_those_afterwards(fails: bool) -> None:
    sent: list[protocol.EngineEvent] = []
    thrice = threading.Event()

    def emit(event: protocol.EngineEvent) -> None:
        sent.append(event)
        if len(sent) == 3:
            thrice.set()

    def load() -> None:
        with beating(emit, every_s=0.001):
            assert thrice.wait(60)
            if fails:
                raise RuntimeError("no model")

    if fails:
        with pytest.raises(RuntimeError, match="no model"):
            load()
    else:
        load()
    assert set(sent) == {protocol.Heartbeat(0, idle=True)}
    assert "loading" not in {thread.name for thread in threading.enumerate()}
