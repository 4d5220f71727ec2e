"""The data plane: drains the ring, builds bars, makes tokens and passes whole records to the sessions.

It runs on the engine's ingest thread and never blocks a producer. Bars wait in a backlog of their session
until the engine has `room` for them (`ingest.backlog`). Of a source that can wait, records stay in the ring
while any backlog is full, which pauses the source. The session of an overwritten record is unknown, so a loss
flags the next bars of *every* session.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from ingest.backlog import Backlog, TapeWindow
from ingest.bar_kernel import (
    AMENDS,
    BAR,
    EVENT,
    GAP,
    INCOMPLETE,
    LACKS_LATE,
    LATE,
    NEVER,
    RESETS,
    Bars,
)  # fmt: skip
from ingest.bars import (
    COUNTS,
    BarBuilder,
    BarPolicy,
    Count,
    Feeds,
    RefusedRecord,
    hold_all_back,
    hold_back,
    reads_of,
    received_before,
)
from ingest.compact import Anchor, CompactEncoder, CompactSpec, Encoded, Restart, fields_of
from ingest.events import event_tokens, words_in, words_of
from ingest.late_updates import Amender
from ingest.lines import LineSpec
from ingest.plane_state import BuilderState, PlaneState, Rows, Taken
from ingest.record import FLAG_MORE, RECORD, LowWatermarks, ReadRange, Records
from ingest.retained import Retained
from ingest.ring import Ring
from ingest.rollup import SummedBar
from ingest.tokens import Tokeniser
from ingest.words import Texts
from metrics.catalogue import EVENTS
from metrics.feed_faults import RULED
from metrics.histogram import Words, record
from metrics.store import HistogramHandle, MetricStore
from support.numba_kernel import kernel

log = logging.getLogger(__name__)

_STAGE = "foretick_stage_seconds"
_TICK_S, _REST_S = 0.05, 1.0
"""Longest sleep with and without idle bars, or bars held back, to look for."""
_OF_BAR = ~(LACKS_LATE | INCOMPLETE)
"""Flags of a bar that its record has, too."""
_OF_RECORD = [
    *("ts_last_event", "ts_source", "ts_ring", "ts_closed", "ring_wait", "leg", "flags"),
    *("ts_open", "o", "h", "l", "c", "v", "v_high", "v_low"),
]
"""What a tape record has of its bar."""
_REPORT_NS = 60_000_000_000
"""Shortest time between two lines of the log on late records of a session."""
_DRAIN = 4096  # records per step; bounds how long one step holds the GIL
_COUNTED: Mapping[Count, str] = {
    "late": "records_late",
    "ignored": "records_ignored",
    "jumps": "price_jumps",
    "repeated": "records_in_snapshot",
    "duplicates": "records_duplicate",
    "taken": "records_in_bars",
    "dropped": "records_dropped",
}
"""The metrics of what the builder counts of a session's records."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session for ingest: where its bars come from, and how they are written."""

    name: str
    feeds: Feeds
    line: LineSpec | CompactSpec = field(default_factory=LineSpec)
    window: TapeWindow = field(default_factory=TapeWindow)
    text_tokens: int = 48
    """Most tokens of a text in a line."""
    tokeniser: Tokeniser | None = None
    """Of its model; None: the plane's."""


class TapeRecord(msgspec.Struct, frozen=True, gc=False):
    """One whole record of a tape (the line of a bar, or of an event) with its provenance.

    Of its newest tick, in ns: `ts_last_event` is the exchange time, `ts_source` the wall clock when the
    broker or socket had it, and `ts_ring` the monotonic clock when it entered the ring; `ts_closed` is that
    of the record that closed the bar. `flags` are those of `ingest.bars`; LACKS_LATE and INCOMPLETE say so of
    the window that ends with it. `ring_wait_ns` is the newest tick's; `bars_ns` and `tokenise_ns` are those
    of its batch. ``bar`` is the bar itself, of an event one of no bars. Of a compact session: the ``anchor``
    of its tokens, and whether any bar of the window that ends with it has a ``rounded`` price. ``reads``: see
    `ingest.bars.reads_of`.
    ``low_watermarks``: pairs of a stream and an offset; each record of the session below it is in this one or
    an earlier one, or was dropped.

    The engine adds the rest: ``ordinal``, the number of bars its session had before; ``closed``,
    ``written``: see `daemon.protocol.VersionInputs`; ``history``: an earlier engine answered it.
    """

    tokens: tuple[int, ...]
    ts_last_event: int
    ts_source: int
    ts_ring: int
    ts_closed: int
    flags: int
    ring_wait_ns: int
    bars_ns: int
    tokenise_ns: int
    bar: SummedBar
    anchor: Anchor | None = None
    rounded: bool = False
    reads: tuple[ReadRange, ...] = ()
    low_watermarks: LowWatermarks = ()
    ordinal: int = 0
    closed: tuple[int, ...] = ()
    written: LowWatermarks = ()
    history: bool = False


