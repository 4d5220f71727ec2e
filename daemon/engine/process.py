"""The engine in its own process: attaches the ring and the metrics, serves commands over ZeroMQ ipc.

The gateway starts it as ``python -m daemon.engine.process`` and writes to its standard input, pickled, a
`Spare` and, perhaps long after, an `EngineSpec`. The input then stays open: its end means that the gateway is
gone. What has happened goes to standard output (`daemon.engine.spec.Report`).

On a CPU the process that has loaded libraries and model serves by a fork of itself and stays behind as the
spare: it forks again when the gateway says so. Both share the memory that neither writes to.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import msgspec
import zmq

from daemon import protocol
from daemon.collector import freeze_startup
from daemon.cores import pin
from daemon.engine.spec import Ended, EngineSpec, Report, Serving, Spare, SpareEngine
from daemon.logs import set_up_logging
from daemon.supervision import Threads, reason_of
from feeds.connector import SettingError
from ingest.ring import Ring
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.engine.build import Loaded
    from daemon.engine.service import EngineHost

log = logging.getLogger(__name__)

Ahead: TypeAlias = "tuple[Loaded, ...] | SettingError"
"""The model, where it was loaded before it was needed, or why it cannot be."""
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
    told: Spare = pickle.load(sys.stdin.buffer)
    set_up_logging(told.config.log, "engine")
    if told.cpus:
        pin(told.cpus)
    spin_briefly(os.environ)
    reports = _reports()
    reading, found = _in_thread(lambda: _connected(pickle.load(sys.stdin.buffer)))
    ahead = _load_ahead(told)  # the engine may be needed before it is loaded
    try:
        gateway = found.result()
    except EOFError:  # the gateway needs no spare any more
        return 0
    reading.join()
    spare = _spare_of(told, ahead)
    if spare.forks:
        gateway.close()  # a fork has none of its threads
        return _serve_by_forks(gateway.spec, spare, ahead, reports)
    _report(reports, Serving(os.getpid(), spare.wanted, spare.why))
    return _serve(gateway, ahead)


def _reports() -> BinaryIO:
    """Standard output; what else is printed goes to standard error from here on."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return reports


def _report(reports: BinaryIO, report: Report) -> None:
    with suppress(BrokenPipeError):  # the gateway is gone, which standard input says, too
        reports.write(msgspec.json.encode(report) + b"\n")


