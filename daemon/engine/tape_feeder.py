"""The data plane's thread: from the ring to the tapes, with credits for each session."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from msgspec import structs

from daemon.config.schema import Config, SessionConfig
from daemon.config.symbols import Rolls, rolls_of
from daemon.engine.build import Built
from daemon.engine.provenance import BarOrigin
from daemon.engine.replayed_bars import History
from daemon.engine.snapshot_store import SavedSession
from daemon.progress import Progress
from daemon.protocol import RecordRefused, SessionHalted, VersionInputs
from daemon.ring_numbers import values_in_ring
from daemon.session_life import FOLLOWING, Event, Lives, count_illegal
from ingest.backlog import TapeWindow
from ingest.bar_kernel import AMENDS, EVENT, GAP, SPREAD, Bars
from ingest.bars import BarPolicy, Feeds, RefusedRecord
from ingest.compact import Anchor, CompactSpec, Restart
from ingest.events import events_code
from ingest.feed_rules import actions_code
from ingest.lines import LineSpec
from ingest.plane import BarConsumer, DataPlane, Made, Phase, SessionSpec, TapeRecord, WatchBars
from ingest.plane_state import PlaneState, Taken
from ingest.record import LowWatermarks, ReadRange
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.catalogue import EVENTS, Treatment
from metrics.feed_faults import FAULT_NAMES, RULED
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.request import Failure
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems

CREDITS = 8
"""Bars of one session that the scheduler has at a time: no session fills a pass, nor the queue before others.
The next ones wait in the session's backlog (`ingest.backlog`). Four times as many of a source that waits."""

IN_ORDER = 64
"""Where a log is read, this many bars of a session that no engine has answered go version by version after a
start: those that came while the daemon was down are answered as if it had not been. A longer backlog is
caught up with faster.
"""


class FeederState(NamedTuple):
    """A session's input between two records of its tape. ``bars``: those it had so far."""

    plane: PlaneState
    taken: list[Taken]
    closed: tuple[int, ...]
    written: LowWatermarks
    bars: int


def inputs_of(records: Sequence[TapeRecord]) -> VersionInputs:
    """The feed's records that ``records``, oldest first, were made from."""
    spans: dict[int, ReadRange] = {}
    for read in (read for record in records for read in record.reads):
        before = spans.get(read.stream, read)
        spans[read.stream] = ReadRange(
            read.stream, min(before.first, read.first), max(before.last, read.last)
        )
    newest = records[-1]
    single = is_single(newest)
    return VersionInputs(tuple(spans.values()), newest.low_watermarks, newest.closed, newest.written, single)


def is_single(record: TapeRecord) -> bool:
    """Whether it has the line of one record, which closed no bar."""
    return bool(record.flags & (AMENDS | EVENT))


def has_gap(record: TapeRecord) -> bool:
    """Whether data was lost before this record."""
    return bool(record.flags & GAP)


def origin_of(record: TapeRecord) -> BarOrigin:
    """Where the records of a bar were read."""
    return BarOrigin(() if record.flags & SPREAD else record.reads, has_gap(record))


def missed(records: Sequence[TapeRecord], objective_ns: int, now_ns: int) -> int:
    """Bars that were closed longer ago than the freshness objective; 0 without one. Monotonic clock."""
    return sum(0 < objective_ns < now_ns - record.ts_closed for record in records)


def refusal_of(session: str, refused: RefusedRecord) -> RecordRefused:
    """What the gateway learns of a record that a session refused."""
    record = refused.record
    return RecordRefused(
        session,
        refused.leg,
        refused.reason,
        stream=int(record["stream"]),
        offset=int(record["offset"]),
        part=int(record["part"]),
        seq=int(record["seq"]),
        ts_event=int(record["ts_event"]),
        ts_recv=int(record["ts_recv"]),
        values=values_in_ring(record),
    )


