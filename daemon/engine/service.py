"""The engine side of the daemon: starts its threads, carries out commands, drains.

The same object runs in its own process (`daemon.engine.process`) or in the gateway's (`inproc` mode, tests):
it takes commands and emits events in either. `daemon.engine.assembly` builds it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from daemon import protocol
from daemon.api.generation import CountTokens, GenerateAll, ViewPrompt
from daemon.api.messages import Label
from daemon.engine.prompt_view import PromptView
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import SESSION_RESET, failed
from daemon.engine.session_lifecycle import EngineSessions
from daemon.engine.session_parts import SessionParts
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder
from daemon.supervision import Threads
from ingest import warm_up
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineHost:
    """Runs the engine over one ring. ``emit`` is called from several threads.

    ``gauges`` write metrics with each heartbeat.
    """

    ready: protocol.EngineReady
    worker: Worker
    input: TapeFeeder
    questions: StandingQuestions
    sessions: EngineSessions
    snapshots: Snapshots
    parts: SessionParts
    view: PromptView
    gauges: Sequence[Callable[[], None]]
    threads: Threads
    emit: Callable[[protocol.EngineEvent], None]
    _stopping: threading.Event = field(default_factory=threading.Event)
    _running: list[threading.Thread] = field(default_factory=list)

    @property
    def scheduler(self) -> Scheduler:
        """Runs all its work."""
        return self.parts.scheduler

    def start(self) -> None:
        """Start; emits `Ready` first."""
        warm_up()
        self.emit(self.ready)
        self.worker.start()
        self._running = [
            self.threads.make(self._take_in, "data-plane", returns=True),
            self.threads.make(self._beat, "heartbeat"),
        ]
        for thread in self._running:
            thread.start()

    def handle(self, command: protocol.Command) -> None:
        """Carry out one command; results and failures are emitted as events.

        A question to a session whose tape is about to be replaced waits until it is.
        """
        if self.sessions.replaces(command) and self.scheduler.run_between(partial(self.handle, command)):
            return
        try:
            match command:
                case protocol.SetQuestions():
                    if self.sessions.needs_reset(command.session):
                        self.emit(failed(command.id, SESSION_RESET))
                    else:
                        self.questions.set(command)
                case (
                    protocol.OpenSession()
                    | protocol.ReconfigureSession()
                    | protocol.CloseSession()
                    | protocol.TakeOver()
                ):
                    self.sessions.handle(command)
                case Label():
                    self.questions.label(command)
                case protocol.PartitionsAssigned():
                    self.input.partitions_assigned(command.sessions)
                case protocol.PartitionsRevoked():
                    self.input.partitions_revoked(command.sessions)
                case protocol.NameStream():
                    self.snapshots.name_stream(command)
                case protocol.NoteProgress():
                    self.snapshots.note_progress(command.progress)
                case protocol.EndInput():
                    self.input.end()
                case protocol.StopEngine():
                    self.stop(command.drain_s)
                case GenerateAll():
                    self.parts.requests.generate(command.requests)
                case ViewPrompt():
                    self.view.show(command)
                case CountTokens():
                    self.parts.requests.count(command)
                case _:
                    self.parts.requests.change(command)
        except Exception as error:
            log.exception("%s failed", command)
            failures = protocol.failures_of(command, "engine", f"{type(error).__name__}: {error}")
            if not failures:
                raise
            for failure in failures:
                self.emit(failure)

    def stop(self, drain_s: float) -> None:
        """Finish what the ring holds within ``drain_s`` seconds; emits `Stopped` last."""
        deadline = time.monotonic() + drain_s
        self.threads.expect_end()
        self._stopping.set()
        self.scheduler.run_between(self.parts.refresher.stop)  # a stop does not wait for it
        self.input.stop()
        for thread in self._running:
            thread.join(drain_s)
        drained = self.worker.stop(max(0.0, deadline - time.monotonic()))
        if drained and not any(thread.is_alive() for thread in self._running):
            self.snapshots.close(max(0.0, deadline - time.monotonic()))
        self.emit(protocol.EngineStopped(drained))

    def _take_in(self) -> None:
        self.input.run(lambda: self.worker.idle, lambda: self.emit(protocol.InputDone()))

    def _beat(self) -> None:
        while not self._stopping.wait(protocol.HEARTBEAT_S):
            self.emit(protocol.EngineHeartbeat(self.worker.progress, self.worker.idle))
            for write in self.gauges:
                write()