Made = list[tuple[str, list[TapeRecord]]]
"""(session, its records), of one batch of the ring: each session's in order."""

WatchBars = Callable[[str, Bars], None]
"""Sees (session, BAR [n]) of its closed bars, and of the corrections of earlier ones, in order."""


class Phase(Enum):
    """How a session's next bars go to the engine."""

    LIVE = "live"
    """As many at a time as it has room for."""
    IN_ORDER = "in order"
    """As many at a time as one record closes: each version is made as the first time."""
    REBUILDING = "rebuilding"
    """As in order. An earlier engine answered them, so they are neither held nor skipped."""


class BarConsumer:
    """What a data plane feeds. It takes all bars as they come; override what differs.

    The plane's thread calls these methods, and an exception of `submit` or `restart` ends its step.
    """

    def submit(self, made: Made) -> None:
        """Take records, those of all sessions together."""
        raise NotImplementedError

    def room(self, session: str) -> int:
        """How many more bars it takes now: wake the ring when that grows and the session `waits`."""
        return sys.maxsize

    def phase(self, session: str) -> Phase:
        """How the session's next bars are to come."""
        return Phase.LIVE

    def may_close_idle(self, session: str) -> bool:
        """Whether its open bars are closed when it is idle; until then it is not idle."""
        return True

    def watch(self, session: str, bars: Bars) -> None:
        """See closed bars, and corrections of earlier ones, BAR [n], in order, before they are submitted."""

    def restart(self, session: str, restart: Restart) -> None:
        """Note a new anchor, or that the window begins again, before the first record behind that."""

    def halt(self, session: str, is_halted: bool) -> None:
        """Note that a session's trading has halted, or goes on: when the record comes, before its row."""

    def refuse(self, session: str, refused: RefusedRecord) -> None:
        """Note a record that a session refuses."""


class _DecimalEncoder:
    """Encodes a session's bars and events as decimal lines; `amender` changes what is written already."""

    def __init__(self, tokeniser: Tokeniser, spec: LineSpec, texts: Texts) -> None:
        self.amender: Amender | None = None
        self._rounded = 0
        self._tokeniser, self._spec, self._texts = tokeniser, spec, texts
        self._text_tokens = 0

    def change(self, spec: LineSpec, window: TapeWindow, policy: BarPolicy, text_tokens: int) -> None:
        """Write lines so from now on."""
        self._spec, self._text_tokens = spec, text_tokens
        amends = policy.late == "amend"
        if not amends and policy.on_split != "adjust":
            self.amender = None
        elif self.amender is None:
            self.amender = Amender(self._lines, window, amends=amends)
        else:
            self.amender.change(window, amends=amends)

    @property
    def totals(self) -> dict[str, int]:
        """What it has counted, by metric; corrections since late records began to amend."""
        amended = 0 if self.amender is None else self.amender.amended
        return {"bars_rounded": self._rounded, "records_amended": amended}

    def encode(self, bars: Bars) -> list[Encoded]:
        """The bars that are to be appended, in their pieces."""
        if self.amender is not None:
            bars, lines, restarts = self.amender.encode(bars)
        else:
            bars = bars[(bars["flags"] & LATE) == 0]  # of an earlier policy
            lines = self._lines(bars)
            borders = np.flatnonzero(bars["flags"] & np.uint32(RESETS)).tolist()
            restarts = dict.fromkeys(borders, Restart(None, ()))
        return [
            Encoded(bars[start:end], lines[start:end], restart=restarts.get(start))
            for start, end in pairwise(sorted({0, *restarts, len(bars)}))
        ]

    def _lines(self, rows: Bars) -> list[list[int]]:
        is_event = (rows["flags"] & np.uint32(EVENT)) != 0
        if not is_event.any():
            return self._of_bars(rows)
        of_bars = iter(self._of_bars(rows[~is_event]))
        pairs = zip(rows, is_event.tolist(), strict=True)
        return [self._of_event(row) if event else next(of_bars) for row, event in pairs]

    def _of_event(self, row: np.void) -> list[int]:
        words = self._tokeniser.plain(self._texts.find(words_of(row)))
        return list(event_tokens(row, self._spec, words, self._tokeniser.encode, self._text_tokens))

    def _of_bars(self, bars: Bars) -> list[list[int]]:
        unit = 10 ** (self._spec.price_scale - self._spec.price_decimals)
        exact = np.logical_and.reduce([bars[name] % unit == 0 for name in "ohlc"])
        self._rounded += len(bars) - int(np.count_nonzero(exact))
        return self._tokeniser.lines(bars, self._spec)