def policy_of(config: Config, session: SessionConfig, *, compact: bool = False) -> BarPolicy:
    """How records become bars; ``compact``: and events no lines.

    Raises ValueError for a lateness of too many intervals.
    """
    bars, quality = session.bars(config.bars), config.quality
    return BarPolicy(
        bars.interval,
        bars.lateness,
        "skip" if bars.empty == "skip" else "fill",
        bars.max_fill,
        bars.idle_close,
        bars.late,
        bars.price_jump,
        bars.on_price_jump == "refuse",
        bars.ready,
        actions_code({kind.name: getattr(quality, kind.name) for kind in RULED if kind.actions}),
        quality.bad_tick_band,
        bars.venue_lag if len({_venue(symbol) for symbol in session.symbols}) > 1 else 0,
        events_code({kind: _treatment(config, kind, compact) for kind in EVENTS}),
        config.events.on_split,
    )


def _treatment(config: Config, kind: str, compact: bool) -> Treatment:
    """What is done about a kind of event."""
    found: Treatment = getattr(config.events, kind)
    return "flag" if compact and found == "line" else found


def feeds_of(
    config: Config,
    session: SessionConfig,
    numbers: Mapping[str, int],
    since_ns: int,
    line: LineSpec | CompactSpec,
    rolls: Sequence[Rolls] = (),
) -> Feeds:
    """What a session is made of; ``numbers``: those of all symbols in the ring; ``rolls``: of its own."""
    venues = [_venue(symbol) for symbol in session.symbols]
    return Feeds(
        tuple(numbers[each] for each in session.symbols),
        policy_of(config, session, compact=isinstance(line, CompactSpec)),
        since_ns,
        line.price_scale,
        tuple(map(venues.index, venues)),
        tuple(
            tuple((int(each.at), each.factor) for each in config.quality.splits if each.symbol == symbol)
            for symbol in session.symbols
        ),
        tuple(tuple(at for at, _ in each.moments) for each in rolls),
        any(each.resets for each in rolls),
    )


def _venue(symbol: str) -> str:
    return symbol.partition(":")[0]


@dataclass(eq=False, slots=True)
class _Fed:
    """A session that is fed."""

    history: History
    ahead: int = 0
    """Bars that the scheduler has; under the lock of `TapeFeeder`."""
    asked: int = 0
    """Of these, bars of versions whose questions are being answered; where every bar is. Under the lock."""
    answering: bool = False
    refreshing: bool = False
    """Its window is being prefilled in the background."""
    paused: bool = False
    """It is given no bars for now."""
    bars: int = 0
    unanswered: int = 0
    """Bars so far that no earlier engine had answered."""
    anchor: Anchor | None = None
    """Of its newest version."""

    @property
    def on_the_way(self) -> int:
        """Bars that the scheduler has, and that are on no tape yet."""
        return self.ahead - self.asked

    def ask(self, bars: int) -> None:
        """A version of these bars is asked."""
        self.asked, self.answering = self.asked + bars, True

    def end_answers(self) -> None:
        """All that was asked is answered."""
        self.answering = False

    def refresh(self, is_refreshing: bool) -> None:
        """Its window is being prefilled in the background, or not any more."""
        self.refreshing = is_refreshing

    def pause(self, is_paused: bool) -> None:
        """Hold its bars back, or release them."""
        self.paused = is_paused

    def commit(self, anchor: Anchor | None) -> None:
        """It has a new version."""
        self.anchor = anchor

    def restore(self, state: SavedSession, known: Progress) -> None:
        """Go on from a snapshot."""
        self.bars, self.anchor = state.bars, state.parts.record.anchor
        # without a log there is nothing to read again
        known_closed = known.closed if state.has_log else ()
        self.history = History(
            self.history.life,
            len(state.positions),
            known_closed,
            state.closed,
            written=known.written,
            restored_written=state.written,
        )

    def take(self, record: TapeRecord) -> TapeItem[TapeRecord]:
        """Its next bar for the scheduler."""
        history = self.history
        if is_single(record):
            answered = history.take_single(record.reads[-1])
        else:
            answered = history.take(record.bar.leg, record.bar.ts_open)
        self.unanswered += not answered
        record = structs.replace(
            record,
            ordinal=self.bars,
            closed=history.closed,
            written=history.written,
            history=answered,
        )
        self.bars += 1
        return TapeItem(record.tokens, record, record.ts_last_event, record.ts_closed)


class _Model(NamedTuple):
    """Whose tapes are fed."""

    built: Built
    scheduler: Scheduler
    tokeniser: Tokeniser


