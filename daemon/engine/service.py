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
from daemon.api.generation import CountTokens, Generate, GenerateAll, ViewPrompt
from daemon.api.messages import Label
from daemon.engine.build import Built
from daemon.engine.prompt_view import PromptView
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import SESSION_RESET, failed
from daemon.engine.session_lifecycle import EngineSessions
from daemon.engine.session_parts import SessionParts
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder
from daemon.supervision import Threads
from ingest import warm_up
from scheduler.request import Failure
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model with its scheduler (of ``parts``) and what serves its sessions."""

    questions: StandingQuestions
    sessions: EngineSessions
    snapshots: Snapshots
    parts: SessionParts
    view: PromptView

    @property
    def built(self) -> Built:
        """The model."""
        return self.sessions.built


@dataclass(eq=False)
class EngineHost:
    """Runs the engine over one ring, for one model or several. ``emit`` is called from several threads.

    ``gauges`` write metrics with each heartbeat.
    """

    ready: protocol.EngineReady
    worker: Worker
    input: TapeFeeder
    models: Sequence[ServedModel]
    gauges: Sequence[Callable[[], None]]
    threads: Threads
    emit: Callable[[protocol.EngineEvent], None]
    _stopping: threading.Event = field(default_factory=threading.Event)
    _running: list[threading.Thread] = field(default_factory=list)

    @property
    def first(self) -> ServedModel:
        """That of `[model]`."""
        return self.models[0]

    @property
    def scheduler(self) -> Scheduler:
        """Of the first model; what is to be done between two batches of any may be given to it."""
        return self.first.parts.scheduler

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
        if self.first.sessions.replaces(command) and self.scheduler.run_between(
            partial(self.handle, command)
        ):
            return
        try:
            match command:
                case protocol.SetQuestions():
                    if self.first.sessions.needs_reset(command.session):
                        self.emit(failed(command.id, SESSION_RESET))
                    else:
                        self._of(command.session).questions.set(command)
                case protocol.OpenSession() | protocol.ReconfigureSession():
                    self._change_session(command)
                case protocol.CloseSession():
                    self._of(command.name).sessions.handle(command)
                case protocol.TakeOver():
                    self._take_over(command)
                case Label():
                    self._of(command.session).questions.label(command)
                case protocol.PartitionsAssigned():
                    self.input.partitions_assigned(command.sessions)
                case protocol.PartitionsRevoked():
                    self.input.partitions_revoked(command.sessions)
                case protocol.NameStream():
                    for model in self.models:
                        model.snapshots.name_stream(command)
                case protocol.NoteProgress():
                    for model in self.models:
                        model.snapshots.note_progress(command.progress)
                case protocol.EndInput():
                    self.input.end()
                case protocol.StopEngine():
                    self.stop(command.drain_s)
                case GenerateAll():
                    self._generate(command)
                case ViewPrompt():
                    self._of(command.session).view.show(command)
                case CountTokens():
                    self._asked(command.request).parts.requests.count(command)
                case _:
                    for model in self.models:  # one of them knows the request
                        model.parts.requests.change(command)
        except Exception as error:
            log.exception("%s failed", command)
            failures = protocol.failures_of(command, "engine", f"{type(error).__name__}: {error}")
            if not failures:
                raise
            for failure in failures:
                self.emit(failure)

    def _of(self, session: str) -> ServedModel:
        """The session's model; the first says that there is no such session."""
        return next((each for each in self.models if session in each.built.lines), self.first)

    def _named(self, name: str) -> ServedModel:
        """The model that the configuration calls so. Raises ValueError where there is none."""
        found = [each for each in self.models if name in each.built.names]
        if name and not found:
            known = ", ".join(each.built.names[-1] for each in self.models)
            raise ValueError(f"there is no model named {name!r}; there are: {known}. It needs a restart")
        return found[0] if name else self.first

    def _change_session(self, command: protocol.OpenSession | protocol.ReconfigureSession) -> None:
        try:
            model = self._named(command.session.model)
        except ValueError as error:
            self.emit(failed(command.id, Failure("bad_request", str(error))))
        else:
            model.sessions.handle(command)

    def _asked(self, asked: Generate) -> ServedModel:
        """Who answers: without session and model, the first that reads words."""
        if asked.session:
            return self._of(asked.session)
        if asked.model:
            return self._named(asked.model)
        return next((each for each in self.models if each.built.prompt.terse is None), self.first)

    def _generate(self, command: GenerateAll) -> None:
        """Of each model what is asked of it, together."""
        asked = [(self._asked(each), each) for each in command.requests]
        for model in self.models:
            if requests := [each for whose, each in asked if whose is model]:
                model.parts.requests.generate(requests)

    def _take_over(self, command: protocol.TakeOver) -> None:
        """Sessions of all models; the first says when."""
        for model in self.models[1:]:
            model.parts.scheduler.run_between(partial(model.sessions.count_from, command.progress))
        self.first.sessions.handle(command)

    def stop(self, drain_s: float) -> None:
        """Finish what the ring holds within ``drain_s`` seconds; emits `Stopped` last."""
        deadline = time.monotonic() + drain_s
        self.threads.expect_end()
        self._stopping.set()
        for model in self.models:  # a stop does not wait for them
            self.scheduler.run_between(model.parts.refresher.stop)
        self.input.stop()
        for thread in self._running:
            thread.join(drain_s)
        drained = self.worker.stop(max(0.0, deadline - time.monotonic()))
        if drained and not any(thread.is_alive() for thread in self._running):
            for model in self.models:
                model.snapshots.close(max(0.0, deadline - time.monotonic()))
        self.emit(protocol.EngineStopped(drained))

    def _take_in(self) -> None:
        self.input.run(lambda: self.worker.idle, lambda: self.emit(protocol.InputDone()))

    def _beat(self) -> None:
        while not self._stopping.wait(protocol.HEARTBEAT_S):
            self.emit(protocol.EngineHeartbeat(self.worker.progress, self.worker.idle))
            for write in self.gauges:
                write()