class _Session:
    """A session's waiting bars, encoder and counters. ``bars_ns``: what making its newest bars took."""

    def __init__(
        self, spec: SessionSpec, tokeniser: Tokeniser, texts: Texts, metrics: MetricStore, skips: bool
    ) -> None:
        self.spec, self._texts = spec, texts
        self._encoder: CompactEncoder | _DecimalEncoder = (
            CompactEncoder(tokeniser, spec.line)
            if isinstance(spec.line, CompactSpec)
            else _DecimalEncoder(tokeniser, spec.line, texts)
        )
        self.backlog = Backlog(spec.window, skips=skips)
        self._retained: Retained[int | None] = Retained(spec.window)
        """The records on its tape by the openings of their bars; None: a correction, or an event."""
        self.bars_ns = 0
        self.releasing = False
        """Bars from the backlog are on their way to the engine, until `released`."""
        self.restored = False
        """It came from a snapshot, and nothing behind that has been read yet."""
        self._late = self._late_event = 0
        """Late records so far, and the event time of the newest one, ns."""
        self._late_reported = self._report_late_at = 0
        self._left_out = 0
        """Bars to come that are dropped."""
        self.bars = metrics.counter("foretick_bars_total", session=spec.name)
        self.waiting = metrics.gauge("foretick_bars_waiting", session=spec.name)
        self.waiting.set(0)  # an engine before this one may have ended while some waited
        self._growths = {
            name: metrics.growth(f"foretick_{name}_total", session=spec.name)
            for name in ("bars_skipped", "bars_rounded", "records_amended", "volumes_saturated", "anchors")
        }
        self._records = [
            *(metrics.growth(f"foretick_{_COUNTED[each]}_total", session=spec.name) for each in COUNTS),
            *(metrics.growth("foretick_events_total", session=spec.name, kind=kind) for kind in EVENTS),
        ]
        """In the order of `BarBuilder.totals`."""
        self.halted = False
        self.change(spec)

    def change(self, spec: SessionSpec) -> None:
        """Another policy or retention."""
        self.spec = spec
        self.backlog.retain(spec.window)
        self._retained.change(spec.window)
        match self._encoder, spec.line:
            case CompactEncoder() as compact, CompactSpec() as line:
                compact.retain(line)
            case _DecimalEncoder() as decimal, LineSpec() as line:
                decimal.change(line, spec.window, spec.feeds.policy, spec.text_tokens)

    def report_late(self, now_ns: int) -> None:
        """Log how many records came late since the last time, once in `_REPORT_NS`."""
        if self._late == self._late_reported or now_ns < self._report_late_at:
            return
        log.warning(
            "session %s: %d records came after their bar had closed (bars.late = %s), the newest one of %s",
            self.spec.name,
            self._late - self._late_reported,
            self.spec.feeds.policy.late,
            np.datetime64(self._late_event, "ns"),
        )
        self._late_reported, self._report_late_at = self._late, now_ns + _REPORT_NS

    def halt(self, is_halted: bool) -> None:
        """Its trading has halted, or goes on."""
        self.halted = is_halted

    def count_records(self, totals: Sequence[int], late_event: int) -> None:
        """Note its row of `BarBuilder.totals`, and the event time of its newest late record, ns."""
        for growth, total in zip(self._records, totals, strict=True):
            growth.update(total)
        self._late, self._late_event = totals[COUNTS.index("late")], late_event

    def exclude(self, bars: int) -> None:
        """Drop the next ``bars`` when they close."""
        self._left_out = bars

    def go_on(self) -> None:
        """It is read from now on, if it came from a snapshot."""
        self.restored = False

    def take(self, n: int, now_ns: int) -> Bars | None:
        """The ``n`` oldest bars of the backlog, BAR [n], on their way to the engine; None for no bar."""
        self.releasing = n > 0
        return self.backlog.take(n, now_ns) if n > 0 else None

    def released(self) -> None:
        """What was taken is with the engine."""
        self.releasing = False

    def cut(self, builder: BuilderState) -> PlaneState:
        """Its state, with that of its open bars."""
        encoder = self._encoder
        compact = encoder.cut() if isinstance(encoder, CompactEncoder) else None
        amender = None if self._amender is None else self._amender.cut()
        waiting, retained = Rows.of(self.backlog.bars), self._retained.rows()
        texts = self._texts.cut(words_in(self.backlog.bars))
        return PlaneState(builder, waiting, self.backlog.shortest, retained, compact, amender, texts)

    @property
    def _amender(self) -> Amender | None:
        return self._encoder.amender if isinstance(self._encoder, _DecimalEncoder) else None

    def restore(self, cut: PlaneState, number: int, now_ns: int) -> None:
        """Go on from a cut, as session ``number``. Raises ValueError for another kind of session."""
        encoder, amender = self._encoder, self._amender
        is_compact = isinstance(encoder, CompactEncoder)
        if is_compact != (cut.compact is not None) or (amender is None) != (cut.amender is None):
            raise ValueError("the stored session wrote its bars in another way")
        self.restored = True
        waiting = cut.waiting.array(BAR)
        received_before(waiting, number, now_ns)
        self._texts.restore(cut.texts)
        self.backlog.restore(waiting, cut.shortest)
        self._retained.restore(cut.retained)
        if isinstance(encoder, CompactEncoder) and cut.compact is not None:
            encoder.restore(cut.compact)
        if amender is not None and cut.amender is not None:
            amender.restore(cut.amender)

    def add(self, bars: Bars, bars_ns: int, *, rebuilding: bool) -> None:
        """Its closed bars wait, with late records among them, and are counted."""
        dropped = min(self._left_out, len(bars))
        if dropped:
            self._left_out, bars = self._left_out - dropped, bars[dropped:]
        self.bars.inc(int(np.count_nonzero((bars["flags"] & (LATE | EVENT)) == 0)))
        self.backlog.add(bars, all_count=rebuilding)
        self.bars_ns = bars_ns
        self._grow(bars_skipped=self.backlog.skipped)

    def encode(self, bars: Bars) -> list[Encoded]:
        """Encode bars from its backlog, in pieces of one anchor each."""
        pieces = self._encoder.encode(bars)
        self._grow(**self._encoder.totals)
        for piece in pieces:
            self.backlog.learn(piece.lines)
        return pieces

    def lacking(self, piece: Encoded) -> list[int]:
        """Append bars with their lines; flags that say what the window ending with each lacks."""
        bars, lines = piece.bars, piece.lines
        if (restart := piece.restart) is not None and (restart.anchor is None or not restart.window):
            self._retained.clear()
            for (tokens, event), opened in zip(restart.window, restart.opened, strict=True):
                self._retained.add(opened, len(tokens), event)
        events, keys = bars["ts_last_event"].tolist(), bars["ts_open"].tolist()
        for at in np.flatnonzero(bars["flags"] & (AMENDS | EVENT)).tolist():
            keys[at] = None
        lengths = list(map(len, lines))
        if np.maximum(bars["late_open"], bars["refused_open"]).max() == NEVER:
            self._retained.defer(keys, lengths, events)
            return [0] * len(keys)
        rows = zip(keys, lengths, events, strict=True)
        found = []
        for row, bar in zip(rows, bars, strict=True):
            self._retained.add(*row)
            oldest = next((key for key in self._retained if key is not None), NEVER + 1)
            late, refused = bar["late_open"] >= oldest, bar["refused_open"] >= oldest
            found.append((LACKS_LATE if late else 0) | (INCOMPLETE if refused else 0))
        return found

    def _grow(self, **totals: int) -> None:
        for name, total in totals.items():
            self._growths[name].update(total)


