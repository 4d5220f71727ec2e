"""Changes of sessions and their standing questions while the daemon runs.

They come from a configuration that is read again (SIGHUP) and from clients. Either way the whole
configuration is checked first, and what follows from it is carried out step by step
(`daemon.config.changes`). An engine that is started again gets the configuration as it is then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.api.generation import Failed
from daemon.config.changes import changes, live, of_known_models, questions_by_session, resolved, rolls_among
from daemon.config.checks import cross_check
from daemon.config.errors import ConfigError
from daemon.config.instruments import instruments_of
from daemon.config.load import load_table
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import with_revisions
from daemon.config.symbols import Names
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.change_queue import ChangeQueue
from daemon.gateway.checkpoint.publisher import Publisher
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.inputs import Inputs
from daemon.gateway.patterns import Patterns, Unopened, silent_ns
from daemon.gateway.pending import PendingCommands
from daemon.gateway.question_requests import Questions
from daemon.gateway.standby import Standby
from daemon.progress import Position, Progress
from daemon.session_life import CLOSED, FOLLOWING, Event, State
from feeds.market_data import AnyRecord
from flash.question import Question
from metrics.store import MetricStore

log = logging.getLogger(__name__)

RETRY_S = 0.2
NEXT_ENGINE_S = 120.0
"""How long a session that was removed to begin again waits for an engine."""
OPEN_AT_A_TIME = 8
OPEN_AGAIN_S = 5.0
"""How long a session that could not be opened stays closed at least."""


class LiveSessions:
    """The configuration as it is now. Lives on the event loop; one change at a time."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        questions: Questions,
        publisher: Publisher,
        inputs: Inputs,
        progress: ProgressStore,
        store: MetricStore,
        pending: PendingCommands,
        standby: Standby,
        patterns: Patterns,
    ) -> None:
        self._progress, self._standby, self._lives = progress, standby, standby.lives
        self._patterns = patterns
        self.config = config
        self._sessions, self._questions, self._publisher = sessions, questions, publisher
        self._inputs, self._store, self._pending = inputs, store, pending
        self._queue = ChangeQueue()
        self._positions: dict[str, Mapping[str, Position]] = {}
        """Where sessions that were added read on."""
        self.unopened: dict[str, str] = {}
        """Why sessions whose records are read here are not open, by name."""
        self._retry_at: dict[str, float] = {}
        """When to open them again, monotonic, s."""

    def now(self) -> Config:
        """The configuration with the standing questions as they are now."""
        return self._questions.configured(self.config)

    # Called by the gateway.

    async def pause_unreadable(self) -> None:
        """Before an engine is started again, which reads question packs again: pause the questions whose pack
        is gone or another one by now.

        Sessions that are opened later go without them, until the configuration is read again.
        """
        why = await self._questions.unreadable(self.config)
        if not why:
            return
        self._store.inc("foretick_packs_unreadable_total", len(why))
        kept = tuple(each for each in self.config.questions if each.pack not in why)
        self.config = msgspec.structs.replace(self.config, questions=kept)
        for session, left in (await self._questions.pause_packs(why)).items():
            version = self._sessions.states[session].version
            self._publisher.questions_set(protocol.QuestionsSet(0, session, version, left))

    async def reload(self, new: Config) -> bool:
        """Do as ``new`` says, and log what cannot be changed or was refused; returns whether nothing was.

        Raises ConfigError for a file of instruments, or a question pack, that cannot be read.
        """
        new, names = with_revisions(of_known_models(self.config, new)), Names(new.symbols)
        self._patterns.replace(new.patterns, instruments_of(new), names)
        return await self._queue.run(partial(self._reload, new, names))

    async def _reload(self, new: Config, names: Names) -> bool:
        old, new, opened = self.now(), self._with_opened(new), frozenset(self._patterns.opened)
        found = changes(old, new)
        for key in found.fixed:
            log.warning("%s stays as it is: it takes effect at the next start", key)
        done = not found.fixed
        self._inputs.rename(names)
        self.config = live(old, msgspec.structs.replace(new, sessions=old.sessions, bars=old.bars))
        for name in found.removed:
            done &= await self._logged(name, self._remove(name))
        # what is refused keeps its old settings, written out: the defaults may have changed
        kept = {s.name: s for s in resolved(self.config)}
        self.config = msgspec.structs.replace(self.config, bars=new.bars, sessions=tuple(kept.values()))
        for session in found.changed:
            done &= await self._logged(session.name, self._change(session))
        for session in found.added:
            if session.name not in self._sessions.states:
                adding = self._put_back if session.name in found.removed else self._add
                done &= await self._logged(session.name, adding(session))
        self._arrange(new)
        for session in self.config.sessions:
            if session.name in opened and session.name not in self._patterns.opened:  # it began again
                self._patterns.add(session)
        await self._questions.reload(self.config)
        return done

    async def resume(self, names: Collection[str]) -> dict[str, Mapping[str, Position]]:
        """Reset these sessions to what others have acknowledged; returns where they read on."""
        await self._queue.run(partial(self._bring_back_all, names))
        return {name: found for name in names if (found := self._positions.pop(name, {}))}

    def closed(self, sessions: Iterable[str]) -> set[str]:
        """Those of these sessions that are not open here."""
        return self._lives.among(sessions, CLOSED)

    async def open(self, sessions: Collection[str]) -> set[str]:
        """Open sessions whose first record has come; returns those that cannot be now.

        They are tried again with a record that comes `OPEN_AGAIN_S` later.
        """
        await self._queue.run(partial(self._open_due, sessions))
        return self.closed(sessions)

    async def _open_due(self, sessions: Collection[str]) -> None:
        now, closed = time.monotonic(), self.closed(sessions)
        due = {name for name in closed if self._retry_at.get(name, now) <= now}
        await self._bring_back_all(due)
        for name in due:
            self._positions.pop(name, None)

    async def close_unused(self, is_elsewhere: Callable[[str], bool]) -> None:
        """Close sessions that no source reads or follows here: those that have gone, or are answered by
        others. Their files stay for whoever answers them.
        """

        def is_unused(name: str) -> bool:
            gone = self._lives.state(name) in (State.OUTDATED, State.REVOKED) or is_elsewhere(name)
            return gone and not self._inputs.holds(name)

        if any(map(is_unused, self._lives.open)):
            await self._queue.run(partial(self._close_unused, is_unused))

    async def _close_unused(self, is_unused: Callable[[str], bool]) -> None:
        for name in filter(is_unused, self._lives.open):
            self._lives.on(Event.CLOSED, [name])
            self.unopened.pop(name, None)
            await self._logged(name, self._released(name))

    async def _released(self, name: str) -> None:
        await self._pending.reply(lambda number: protocol.CloseSession(number, name, releases=True))

    def drop(self, names: Collection[str], *, complete: bool) -> None:
        """What is under way of these sessions, also of ``complete`` versions, is made again."""
        self._publisher.drop(names, complete=complete)

    def reads(self, session: str) -> bool:
        """Whether any source reads the session here."""
        return self._inputs.reads(session)

    async def promote(self, names: Collection[str]) -> None:
        """Have the engine answer these behind what others have acknowledged, where it has only followed.

        One that is gone meanwhile is waited for.
        """
        await self._queue.run(partial(self._promote, names))

    async def _promote(self, names: Collection[str]) -> None:
        progress = {name: self._progress.resumed(name) for name in names if name in self._sessions.states}
        while True:
            try:
                await self._command(lambda number: protocol.TakeOver(number, progress))
            except messages.QueryError as error:
                log.warning("the engine cannot take over yet: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def partitions_assigned(self, sessions: Collection[str]) -> None:
        """These sessions' records are read from now on."""
        self._pending.send(protocol.PartitionsAssigned(tuple(sessions)))

    def partitions_revoked(self, sessions: Collection[str]) -> None:
        """Another daemon reads these sessions' records from now on."""
        self._pending.send(protocol.PartitionsRevoked(tuple(sessions)))

    def _configured(self, names: Collection[str]) -> list[SessionConfig]:
        return [each for each in self.config.sessions if each.name in names]

    async def _bring_back_all(self, names: Collection[str]) -> None:
        """A few at a time: the engine opens those that wait between two batches, and answers nothing then."""
        few = asyncio.Semaphore(OPEN_AT_A_TIME)
        await asyncio.gather(*(self._bring_back(each, few) for each in self._configured(names)))

    async def _bring_back(self, session: SessionConfig, few: asyncio.Semaphore) -> None:
        """Open it, or open it again, where others have left it."""
        name = session.name
        try:
            async with few:
                await self._again(session)
        except messages.QueryError as error:
            self._lives.on(Event.FAILED, [name])
            if error.code == "engine":  # it has refused nothing: the next one is asked again
                return
            if name in self._patterns.opened:
                log.warning("no session is opened for %s: %s", session.symbol, error)
                self._patterns.refuse(session.symbol, time.monotonic_ns())
                self._gone(name)
                return
            log.error("session %s is not open: %s", name, error)
            self.unopened[name], self._retry_at[name] = error.message, time.monotonic() + OPEN_AGAIN_S
        else:
            self.unopened.pop(name, None)

    async def _again(self, session: SessionConfig) -> None:
        """Remove a session from the engine, if it has it, and add it again.

        It stays a session meanwhile: an engine that dies in between is followed by one that has it. Its
        questions stay as clients have set them, and its metrics go on.
        """
        name = session.name
        try:
            if not self.closed([name]):
                await self._command(lambda number: protocol.CloseSession(number, name, keeps=True))
        except messages.QueryError as error:
            if error.code == "engine":
                raise
            # the engine does not know it: an earlier call ended in between
        asked = tuple(self._sessions.states[name].questions)
        await self._open(session, self._progress.resumed(name), asked, self._store.block_of(name))

    def _replied(self, command: protocol.SessionCommand, event: protocol.ReplyEvent) -> None:
        """The engine replied: later events see the session as it is now. Its client may be gone."""
        match command:
            case protocol.OpenSession() if isinstance(event, Failed):
                name = command.session.name
                if name not in self._sessions.states:
                    self._store.remove_session(name)
                    self._lives.on(Event.FAILED, [name])
            case _ if isinstance(event, Failed):
                pass
            case protocol.OpenSession():
                assert isinstance(event, protocol.SessionAdded)
                self._positions[command.session.name] = event.positions
                self._added(command)
                self._sessions.halt(command.session.name, event.halted)
            case protocol.ReconfigureSession():
                self._changed(command.session)
            case protocol.CloseSession(keeps=False):
                self._gone(command.name)

    def _added(self, command: protocol.OpenSession) -> None:
        """There is another session, or one was reset."""
        name = command.session.name
        before = self._sessions.states.get(name)
        if before is not None:
            before.remove()
            self._publisher.remove(name)
        self._sessions.add(command.session, command.questions, command.progress.version)
        self._publisher.add(command.session)
        self._lives.on(Event.OPENED, [name])
        if before is not None:
            state = self._sessions.states[name]
            state.ask_these(state.questions, before.paused)
        else:
            self._set((*self.config.sessions, command.session))

    def _changed(self, session: SessionConfig) -> None:
        """A session has other settings."""
        self._sessions.change(session)
        self._set(session if s.name == session.name else s for s in self.config.sessions)

    def _gone(self, name: str) -> None:
        """There is no such session any more, if there was one."""
        if name not in self._sessions.states:
            return
        serves = self._inputs.serves(name)
        version = self._sessions.remove(name).version
        self._patterns.remove(name)
        self._publisher.remove(name)
        self.unopened.pop(name, None)
        self._lives.on(Event.REMOVED, [name])
        if serves:  # otherwise its progress is what another daemon commits
            self._progress.removed(name, version)
        self._store.remove_session(name)
        self._set(s for s in self.config.sessions if s.name != name)

    # Sessions that patterns open.

    @property
    def unmatched(self) -> Collection[str]:
        """Symbols that came and that no pattern matches."""
        return self._patterns.unmatched.keys()

    def discover(self, record: AnyRecord) -> Unopened | None:
        """A record of a symbol that no session reads: why none does, or None if one does from now on."""
        found = self._patterns.consider(record, time.monotonic_ns(), self._sessions.states)
        if isinstance(found, Unopened):
            return found
        return None if self._register([found]) else Unopened.REFUSED

    def adopt(self) -> set[str]:
        """Have the sessions that were opened earlier or by other daemons; returns those that are new here.

        One that has been silent for too long is closed for the others, too, by the time of its newest bar.
        """
        now_ns, new = time.time_ns(), dict[str, SessionConfig]()
        for name, (opened, progress) in self._progress.opened.items():
            silence = silent_ns(progress, now_ns)
            if name in self._patterns.opened:
                # of a new life, its newest bar is of the one before
                known_for = self._sessions.states[name].last_seen_age_ns
                is_over = 0 < self._patterns.idle_timeout(name) < min(silence, known_for)
                if is_over and self.closed([name]) and not self._inputs.holds(name):
                    self._gone(name)
                continue
            session = self._patterns.reopened(name, opened, silence)
            if session and name not in self._sessions.states and not self._inputs.has_route(opened.symbol):
                new[session.symbol] = session
        return self._register(list(new.values()))

    async def close_idle(self) -> None:
        """Close sessions of patterns whose records have not come for too long."""

        def is_idle(name: str) -> bool:
            state, limit = self._sessions.states[name], self._patterns.idle_timeout(name)
            return 0 < limit < state.last_seen_age_ns and self._inputs.serves(name)

        if any(map(is_idle, self._patterns.opened)):
            await self._queue.run(partial(self._close_idle, is_idle))

    async def _close_idle(self, is_idle: Callable[[str], bool]) -> None:
        for name in list(self._patterns.opened):
            # each is looked at again: a record may have come while others were closed
            if name in self._patterns.opened and is_idle(name):
                log.info("session %s is closed: nothing came for too long", name)
                await self._logged(name, self._remove(name))

    def _register(self, sessions: Sequence[SessionConfig]) -> set[str]:
        """There are these sessions, too; a record of theirs opens them. Returns those that are there."""
        if not sessions:  # as a rule, once a second
            return set()
        asked = questions_by_session(msgspec.structs.replace(self.config, sessions=tuple(sessions)))
        done = []
        for session in sessions:
            try:
                self._store.add_session(session.name)
            except OSError as error:
                log.error("no session for %s: no shared memory for its metrics: %s", session.symbol, error)
                continue
            self._sessions.add(session, asked[session.name], self._progress.of(session.name).version)
            self._publisher.add(session)
            self._patterns.add(session)
            done.append(session)
        self.config = msgspec.structs.replace(self.config, sessions=(*self.config.sessions, *done))
        self._publisher.extended(self.config)
        self._inputs.extend(done)
        return {each.name for each in done}

    def _with_opened(self, new: Config) -> Config:
        """With the sessions that the new patterns have opened."""
        read = {symbol for session in new.sessions for symbol in session.symbols}
        known = self._patterns.opened.items()
        found = [
            self._patterns.reopened(name, opened, 0) for name, opened in known if opened.symbol not in read
        ]
        return msgspec.structs.replace(new, sessions=(*new.sessions, *filter(None, found)))

    # Called for clients.

    async def add(self, request: messages.AddSession) -> messages.SessionsReply:
        """Open a session."""
        name = request.settings.get("name")
        if name in self._sessions.states:
            raise messages.QueryError("bad_request", f"there is already a session {name!r}")
        session = _session(request.settings)
        await self._queue.run(lambda: self._to(self._checked((*self.config.sessions, session))))
        return self._sessions.listed(request.id)

    async def change(self, request: messages.ChangeSession) -> messages.SessionsReply:
        """Give a session other settings."""
        self._sessions.state(request.session)
        await self._queue.run(partial(self._change_settings, request))
        return self._sessions.listed(request.id)

    async def _change_settings(self, request: messages.ChangeSession) -> None:
        old = next((s for s in self.config.sessions if s.name == request.session), None)
        if old is None:
            raise messages.QueryError("unknown_session", f"{request.session} was removed meanwhile")
        if request.settings.get("name", old.name) != old.name:
            raise messages.QueryError("bad_request", "a session keeps its name")
        given = _session({"name": old.name, "symbol": old.symbol, **request.settings})
        new = msgspec.structs.replace(old, **{key: getattr(given, key) for key in request.settings})
        await self._to(self._checked(tuple(new if s is old else s for s in self.config.sessions)))

    async def remove(self, request: messages.RemoveSession) -> messages.SessionsReply:
        """Close a session."""
        self._sessions.state(request.session)
        await self._queue.run(partial(self._remove_known, request.session))
        return self._sessions.listed(request.id)

    async def _remove_known(self, name: str) -> None:
        self._sessions.state(name)
        await self._remove(name)

    def _checked(self, sessions: tuple[SessionConfig, ...]) -> Config:
        new = msgspec.structs.replace(self.config, sessions=sessions)
        before = cross_check(self.config)  # such as a question whose session was removed
        problems = [each for each in cross_check(new) if each not in before]
        if problems:
            raise messages.QueryError("bad_request", "; ".join(str(problem) for problem in problems))
        return new

    async def _to(self, new: Config) -> None:
        """Change the sessions to those of ``new``; raises QueryError for what the engine refuses."""
        found = changes(self.config, new)
        for name in found.removed:
            await self._remove(name)
        for session in found.changed:
            await self._change(session)
        for session in found.added:
            await (self._put_back if session.name in found.removed else self._add)(session)
        self._arrange(new)

    # One session.

    async def _add(self, session: SessionConfig) -> None:
        """Add a new one."""
        sessions = (*(s for s in self.config.sessions if s.name != session.name), session)
        asked = questions_by_session(msgspec.structs.replace(self.config, sessions=sessions))[session.name]
        try:
            block = self._store.add_session(session.name)
        except OSError as error:
            raise messages.QueryError("engine", f"no shared memory for its metrics: {error}") from None
        await self._open(session, self._progress.added(session.name), asked, block.name)

    async def _open(
        self, session: SessionConfig, progress: Progress, asked: tuple[Question, ...], metrics: str
    ) -> None:
        """``progress``: what it goes on from; ``asked``: its questions; ``metrics``: of a new one."""
        numbers = self._inputs.number([session])
        symbols = {symbol: numbers[symbol] for symbol in session.symbols}
        if self._lives.state(session.name) is State.ABSENT:
            self._lives.on(Event.ADDED, [session.name])
            if not self._standby.answers:
                self._lives.on(Event.FOLLOWED, [session.name])
        follows = self._lives.state(session.name) in FOLLOWING
        await self._command(
            lambda n: protocol.OpenSession(
                n, session, asked, symbols, progress, metrics, follows, rolls_among(self.config, session)
            )
        )

    async def _put_back(self, session: SessionConfig) -> None:
        """Add a session that was removed to begin again: to the next engine, if this one dies meanwhile."""
        deadline = time.monotonic() + NEXT_ENGINE_S
        while True:
            try:
                await self._add(session)
            except messages.QueryError as error:
                if error.code != "engine" or time.monotonic() > deadline:
                    raise
                log.warning("session %s cannot begin again yet: %s", session.name, error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _change(self, session: SessionConfig) -> None:
        if self.closed([session.name]):
            self._changed(session)
            return
        rolls = rolls_among(self.config, session)
        await self._command(lambda number: protocol.ReconfigureSession(number, session, rolls))

    async def _remove(self, name: str) -> None:
        if self.closed([name]):
            self._gone(name)
            return
        # its records go nowhere from now on
        self._inputs.change([s for s in self.config.sessions if s.name != name])
        try:
            serves = self._inputs.serves(name)
            await self._command(lambda number: protocol.CloseSession(number, name, serves=serves))
        finally:
            self._inputs.change(self.config.sessions)

    async def _command(self, make: Callable[[int], protocol.SessionCommand]) -> None:
        command = make(0)
        await self._pending.reply(
            lambda number: msgspec.structs.replace(command, id=number), partial(self._replied, command)
        )

    async def _logged(self, name: str, step: Awaitable[None]) -> bool:
        try:
            await step
        except messages.QueryError as error:
            log.error("session %s was not changed: %s", name, error)
            return False
        return True

    def _set(self, sessions: Iterable[SessionConfig]) -> None:
        self.config = msgspec.structs.replace(self.config, sessions=tuple(sessions))
        self._publisher.configured(self.config)
        self._inputs.change(self.config.sessions)

    def _arrange(self, new: Config) -> None:
        """List the sessions in the order of ``new``."""
        order = {session.name: number for number, session in enumerate(new.sessions)}
        self._set(sorted(self.config.sessions, key=lambda s: order.get(s.name, len(order))))
        states = self._sessions.states
        for session in self.config.sessions:
            if session.name in states:
                states[session.name] = states.pop(session.name)


def _session(settings: Mapping[str, object]) -> SessionConfig:
    try:
        return load_table(SessionConfig, settings)
    except ConfigError as error:
        raise messages.QueryError("bad_request", str(error)) from None
