"""The data plane: drains rings, builds bars, makes tokens and hands whole records to the sessions.

The engine's ingest thread runs it. It never blocks a producer: while `ready` says that the engine has enough
work, it leaves the records in the ring, which pauses the source or drops records. Overwritten records have no
known session, so a loss flags the next bars of *every* session of that source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingest.bars import BarBuilder, Bars
from ingest.lines import LineSpec
from ingest.record import RECORD, Records
from ingest.ring import Ring, wait_any
from ingest.tokens import Tokeniser
from metrics.histogram import Words, record
from metrics.kernel import kernel
from metrics.store import CounterHandle, HistogramHandle, MetricStore

_STAGE = "foretick_stage_seconds"
_DRAIN = 4096  # records a step; bounds how long one step can keep the interpreter


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session as ingest sees it; its number is its index in the plane's list. `source` is a name."""

    name: str
    source: str
    line: LineSpec = field(default_factory=LineSpec)


@dataclass(frozen=True, slots=True)
class SourceRing:
    """A source's ring; `name` is the `source` label of its metrics."""

    name: str
    ring: Ring


@dataclass(frozen=True, slots=True)
class TapeRecord:
    """One whole record of a tape (a bar's line) with its provenance.

    `ts_last_event` is exchange time, `ts_recv` wall clock and `ts_ring` monotonic clock of the newest tick in
    it, all ns. Every offset below `low_watermark` of the session in `partition` is in this record, an earlier
    one, or was dropped. `flags` are those of `ingest.bars`. `ring_wait_ns` is the newest tick's; `bars_ns`
    and `tokenise_ns` are those of the batch it came in.
    """

    tokens: tuple[int, ...]
    ts_last_event: int
    ts_recv: int
    ts_ring: int
    partition: int
    first_offset: int
    last_offset: int
    low_watermark: int
    flags: int
    ring_wait_ns: int
    bars_ns: int
    tokenise_ns: int
    n_bars: int = 1


Submit = Callable[[int, list[TapeRecord]], None]


@kernel
def record_waits(words: Words, base: int, records: Records, now: int) -> None:
    """Count every record's time in the ring."""
    for i in range(records.shape[0]):
        waited: Any = now - np.int64(records[i]["ts_ring"])
        record(words, base, waited)


class _Growth:
    """Adds the growth of totals by session to counters."""

    def __init__(self, totals: Callable[[], list[int]], counters: Sequence[CounterHandle]) -> None:
        self._totals, self._counters, self._seen = totals, counters, totals()

    def update(self) -> None:
        """Add what came since the last call."""
        totals = self._totals()
        for counter, now, before in zip(self._counters, totals, self._seen, strict=True):
            if now != before:
                counter.inc(now - before)
        self._seen = totals


