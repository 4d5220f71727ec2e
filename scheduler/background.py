"""Background prefill: windows are refreshed, compared, or rebuilt after their KV was lost.

`Refresher` prefills one window at a time, over all sessions, with the tokens that questions and appends leave
free in each batch, and catches up with records appended meanwhile. Then, between two batches, the standing
questions are asked of both states, and an `exact` tape adopts the fresh one. `Rebuilder` prefills the window
of a session whose stored KV is lost as soon as work waits for it, as an ordinary request of class SESSION.

Everything runs on the thread that steps the scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.step import Chunk, Executor, OutOfMemory
from regions.offload.store import NotResident
from regions.tape import Tape
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems
from scheduler.types import PriorityClass

if TYPE_CHECKING:
    from engine.divergence import Divergence, Probe
    from regions.ephemeral import Fork

log = logging.getLogger(__name__)

RETRY_NS = 10**9
"""Delay before a failed rebuild is tried again."""


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """When a session's window is prefilled again; 0 means never.

    An ``exact`` session adopts the fresh window, after ``every_records`` evicted records or ``idle_ns``
    without input. Other sessions are only compared with it, every ``compare_ns``.
    """

    exact: bool
    every_records: int = 0
    idle_ns: int = 0
    compare_ns: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Asks a session's standing questions of its carried state and of a fresh one."""

    questions: Callable[[str], Sequence[Probe]]
    probe: Callable[[Tape, Fork, Sequence[Probe]], Sequence[Divergence]]
    batch_tokens: int
    """Most tokens of one comparison."""

    def run(self, tape: Tape, fresh: Fork) -> Sequence[Divergence]:
        """Compare on as many questions as fit in one batch. Empty when memory runs out."""
        questions = self.questions(tape.name)
        both = accumulate(2 * len(tokens) for tokens, _ in questions)
        fitting = [it for it, total in zip(questions, both, strict=True) if total <= self.batch_tokens]
        try:
            return self.probe(tape, fresh, fitting) if fitting else []
        except OutOfMemory as error:
            log.warning("%s: states were not compared, memory ran out: %s", tape.name, error)
            return []


@dataclass(eq=False, slots=True)
class _Window:
    """One session; times in ns of the refresher's clock."""

    tape: Tape
    policy: RefreshPolicy
    committed: int
    """When the newest version was committed."""
    begun: int
    """When its last prefill began, however that ended."""
    begun_records: int = 0
    """TapeItems evicted by then."""

    @property
    def stale_records(self) -> int:
        return self.tape.evicted_records - self.begun_records


@dataclass(eq=False, slots=True)
class _Prefill:
    """A window that is being prefilled."""

    window: _Window
    fresh: Fork
    tokens: int
    """Tokens of the window when the prefill began."""
    request: Request | None = None
    overtaken: bool = False
    """The prefill must restart."""


