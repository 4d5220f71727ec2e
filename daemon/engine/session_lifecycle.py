"""Sessions that come, change and go while the engine runs."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from daemon import protocol
from daemon.api.generation import CountTokens, GenerateAll
from daemon.config.schema import Config, SessionConfig
from daemon.engine.answers import Emit
from daemon.engine.build import Built, explained, header_of, line_spec, retention_of, window_of
from daemon.engine.pool_size import check_pool
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import SESSION_RESET, failed
from daemon.engine.session_parts import SessionParts
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder, policy_of
from daemon.progress import Progress
from daemon.session_life import ELSEWHERE, REPLACED, Event, State
from engine.model.architectures import ModelError
from engine.step import OutOfMemory
from feeds.connector import SettingError
from flash.registry import Standing
from ingest.compact import CompactSpec
from ingest.lines import LineSpec
from metrics.store import Block, MetricStore
from regions.tape import Tape
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

REMOVED = Failure("unknown_session", "the session was removed meanwhile")
RELEASED = Failure("rebuilding", "another daemon answers the session now: ask again")


@dataclass(eq=False)
class EngineSessions:
    """Opens, changes and closes sessions between two batches. Commands come from one thread.

    The KV of other sessions is not touched. A new session takes records once it is open; one that is to be
    closed takes none any more, then its work ends, and then its blocks are free. One that is
    reset is asked as it was until it is open again.
    """

    config: Config
    built: Built
    scheduler: Scheduler
    input: TapeFeeder
    questions: StandingQuestions
    parts: SessionParts
    snapshots: Snapshots
    store: MetricStore
    emit: Emit
    _sessions: dict[str, SessionConfig] = field(init=False)

    def __post_init__(self) -> None:
        self._sessions = {session.name: session for session in self.config.sessions}

    def handle(self, command: protocol.SessionCommand) -> None:
        """Answer with the command's event or, with nothing changed, `Failed`."""
        try:
            match command:
                case protocol.OpenSession():
                    self._add(command)
                case protocol.ReconfigureSession():
                    self._change(command)
                case protocol.CloseSession():
                    self._remove(command)
                case protocol.TakeOver():
                    self._between(command, self._take_over, command)
        except (SettingError, ValueError) as error:
            self._refuse(command, error)

    def settings(self, name: str) -> SessionConfig | None:
        """Those of a session; None once it is removed."""
        return self._sessions.get(name)

    def needs_reset(self, name: str) -> bool:
        """Whether the session is asked as it was, and nothing about it can be changed."""
        return self.input.lives.state(name) in REPLACED

    def replaces(self, command: protocol.Command) -> bool:
        """Whether a question is about a session whose tape is about to be replaced: ask it between two
        batches, behind that.
        """
        match command:
            case GenerateAll():
                return any(self._restores(each.session) for each in command.requests)
            case CountTokens():
                return self._restores(command.request.session)
        return False

    def _restores(self, name: str) -> bool:
        return self.input.lives.state(name) is State.RESTORING

    def _add(self, command: protocol.OpenSession) -> None:
        session, life = command.session, self.input.lives.of(command.session.name)
        if life.state is State.RESETTING:
            life.on(Event.REOPENING)
            self._between(command, self._reset_session, command)
            return
        line, standing = self._prepare(command)
        life.on(Event.ADDED)
        if not self._between(command, self._open, command, line, standing):
            self._forget(session.name)

    def _reset_session(self, command: protocol.OpenSession) -> None:
        """Between two batches. What the old tape was asked and has not answered is asked of the new one."""
        name = command.session.name
        try:
            tape = self.built.tapes.pop(name)
            del self._sessions[name]
            self._end(tape, SESSION_RESET, keeps=True)
            line, standing = self._prepare(command)
        except (SettingError, ValueError) as error:
            self._forget(name)
            self._refuse(command, error)
        else:
            self._open(command, line, standing)
        self.parts.requests.ask_again()

    def _prepare(self, command: protocol.OpenSession) -> tuple[LineSpec | CompactSpec, tuple[Standing, ...]]:
        """Raises ValueError and SettingError."""
        session = command.session
        if session.name in self._sessions:
            raise ValueError(f"there is already a session {session.name!r}")
        line = self._line(session)
        standing = self.questions.made(session.name, command.questions)
        told = explained(self.config, session, line, self.built.prompt)
        self.built.prefixes.add(session, header_of(line), command.questions, told)
        self.built.lines[session.name] = line
        self._sessions[session.name] = session
        return line, standing

    def _open(
        self, command: protocol.OpenSession, line: LineSpec | CompactSpec, standing: tuple[Standing, ...]
    ) -> None:
        """Between two batches. The prefix is prefilled here, unless another session has the same one."""
        session = command.session
        try:
            if command.metrics:
                self.store.attach_session(Block(command.metrics, {"session": [session.name]}))
            tape = self.built.open(session, command.progress, self.config.freshness_objective_ns(session))
        except (ValueError, ModelError, OutOfMemory, OSError) as error:
            self._forget(session.name)
            self._refuse(command, error)
            return
        self.parts.add(session, tape, standing)
        self.snapshots.set(session, tape)
        opened = self.snapshots.resume(session.name)
        self.input.lives.on(Event.FOLLOWED if command.follows else Event.OPENED, [session.name])
        # in this order: a record that comes after the reply is the session's, too
        self.input.set(session, line, command.rolls, command.symbols, opened)
        restored = self.built.restored.get(session.name)
        halted = restored is not None and restored.halted
        self.emit(protocol.SessionAdded(command.id, *self.snapshots.resumed(session), halted))

    def _forget(self, name: str) -> None:
        """Undo `_add`."""
        self.input.lives.on(Event.FAILED, [name])
        self._sessions.pop(name, None)
        self.built.forget(name)

    def _change(self, command: protocol.ReconfigureSession) -> None:
        session = command.session
        tape = self.built.tapes.get(session.name)
        if tape is None or self.needs_reset(session.name):
            raise ValueError(f"there is no session {session.name!r}")
        self._between(command, self._apply, command, tape, self._line(session))

    def _apply(self, command: protocol.ReconfigureSession, tape: Tape, line: LineSpec | CompactSpec) -> None:
        """Between two batches. A shorter window is evicted at its next bar."""
        session = command.session
        try:
            tape.retain(retention_of(session, self.built.prompt), session.summed_tokens)
        except ValueError as error:
            self._refuse(command, error)
            return
        self.built.limit.open(session, compact=isinstance(line, CompactSpec))
        self.input.set(session, line, command.rolls)
        tape.bound_staleness(self.config.freshness_objective_ns(session))
        self.built.lines[session.name] = line
        self._sessions[session.name] = session
        self.parts.change(session, tape)
        self.snapshots.set(session, tape)
        self.emit(protocol.Done(command.id))

    def _remove(self, command: protocol.CloseSession) -> None:
        tape = self.built.tapes.get(command.name)
        if tape is None:
            raise ValueError(f"there is no session {command.name!r}")
        life = self.input.lives.of(command.name)
        if command.keeps:
            life.on(Event.RESET)
            self.input.remove(command.name, partial(self.emit, protocol.Done(command.id)))
            return
        keeps = command.releases or not command.serves or life.state in ELSEWHERE
        life.on(Event.REMOVED)
        del self.built.tapes[command.name], self._sessions[command.name]  # from now on it cannot be asked

        def close() -> None:
            """On the data plane's thread, after the last record."""
            self._between(command, self._close, command, tape, keeps)

        self.input.remove(command.name, close)

    def _close(self, command: protocol.CloseSession, tape: Tape, keeps: bool) -> None:
        """Between two batches, after the last append."""
        self._end(tape, RELEASED if command.releases else REMOVED, keeps=keeps)
        if not command.releases:
            self.store.remove_session(command.name)
        self.emit(protocol.Done(command.id))

    def _end(self, tape: Tape, failure: Failure, *, keeps: bool = False) -> None:
        """End all work of a session with ``failure``, and forget it. ``keeps``: its snapshots stay."""
        self.snapshots.forget(tape, keeps=keeps)
        self.parts.remove(tape, failure)
        self.built.close(tape)

    def _take_over(self, command: protocol.TakeOver) -> None:
        """Between two batches."""
        self.count_from(command.progress)
        self.input.promote(command.progress, partial(self.emit, protocol.Done(command.id)))

    def count_from(self, found: Mapping[str, Progress]) -> None:
        """Between two batches: versions count on from those that another daemon has published."""
        for name, progress in found.items():
            tape = self.built.tapes.get(name)
            if tape is not None:
                tape.count_from(progress.version)

    def _line(self, session: SessionConfig) -> LineSpec | CompactSpec:
        """How its bars are written. Raises ValueError, and SettingError unless the pool holds all windows."""
        line = line_spec(session, self.config.bars, self.built.prompt)
        policy_of(self.config, session)
        limit = self.built.limit
        if not limit.has_room(session, compact=isinstance(line, CompactSpec)):
            sessions = self._sessions | {session.name: session}
            lines = self.built.lines | {session.name: line}
            pool = structs.replace(self.config.pool, blocks=limit.capacity)
            compact = [name for name in sessions if isinstance(lines[name], CompactSpec)]
            window = window_of(self.built.prompt)
            try:
                check_pool(structs.replace(self.config, pool=pool), list(sessions.values()), compact, window)
            except SettingError as error:
                if self.config.pool.has_size:
                    raise
                why = f"the {limit.capacity} blocks set aside at the start do not hold its window, too"
                raise SettingError(error.key, f"{why}: restart with this session, or set them") from None
        return line

    def _between(self, command: protocol.SessionCommand, work: Callable[..., None], *of: Any) -> bool:
        """Have ``work(*of)`` done between two batches; refused, False, where the engine is stopping."""

        def do() -> None:
            try:
                work(*of)
            except Exception as error:  # whoever sent the command waits for a reply
                log.exception("%s failed", command)
                self.emit(failed(command.id, Failure("bad_request", f"{type(error).__name__}: {error}")))

        accepted = self.scheduler.run_between(do)
        if not accepted:
            self.emit(failed(command.id, STOPPING))
        return accepted

    def _refuse(self, command: protocol.SessionCommand, error: Exception) -> None:
        self.emit(failed(command.id, Failure("bad_request", str(error))))
