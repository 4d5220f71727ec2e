"""The data plane: drains the ring, builds bars, makes tokens and passes whole records to the sessions.

It runs on the engine's ingest thread and never blocks a producer. Bars wait in a backlog of their session
until the engine has `room` for them (`ingest.backlog`). Of a source that can wait, records stay in the ring
while any backlog is full, which pauses the source. The session of an overwritten record is unknown, so a loss
flags the next bars of *every* session.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingest.backlog import Backlog, Window
from ingest.bars import BarBuilder, Bars
from ingest.compact import Anchor, CompactEncoder, CompactSpec, Encoded, Restart
from ingest.lines import LineSpec
from ingest.record import RECORD, Records
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.histogram import Words, record
from metrics.kernel import kernel
from metrics.store import HistogramHandle, MetricStore

_STAGE = "foretick_stage_seconds"
_TICK_S, _REST_S = 0.05, 1.0
"""Longest sleep with and without idle bars, or bars held back, to look for."""
_DRAIN = 4096  # records per step; bounds how long one step holds the GIL


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session for ingest; its number is its index in the plane's list."""

    name: str
    line: LineSpec | CompactSpec = field(default_factory=LineSpec)
    window: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class TapeRecord:
    """One whole record of a tape (a bar's line) with its provenance.

    Of its newest tick, in ns: `ts_last_event` is the exchange time, `ts_source` the wall clock when the
    broker or socket had it, and `ts_ring` the monotonic clock when it entered the ring; `ts_closed` is that
    of the record that closed the bar. Every
    offset of the session below `low_watermark` is in this record or an earlier one, or was dropped. `flags`
    are those of `ingest.bars`. `ring_wait_ns` is the newest tick's; `bars_ns` and `tokenise_ns` are those of
    its batch. Of a compact session: the ``anchor`` of its tokens, and whether any bar of the window that ends
    with it has a ``rounded`` price.
    """

    tokens: tuple[int, ...]
    ts_last_event: int
    ts_source: int
    ts_ring: int
    ts_closed: int
    first_offset: int
    last_offset: int
    low_watermark: int
    flags: int
    ring_wait_ns: int
    bars_ns: int
    tokenise_ns: int
    anchor: Anchor | None = None
    rounded: bool = False


Submit = Callable[[list[tuple[int, list[TapeRecord]]]], None]
"""Takes (session number, its records), of one batch of the ring: each session's in order."""


class _DecimalEncoder:
    """Encodes a session's bars as decimal lines."""

    rounded = saturated = anchors = 0

    def __init__(self, tokeniser: Tokeniser, spec: LineSpec) -> None:
        self._tokeniser, self._spec = tokeniser, spec

    def encode(self, bars: Bars) -> list[Encoded]:
        """See `CompactEncoder`."""
        return [Encoded(self._tokeniser.lines(bars, self._spec))]


def _encoder(tokeniser: Tokeniser, spec: LineSpec | CompactSpec) -> _DecimalEncoder | CompactEncoder:
    if isinstance(spec, LineSpec):
        return _DecimalEncoder(tokeniser, spec)
    return CompactEncoder(tokeniser, spec)


@kernel
def record_waits(words: Words, base: int, records: Records, now: int) -> None:
    """Observe every record's time in the ring."""
    for i in range(records.shape[0]):
        waited: Any = now - np.int64(records[i]["ts_ring"])
        record(words, base, waited)