class TapeFeeder(BarConsumer):
    """Appends the ring's records to the tapes; `run` is the data plane's thread."""

    def __init__(
        self,
        config: Config,
        ring: Ring,
        source: str,
        models: Sequence[tuple[Built, Scheduler]],
        symbols: Mapping[str, int],
        store: MetricStore,
        clock: Callable[[], int] = time.monotonic_ns,
        emit: Callable[[RecordRefused | SessionHalted], None] = lambda event: None,
        credits: int = 0,
        standby: bool = False,
        watch: WatchBars = lambda session, bars: None,
    ) -> None:
        """``config``: with the sessions of all ``models``.

        ``credits``: bars of a session that the scheduler has at a time, by default `CREDITS` say.
        ``standby``: another daemon answers all sessions, until `promote`. ``watch`` sees (session, its closed
        bars and corrections) before they are appended.
        """
        self._clock = clock
        self._config = config
        self._models = [
            _Model(each, its, Tokeniser(each.prompt.encode, each.prompt.without_special))
            for each, its in models
        ]
        self._ring, self._store = ring, store
        self._emit, self._watch = emit, watch
        sources = [connector for _, connector in config.feeds.values()]
        self._rereads = bool(sources) and all(each.rereads for each in sources)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._leave_ring = threading.Event()
        """Set by `end` and by `stop`: ends the data plane's loop."""
        self._changing = threading.Lock()
        self._symbols = dict(symbols)
        rolls = rolls_of(config.symbols)
        self._specs = {
            each.name: self._spec(each, self._model(each.name).built.lines[each.name], rolls)
            for each in config.sessions
        }
        self.lives = Lives(count_illegal(store, "engine"))
        names = [session.name for session in config.sessions]
        self.lives.on(Event.ENGINE_STARTED, names)
        if standby:
            self.lives.on(Event.STANDBY, names)
        self._fed = {session.name: self._feed(session) for session in config.sessions}
        self._most = 1 if config.flash.every_bar else credits or (CREDITS if config.skips else 4 * CREDITS)
        tokeniser, specs = self._models[0].tokeniser, list(self._specs.values())
        self.plane = DataPlane(ring, source, tokeniser, specs, self, store, clock=clock, skips=config.skips)
        for model in self._models:
            model.scheduler.subscribe(self.on_commit, self.on_drop)

    def run(self, idle: Callable[[], bool], on_end: Callable[[], None]) -> None:
        """Run until `stop`, then take what the ring still holds.

        After `end`, ``on_end`` is called when all input is answered: no bar waits and the worker is
        ``idle()``.
        """
        self.plane.run(self._leave_ring)
        if self._ended.is_set() and self._finish(idle):
            on_end()
        while self.plane.step():
            pass

    def spec(self, session: str) -> SessionSpec:
        """A session as the data plane has it."""
        return self._specs[session]

    @property
    def settled(self) -> bool:
        """The ring is empty, and no bar waits or is with the scheduler."""
        return not (self._ring.fill or self.plane.waiting or any(fed.ahead for fed in self._fed.values()))

    def set(
        self,
        session: SessionConfig,
        line: LineSpec | CompactSpec,
        rolls: Mapping[str, Rolls],
        symbols: Mapping[str, int] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Add a session, or change one that stays.

        ``rolls``: those of its symbols that are continuous contracts; ``symbols``: numbers of new ones.
        ``done`` is called before the first record of a new session, on the data plane's thread. What is in
        the ring already is not a new session's.
        """
        with self._changing:
            self._symbols |= symbols or {}
            since_ns = 0
            if session.name not in self._specs:
                since_ns = self._clock()
                self._fed[session.name] = self._feed(session)
            self._specs[session.name] = self._spec(session, line, rolls, since_ns)
            self.plane.change(list(self._specs.values()), done or (lambda: None))

    def rebuilding(self, session: str) -> bool:
        """Whether bars that were answered before the engine's start are still to come. Any thread."""
        fed = self._fed.get(session)
        return fed is not None and (self._rereads or fed.bars > 0) and fed.history.rebuilding

    def pause(self, session: str, is_paused: bool) -> None:
        """Hold a session's bars back from the scheduler, or release them. Any thread."""
        self._fed[session].pause(is_paused)
        if not is_paused:
            self._ring.wake()

    def ahead(self, session: str) -> int:
        """Bars of a session that the scheduler has, and that are on no tape yet. Any thread."""
        with self._lock:
            return self._fed[session].on_the_way

    def cut(self, session: str) -> FeederState | None:
        """The session's state; None while bars are on their way to its tape. Between two batches."""
        found = self.plane.cut(session, lambda: not self.ahead(session))
        if found is None:
            return None
        fed = self._fed[session]
        return FeederState(*found, fed.history.seen, fed.history.seen_written, fed.bars)

    def restore(self, session: str, state: SavedSession) -> None:
        """Go on from a snapshot, before the first record."""
        reread = [state.has_log] * len(state.positions)
        self.plane.restore(session, state.plane, reread)
        self._fed[session].restore(state, self._progress(session))

    def partitions_assigned(self, sessions: Collection[str]) -> None:
        """The records of these sessions are read from now on: see `DataPlane.restore`."""
        self.lives.on(Event.ASSIGNED, sessions)
        for name in sessions:
            if name in self._fed:
                self._fed[name].history.settle()
        with self._changing:
            go_on = partial(self.plane.go_on, sessions)
            self.plane.change(list(self._specs.values()), go_on)

    def partitions_revoked(self, sessions: Collection[str]) -> None:
        """Another daemon owns these sessions, and writes their files, until `partitions_assigned`."""
        self.lives.on(Event.REVOKED, sessions)

    def remove(self, name: str, done: Callable[[], None]) -> None:
        """Stop taking records for a session; then ``done`` is called, on the data plane's thread."""
        with self._changing:
            self._specs.pop(name, None)
            self.plane.change(list(self._specs.values()), done)

    def promote(self, progress: Mapping[str, Progress], done: Callable[[], None]) -> None:
        """Another daemon has answered these sessions up to ``progress``; from now on they are answered here.

        Then ``done`` is called, on the data plane's thread, before the next record.
        """

        def go_on() -> None:
            with self._lock:
                for name in progress:
                    self._model(name).built.progress[name] = progress[name]
                for name, known in progress.items():
                    if name in self._fed:
                        self._fed[name].history.promote(known.closed, known.written)
            done()

        with self._changing:
            self.plane.change(list(self._specs.values()), go_on)

    def end(self) -> None:
        """The source has ended."""
        self._ended.set()
        self._leave()

    def stop(self) -> None:
        """Take what the ring holds, then return from `run`."""
        self._stop.set()
        self._leave()

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """These bars' credits come back; where every bar is answered, when that is done."""
        fed = self._fed[tape.name]
        fed.commit(records[-1].payload.anchor)
        if self._config.flash.every_bar:
            with self._lock:
                fed.ask(len(records))
        else:
            self._give_back(tape.name, len(records))

    def answered(self, session: str) -> None:
        """All that is asked of a session's bars so far is answered. The scheduler's thread."""
        if (fed := self._fed.get(session)) is not None:
            fed.end_answers()
            self._go_on(session, fed)

    def refreshing(self, session: str, is_refreshing: bool) -> None:
        """A session's window is being prefilled in the background, or not any more. The scheduler's thread.

        Where every bar is answered, the next one waits for that, so that equal records make equal windows.
        """
        if (fed := self._fed.get(session)) is not None:
            fed.refresh(is_refreshing)
            self._go_on(session, fed)

    def _go_on(self, session: str, fed: _Fed) -> None:
        if fed.asked and not fed.answering and not fed.refreshing:
            self._give_back(session, fed.asked, answered=True)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """These bars' credits come back."""
        self._give_back(tape.name, len(records))

    def open_lines(self, session: str) -> list[int]:
        """The session's open bars behind its newest version, as tokens; none while bars between them wait."""
        fed = self._fed[session]
        lines = self.plane.open_lines(session, fed.anchor)
        with self._lock:
            return [] if fed.on_the_way else lines

    # What the data plane calls, on its thread.

    def submit(self, made: Made) -> None:
        """Append the records to their tapes."""
        for model in self._models:
            tapes = model.built.tapes
            # each is looked up once: a command's thread may remove it, and then it is closed after this
            found = [
                (tape, self._fed[name], records)
                for name, records in made
                if (tape := tapes.get(name)) is not None
            ]
            with self._lock:
                for _, fed, records in found:
                    fed.ahead += len(records)
            model.scheduler.append(
                *((tape, [fed.take(each) for each in records]) for tape, fed, records in found)
            )

    def room(self, session: str) -> int:
        """How many more bars the scheduler takes."""
        fed = self._fed[session]
        if fed.paused or (fed.ahead and self.phase(session) is not Phase.LIVE):
            return 0
        return self._most - fed.ahead

    def phase(self, session: str) -> Phase:
        """Bars answered before go version by version, as the first time, and so do `IN_ORDER` behind them."""
        fed = self._fed[session]
        if fed.history.rebuilding:
            return Phase.REBUILDING
        in_order = self._config.flash.every_bar or (self._rereads and fed.unanswered < IN_ORDER)
        return Phase.IN_ORDER if in_order else Phase.LIVE

    def may_close_idle(self, session: str) -> bool:
        """Records of the open bars may wait behind what the other daemon has committed."""
        return self.lives.state(session) not in FOLLOWING

    def watch(self, session: str, bars: Bars) -> None:
        """Pass the bars on to who watches."""
        self._watch(session, bars)

    def restart(self, session: str, restart: Restart) -> None:
        """Give a session its new window, behind a new anchor if it is compact; its next bars wait for it, and
        questions do not.
        """
        model = self._model(session)
        tape = model.built.tapes.get(session)
        if tape is None:
            return
        window = [TapeItem(tokens, None, event) for tokens, event in restart.window]
        refresh = partial(model.scheduler.refresh, tape, window=window)
        header = None if restart.anchor is None else restart.anchor.header
        model.built.prefixes.anchor(tape.name, header, refresh)

    def halt(self, session: str, is_halted: bool) -> None:
        """Tell the gateway."""
        self._emit(SessionHalted(session, is_halted))

    def refuse(self, session: str, refused: RefusedRecord) -> None:
        """Count and report a record."""
        reason = "quality" if refused.reason in FAULT_NAMES else refused.reason
        self._store.inc("foretick_records_refused_total", session=session, reason=reason)
        self._emit(refusal_of(session, refused))

    def _spec(
        self,
        session: SessionConfig,
        line: LineSpec | CompactSpec,
        rolls: Mapping[str, Rolls],
        since_ns: int = 0,
    ) -> SessionSpec:
        own = [rolls.get(symbol, Rolls()) for symbol in session.symbols]
        feeds = feeds_of(self._config, session, self._symbols, since_ns, line, own)
        if isinstance(line, LineSpec):
            line = replace(line, rolls=tuple(each.moments for each in own))
        built, _, tokeniser = self._model(session.name)
        kept = built.tapes[session.name].retention
        window = TapeWindow(kept.tokens, kept.records, kept.span_ns)
        return SessionSpec(session.name, feeds, line, window, self._config.events.text_tokens, tokeniser)

    def _model(self, session: str) -> _Model:
        """The session's; of one that is gone, the first."""
        return next((each for each in self._models if session in each.built.lines), self._models[0])

    def _progress(self, session: str) -> Progress:
        return self._model(session).built.progress.get(session, Progress())

    def _feed(self, session: SessionConfig) -> _Fed:
        known = self._progress(session.name)
        symbols = len(session.symbols)
        life = self.lives.of(session.name)
        return _Fed(History(life, symbols, known.closed, written=known.written))

    def _leave(self) -> None:
        self._leave_ring.set()
        self._ring.wake()

    def _finish(self, idle: Callable[[], bool]) -> bool:
        """Take the rest, at the engine's pace, and close the open bars; False if `stop` came first."""
        while self._ring.fill and not self._stop.is_set():
            if not self.plane.step():
                self._stop.wait(0.001)
        if not self._stop.is_set():
            self.plane.flush()
        # In this order: bars that no longer wait are committed, and the worker is idle only after their work.
        while not (self.plane.waiting == 0 and not any(fed.ahead for fed in self._fed.values()) and idle()):
            if self._stop.wait(0.001):
                return False
            self.plane.step()
        return True

    def _give_back(self, session: str, credits: int, *, answered: bool = False) -> None:
        with self._lock:
            self._fed[session].ahead -= credits
            self._fed[session].asked -= credits * answered
        if self.plane.waits(session):
            self._ring.wake()
