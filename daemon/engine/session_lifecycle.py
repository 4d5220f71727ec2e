"""Sessions that come, change and go while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from daemon import protocol
from daemon.api.generation import CountTokens, Failed, GenerateAll
from daemon.api.messages import Code
from daemon.config.schema import Config, SessionConfig
from daemon.engine.answers import Emit, StandingAnswers
from daemon.engine.build import Built, check_pool, line_spec, retention_of
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import SESSION_RESET, RequestRunner
from daemon.engine.rollups import Rollups
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder, policy_of
from daemon.engine.version_records import VersionRecords
from engine.model.architectures import ModelError
from engine.step import OutOfMemory
from feeds.connector import SettingError
from flash.registry import Registry, Standing
from ingest.compact import CompactSpec
from ingest.lines import LineSpec
from metrics.store import Block, MetricStore
from regions.tape import Tape
from scheduler.lifecycle import STOPPING
from scheduler.refresh import Refresher
from scheduler.refresh_policy import RefreshPolicy
from scheduler.request import Failure
from scheduler.scheduler import Scheduler

REMOVED = Failure("unknown_session", "the session was removed meanwhile")


def refresh_policy(session: SessionConfig) -> RefreshPolicy:
    """When the session's window is prefilled again."""
    s = session
    return RefreshPolicy(s.semantics == "exact", s.refresh_every, s.refresh_idle, s.divergence_every)


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
    registry: Registry
    input: TapeFeeder
    questions: StandingQuestions
    answers: StandingAnswers
    requests: RequestRunner
    records: VersionRecords
    confidence: Confidence
    refresher: Refresher
    rollups: Rollups
    snapshots: Snapshots
    store: MetricStore
    emit: Emit
    _sessions: dict[str, SessionConfig] = field(init=False)
    _kept: dict[str, Tape] = field(default_factory=dict)
    """Old tapes of sessions that take no records until they are added again; they answer questions."""
    _opening: set[str] = field(default_factory=set)
    """Sessions whose tape is about to be replaced by another one."""

    def __post_init__(self) -> None:
        self._sessions = {session.name: session for session in self.config.sessions}

    def handle(self, command: protocol.SessionCommand) -> None:
        """Answer with the command's event or, with nothing changed, `Failed`."""
        try:
            match command:
                case protocol.AddSession():
                    self._add(command)
                case protocol.ChangeSession():
                    self._change(command)
                case protocol.RemoveSession():
                    self._remove(command)
                case protocol.TakeOver():
                    if not self.scheduler.run_between(partial(self._take_over, command)):
                        self._refuse(command, "shutting_down", STOPPING.message)
        except SettingError as error:
            self._refuse(command, "bad_request", str(error))
        except ValueError as error:
            self._refuse(command, "bad_request", str(error))

    def needs_reset(self, name: str) -> bool:
        """Whether the session is asked as it was, and nothing about it can be changed."""
        return name in self._kept or name in self._opening

    def replaces(self, command: protocol.Command) -> bool:
        """Whether a question is about a session whose tape is about to be replaced: ask it between two
        batches, behind that.
        """
        match command:
            case GenerateAll():
                return any(each.session in self._opening for each in command.requests)
            case CountTokens():
                return command.session in self._opening
        return False

    def _add(self, command: protocol.AddSession) -> None:
        session = command.session
        if session.name in self._kept:
            self._opening.add(session.name)
            if not self.scheduler.run_between(partial(self._reset_session, command)):
                self._refuse(command, "shutting_down", STOPPING.message)
            return
        line, standing = self._prepare(command)
        if not self.scheduler.run_between(partial(self._open, command, line, standing)):
            self._forget(session.name)
            self._refuse(command, "shutting_down", STOPPING.message)

    def _reset_session(self, command: protocol.AddSession) -> None:
        """Between two batches. What the old tape was asked and has not answered is asked of the new one."""
        name = command.session.name
        del self.built.tapes[name], self._sessions[name]
        self._end(self._kept.pop(name), SESSION_RESET, keeps=True)
        try:
            line, standing = self._prepare(command)
        except (SettingError, ValueError) as error:
            self._refuse(command, "bad_request", str(error))
        else:
            self._open(command, line, standing)
        if name not in self.built.tapes:
            self.store.remove_session(name)
        self._opening.discard(name)
        self.requests.ask_again()

    def _prepare(self, command: protocol.AddSession) -> tuple[LineSpec | CompactSpec, tuple[Standing, ...]]:
        """Raises ValueError and SettingError."""
        session = command.session
        if session.name in self._sessions:
            raise ValueError(f"there is already a session {session.name!r}")
        line = line_spec(session, self.config.bars, self.built.prompt)
        policy_of(session.bars(self.config.bars))
        self._check_pool(session, line)
        standing = self.questions.made(session.name, command.questions)
        header = None if isinstance(line, LineSpec) else line.blank.header
        several = bool(session.more_symbols)
        rollup = session.summed_tokens
        self.built.prefixes.add(session.name, header, command.questions, several=several, rollup=rollup)
        self.built.lines[session.name] = line
        self._sessions[session.name] = session
        return line, standing

    def _open(
        self, command: protocol.AddSession, line: LineSpec | CompactSpec, standing: tuple[Standing, ...]
    ) -> None:
        """Between two batches. The prefix is prefilled here, unless another session has the same one."""
        session = command.session
        try:
            if command.metrics:  # in one process the store is the gateway's
                self.store.attach_session(Block(command.metrics, {"session": [session.name]}))
            tape = self.built.open(session, command.progress, self.config.promise_ns(session))
        except (ValueError, ModelError, OutOfMemory, OSError) as error:
            self._forget(session.name)
            self._refuse(command, "bad_request", str(error))
            return
        self.confidence.add(session.name)
        self.answers.add(session)
        self.registry.replace(session.name, standing)
        self.refresher.watch(tape, refresh_policy(session))
        self.rollups.set(session, tape)
        self.snapshots.set(session, tape)
        self.built.recovery.count(self.store)
        opened = None
        if session.name in self.built.restored:
            self.snapshots.give_back(session.name)
            opened = partial(self.snapshots.partitions_assigned, session.name)
        # in this order: a record that comes after the reply is the session's, too
        self.input.set(session, line, command.symbols, opened)
        snapshots = self.snapshots
        found = snapshots.positions(session), snapshots.streams(session.name)
        self.emit(protocol.SessionAdded(command.id, *found))

    def _forget(self, name: str) -> None:
        """Undo `_add`."""
        self._sessions.pop(name, None)
        self.built.lines.pop(name, None)
        self.built.prefixes.remove(name)

    def _change(self, command: protocol.ChangeSession) -> None:
        session = command.session
        tape = self.built.tapes.get(session.name)
        if tape is None or session.name in self._kept:
            raise ValueError(f"there is no session {session.name!r}")
        line = line_spec(session, self.config.bars, self.built.prompt)
        policy_of(session.bars(self.config.bars))
        self._check_pool(session, line)
        if not self.scheduler.run_between(partial(self._apply, command, tape, line)):
            self._refuse(command, "shutting_down", STOPPING.message)

    def _apply(self, command: protocol.ChangeSession, tape: Tape, line: LineSpec | CompactSpec) -> None:
        """Between two batches. A shorter window is evicted at its next bar."""
        session = command.session
        try:
            tape.retain(retention_of(session, self.built.prompt), session.summed_tokens)
        except ValueError as error:
            self._refuse(command, "bad_request", str(error))
            return
        self.input.set(session, line)
        tape.bound_staleness(self.config.promise_ns(session))
        self.built.lines[session.name] = line
        self._sessions[session.name] = session
        self.answers.add(session)
        self.refresher.watch(tape, refresh_policy(session))
        self.rollups.set(session, tape)
        self.snapshots.set(session, tape)
        self.emit(protocol.Done(command.id))

    def _remove(self, command: protocol.RemoveSession) -> None:
        tape = self.built.tapes.get(command.name)
        if tape is None:
            raise ValueError(f"there is no session {command.name!r}")
        if command.keeps:
            self._kept[command.name] = tape
            self.input.remove(command.name, partial(self.emit, protocol.Done(command.id)))
            return
        self._kept.pop(command.name, None)
        del self.built.tapes[command.name], self._sessions[command.name]  # from now on it cannot be asked
        self.input.remove(command.name, partial(self._close_soon, command, tape))

    def _close_soon(self, command: protocol.RemoveSession, tape: Tape) -> None:
        """On the data plane's thread, after the last record."""
        if not self.scheduler.run_between(partial(self._close, command, tape)):
            self._refuse(command, "shutting_down", STOPPING.message)

    def _close(self, command: protocol.RemoveSession, tape: Tape) -> None:
        """Between two batches, after the last append."""
        self._end(tape, REMOVED, keeps=not command.serves)
        self.store.remove_session(command.name)
        self.emit(protocol.Done(command.id))

    def _end(self, tape: Tape, failure: Failure, *, keeps: bool = False) -> None:
        """End all work of a session with ``failure``, and forget it. ``keeps``: its snapshots stay."""
        name = tape.name
        self.answers.leave(name)
        self.refresher.forget(tape)
        self.rollups.forget(tape)
        self.snapshots.forget(tape, keeps=keeps)
        self.scheduler.remove(tape, failure)
        self.registry.remove(name)
        self.records.remove(name)
        self.answers.remove(name)
        self.confidence.remove(name)
        self.built.close(tape)

    def _take_over(self, command: protocol.TakeOver) -> None:
        """Between two batches. Versions count on from those that the other daemon has published."""
        for name, progress in command.progress.items():
            tape = self.built.tapes.get(name)
            if tape is not None:
                tape.count_from(progress.version)
        self.input.promote(command.progress, partial(self.emit, protocol.Done(command.id)))

    def _check_pool(self, session: SessionConfig, line: LineSpec | CompactSpec) -> None:
        """Raise SettingError unless the pool holds the windows of all sessions."""
        sessions = self._sessions | {session.name: session}
        lines = self.built.lines | {session.name: line}
        pool = structs.replace(self.config.pool, blocks=self.built.engine.pool.total_blocks)
        compact = [name for name in sessions if isinstance(lines[name], CompactSpec)]
        check_pool(structs.replace(self.config, pool=pool, sessions=tuple(sessions.values())), compact)

    def _refuse(self, command: protocol.SessionCommand, code: Code, message: str) -> None:
        self.emit(Failed(command.id, code, message))
