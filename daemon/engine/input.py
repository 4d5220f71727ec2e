"""The data plane's thread: from the ring to the tapes, with credits for each session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from daemon.config.schema import Config
from daemon.engine.build import Built
from daemon.protocol import Inputs
from ingest.backlog import Window
from ingest.bars import GAP, BarBuilder, BarPolicy
from ingest.compact import Restart
from ingest.plane import DataPlane, SessionSpec, TapeRecord
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore
from regions.tape import Retention, Tape
from scheduler.request import Failure
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems

CREDITS = 16
"""Bars of one session that the scheduler has at a time: no session fills a pass, nor the queue before others.
The next ones wait in the session's backlog (`ingest.backlog`)."""


class Appended(NamedTuple):
    """A bar from the data plane, and the number of bars its session had before."""

    record: TapeRecord
    ordinal: int


def newest(records: Sequence[TapeItem[Appended]]) -> TapeRecord:
    """The newest record of a version."""
    return records[-1].payload.record


def has_gap(payload: Appended) -> bool:
    """Whether data was lost before this record."""
    return bool(payload.record.flags & GAP)


def inputs_of(payloads: Sequence[Appended]) -> Inputs:
    """The feed's records that ``payloads``, oldest first, were made from."""
    records = [payload.record for payload in payloads]
    return Inputs(
        min(record.first_offset for record in records),
        max(record.last_offset for record in records),
        records[-1].low_watermark,
    )


class EngineInput:
    """Appends the ring's records to the tapes; `run` is the data plane's thread."""

    def __init__(
        self,
        config: Config,
        ring: Ring,
        source: str,
        built: Built,
        scheduler: Scheduler,
        store: MetricStore,
    ) -> None:
        self._ring, self._scheduler, self._prefixes = ring, scheduler, built.prefixes
        self._tapes = [built.tapes[session.name] for session in config.sessions]
        self._appended = [0] * len(self._tapes)
        self._numbers = {tape.name: number for number, tape in enumerate(self._tapes)}
        self._ahead = [0] * len(self._tapes)
        """Bars of each session that the scheduler has."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._leave_ring = threading.Event()
        """Set by `end` and by `stop`: ends the data plane's loop."""
        bars = config.bars
        self._plane = DataPlane(
            ring,
            source,
            BarBuilder(len(self._tapes), BarPolicy(bars.interval, bars.lateness, bars.empty, bars.max_fill)),
            Tokeniser(built.prompt.encode),
            [SessionSpec(tape.name, built.lines[tape.name], _window(tape.retention)) for tape in self._tapes],
            self._append,
            store,
            room=lambda session: CREDITS - self._ahead[session],
            skips=config.source.skips,
            idle_close_ns=bars.idle_close,
            restart=self._restart,
        )
        scheduler.subscribe(self.on_commit, self.on_drop)

    def run(self, idle: Callable[[], bool], on_end: Callable[[], None]) -> None:
        """Run until `stop`, then take what the ring still holds.

        After `end`, ``on_end`` is called when all input is answered: no bar waits and the worker is
        ``idle()``.
        """
        self._plane.run(self._leave_ring)
        if self._ended.is_set() and self._finish(idle):
            on_end()
        while self._plane.step():
            pass

    def end(self) -> None:
        """The source has ended."""
        self._ended.set()
        self._leave()

    def stop(self) -> None:
        """Take what the ring holds, then return from `run`."""
        self._stop.set()
        self._leave()

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """These bars' credits come back."""
        self._committed(tape, len(records))

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """As `on_commit`."""
        self._committed(tape, len(records))

    def _append(self, made: Sequence[tuple[int, Sequence[TapeRecord]]]) -> None:
        with self._lock:
            for session, records in made:
                self._ahead[session] += len(records)
        self._scheduler.append_together(
            [(self._tapes[session], self._items(session, records)) for session, records in made]
        )

    def _items(self, session: int, records: Sequence[TapeRecord]) -> list[TapeItem[Appended]]:
        first = self._appended[session]
        self._appended[session] += len(records)
        return [
            TapeItem(record.tokens, Appended(record, first + i), record.ts_last_event)
            for i, record in enumerate(records)
        ]

    def _restart(self, session: int, restart: Restart) -> None:
        """Give a compact session its new anchor; its next bars wait for it, and questions do not."""
        tape = self._tapes[session]
        window = [TapeItem(tokens, None, event) for tokens, event in restart.window]
        refresh = partial(self._scheduler.refresh, tape, window=window)
        self._prefixes.anchor(tape.name, restart.anchor.header, refresh)

    def _leave(self) -> None:
        self._leave_ring.set()
        self._ring.wake()

    def _finish(self, idle: Callable[[], bool]) -> bool:
        """Take the rest, at the engine's pace, and close the open bars; False if `stop` came first."""
        while self._ring.fill and not self._stop.is_set():
            if not self._plane.step():
                self._stop.wait(0.001)
        if not self._stop.is_set():
            self._plane.flush()
        # In this order: bars that no longer wait are committed, and the worker is idle only after their work.
        while not (self._plane.waiting == 0 and not any(self._ahead) and idle()):
            if self._stop.wait(0.001):
                return False
            self._plane.step()
        return True

    def _committed(self, tape: Tape, records: int) -> None:
        session = self._numbers[tape.name]
        with self._lock:
            self._ahead[session] -= records
        if self._plane.waits(session):
            self._ring.wake()


def _window(retention: Retention) -> Window:
    return Window(retention.tokens, retention.records, retention.span_ns)