class Refresher:
    """Refreshes `exact` sessions and compares the states of all.

    ``executor`` catches up with at most ``catch_up_tokens`` between two batches. Positions stay below
    ``frame_limit``. ``clock`` gives ns.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sessions: Iterable[tuple[Tape, RefreshPolicy]],
        comparison: Comparison,
        observer: Observer,
        clock: Callable[[], int],
        *,
        frame_limit: int,
        catch_up_tokens: int,
    ) -> None:
        self._scheduler, self._executor, self._comparison = scheduler, executor, comparison
        self._observer, self._clock = observer, clock
        self._frame_limit, self._catch_up_tokens = frame_limit, catch_up_tokens
        now = clock()
        self._windows: dict[Tape, _Window] = {tape: _Window(tape, p, now, now) for tape, p in sessions}
        self._queue: deque[_Window] = deque()
        self._running: _Prefill | None = None
        scheduler.subscribe(self.on_commit)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Begin the refreshes that are due; restart a prefill that the tape has overtaken."""
        window, running = self._windows.get(tape), self._running
        if window is None:
            return
        window.committed = self._clock()
        if running is not None and running.window is window:
            if self._is_overtaken(running):
                running.overtaken = True
                self._cancel(running)
        elif self._is_due(window):
            self._enqueue(window)

    def idle(self) -> float | None:
        """Refresh sessions that got no data for a while; the worker calls this when it is idle.

        Returns the seconds until the next session may be due; None when only an append can change that.
        """
        later: list[int] = []
        for window in self._windows.values():
            wait = self._idle_wait(window)
            if wait is not None and wait > 0:
                later.append(wait)
            elif wait is not None:
                self._enqueue(window)
        return min(later) * 1e-9 if later else None

    def forget(self, tape: Tape) -> None:
        """Stop refreshing ``tape``; call it before the tape is released."""
        window = self._windows.pop(tape, None)
        if window is not None and window in self._queue:
            self._queue.remove(window)
        if self._running is not None and self._running.window is window:
            self._cancel(self._running)

    def stop(self) -> None:
        """Begin no more refreshes and cancel the one under way: shutdown does not wait for it."""
        for tape in list(self._windows):
            self.forget(tape)

    # When.

    def _is_due(self, window: _Window) -> bool:
        policy, tape = window.policy, window.tape
        if policy.exact:
            return 0 < policy.every_records <= window.stale_records
        if not 0 < policy.compare_ns <= self._clock() - window.begun:
            return False
        return tape.evicted_records > 0 and bool(self._comparison.questions(tape.name))

    def _idle_wait(self, window: _Window) -> int | None:
        policy = window.policy
        if not policy.exact or not policy.idle_ns or not window.stale_records or not window.tape.resident:
            return None
        return window.committed + policy.idle_ns - self._clock()

    def _is_overtaken(self, running: _Prefill) -> bool:
        """All of its window was evicted, or its positions would pass the frame limit."""
        tape, begins = running.window.tape, running.fresh.begins_at
        end = running.fresh.cached_tokens + tape.evicted_tokens + tape.live_tokens - begins
        return tape.evicted_tokens - begins >= running.tokens or end > self._frame_limit

    def _is_wanted(self, running: _Prefill) -> bool:
        """Its tape is still refreshed, and the refresher has not been stopped."""
        return running.window.tape in self._windows

    # One window.

    def _enqueue(self, window: _Window) -> None:
        running = self._running is not None and self._running.window is window
        if not running and window not in self._queue:
            self._queue.append(window)
        self._begin()

    def _begin(self) -> None:
        """Begin the next refresh of the queue unless one is under way."""
        while self._queue and self._running is None:
            window = self._queue.popleft()
            window.begun, window.begun_records = self._clock(), window.tape.evicted_records
            tokens = window.tape.window
            if tokens:
                self._running = _Prefill(window, window.tape.fresh_window(), len(tokens))
                self._prefill(self._running, tokens)

    def _prefill(self, running: _Prefill, tokens: list[int]) -> None:
        running.request = Request(
            RequestSpec(
                cls=PriorityClass.STREAM,
                session=running.window.tape.name,
                prompt=tokens,
                max_tokens=0,
                on_done=partial(self._prefilled, running),
                reader=running.fresh,
                background=True,
            )
        )
        self._scheduler.submit(running.request)

    def _prefilled(self, running: _Prefill, request: Request) -> None:
        done = request.state is State.FINISHED
        if done and self._scheduler.run_between(partial(self._complete, running)):
            return
        if request.error is not None:
            log.warning("%s was not refreshed: %s", request.session, request.error.message)
        self._end(running)

    def _complete(self, running: _Prefill) -> None:
        """Between two batches: catch up, restart, or use the fresh window."""
        running.overtaken = running.overtaken or self._is_overtaken(running)
        if running.overtaken or not self._is_wanted(running):
            self._end(running)
            return
        tape, fresh = running.window.tape, running.fresh
        missing = tape.window[fresh.begins_at + fresh.length - tape.evicted_tokens :]
        ended = True
        try:
            if missing and not self._caught_up(fresh, missing):
                ended = False
                self._prefill(running, [*fresh.tokens, *missing])
                return
            if found := self._comparison.run(tape, fresh):
                self._observer.compared(tape.name, found)
            if running.window.policy.exact:
                tape.adopt(fresh)
                self._observer.refreshed(tape.name)
        except NotResident as error:
            log.warning("%s was not refreshed: %s", tape.name, error)
        finally:
            if ended:
                self._end(running)

    def _caught_up(self, fresh: Fork, missing: list[int]) -> bool:
        """Compute the last tokens at once: each batch may append more, so some would always be missing."""
        if len(missing) > self._catch_up_tokens or not fresh.acquire(len(missing)):
            return False
        try:
            self._executor.execute([Chunk(fresh, missing, sample=False)])
        except OutOfMemory:
            return False
        return True

    def _end(self, running: _Prefill) -> None:
        running.fresh.release()
        self._running = None
        if running.overtaken and self._is_wanted(running):
            self._observer.refresh_restarted()
            self._queue.append(running.window)
        self._begin()

    def _cancel(self, running: _Prefill) -> None:
        assert running.request is not None  # it is submitted as soon as it is made
        self._scheduler.cancel(running.request.id)


class Rebuilder:
    """Prefills lost windows again when work waits for them. ``clock`` gives ns."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._running: set[Tape] = set()
        self._retry: dict[Tape, int] = {}  # not before so many ns
        scheduler.on_lost(self._wanted)

    def idle(self) -> float | None:
        """Seconds until a failed rebuild may be tried again; None if there is none.

        Each is returned once when it is due: the next step tries it if work still waits.
        """
        now = self._clock()
        due = [tape for tape, at in self._retry.items() if at <= now]
        for tape in due:
            del self._retry[tape]
        return 0.0 if due else min(((at - now) * 1e-9 for at in self._retry.values()), default=None)

    def _wanted(self, tape: Tape) -> None:
        """Work waits for ``tape``."""
        if tape in self._running or self._clock() < self._retry.get(tape, 0):
            return
        self._retry.pop(tape, None)
        fresh, window = tape.fresh_window(), tape.window
        if not window:  # it was all evicted meanwhile
            if not self._scheduler.run_between(partial(tape.rebuild, fresh)):
                fresh.release()
            return
        log.warning("%s: its stored KV is lost; prefilling %d tokens again", tape.name, len(window))
        self._running.add(tape)
        self._scheduler.submit(
            Request(
                RequestSpec(
                    cls=PriorityClass.SESSION,
                    session=tape.name,
                    prompt=window,
                    max_tokens=0,
                    on_done=partial(self._prefilled, tape, fresh),
                    reader=fresh,
                )
            )
        )

    def _prefilled(self, tape: Tape, fresh: Fork, request: Request) -> None:
        """Rebuild the tape. Nothing was appended meanwhile: appends wait for a lost tape."""
        self._running.discard(tape)
        self._retry[tape] = self._clock() + RETRY_NS
        try:
            if request.state is State.FINISHED:
                tape.rebuild(fresh)
                del self._retry[tape]
                return
        finally:
            fresh.release()
        if request.error is not None:
            log.error("%s could not be rebuilt: %s", tape.name, request.error.message)
