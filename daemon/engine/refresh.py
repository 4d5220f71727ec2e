"""Windows prefilled anew in the background: `exact` sessions go on from them, others are measured by them.

One window at a time, over all sessions, is prefilled by requests that only prefill, so in what questions and
appends leave over. Then what was appended meanwhile is caught up with, until nothing is missing; between two
batches the standing questions are asked of both states, and an `exact` tape adopts the fresh one. A window
that is wholly evicted before that is begun again.

All of it runs on the thread that steps the scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from daemon.config.schema import SessionConfig
from engine.divergence import Divergence, Probe, probe
from engine.engine import Engine
from engine.step import Chunk, OutOfMemory
from metrics.store import MetricStore
from regions.ephemeral import Fork
from regions.offload.store import NotResident
from regions.tape import Tape
from scheduler.request import Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import Records
from scheduler.types import PriorityClass
from scheduler.types import Tape as AnyTape

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Kept:
    """One session; times in ns of the refresher's clock."""

    settings: SessionConfig
    tape: Tape
    committed: int
    """When the newest version came."""
    begun: int
    """When a window was begun last, whatever became of it."""
    begun_records: int = 0
    """Records that had been evicted by then."""

    @property
    def stale_records(self) -> int:
        return self.tape.evicted_records - self.begun_records


@dataclass(eq=False, slots=True)
class _Run:
    """A window under way."""

    kept: _Kept
    fresh: Fork
    tokens: int
    """Of the window when it was begun."""
    request: Request | None = field(default=None)
    overtaken: bool = field(default=False)
    """It is to be begun again."""


