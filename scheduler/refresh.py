"""Background prefill: windows are refreshed, compared, or moved behind another frozen prefix.

`Refresher` prefills one window at a time, over all sessions, first those that records wait for. The others
get the tokens that questions and appends leave free in each batch, and catch up with records appended
meanwhile. Then, between two batches, the standing questions are asked of both states, and an `exact` tape
adopts the fresh one. It also replaces a tape's frozen prefix (`Scheduler.refresh`): the other prefix is
prefilled first, then the window behind it. `scheduler.refresh_policy` says what is due.

Everything runs on the thread that steps the scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

from engine.step import Chunk, Executor, OutOfMemory
from regions.frozen import Context
from regions.offload.kv_store import NotResident
from regions.tape import LiveRecord, Tape
from scheduler.interfaces import PriorityClass
from scheduler.observer import Observer
from scheduler.refresh_policy import RefreshPolicy, Replacement, SessionWindow
from scheduler.request import Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeAppend, TapeItems

if TYPE_CHECKING:
    from engine.divergence import Divergence, Probe
    from regions.ephemeral import Fork

log = logging.getLogger(__name__)


class Prefixes(Protocol):
    """Shares frozen prefixes among sessions."""

    def open_prefix(self, tokens: Sequence[int]) -> Fork:
        """A reader of what is in KV of a frozen prefix; the caller prefills the rest into it."""

    def close_prefix(self, tokens: Sequence[int], prompt: Fork) -> Context:
        """The frozen prefix of ``tokens``, all in ``prompt``'s KV, as a context that the caller owns."""


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
class _Prefill:
    """A window that is being prefilled, after the frozen prefix if that is replaced."""

    window: SessionWindow
    replacement: Replacement | None = None
    prompt: Fork | None = None
    """The reader of the prefix while it is prefilled."""
    frozen: Context | None = None
    """The prefix, until the tape takes it over."""
    fresh: Fork | None = None
    tokens: int = 0
    """Tokens of the window when the prefill began."""
    request: Request | None = None
    overtaken: bool = False
    """The prefill must restart."""
    waiting: bool = False
    """It is ready; older records are appended first."""

    @property
    def urgent(self) -> bool:
        """Records wait for it."""
        return self.replacement is not None and self.replacement.records is not None

    def open_prefix(self, prefixes: Prefixes) -> tuple[Fork, Sequence[int]]:
        """Begin with the other prefix: its reader, and the tokens that are to be prefilled."""
        assert self.replacement is not None  # its prefix
        frozen = self.replacement.frozen
        self.prompt = prefixes.open_prefix(frozen)
        return self.prompt, frozen[self.prompt.cached_tokens :]

    def close_prefix(self, prefixes: Prefixes) -> None:
        """The prefix is prefilled."""
        assert self.replacement is not None
        assert self.prompt is not None  # opened first
        self.frozen = prefixes.close_prefix(self.replacement.frozen, self.prompt)
        self.prompt = None

    def open_window(self) -> tuple[Fork, Sequence[int]]:
        """Go on with the window: its reader, and the tokens that are to be prefilled."""
        tape, following = self.window.tape, self.replacement
        leaving = max(0, following.first - tape.evicted_records) if following is not None else 0
        self.fresh = tape.fresh_window(self.frozen, leaving)
        tokens = tape.window[self.fresh.begins_at - tape.evicted_tokens :]
        if following is not None and following.records is not None:
            tokens = list(chain.from_iterable(record.tokens for record in following.records))
        self.tokens = len(tokens)
        return self.fresh, tokens

    def ask(self, reader: Fork, tokens: Sequence[int], on_done: Callable[[Request], None]) -> Request:
        """The request that prefills ``tokens`` into ``reader``."""
        self.request = Request(
            RequestSpec(
                cls=PriorityClass.SESSION if self.urgent else PriorityClass.STREAM,
                session=self.window.tape.name,
                prompt=tokens,
                max_tokens=0,
                on_done=on_done,
                reader=reader,
                background=not self.urgent,
            )
        )
        return self.request

    def is_overtaken(self, frame_limit: int) -> bool:
        """All of its window was evicted, or its positions would pass the frame limit."""
        if self.fresh is None or self.urgent:
            return False
        tape, begins = self.window.tape, self.fresh.begins_at
        end = self.fresh.cached_tokens + tape.evicted_tokens + tape.live_tokens - begins
        return tape.evicted_tokens - begins >= self.tokens > 0 or end > frame_limit

    def overtake(self) -> None:
        """It must restart."""
        self.overtaken = True

    def waits_for(self, append: TapeAppend | None) -> bool:
        """Whether older records, which wait in ``append``, come before it; until `proceed`."""
        self.waiting = append is not None and append.seq <= (self.window.barrier or 0)
        return self.waiting

    def proceed(self) -> None:
        """Wait no longer."""
        self.waiting = False

    def adopt(self, fresh: Fork) -> None:
        """Have the tape take over the window, and the prefix if there is another one."""
        tape = self.window.tape
        if self.replacement is None:
            tape.adopt(fresh)
            return
        assert self.frozen is not None  # it was prefilled first
        records = self.replacement.records
        live = None if records is None else [LiveRecord(r.tokens, r.ts_event) for r in records]
        tape.adopt_prefix(fresh, self.frozen, live)
        self.frozen = None

    def release(self) -> None:
        for part in (self.prompt, self.fresh, self.frozen):
            if part is not None:
                part.release()
        self.prompt = self.fresh = self.frozen = None


