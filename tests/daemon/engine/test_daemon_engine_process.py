"""The engine's process: the gateway hears it while it loads."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import zmq

from daemon import protocol
from daemon.engine.process import Beats
from daemon.engine.spec import EngineSpec, Spare
from tests.kit import inproc_config

_LOADS_FOR_EVER = """
import threading
from daemon.engine import process
process._load_ahead = lambda spare: threading.Event().wait()
process.main()
"""


def test_an_engine_sends_heartbeats_while_it_loads_and_none_of_those_afterwards() -> None:
    sent: list[protocol.EngineEvent] = []
    thrice = threading.Event()

    def emit(event: protocol.EngineEvent) -> None:
        sent.append(event)
        if len(sent) == 3:
            thrice.set()

    beats = Beats(emit, every_s=0.001)
    assert thrice.wait(60)
    beats.stop()
    assert set(sent) == {protocol.EngineHeartbeat(0, idle=True)}
    assert "loading" not in {thread.name for thread in threading.enumerate()}


def test_a_spare_that_is_needed_before_it_has_loaded_the_model_is_heard(tmp_path: Path) -> None:
    config, endpoint = inproc_config(), f"ipc://{tmp_path}/events"
    spec = EngineSpec(
        config=config,
        ring="none",
        wake_fd=0,
        store=[],
        commands=f"ipc://{tmp_path}/commands",
        events=endpoint,
        progress={},
        symbols={},
    )
    with zmq.Context() as context, context.socket(zmq.PULL) as events:
        events.bind(endpoint)
        with subprocess.Popen([sys.executable, "-c", _LOADS_FOR_EVER], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            try:
                process.stdin.write(pickle.dumps(Spare(config, frozenset())) + pickle.dumps(spec))
                process.stdin.flush()
                assert events.poll(60_000)
                assert protocol.decode_event(events.recv()) == protocol.EngineHeartbeat(0, idle=True)
            finally:
                process.kill()
