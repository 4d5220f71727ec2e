"""The engine in its own process: attaches the ring and the metrics, serves commands over ZeroMQ ipc.

The gateway starts it as ``python -m daemon.engine.process`` with a pickled `EngineSpec` on standard input,
which then stays open: end of file means that the gateway is gone. A `Spare` may come first, long before.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import zmq

from daemon import protocol
from daemon.collector import freeze_startup
from daemon.cores import pin
from daemon.engine.spec import EngineSpec, Spare
from daemon.logs import set_up_logging
from daemon.supervision import Threads
from feeds.connector import SettingError
from ingest.ring import Ring
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.engine.build import Loaded
    from daemon.engine.service import EngineHost

log = logging.getLogger(__name__)

EXIT_FATAL = 3
SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long OpenMP's threads spin for the next region before they sleep: about a millisecond.

That is longer than the pauses within a pass. By default GNU's spin some 20 ms after each, LLVM's 200 ms.
"""


class EventSocket:
    """Sends events from any thread: ZeroMQ lets a socket change threads if calls are serialised."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)  # never block the worker; the gateway bounds what is in flight
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    def emit(self, event: protocol.EngineEvent) -> None:
        """Queue one event for the gateway."""
        with self._lock:
            self._socket.send(protocol.encode(event))

    def close(self) -> None:
        """Close once everything queued is sent."""
        with self._lock:
            self._socket.close()


def main() -> int:
    """Run until the gateway says stop or disappears; returns the exit status."""
    # Signals from Ctrl-C or a service manager reach the whole group; the gateway decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    first: EngineSpec | Spare = pickle.load(sys.stdin.buffer)
    set_up_logging(first.config.log, "engine")
    if first.cpus:
        pin(first.cpus)
    spin_briefly(os.environ)
    ahead: Loaded | None = None
    if isinstance(first, Spare):
        # it may be needed before it has loaded the model
        told = _in_thread(lambda: _connected(pickle.load(sys.stdin.buffer)))
        ahead = _load_ahead(first)
        try:
            gateway = told.result()
        except EOFError:  # the gateway needs no spare any more
            return 0
    else:
        gateway = _connected(first)
    gateway_gone = partial(_wait_for_end, sys.stdin.fileno())
    Threads(_exit).make(gateway_gone, "standard input").start()
    commands = gateway.context.socket(zmq.PULL)
    commands.connect(gateway.spec.commands)
    try:
        return _serve(gateway, commands, ahead)
    finally:
        commands.close()
        gateway.beats.stop()
        gateway.events.close()
        gateway.context.term()


class Beats:
    """Sends heartbeats until `stop`: an engine that loads is not hung."""

    def __init__(
        self, emit: Callable[[protocol.EngineEvent], None], every_s: float = protocol.HEARTBEAT_S
    ) -> None:
        self._emit, self._every_s, self._ended = emit, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send none afterwards."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._emit(protocol.EngineHeartbeat(0, idle=True))
            if self._ended.wait(self._every_s):
                return


class _Front(NamedTuple):
    """The gateway that this engine serves, which receives its heartbeats."""

    spec: EngineSpec
    context: zmq.Context[zmq.Socket[bytes]]
    events: EventSocket
    beats: Beats


def _connected(spec: EngineSpec) -> _Front:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = EventSocket(context, spec.events)
    return _Front(spec, context, events, Beats(events.emit))


def _in_thread(work: Callable[[], _Front]) -> Future[_Front]:
    """The result of ``work``, which does not keep the process from ending."""
    result: Future[_Front] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="spare", daemon=True).start()
    return result


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set `SPIN`, unless the operator has set one of them or OpenMP's own OMP_WAIT_POLICY."""
    if not {"OMP_WAIT_POLICY", *SPIN} & set(environment):
        environment.update(SPIN)


def _load_ahead(spare: Spare) -> Loaded | None:
    """Load the libraries, the kernels and, on a CPU, the model; None without a model.

    On a GPU its memory would be taken twice. What fails here is reported when the engine itself loads it.
    """
    from daemon.engine.build import load_on_cpu
    from ingest import warm_up

    warm_up()
    try:
        loaded = load_on_cpu(spare.config)
        freeze_startup()
        return loaded
    except (SettingError, ValueError) as error:
        log.warning("the spare engine has no model: %s", error)
        return None


def _serve(gateway: _Front, commands: zmq.Socket[bytes], ahead: Loaded | None = None) -> int:
    try:
        host = _loaded(gateway.spec, gateway.events, ahead)
    except SettingError as error:
        gateway.events.emit(protocol.Fatal(error.key, error.message))
        return EXIT_FATAL
    if ahead is None:
        freeze_startup()
    host.start()
    gateway.beats.stop()
    while True:
        command = protocol.decode_command(commands.recv())
        host.handle(command)
        if isinstance(command, protocol.StopEngine):
            return 0


def _loaded(spec: EngineSpec, events: EventSocket, ahead: Loaded | None) -> EngineHost:
    """The engine, with its model loaded. Raises SettingError."""
    # imported here: OpenMP, which comes with torch, reads its settings and counts the CPUs as it loads
    from daemon.engine.assembly import wire_engine
    from daemon.engine.build import build

    ring = Ring.attach(spec.ring, wake_fd=spec.wake_fd)
    store = MetricStore.attach(spec.store)
    built = build(spec.config, spec.progress, ahead)
    (source,) = spec.store[0].labels["source"]
    return wire_engine(
        spec.config,
        built,
        ring,
        store,
        events.emit,
        source=source,
        symbols=spec.symbols,
        standby=spec.standby,
    )


def _wait_for_end(descriptor: int) -> None:
    # os.read, not the buffered reader, whose lock would abort the interpreter at exit
    while os.read(descriptor, 1):
        pass


def _exit(name: str, why: str) -> None:
    """Exit: without standard input this process could not notice that the gateway is gone."""
    log.error("%s ended (%s): the gateway is gone; ending", name, why)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