class Refresher:
    """Refreshes `exact` sessions and samples the divergence of all.

    ``probes``: a session's standing questions. ``batch_tokens``: the most tokens that are asked at a time.
    ``chunk_tokens``: the most that are caught up with between two batches. ``clock`` gives ns.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        sessions: Iterable[tuple[SessionConfig, Tape]],
        probes: Callable[[str], Sequence[Probe]],
        store: MetricStore,
        clock: Callable[[], int],
        *,
        batch_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self._scheduler, self._engine, self._probes = scheduler, engine, probes
        self._store, self._clock = store, clock
        self._batch_tokens, self._chunk_tokens = batch_tokens, chunk_tokens
        now = clock()
        self._kept: dict[AnyTape, _Kept] = {tape: _Kept(s, tape, now, now) for s, tape in sessions}
        self._queue: deque[_Kept] = deque()
        self._run: _Run | None = None
        self._stopped = False
        scheduler.subscribe(self)

    def on_commit(self, tape: AnyTape, version: int, records: Records) -> None:
        """Begin what is due; begin again what the tape has run away from."""
        kept = self._kept.get(tape)
        if kept is None:
            return
        kept.committed = self._clock()
        run = self._run
        if run is not None and run.kept is kept:
            if self._is_overtaken(run):
                run.overtaken = True
                self._cancel(run)
        elif self._is_due(kept):
            self._enqueue(kept)

    def on_drop(self, tape: AnyTape, records: Records, failure: Failure) -> None:
        """Nothing to do: the tape did not change."""

    def idle(self) -> float | None:
        """The worker found nothing to do: refresh what got no data for a while.

        In how many seconds the next session may be due; None, when only an append can change that.
        """
        later: list[int] = []
        for kept in self._kept.values():
            wait = self._idle_wait(kept)
            if wait is not None and wait > 0:
                later.append(wait)
            elif wait is not None:
                self._enqueue(kept)
        return min(later) * 1e-9 if later else None

    def forget(self, tape: Tape) -> None:
        """Take no more care of ``tape``; before it is released."""
        kept = self._kept.pop(tape, None)
        if kept is not None and kept in self._queue:
            self._queue.remove(kept)
        if self._run is not None and self._run.kept is kept:
            self._cancel(self._run)

    def stop(self) -> None:
        """Begin nothing more, and give up what is under way: stopping does not wait for it."""
        self._stopped = True
        self._queue.clear()
        if self._run is not None:
            self._cancel(self._run)

    # When.

    def _is_due(self, kept: _Kept) -> bool:
        settings = kept.settings
        if settings.semantics == "exact":
            return 0 < settings.refresh_every <= kept.stale_records
        waited = self._clock() - kept.begun
        return (
            0 < settings.divergence_every <= waited
            and kept.tape.evicted_records > 0
            and bool(self._probes(settings.name))
        )

    def _idle_wait(self, kept: _Kept) -> int | None:
        settings = kept.settings
        if settings.semantics != "exact" or not settings.refresh_idle:
            return None
        if not kept.stale_records or not kept.tape.resident:
            return None
        return kept.committed + settings.refresh_idle - self._clock()

    def _is_overtaken(self, run: _Run) -> bool:
        """Nothing is left of the window that was begun, or positions would pass the frame limit."""
        tape, begins = run.kept.tape, run.fresh.begins_at
        end = run.fresh.cached_tokens + tape.evicted_tokens + tape.live_tokens - begins
        return tape.evicted_tokens - begins >= run.tokens or end > self._engine.frame_limit

    # One window.

    def _enqueue(self, kept: _Kept) -> None:
        if kept not in self._queue and not (self._run is not None and self._run.kept is kept):
            self._queue.append(kept)
        self._begin()

    def _begin(self) -> None:
        """The next of the queue, if none is under way."""
        while self._queue and self._run is None and not self._stopped:
            kept = self._queue.popleft()
            kept.begun, kept.begun_records = self._clock(), kept.tape.evicted_records
            window = kept.tape.window
            if window:
                self._run = _Run(kept, kept.tape.fresh_window(), len(window))
                self._prefill(self._run, window)

    def _prefill(self, run: _Run, tokens: list[int]) -> None:
        run.request = Request(
            RequestSpec(
                cls=PriorityClass.STREAM,
                session=run.kept.settings.name,
                prompt=tokens,
                max_tokens=0,
                background=True,
                on_done=partial(self._prefilled, run),
                reader=run.fresh,
            )
        )
        self._scheduler.submit(run.request)

    def _prefilled(self, run: _Run, request: Request) -> None:
        if request.state is State.FINISHED and self._scheduler.run_between(partial(self._settle, run)):
            return
        if request.error is not None:
            log.warning("%s was not refreshed: %s", request.session, request.error.message)
        self._end(run)

    def _settle(self, run: _Run) -> None:
        """Between batches: catch up, begin again, or use what is there."""
        run.overtaken = run.overtaken or self._is_overtaken(run)
        if run.overtaken or not self._is_wanted(run):
            self._end(run)
            return
        tape, fresh = run.kept.tape, run.fresh
        missing = tape.window[fresh.begins_at + fresh.length - tape.evicted_tokens :]
        try:
            complete = not missing or self._caught_up(fresh, missing)
        except Exception:
            self._end(run)
            raise
        if not complete:
            self._prefill(run, [*fresh.tokens, *missing])
            return
        try:
            self._sample(run)
            if run.kept.settings.semantics == "exact":
                tape.adopt(fresh)
                self._store.inc("foretick_refreshes_total", session=tape.name)
        except NotResident as error:
            log.warning("%s was not refreshed: %s", tape.name, error)
        finally:
            self._end(run)

    def _caught_up(self, fresh: Fork, missing: list[int]) -> bool:
        """The last tokens at once: in a batch, the tape's next append would leave others missing for ever."""
        if len(missing) > self._chunk_tokens or not fresh.acquire(len(missing)):
            return False
        try:
            self._engine.execute([Chunk(fresh, missing, sample=False)])
        except OutOfMemory:
            return False
        return True

    def _end(self, run: _Run) -> None:
        run.fresh.release()
        self._run = None
        if run.overtaken and self._is_wanted(run):
            self._store.inc("foretick_refresh_restarts_total")
            self._queue.append(run.kept)
        self._begin()

    def _cancel(self, run: _Run) -> None:
        assert run.request is not None  # a run is submitted as soon as it is made
        self._scheduler.cancel(run.request.id)

    def _is_wanted(self, run: _Run) -> bool:
        return not self._stopped and run.kept.tape in self._kept

    def _sample(self, run: _Run) -> None:
        """Ask both states the standing questions, as many as fit in one batch."""
        tape = run.kept.tape
        probes = self._probes(tape.name)
        both = accumulate(2 * len(tokens) for tokens, _ in probes)
        fitting = [it for it, total in zip(probes, both, strict=True) if total <= self._batch_tokens]
        try:
            found = probe(self._engine, tape, run.fresh, fitting) if fitting else []
        except OutOfMemory as error:
            log.warning("%s: no memory to compare its states: %s", tape.name, error)
            return
        if found:
            self._report(tape.name, found)

    def _report(self, session: str, found: Sequence[Divergence]) -> None:
        self._store.inc("foretick_divergence_samples_total", len(found), session=session)
        agreeing = sum(divergence.agrees for divergence in found)
        self._store.inc("foretick_divergence_agreements_total", agreeing, session=session)
        mean = sum(divergence.kl_nats for divergence in found) / len(found)
        self._store.set("foretick_divergence_kl_nats", mean, session=session)