class Refresher:
    """Refreshes `exact` sessions, compares the states of all, and replaces frozen prefixes.

    ``executor`` catches up with at most ``catch_up_tokens`` between two batches. Positions stay below
    ``frame_limit``. ``clock`` gives ns. ``on_busy`` gets a session and whether its window is being prefilled,
    or waits for that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        prefixes: Prefixes,
        sessions: Iterable[tuple[Tape, RefreshPolicy]],
        comparison: Comparison,
        observer: Observer,
        clock: Callable[[], int],
        *,
        frame_limit: int,
        catch_up_tokens: int,
        on_busy: Callable[[str, bool], None] = lambda session, is_busy: None,
    ) -> None:
        self._on_busy = on_busy
        self._scheduler, self._executor, self._prefixes = scheduler, executor, prefixes
        self._comparison = comparison
        self._observer, self._clock = observer, clock
        self._frame_limit, self._catch_up_tokens = frame_limit, catch_up_tokens
        now = clock()
        self._windows: dict[Tape, SessionWindow] = {
            tape: SessionWindow(tape, p, now, now) for tape, p in sessions
        }
        self._queue: deque[SessionWindow] = deque()
        self._failed: set[SessionWindow] = set()  # their replacement is tried again
        self._running: _Prefill | None = None
        self._stopping = False
        scheduler.subscribe(self.on_commit, self.on_drop)
        scheduler.on_refresh(self._replace)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Begin the refreshes that are due; restart a prefill that the tape has overtaken."""
        for failed in [window for window in self._failed if window.retry <= self._clock()]:
            self._enqueue(failed)
        window, running = self._windows.get(tape), self._running
        if window is None:
            return
        window.commit(self._clock())
        if running is not None and running.window is window:
            if running.waiting:
                self._between(running, self._complete)
            elif running.is_overtaken(self._frame_limit):
                self._restart(running)
        elif self._is_due(window):
            self._enqueue(window)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """The tape did not change, but a replacement may have waited for these records."""
        running = self._running
        if running is not None and running.window.tape is tape and running.waiting:
            self._between(running, self._complete)

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

    def watch(self, tape: Tape, policy: RefreshPolicy) -> None:
        """Refresh ``tape`` as ``policy`` says from now on."""
        window, now = self._windows.get(tape), self._clock()
        if window is None:
            self._windows[tape] = SessionWindow(tape, policy, now, now)
        else:
            window.follow(policy)

    def forget(self, tape: Tape) -> None:
        """Stop refreshing ``tape``; call it before the tape is released."""
        window = self._windows.pop(tape, None)
        self._scheduler.queues.barriers.pop(tape, None)
        if window is not None and window in self._queue:
            self._queue.remove(window)
        if window is not None:
            self._failed.discard(window)
            self._tell(window)
        if self._running is not None and self._running.window is window:
            self._cancel(self._running)

    def settled(self, tape: Tape) -> bool:
        """Whether its window is neither being prefilled nor to be replaced."""
        window, running = self._windows.get(tape), self._running
        replaced = window is not None and window.replacement is not None
        return not replaced and (running is None or running.window is not window)

    def stale_records(self, tape: Tape) -> int:
        """Records evicted since the last prefill of its window began."""
        window = self._windows.get(tape)
        return 0 if window is None else window.stale_records

    def restore(self, tape: Tape, stale_records: int) -> None:
        """See `SessionWindow.restore`."""
        window = self._windows.get(tape)
        if window is not None:
            window.restore(stale_records)

    def stop(self) -> None:
        """Begin no further refreshes and cancel the one under way: shutdown does not wait for it.

        Records that wait for another prefix still get it, also those that arrive later.
        """
        self._stopping = True
        for window in self._queue:
            self._tell(window)
        if self._running is not None and not self._running.urgent:
            self._cancel(self._running)

    # When.

    def _replace(self, tape: Tape, following: Replacement) -> None:
        """See `Scheduler.refresh`. A window that was given and is not adopted yet stays."""
        window = self._windows.get(tape)
        if window is None:
            return
        append = self._scheduler.queues.appends.get(tape)
        newest = append.queue[-1].seq if append is not None else 0
        window.replace(following, newest)
        self._update_barrier(window)
        running = self._running
        if running is None or running.window is not window:
            self._enqueue(window)
        elif not self._is_wanted(running):
            self._cancel(running)

    def _update_barrier(self, window: SessionWindow) -> None:
        barriers = self._scheduler.queues.barriers
        if window.barrier is None:
            barriers.pop(window.tape, None)
        else:
            barriers[window.tape] = window.barrier

    def _is_due(self, window: SessionWindow) -> bool:
        if not window.is_due(self._clock()):
            return False
        return window.policy.exact or bool(self._comparison.questions(window.tape.name))

    def _idle_wait(self, window: SessionWindow) -> int | None:
        now = self._clock()
        return window.retry - now if window in self._failed else window.idle_wait(now)

    def _is_wanted(self, running: _Prefill) -> bool:
        """Its tape is still refreshed, and not to get another prefix; at a stop, records wait for it."""
        window = running.window
        if self._stopping and not running.urgent:
            return False
        return window.tape in self._windows and running.replacement is window.replacement

    # One window.

    def _enqueue(self, window: SessionWindow) -> None:
        self._failed.discard(window)
        running = self._running
        if running is not None and running.window is window:
            return
        if window not in self._queue:
            self._queue.append(window)
        if running is not None and not running.urgent and window.barrier is not None:
            self._restart(running)  # it may never get a token, and records wait for this one
        self._begin()
        self._tell(window)

    def _tell(self, window: SessionWindow) -> None:
        """Say whether its window is being prefilled, or waits for that; at a stop, nothing waits long."""
        runs = self._running is not None and self._running.window is window
        self._on_busy(window.tape.name, runs or (window in self._queue and not self._stopping))

    def _next(self) -> SessionWindow | None:
        """The first window of the queue that records wait for, else the first one."""
        urgent = next((window for window in self._queue if window.barrier is not None), None)
        return urgent or (self._queue[0] if self._queue and not self._stopping else None)

    def _begin(self) -> None:
        """Begin the next refresh of the queue unless one is under way."""
        while self._running is None and (window := self._next()) is not None:
            self._queue.remove(window)
            window.begin(self._clock())
            following = window.replacement
            if following is None and not window.tape.live_records:
                self._tell(window)
                continue
            self._running = running = _Prefill(window, following)
            if following is None:
                self._prefill(running, *running.open_window(), self._complete)
            else:
                self._prefill(running, *running.open_prefix(self._prefixes), self._prefix_complete)

    def _prefill(
        self, running: _Prefill, reader: Fork, tokens: Sequence[int], then: Callable[[_Prefill], None]
    ) -> None:
        """Prefill ``tokens`` into ``reader`` and call ``then`` between two batches."""
        if not tokens:
            self._between(running, then)
            return
        self._scheduler.submit(running.ask(reader, tokens, partial(self._prefilled, running, then)))

    def _prefilled(self, running: _Prefill, then: Callable[[_Prefill], None], request: Request) -> None:
        if request.state is State.FINISHED:
            self._between(running, then)
            return
        if request.error is not None:
            self._report(request.session, request.error.message)
        self._end(running)

    def _between(self, running: _Prefill, then: Callable[[_Prefill], None]) -> None:
        """Call ``then`` between two batches, or end when the scheduler is closed."""
        running.proceed()
        if not self._scheduler.run_between(partial(then, running)):
            self._end(running)

    def _prefix_complete(self, running: _Prefill) -> None:
        if running.overtaken or not self._is_wanted(running):
            self._end(running)
            return
        running.close_prefix(self._prefixes)
        self._prefill(running, *running.open_window(), self._complete)

    def _complete(self, running: _Prefill, awaited: bool = False) -> None:
        """Between two batches: catch up, wait, restart, or use the fresh window.

        A tape that is to be compared or adopts is brought back to the pool first, unless it was ``awaited``.
        """
        if running.is_overtaken(self._frame_limit):
            running.overtake()
        if running.overtaken or not self._is_wanted(running):
            self._end(running)
            return
        tape, fresh = running.window.tape, running.fresh
        assert fresh is not None  # it was prefilled
        missing: list[int] = []
        if not running.urgent:
            missing = tape.window[fresh.begins_at + fresh.length - tape.evicted_tokens :]
        elif running.waits_for(self._scheduler.queues.appends.get(tape)):
            return
        if missing and not self._caught_up(fresh, missing):
            self._prefill(running, fresh, [*fresh.tokens, *missing], self._complete)
            return
        if running.replacement is None and not awaited and not tape.resident and not tape.lost:
            self._scheduler.when_resident(tape, partial(self._complete, running, True))
            return
        try:
            self._use(running, fresh)
        except NotResident as error:
            self._report(tape.name, str(error))
        finally:
            self._end(running)

    def _report(self, session: str, why: str) -> None:
        """Report a failed refresh."""
        log.warning("%s was not refreshed: %s", session, why)
        self._observer.refresh_failed(session)

    def _use(self, running: _Prefill, fresh: Fork) -> None:
        """Compare with the fresh window, adopt it, or both."""
        window, tape, following = running.window, running.window.tape, running.replacement
        if following is None:
            if found := self._comparison.run(tape, fresh):
                self._observer.compared(tape.name, found)
            if not window.policy.exact:
                return
        running.adopt(fresh)
        if following is not None:
            window.replaced()
            self._update_barrier(window)
        self._observer.refreshed(tape.name)

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
        running.release()
        self._running = None
        window = running.window
        if window.tape in self._windows:
            if running.overtaken:
                self._observer.refresh_restarted()
                self._queue.append(window)
            elif window.replacement not in (None, running.replacement):
                self._queue.append(window)
            elif window.replacement is not None:
                window.fail(self._clock())
                self._failed.add(window)
        self._begin()
        self._tell(window)

    def _restart(self, running: _Prefill) -> None:
        """Cancel the prefill, to begin it again later."""
        running.overtake()
        self._cancel(running)

    def _cancel(self, running: _Prefill) -> None:
        if running.waiting:
            self._end(running)
        elif running.request is not None:
            self._scheduler.cancel(running.request.id)