def _serve_by_forks(spec: EngineSpec, spare: SpareEngine, ahead: Ahead, reports: BinaryIO) -> int:
    """Serve by a fork, and by another one whenever the gateway sends a spec; returns the exit status."""
    here = os.getpid()
    while True:
        try:
            pid = os.fork()
        except OSError as error:
            _report(reports, Serving(here, False, f"no spare engine: it cannot be forked: {error.strerror}"))
            return _serve(_connected(spec), ahead)
        if not pid:
            reports.close()
            _name("foretick-engine")
            return _serve(_connected(spec), ahead, parent=here)
        _name("foretick-spare")
        _report(reports, Serving(pid, spare.wanted, spare.why))
        if not _has_ended(pid):
            return 0
        _report(reports, Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        try:
            spec = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0


def _has_ended(pid: int) -> bool:
    """Wait for the end of a child, or of the gateway; returns whether it was the child."""
    child = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(sys.stdin.fileno(), 0)  # its end is an event, unread bytes are none
        waiting.register(child, select.POLLIN)
        return child in (each for each, _ in waiting.poll())
    finally:
        os.close(child)


def _name(process: str) -> None:
    """What `ps` and `top` call this process."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(process)


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


class _GatewayLink(NamedTuple):
    """The gateway that this engine serves, which receives its heartbeats."""

    spec: EngineSpec
    context: zmq.Context[zmq.Socket[bytes]]
    events: EventSocket
    beats: Beats

    def close(self) -> None:
        """Send no heartbeats any more; what is queued still goes out."""
        self.beats.stop()
        self.events.close()
        self.context.term()


def _connected(spec: EngineSpec) -> _GatewayLink:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = EventSocket(context, spec.events)
    return _GatewayLink(spec, context, events, Beats(events.emit))


def _in_thread(work: Callable[[], _GatewayLink]) -> tuple[threading.Thread, Future[_GatewayLink]]:
    """A thread that does ``work``, and its result; it does not keep the process from ending."""
    result: Future[_GatewayLink] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="spare", daemon=True)
    thread.start()
    return thread, result


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set `SPIN`, unless the operator has set one of them or OpenMP's own OMP_WAIT_POLICY."""
    if not {"OMP_WAIT_POLICY", *SPIN} & set(environment):
        environment.update(SPIN)


def _load_ahead(spare: Spare) -> Ahead:
    """Load the libraries, the kernels and, on a CPU, the models; () without these, or why it failed.

    On a GPU the spare's would take its memory a second time.
    """
    try:
        from daemon.engine.build import load_on_cpu
        from ingest import warm_up

        warm_up()
        loaded = load_on_cpu(spare.config)
    except SettingError as error:
        return error
    except (ImportError, MemoryError) as error:
        return SettingError("process", f"the engine cannot be loaded: {reason_of(error)}")
    except ValueError:  # the engine says it as it loads
        return ()
    freeze_startup()
    return loaded


def _spare_of(told: Spare, ahead: Ahead) -> SpareEngine:
    """Whether another engine waits beside this one, and whether this one serves by a fork."""
    if isinstance(ahead, SettingError):
        return SpareEngine(wanted=False, forks=False, why="no spare engine: there is no engine")
    from daemon.engine.spare_engine import spare_engine

    return spare_engine(told.config, ahead)


def _serve(gateway: _GatewayLink, ahead: Ahead, parent: int = 0) -> int:
    """Serve until the gateway says stop; returns the exit status. ``parent``: whose fork this is."""
    Threads(_exit).make(partial(_wait_for_end, sys.stdin.fileno(), parent), "standard input").start()
    commands = gateway.context.socket(zmq.PULL)
    commands.connect(gateway.spec.commands)
    try:
        return _obey(gateway, commands, ahead)
    finally:
        commands.close()
        gateway.close()


def _obey(gateway: _GatewayLink, commands: zmq.Socket[bytes], ahead: Ahead) -> int:
    try:
        if isinstance(ahead, SettingError):
            raise ahead
        host = _loaded(gateway.spec, gateway.events, ahead)
    except SettingError as error:
        gateway.events.emit(protocol.Fatal(error.key, error.message))
        return EXIT_FATAL
    freeze_startup()
    host.start()
    gateway.beats.stop()
    while True:
        command = protocol.decode_command(commands.recv())
        host.handle(command)
        if isinstance(command, protocol.StopEngine):
            return 0


def _loaded(spec: EngineSpec, events: EventSocket, ahead: tuple[Loaded, ...]) -> EngineHost:
    """The engine, with its model loaded. Raises SettingError."""
    # imported here: OpenMP, which comes with torch, reads its settings and counts the CPUs as it loads
    from daemon.engine.assembly import load_engine

    ring = Ring.attach(spec.ring, wake_fd=spec.wake_fd)
    store = MetricStore.attach(spec.store)
    return load_engine(spec.config, spec.progress, ahead, ring, store, events.emit, spec.symbols)


def _wait_for_end(descriptor: int, parent: int) -> None:
    """Return at the end of file, or when the process ``parent`` is gone, which has forked this one (0: none).

    Nothing is read: the file is also the parent's.
    """
    waiting = select.poll()
    waiting.register(descriptor, 0)
    if parent:
        with suppress(ProcessLookupError):
            waiting.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() != parent:
            return
    waiting.poll()


def _exit(name: str, why: str) -> None:
    """Exit: without standard input this process could not notice that the gateway is gone."""
    log.error("%s ended (%s): the gateway, or the spare whose fork this is, is gone; ending", name, why)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