class DataPlane:
    """Ring in, tape records out through `submit`, those of all sessions together.

    `restart(session number, restart)` is called before the first record around a new anchor.
    `source` labels the ring's metrics, `clock` is the monotonic clock in ns. `idle_close_ns` (0: never)
    closes the bars of sessions silent for so long. `room(session number)` is how many more bars the engine
    takes now: wake the ring when that grows and the session `waits`. ``skips``: the source cannot wait, see
    `ingest.backlog`. The plane is the only writer of these metrics: the stages
    ring_wait, bars and tokenise, `foretick_bars_total`, `foretick_records_late_total`,
    `foretick_records_ignored_total`, `foretick_bars_rounded_total`, `foretick_volumes_saturated_total`,
    `foretick_anchors_total`, `foretick_bars_skipped_total`, `foretick_bars_waiting`,
    `foretick_ring_dropped_total` and `foretick_ring_fill_ratio`. An exception of
    `submit` or `restart` propagates from `step`, `flush` or `run`.
    """

    def __init__(
        self,
        ring: Ring,
        source: str,
        builder: BarBuilder,
        tokeniser: Tokeniser,
        specs: Sequence[SessionSpec],
        submit: Submit,
        metrics: MetricStore,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        room: Callable[[int], int] = lambda session: sys.maxsize,
        skips: bool = False,
        idle_close_ns: int = 0,
        restart: Callable[[int, Restart], None] = lambda session, restart: None,
    ) -> None:
        self._ring, self._builder, self._submit, self._restart = ring, builder, submit, restart
        self._encoders = [_encoder(tokeniser, spec.line) for spec in specs]
        self._backlogs = [Backlog(spec.window, skips=skips) for spec in specs]
        self._bars_ns = [0] * len(specs)
        self._clock, self._room, self._idle_close_ns = clock, room, idle_close_ns
        self._buffer = np.zeros(_DRAIN, RECORD)
        # earlier readers have counted the losses until now
        self._dropped = metrics.growth("foretick_ring_dropped_total", ring.lost, source=source)
        self._fill = metrics.gauge("foretick_ring_fill_ratio", source=source)
        names = [spec.name for spec in specs]
        self._late = [metrics.growth("foretick_records_late_total", session=name) for name in names]
        self._ignored = [metrics.growth("foretick_records_ignored_total", session=name) for name in names]
        self._bar_counters = [metrics.counter("foretick_bars_total", session=name) for name in names]
        self._rounded = [metrics.growth("foretick_bars_rounded_total", session=name) for name in names]
        self._saturated = [metrics.growth("foretick_volumes_saturated_total", session=name) for name in names]
        self._anchors = [metrics.growth("foretick_anchors_total", session=name) for name in names]
        self._skipped = [metrics.growth("foretick_bars_skipped_total", session=name) for name in names]
        self._waiting = [metrics.gauge("foretick_bars_waiting", session=name) for name in names]
        self._ring_wait = metrics.histogram(_STAGE, stage="ring_wait")
        self._bars = metrics.histogram(_STAGE, stage="bars")
        self._tokenise = metrics.histogram(_STAGE, stage="tokenise")

    def step(self) -> int:
        """Drain the ring once and release bars; returns the number of records, 0 while a backlog is full."""
        drained = 0 if self.full else self._drain()
        if self._idle_close_ns:
            self._accept(self._builder.close_idle(self._clock(), self._idle_close_ns), 0)
        self._release()
        return drained

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; waits on the ring when it is empty. Wake the ring when `stop` is set."""
        while not stop.is_set():
            if self.step():
                continue
            if self.full:
                stop.wait(0.001)
            else:
                held = self._idle_close_ns or self.waiting
                self._ring.wait(_TICK_S if held else _REST_S)

    def flush(self) -> None:
        """Close every open bar at the end of the input. Call it on the thread that steps."""
        self._accept(self._builder.flush(), 0)
        self._release()

    @property
    def full(self) -> bool:
        """A backlog is full, so the ring is not read."""
        return any(backlog.full for backlog in self._backlogs)

    @property
    def waiting(self) -> int:
        """Bars that wait for room."""
        return sum(map(len, self._backlogs))

    def waits(self, session: int) -> bool:
        """Whether bars of the session wait for room. Any thread."""
        return len(self._backlogs[session]) > 0

    def _drain(self) -> int:
        self._fill.set(self._ring.fill)
        n = self._ring.pop(self._buffer)
        if self._dropped.update(self._ring.lost):  # the loss lies before the records just drained
            self._builder.mark_gap(range(len(self._encoders)))
        if n == 0:
            return 0
        records = self._buffer[:n]
        started = self._clock()
        record_waits(self._ring_wait.words, self._ring_wait.base, records, started)
        bars = self._builder.update(records, started)
        bars_ns = self._since(started, self._bars)
        for growths, totals in ((self._late, self._builder.late), (self._ignored, self._builder.ignored)):
            for growth, total in zip(growths, totals, strict=True):
                growth.update(total)
        self._accept(bars, bars_ns)
        return n

    def _accept(self, bars: Bars, bars_ns: int) -> None:
        for session in np.unique(bars["session"]).tolist():
            own = bars[bars["session"] == session]
            self._bar_counters[session].inc(len(own))
            self._backlogs[session].add(own)
            self._skipped[session].update(self._backlogs[session].skipped)
            self._bars_ns[session] = bars_ns

    def _release(self) -> None:
        """Encode and submit the bars that the engine has room for."""
        # one call for all sessions: the engine wakes at the first and would begin a pass with it alone
        made: list[tuple[int, list[TapeRecord]]] = []
        now_ns = self._clock()
        for session, backlog in enumerate(self._backlogs):
            if not len(backlog):
                continue
            room = 0 if backlog.held(now_ns) else self._room(session)
            if room > 0:
                self._encode(session, backlog.take(room, now_ns), made)
            self._waiting[session].set(len(backlog))
        if made:
            self._submit(made)

    def _encode(self, session: int, bars: Bars, made: list[tuple[int, list[TapeRecord]]]) -> None:
        """Encode the bars of a session, and add them to what is ``made`` to be submitted."""
        started = self._clock()
        pieces = self._encoders[session].encode(bars)
        tokenise_ns = self._since(started, self._tokenise)
        self._count(session)
        for piece in pieces:
            now, bars = bars[: len(piece.lines)], bars[len(piece.lines) :]
            self._backlogs[session].learn(piece.lines)
            if piece.restart is not None:
                if made:  # records before the restart belong to the old window
                    self._submit(made[:])
                    made.clear()
                self._restart(session, piece.restart)
            made.append((session, _tape_records(piece, now, self._bars_ns[session], tokenise_ns)))

    def _count(self, session: int) -> None:
        encoder = self._encoders[session]
        self._rounded[session].update(encoder.rounded)
        self._saturated[session].update(encoder.saturated)
        self._anchors[session].update(encoder.anchors)

    def _since(self, started: int, histogram: HistogramHandle) -> int:
        took = self._clock() - started
        histogram.observe(took)
        return took


def _tape_records(piece: Encoded, bars: Bars, bars_ns: int, tokenise_ns: int) -> list[TapeRecord]:
    """The tape records of BAR [n] and their lines."""
    rounded = piece.rounded or [False] * len(bars)
    records = []
    for tokens, shows, bar in zip(piece.lines, rounded, bars.tolist(), strict=True):
        _, flags, *_, event, source, ring, closed, ring_wait, first, last, low_watermark = bar
        origin = (
            event,
            source,
            ring,
            closed,
            first,
            last,
            low_watermark,
            flags,
            ring_wait,
            bars_ns,
            tokenise_ns,
        )
        records.append(TapeRecord(tuple(tokens), *origin, piece.anchor, shows))
    return records