class DataPlane:
    """Rings in, tape records out through `submit(session number, records)`.

    `clock` is the monotonic clock in ns. `idle_close_ns` (0: never) closes bars of sessions silent for so
    long. Metrics written here, and by nobody else: the stages ring_wait, bars and tokenise,
    `foretick_bars_total`, `foretick_records_late_total`, `foretick_records_ignored_total`,
    `foretick_ring_dropped_total` and
    `foretick_ring_fill_ratio`. An exception of `submit` leaves through `step`, `flush` or `run`.
    """

    def __init__(
        self,
        sources: Sequence[SourceRing],
        builder: BarBuilder,
        tokeniser: Tokeniser,
        specs: Sequence[SessionSpec],
        submit: Submit,
        metrics: MetricStore,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        ready: Callable[[], bool] = lambda: True,
        idle_close_ns: int = 0,
    ) -> None:
        unknown = {spec.source for spec in specs} - {source.name for source in sources}
        if unknown:
            raise ValueError(f"sessions name sources that have no ring: {sorted(unknown)}")
        self._sources, self._specs = list(sources), list(specs)
        self._builder, self._tokeniser, self._submit = builder, tokeniser, submit
        self._clock, self._ready, self._idle_close_ns = clock, ready, idle_close_ns
        self._buffer = np.zeros(_DRAIN, RECORD)
        # An earlier reader has counted what the ring lost before.
        self._lost = [source.ring.lost for source in self._sources]
        names = [source.name for source in self._sources]
        self._dropped = [metrics.counter("foretick_ring_dropped_total", source=name) for name in names]
        self._fill = [metrics.gauge("foretick_ring_fill_ratio", source=name) for name in names]
        sessions = [spec.name for spec in self._specs]
        self._late = _Growth(
            lambda: builder.late,
            [metrics.counter("foretick_records_late_total", session=name) for name in sessions],
        )
        self._ignored = _Growth(
            lambda: builder.ignored,
            [metrics.counter("foretick_records_ignored_total", session=name) for name in sessions],
        )
        self._bar_counters = [
            metrics.counter("foretick_bars_total", session=spec.name) for spec in self._specs
        ]
        self._ring_wait = metrics.histogram(_STAGE, stage="ring_wait")
        self._bars = metrics.histogram(_STAGE, stage="bars")
        self._tokenise = metrics.histogram(_STAGE, stage="tokenise")

    def step(self) -> int:
        """Drain the rings once; returns how many records. 0 while `ready` says no."""
        if not self._ready():
            return 0
        drained = sum(self._drain(number) for number in range(len(self._sources)))
        if self._idle_close_ns:
            self._deliver(self._builder.close_idle(self._clock(), self._idle_close_ns), 0)
        return drained

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; sleeps on the rings while there is nothing to do."""
        rings = [source.ring for source in self._sources]
        while not stop.is_set():
            if self.step():
                continue
            if self._ready():
                wait_any(rings, 0.05)
            else:
                stop.wait(0.001)

    def flush(self) -> None:
        """Close and deliver every open bar: the input has ended. Call it from the thread that steps."""
        self._deliver(self._builder.flush(), 0)

    def _drain(self, number: int) -> int:
        ring = self._sources[number].ring
        self._fill[number].set(ring.fill)
        n = ring.pop(self._buffer)
        self._note_loss(number)
        if n == 0:
            return 0
        records = self._buffer[:n]
        started = self._clock()
        record_waits(self._ring_wait.words, self._ring_wait.base, records, started)
        bars = self._builder.update(records, started)
        bars_ns = self._since(started, self._bars)
        self._count_dropped()
        self._deliver(bars, bars_ns)
        return n

    def _note_loss(self, number: int) -> None:
        """Count what the ring lost, all of it before the records just drained."""
        source = self._sources[number]
        lost = source.ring.lost - self._lost[number]
        if lost:
            self._lost[number] += lost
            self._dropped[number].inc(lost)
            self._builder.mark_gap(i for i, spec in enumerate(self._specs) if spec.source == source.name)

    def _count_dropped(self) -> None:
        for counted in (self._late, self._ignored):
            counted.update()

    def _deliver(self, bars: Bars, bars_ns: int) -> None:
        for session in np.unique(bars["session"]).tolist():
            own = bars[bars["session"] == session]
            started = self._clock()
            lines = self._tokeniser.lines(own, self._specs[session].line)
            tokenise_ns = self._since(started, self._tokenise)
            self._bar_counters[session].inc(len(own))
            fields = zip(lines, own.tolist(), strict=True)
            self._submit(session, [_tape_record(line, bar, bars_ns, tokenise_ns) for line, bar in fields])

    def _since(self, started: int, histogram: HistogramHandle) -> int:
        took = self._clock() - started
        histogram.observe(took)
        return took


def _tape_record(tokens: list[int], bar: tuple[int, ...], bars_ns: int, tokenise_ns: int) -> TapeRecord:
    """From one element of a BAR array as a tuple."""
    _, partition, flags, *_, event, recv, ring, ring_wait, first, last, safe = bar
    return TapeRecord(
        tuple(tokens), event, recv, ring, partition, first, last, safe, flags, ring_wait, bars_ns, tokenise_ns
    )
