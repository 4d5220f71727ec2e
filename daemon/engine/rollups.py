"""When a session's oldest bars move out of its window, and the rollup that stands before it then.

A rollup is the end of the session's own frozen prefix. Bars move by a refresh (`Scheduler.refresh`): the
longer bars that have them, and the window without them, are prefilled in the background and adopted together.
So a version shows every bar once: in the rollup, or in the window. Only where the retention evicts bars
before a refresh is done are they in neither, until the next rollup has them (``missing``).
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from daemon.config.schema import BarsConfig, Config, SessionConfig
from daemon.engine.build import Built
from ingest.lines import LineSpec
from ingest.plane_state import RollupState
from ingest.rollup import END, Rollup, RollupTier, SummedBar, introduction, newest_within, rollup_line
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.request import Failure
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems


def leaving(live: int, room: int, outside: int, every: int) -> int:
    """How many of the ``live`` oldest bars of a window are to move now; the newest one stays.

    ``room``: how many more bars the window has room for. ``outside``: bars older than its span. Bars move
    ``every`` or more at a time, but for a small window, of which a quarter moves.
    """
    every = max(1, min(every, (live + room) // 4))
    moved = every if room < every else 0
    if outside >= every:
        moved = max(moved, outside)
    return min(moved, live - 1)


def room_of(tape: Tape) -> int:
    """How many more bars of the usual length the window of a tape has room for; it must not be empty."""
    limit, live = tape.retention, tape.live_records
    usual = -(-tape.live_tokens // live)
    room = (limit.tokens - tape.live_tokens) // usual
    return max(0, min(room, limit.records - live) if limit.records else room)


@dataclass(eq=False, slots=True)
class _Rolled:
    """A session's bars: those summed up, and those of its window. Numbers count from its tape's first."""

    session: SessionConfig
    spec: LineSpec
    interval_ns: int
    rollup: Rollup
    window: deque[SummedBar] = field(default_factory=deque)
    summed: int = 0
    """Bars before this one are in ``rollup``; ``window`` begins with it."""
    shown: int = 0
    """Bars before this one are in the rollup that the tape has."""
    moving: bool = False
    """A refresh is under way."""
    lost: bool = False
    """Bars that were to come next never reached the tape."""
    lines: dict[SummedBar, list[int]] = field(default_factory=dict)
    """Tokens of the newest rollup's lines."""

    def change(self, session: SessionConfig) -> None:
        """Other settings, but for those of the rollup's bars."""
        self.session = session

    def cut(self) -> RollupState:
        """As it is now."""
        return RollupState(self.rollup.cut(), tuple(self.window), self.summed, self.shown, self.lost)

    def restore(self, cut: RollupState) -> None:
        """Go on from a cut with the same rollup."""
        self.rollup.restore(cut.rollup)
        self.window = deque(cut.window)
        self.summed, self.shown, self.lost = cut.summed, cut.shown, cut.lost

    def lose(self) -> None:
        """Bars that were to come next never reached the tape."""
        self.lost = True

    def move(self) -> None:
        """A refresh begins."""
        self.moving = True

    def moved(self, first: int) -> None:
        """A refresh is done: the tape's rollup has the bars before ``first``."""
        self.moving, self.shown = False, first

    def add(self, bars: Iterable[SummedBar]) -> None:
        """Bars of its window, the newest ones."""
        for bar in bars:
            self.window.append(bar._replace(gap=True) if self.lost else bar)
            self.lost = False

    def sum_up(self, end: int) -> None:
        """Sum up the bars before number ``end``."""
        while self.summed < end:
            bar = self.window.popleft()
            if bar.bars:  # an event is in no bar
                self.rollup.add(bar)
            self.summed += 1

    def outside(self) -> int:
        """Bars of the window that opened more than its span before the newest."""
        span = self.session.retention_span
        oldest = self.window[-1].ts_open - span if span else 0
        return next((n for n, bar in enumerate(self.window) if bar.ts_open >= oldest), 0)

    def text(self, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        """The tokens of the rollup, the oldest lines left out if there are too many."""
        known, bars = self.lines, self.rollup.bars
        self.lines = {
            bar: known.get(bar) or encode(rollup_line(bar, self.spec, self.interval_ns)) for bar in bars
        }
        before, behind = encode(introduction(self.spec)), encode(END)
        room = self.session.rollup_tokens - len(before) - len(behind)
        kept = newest_within((self.lines[bar] for bar in bars), room)
        return tuple(token for line in (before, *kept, behind) for token in line)


class Rollups:
    """The rollups of all sessions that have one. Everything runs on the thread that steps the scheduler."""

    def __init__(self, config: Config, built: Built, scheduler: Scheduler, store: MetricStore) -> None:
        self._built, self._scheduler, self._store = built, scheduler, store
        self._bars = config.bars
        self._rolled: dict[Tape, _Rolled] = {}
        for session in config.sessions:
            self.set(session, built.tapes[session.name])
        scheduler.subscribe(self.on_commit, self.on_drop)

    def set(self, session: SessionConfig, tape: Tape) -> None:
        """A session came, or its settings changed; not those of its rollup's bars."""
        spec = self._built.lines[session.name]
        if not session.rollup or not isinstance(spec, LineSpec):
            return
        known = self._rolled.get(tape)
        if known is None:
            self._rolled[tape] = _rolled(session, spec, self._bars)
        else:
            known.change(session)

    def settled(self, tape: Tape) -> bool:
        """Whether no bars are on their way from its window to its rollup."""
        rolled = self._rolled.get(tape)
        return rolled is None or not rolled.moving

    def cut(self, tape: Tape) -> RollupState | None:
        """The bars of a session; None without a rollup."""
        rolled = self._rolled.get(tape)
        return None if rolled is None else rolled.cut()

    def restore(self, tape: Tape, cut: RollupState) -> None:
        """Go on from a cut of a session with the same rollup."""
        self._rolled[tape].restore(cut)

    def forget(self, tape: Tape) -> None:
        """A session goes."""
        self._rolled.pop(tape, None)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """The window grew: move its oldest bars if they are due."""
        rolled = self._rolled.get(tape)
        if rolled is None:
            return
        rolled.add(item.payload.bar for item in records)
        rolled.sum_up(tape.evicted_records)
        if not rolled.moving:
            self._move(tape, rolled)
        missing = max(0, tape.evicted_records - rolled.shown)
        self._store.set("foretick_rollup_missing_bars", missing, session=tape.name)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """The tape has a gap, and the rollup will say so."""
        if tape in self._rolled:
            self._rolled[tape].lose()

    def _move(self, tape: Tape, rolled: _Rolled) -> None:
        live = tape.live_records
        moved = leaving(live, room_of(tape), rolled.outside(), rolled.session.rollup_every)
        first = tape.evicted_records + moved
        if first <= rolled.shown:
            return
        rolled.sum_up(first)
        tokens = rolled.text(self._built.prompt.encode)
        rolled.move()
        refresh = partial(self._scheduler.refresh, tape, first=first, adopted=partial(rolled.moved, first))
        self._built.prefixes.sum_up(tape.name, tokens, refresh)


def _rolled(session: SessionConfig, spec: LineSpec, bars: BarsConfig) -> _Rolled:
    tiers = [RollupTier(tier.interval, tier.bars) for tier in session.rollup]
    return _Rolled(session, spec, session.bars(bars).interval, Rollup(tiers))