@kernel
def record_waits(words: Words, base: int, records: Records, now: int) -> None:
    """Observe every record's time in the ring."""
    for i in range(records.shape[0]):
        waited: Any = now - np.int64(records[i]["ts_ring"])
        record(words, base, waited)


class DataPlane:
    """Ring in, tape records out to the consumer, those of all sessions together.

    ``source`` labels the ring's metrics, ``clock`` is the monotonic clock in ns. ``skips``: the source cannot
    wait, see `ingest.backlog`. The plane is the only writer of the metrics that it counts.
    """

    def __init__(
        self,
        ring: Ring,
        source: str,
        tokeniser: Tokeniser,
        specs: Sequence[SessionSpec],
        consumer: BarConsumer,
        metrics: MetricStore,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        skips: bool = False,
    ) -> None:
        self._ring, self._tokeniser, self._consumer = ring, tokeniser, consumer
        self._metrics, self._skips, self._clock = metrics, skips, clock
        self._builder = BarBuilder([spec.feeds for spec in specs])
        texts = self._builder.texts
        self._sessions = [
            _Session(spec, spec.tokeniser or tokeniser, texts, metrics, skips) for spec in specs
        ]
        self._by_name = {spec.name: each for spec, each in zip(specs, self._sessions, strict=True)}
        self._changes: deque[tuple[Sequence[SessionSpec], Callable[[], None]]] = deque()
        self._drained_until = clock()
        """All that came before this time was taken out of the ring."""
        self._building = threading.Lock()
        """Held while open bars change. Nothing is called meanwhile that may wait for another thread."""
        self._buffer = np.zeros(_DRAIN, RECORD)
        self._incomplete = 0, 0
        """Stream and offset of a message whose other records are still in the ring."""
        # earlier readers have counted the losses until now
        self._dropped = metrics.growth("foretick_ring_dropped_total", ring.lost, source=source)
        self._faults = [
            metrics.growth("foretick_feed_faults_total", source=source, kind=kind.name) for kind in RULED
        ]
        self._fill = metrics.gauge("foretick_ring_fill_ratio", source=source)
        self._ring_wait = metrics.histogram(_STAGE, stage="ring_wait")
        self._bars = metrics.histogram(_STAGE, stage="bars")
        self._tokenise = metrics.histogram(_STAGE, stage="tokenise")

    def change(self, specs: Sequence[SessionSpec], done: Callable[[], None] = lambda: None) -> None:
        """Have these sessions from the next step on, which then calls `done`. Any thread may call this.

        A session of the same name and feeds goes on as it is. With another policy its open bars are closed
        first. Open bars of a session that is gone are dropped.
        """
        self._changes.append((specs, done))
        self._ring.wake()

    def step(self) -> int:
        """Drain the ring once and release bars; returns the number of records, 0 while a backlog is full."""
        until = self._ring.read_until or sys.maxsize  # before the ring is read: it has all up to there
        popped = None if self.full else self._pop()
        # behind the pop: a change is here before the first record that was sent for it is in the ring
        while self._changes:
            self._change_next()
        drained = 0 if popped is None else self._take(popped)
        if self._builder.closes_idle:
            now_ns = self._drained_until
            with self._building:
                self._builder.restart_idle_clock(now_ns, self._held_open())
                self._accept(self._builder.close_idle(min(now_ns, until)), 0)
        self._release()
        now_ns = self._clock()
        for session in self._sessions:
            session.report_late(now_ns)
        return drained

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; waits on the ring when it is empty. Wake the ring when `stop` is set."""
        while not stop.is_set():
            if self.step():
                continue
            if self.full:
                stop.wait(0.001)
            else:
                held = self._builder.closes_idle or self.waiting
                self._ring.wait(_TICK_S if held else _REST_S)

    def exclude(self, session: str, bars: int) -> None:
        """Drop the next ``bars`` of a session when they close. Call it on the thread that steps."""
        self._by_name[session].exclude(bars)

    def flush(self, until_ns: int = 0) -> None:
        """Close every open bar at the end of the input. Call it on the thread that steps.

        ``until_ns``: see `BarBuilder.close`.
        """
        with self._building:
            for session in self._sessions:
                session.go_on()
            self._accept(self._builder.flush(until_ns), 0)
        self._release()

    @property
    def full(self) -> bool:
        """A backlog is full, so the ring is not read."""
        return any(session.backlog.full and not session.restored for session in self._sessions)

    @property
    def waiting(self) -> int:
        """Bars that wait for room."""
        return sum(len(session.backlog) for session in self._sessions)

    def waits(self, session: str) -> bool:
        """Whether bars of the session wait for room. Any thread."""
        found = self._by_name.get(session)
        return found is not None and (found.releasing or len(found.backlog) > 0)

    def open_lines(self, session: str, anchor: Anchor | None = None) -> list[int]:
        """A session's open bars as they are now: the token ids of their lines, if compact around ``anchor``.

        None where closed bars wait to be appended, which come first, and where a price does not fit around
        the anchor. Any thread.
        """
        with self._building:
            names = [each.spec.name for each in self._sessions]
            if session not in names or self.waits(session):
                return []
            found, bars = self._by_name[session], self._builder.open_bars(names.index(session))
        lines: list[list[int]] = []
        tokeniser = found.spec.tokeniser or self._tokeniser
        if isinstance(found.spec.line, LineSpec):
            lines = tokeniser.lines(bars, found.spec.line)
        elif anchor is not None:
            with suppress(ValueError):
                lines = tokeniser.compact(fields_of(bars, anchor))
        return [token for line in lines for token in line]

    def cut(
        self, session: str, settled: Callable[[], bool] = lambda: True
    ) -> tuple[PlaneState, list[Taken]] | None:
        """A session's state, and where the newest record of each of its symbols was read. Any thread.

        None while bars are on their way to the engine, or where they are not ``settled`` there.
        """
        with self._building:
            names = [each.spec.name for each in self._sessions]
            if session not in names:
                return None
            found, number = self._by_name[session], names.index(session)
            if found.releasing or not settled():
                return None
            return found.cut(self._builder.cut(number)), self._builder.positions(number)

    def restore(self, session: str, cut: PlaneState, reread: Sequence[bool]) -> None:
        """Have a new session go on from a `cut`, before its first record.

        ``reread``, by symbol: its stream is read from there again, so what it had taken is ignored. Of the
        others, records may be lost. Its waiting bars are held, and its open ones are not idle, before `go_on`
        or a bar that new records close: until then another daemon may answer them, or have done so. Raises
        ValueError, with nothing kept, for the cut of another session.
        """
        with self._building:
            number = [each.spec.name for each in self._sessions].index(session)
            now_ns = self._clock()
            self._builder.restore(number, cut.builder, reread, now_ns)
            self._by_name[session].restore(cut, number, now_ns)
            self._by_name[session].halt(self._builder.halted[number])

    def go_on(self, sessions: Collection[str]) -> None:
        """These sessions are read from now on. On the thread that steps."""
        now_ns = self._clock()
        with self._building:
            for number, each in enumerate(self._sessions):
                if each.restored and each.spec.name in sessions:
                    each.go_on()
                    self._builder.restart_idle_clock(now_ns, [number])

    def mark_gap(self) -> None:
        """Records of any session may be lost: see `BarBuilder.mark_gap`."""
        self._builder.mark_gap()

    def _change_next(self) -> None:
        """Make the next change, and those behind it in one step: unless they remove a session of it, or
        bring one back that it removes, which begins again.
        """
        specs, done = self._changes.popleft()
        names, calls = {spec.name for spec in specs}, [done]
        gone = self._by_name.keys() - names
        while self._changes:
            following = {spec.name for spec in self._changes[0][0]}
            if not names <= following or gone & following:
                break
            specs, done = self._changes.popleft()
            names = following
            calls.append(done)
        self._change(specs)
        for call in calls:
            call()

    def _change(self, specs: Sequence[SessionSpec]) -> None:
        policies = {spec.name: spec.feeds.policy for spec in specs}
        now = {each.spec.name: number for number, each in enumerate(self._sessions)}
        kept = [now.get(spec.name) for spec in specs]
        closing = [
            number
            for name, number in now.items()
            if name in policies and policies[name] != self._sessions[number].spec.feeds.policy
        ]
        with self._building:
            self._accept(self._builder.close(closing), 0)
            self._builder.change([spec.feeds for spec in specs], kept)
            sessions: list[_Session] = []
            for spec, number in zip(specs, kept, strict=True):
                if number is None:
                    texts, tokeniser = self._builder.texts, spec.tokeniser or self._tokeniser
                    sessions.append(_Session(spec, tokeniser, texts, self._metrics, self._skips))
                else:
                    sessions.append(self._sessions[number])
                    if spec is not sessions[-1].spec:
                        sessions[-1].change(spec)
            self._sessions = sessions
            self._by_name = {session.spec.name: session for session in sessions}

    def _held_open(self) -> list[int]:
        """Sessions that are not idle, however long they have no record."""
        may_close = self._consumer.may_close_idle
        return [n for n, each in enumerate(self._sessions) if each.restored or not may_close(each.spec.name)]

    def _pop(self) -> Records:
        """The oldest records of the ring, RECORD [n]; valid until the next call."""
        self._fill.set(self._ring.fill)
        now_ns = self._clock()
        n = self._ring.pop(self._buffer)
        # a session is not idle while its records are behind others in the ring
        self._drained_until = int(self._buffer[n - 1]["ts_ring"]) if n and self._ring.fill else now_ns
        return self._buffer[:n]

    def _take(self, records: Records) -> int:
        """Make bars of them; returns how many they are."""
        if self._dropped.update(self._ring.lost):  # the loss lies before the records that were popped
            self._builder.mark_gap()
        if not len(records):
            return 0
        newest = records[-1]
        more = newest["flags"] & FLAG_MORE
        self._incomplete = (int(newest["stream"]), int(newest["offset"])) if more else (0, 0)
        started = self._clock()
        record_waits(self._ring_wait.words, self._ring_wait.base, records, started)
        with self._building:
            bars = self._builder.update(records, started)
            bars_ns = self._since(started, self._bars)
            for number in np.unique(bars["session"]).tolist():
                self._sessions[number].go_on()
            self._accept(bars, bars_ns)
            if self._builder.texts.many:
                used = {n for each in self._sessions for n in words_in(each.backlog.bars)}
                self._builder.texts.forget(used)
        self._note_halts()
        self._count_records()
        for refused in self._builder.take_refused():
            self._consumer.refuse(self._sessions[refused.session].spec.name, refused)
        return len(records)

    def _count_records(self) -> None:
        for growth, total in zip(self._faults, self._builder.faults.tolist(), strict=True):
            growth.update(total)
        late_events = self._builder.late_events
        for number, totals in self._builder.grown():
            self._sessions[number].count_records(totals, late_events[number])

    def _note_halts(self) -> None:
        """Tell the consumer which sessions have halted, or go on."""
        for session, is_halted in zip(self._sessions, self._builder.halted, strict=True):
            if is_halted != session.halted:
                session.halt(is_halted)
                self._consumer.halt(session.spec.name, is_halted)

    def _accept(self, bars: Bars, bars_ns: int) -> None:
        for number in np.unique(bars["session"]).tolist():
            session = self._sessions[number]
            rebuilding = self._consumer.phase(session.spec.name) is Phase.REBUILDING
            session.add(bars[bars["session"] == number], bars_ns, rebuilding=rebuilding)

    def _release(self) -> None:
        """Encode and submit the bars that the engine has room for."""
        # one call for all sessions: the engine wakes at the first and would begin a pass with it alone
        made: Made = []
        now_ns = self._clock()
        for number, session in enumerate(self._sessions):
            if not len(session.backlog):
                continue
            # late records that correct nothing make no version, whose commit would wake the ring
            while self._release_of(number, session, now_ns, made):
                pass
            session.waiting.set(len(session.backlog))
        if made:
            self._consumer.submit(made)
        for session in self._sessions:
            session.released()

    def _release_of(self, number: int, session: _Session, now_ns: int, made: Made) -> bool:
        """Encode what the engine has room for into ``made``; true for bars that give nothing to submit."""
        with self._building:  # so that a cut is before or behind it
            name, backlog = session.spec.name, session.backlog
            phase = self._consumer.phase(name)
            held = session.restored or (backlog.held(now_ns) and phase is not Phase.REBUILDING)
            room = 0 if held else self._consumer.room(name)
            bars = session.take(room if phase is Phase.LIVE else min(room, backlog.together), now_ns)
            if bars is None or not len(bars):
                return False
            lows = self._low_watermarks(number, session)
        started = self._clock()
        pieces = session.encode(bars)
        tokenise_ns = self._since(started, self._tokenise)
        for piece, origins in zip(pieces, _origins(pieces, lows), strict=True):
            is_bar = (piece.bars["flags"] & np.uint32(EVENT)) == 0
            self._consumer.watch(name, piece.bars if is_bar.all() else piece.bars[is_bar])
            if piece.restart is not None:
                if made:  # records before the restart belong to the old window
                    self._consumer.submit(made[:])
                    made.clear()
                self._consumer.restart(name, piece.restart)
            lacking = session.lacking(piece)
            made.append((name, _tape_records(piece, lacking, origins, session.bars_ns, tokenise_ns)))
        return not pieces

    def _low_watermarks(self, number: int, session: _Session) -> dict[int, int]:
        """By stream, the offset below which each record so far was dropped, or is in no bar that waits."""
        lows = self._builder.low_watermarks(number)
        if len(session.backlog):
            hold_all_back(lows, session.backlog.bars)
        stream, offset = self._incomplete
        if lows.get(stream, 0) > offset:
            lows[stream] = offset
        return lows

    def _since(self, started: int, histogram: HistogramHandle) -> int:
        took = self._clock() - started
        histogram.observe(took)
        return took


_Origin = tuple[tuple[ReadRange, ...], LowWatermarks]
"""Where the records of a bar were read, and the low watermarks when it is on the tape."""


def _origins(pieces: Sequence[Encoded], lows: dict[int, int]) -> list[list[_Origin]]:
    """Of each bar, by piece; ``lows``: the low watermarks behind the last one, changed in place."""
    found: list[list[_Origin]] = []
    for piece in reversed(pieces):
        own: list[_Origin] = []
        rows = zip(reads_of(piece.bars), piece.bars["flags"].tolist(), strict=True)
        for reads, flags in reversed(list(rows)):
            own.append((reads, tuple(lows.items())))
            hold_back(lows, reads, flags)
        found.append(own[::-1])
    return found[::-1]


def _tape_records(
    piece: Encoded, lacking: Sequence[int], origins: Sequence[_Origin], bars_ns: int, tokenise_ns: int
) -> list[TapeRecord]:
    """The tape records of a piece; ``lacking``: flags of their windows."""
    rounded = piece.rounded or [False] * len(piece.lines)
    records = []
    columns = zip(*(piece.bars[name].tolist() for name in _OF_RECORD), strict=True)
    rows = zip(piece.lines, rounded, lacking, columns, origins, strict=True)
    for tokens, shows, lacks, bar, origin in rows:
        event, source, ring, closed, ring_wait, leg, flags, opened = bar[:8]
        first_price, high, low, last_price, volume, volume_high, volume_low = bar[8:]
        prices, gap = (first_price, high, low, last_price), bool(flags & GAP)
        if flags & EVENT:
            summed = SummedBar(opened, 0, 0, 0, 0, 0, 0, gap, leg)
        else:
            summed = SummedBar(opened, *prices, volume, 1, gap, leg, volume_high, volume_low)
        took = ring_wait, bars_ns, tokenise_ns
        flags = flags & _OF_BAR | lacks
        made = TapeRecord(
            tuple(tokens), event, source, ring, closed, flags, *took, summed, piece.anchor, shows, *origin
        )
        records.append(made)
    return records
