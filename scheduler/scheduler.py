"""The scheduler: one iteration is plan, allocate, execute, commit.

Work comes in through an `Inbox` from any thread. All the rest belongs to the one thread that calls `step`:
equal inputs (work, clock, executor) give equal decisions. The scheduler yields after every batch: whatever
arrives meanwhile waits for one batch at most before it is ranked (*Attention Once* section 3.6).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from engine.step import Executor, OutOfMemory, SampledToken
from regions.block_pool import BlockPool
from regions.tape import Tape
from regions.watch import PrefixWatch
from scheduler.allocation import Allocation, allocate, prefers_swap
from scheduler.grouping import Grouping
from scheduler.inbox import Inbox
from scheduler.live import STOPPING, LiveWork, call
from scheduler.observer import Observer
from scheduler.planner import Entry, Plan, first_half, plan
from scheduler.policies import Ordering
from scheduler.prefix_queue import waiting_order
from scheduler.queues import Queues
from scheduler.request import Event, Failure, Request, State
from scheduler.speculation import Speculation
from scheduler.tapes import Records, TapeAppend, TapeListener, due
from scheduler.types import Costs, Limits, PriorityClass, Tier, Work

log = logging.getLogger(__name__)

FIFO = Ordering()


@dataclass(frozen=True, slots=True)
class Executed:
    """What one forward pass ran, and what it sampled."""

    entries: Sequence[Entry]
    """Those without a row of their own included: readers of a shared prefill."""
    rows: Sequence[Entry]
    sampled: Sequence[SampledToken | None]
    """Of each row, None where nothing was to be sampled."""
    now: int
    """When it ended, ns."""


class Scheduler:
    """Priority classes over one executor; see the module. `clock` gives ns and never runs backwards.

    ``ordering`` is that of POOL requests; one by prefix needs the ``index``, an adaptive one draws from
    ``rng``. Without ``costs`` every session bound is due at once and `cost` never swaps; without a ``tier``
    nothing does.
    """

    def __init__(
        self,
        executor: Executor,
        memory: BlockPool,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer | None = None,
        ordering: Ordering = FIFO,
        *,
        costs: Costs | None = None,
        tier: Tier | None = None,
        index: PrefixWatch | None = None,
        rng: random.Random | None = None,
        inbox: Inbox | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self._executor, self._memory, self._limits, self._clock = executor, memory, limits, clock
        self._observer = observer or Observer()
        self._costs, self._tier = costs, tier
        self._inbox = Inbox(clock) if inbox is None else inbox
        self._grouping = (grouping or Grouping()) if limits.grouping else None
        self._speculation = Speculation(limits, memory)
        forget = [self._speculation.forget] + ([self._grouping.forget] if self._grouping else [])
        order, self._learn = waiting_order(ordering, index, rng)
        self.queues = Queues(ordering.key, order)
        self._live = LiveWork(self.queues, memory, limits, clock, self._observer, forget)
        self._on_lost: list[Callable[[Tape], None]] = []
        self._admissions = self._preemptions = 0
        self._after_question = False

    # Any thread.

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Refusals, too, arrive by `on_done`: code `too_long`.

        After `close` the request ends at once with `stopping`, on the caller's thread.
        """
        if not self._inbox.submit(request):
            self._live.end(request, State.FAILED, STOPPING, request.last_chunk_ns)
        return request.id

    def append(self, tape: Tape, records: Records) -> None:
        """Queue whole records for a tape. Raises ValueError for an empty one: then nothing is queued.

        Records that no batch can hold are reported to `on_drop` (`too_long`), and all of them after `close`.
        """
        if any(not record.tokens for record in records):
            raise ValueError(f"{tape.name}: a record needs at least one token")
        if records and not self._inbox.append(tape, records):
            self._live.dropped(tape, list(records), STOPPING)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """More of an unfinished prompt (append mode, *Stream2LLM* section 4.2).

        Like `replace` and `finish` ignored for a request that has ended or whose prompt is finished.
        """
        self._inbox.change_prompt(request_id, "extend", tokens)

    def replace(self, request_id: int, tokens: Sequence[int]) -> None:
        """Another prompt in place of the unfinished one: KV of the common prefix stays (update mode)."""
        self._inbox.change_prompt(request_id, "replace", tokens)

    def finish(self, request_id: int) -> None:
        """The prompt is all there: generate. An empty one fails with `bad_prompt`."""
        self._inbox.change_prompt(request_id, "finish")

    def cancel(self, request_id: int) -> None:
        """End a live request as CANCELLED before the next batch; unknown and ended ids are ignored."""
        self._inbox.cancel(request_id)

    def run_between(self, callback: Callable[[], None]) -> bool:
        """Call `callback` on the stepping thread between two batches; False, and no call, after `close`."""
        return self._inbox.call(callback)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something came in (True), or `interrupt` or the time limit (False)."""
        return self._inbox.wait(timeout_s)

    def interrupt(self) -> None:
        """Wake a thread that blocks in `wait`, now or at its next call."""
        self._inbox.interrupt()

    # The stepping thread, or before it starts.

    def subscribe(self, listener: TapeListener) -> None:
        """Tell `listener` of commits and drops, after those subscribed earlier."""
        self._live.listeners.append(listener)

    def on_lost(self, callback: Callable[[Tape], None]) -> None:
        """Call `callback` at every step with each tape whose lost KV keeps work waiting."""
        self._on_lost.append(callback)

    @property
    def live(self) -> int:
        """Requests and tapes with work that have not ended."""
        return sum(self.queues.live.values())

    def next_due(self) -> float | None:
        """Seconds until an unfinished prompt is given up, unless input comes; None while there is none."""
        return self._live.timeouts.next_due(self._clock())

    def step(self) -> bool:
        """One iteration. False when there was nothing to do."""
        now = self._clock()
        received = self._receive(now)
        planned = self._plan(now)
        allocation = self._allocate(planned)
        executed = self._execute(allocation.entries)
        if executed is not None:
            self._commit(executed)
        worked = received or allocation.changed
        if worked:
            self._observer.depth(self.queues.waiting, self.queues.live)
        return worked or len(self._inbox) > 0

    def close(self) -> None:
        """Refuse new work and end all live work with `stopping`."""
        self._inbox.close()
        for note in self._inbox.take():
            self._live.apply(note)
        self._live.close()

    # Receive: notes of other threads come into force.

    def _receive(self, now: int) -> bool:
        """Whether anything came in or ran out of time."""
        self._live.waits.advance(now)
        notes = self._inbox.take()
        for note in notes:
            self._live.apply(note)
        return self._live.expire(now) or bool(notes)

    # Plan.

    def _plan(self, now: int) -> Plan:
        for append in due(self.queues.sorted_appends(), now, self._limits, self._costs):
            append.due = True
            self.queues.update(append)
        planned = plan(
            self.queues, self._memory, self._limits, self._grouping, after_question=self._after_question
        )
        self._after_question = planned.question
        self._live.waits.note(planned.waits)
        for tape in planned.lost:
            for callback in self._on_lost:
                call(partial(callback, tape))
        return planned

    # Allocate.

    def _allocate(self, planned: Plan) -> Allocation:
        allocation = allocate(planned, self.queues, self._memory, self._preempt)
        for session, tokens in allocation.evicted:
            self._observer.evicted(session, tokens)
        for entry, failure in allocation.failures:
            self._live.fail(entry, failure)
        allocation.entries = self._speculation.draft(allocation.entries)
        return allocation

    def _preempt(self, victim: Request, by: Work) -> None:
        """Make room: to the host if that is cheaper and it has room, else computed again later."""
        tier, reader = self._tier, victim.reader
        swapped = (
            tier is not None
            and reader is not None
            and prefers_swap(victim, self._limits.eviction, self._costs)
            and tier.swap_out(reader)
        )
        self._requeue(victim, Event.PREEMPTED_SWAP if swapped else Event.PREEMPTED_RECOMPUTE, by)

    def _requeue(self, victim: Request, how: Event, by: Work) -> None:
        self._preemptions += 1
        victim.preempt(how, self._preemptions, self._clock(), by.seq)
        self._live.update(victim)
        self._observer.preempted(victim, how, by)

    # Execute.

    def _execute(self, entries: Sequence[Entry]) -> Executed | None:
        """One forward pass; half of it again, once, where the device had no memory. None: nothing ran."""
        if not entries:
            return None
        self._admit(entries)
        try:
            return self._forward(entries)
        except OutOfMemory as error:
            log.warning("no memory for a batch of %d entries: %s", len(entries), error)
            self._observer.out_of_memory(retried=True)
        smaller = self._shrink([entry for entry in entries if entry.n])
        try:
            return self._forward(smaller)
        except OutOfMemory as error:
            self._observer.out_of_memory(retried=False)
            message = f"the device has no memory left for one more step, not even a smaller one: {error}"
            self._live.lose(smaller, Failure("no_memory", message))
            return None

    def _admit(self, entries: Sequence[Entry]) -> None:
        """Requests of a batch are admitted; how long its work waited is told."""
        now = self._clock()
        for entry in entries:
            work = entry.work
            if isinstance(work, TapeAppend):
                if not work.failures:
                    for pending, _ in zip(work.queue, range(entry.n), strict=False):
                        self._observer.queue_wait(work.cls, now - pending.queued_ns)
            elif work.state is State.QUEUED:
                if work.first(Event.SCHEDULED) is None and not work.prefill_only:
                    self._observer.queue_wait(work.cls, now - work.events[0][1])
                self._admissions += 1
                work.admit(self._admissions, now)
                self._live.update(work)

    def _forward(self, entries: Sequence[Entry]) -> Executed | None:
        started = self._clock()
        # without a row are readers of a shared prefill, and unfinished prompts the prefix cache had all of
        rows = [entry for entry in entries if entry.n]
        chunks = [entry.work.chunk(entry.n, entry.drafts) for entry in rows]
        if not chunks:
            return Executed(entries, (), (), started)
        try:
            sampled = self._executor.execute(chunks)
            if len(sampled) != len(chunks):
                raise RuntimeError(f"the executor returned {len(sampled)} rows for {len(chunks)} chunks")
        except OutOfMemory:
            raise
        except Exception as error:
            log.exception("forward pass failed; ending its %d rows", len(rows))
            self._observer.executor_failed(error)
            self._live.lose(rows, Failure("engine", f"{type(error).__name__}: {error}"))
            return None
        now = self._clock()
        tokens: Counter[PriorityClass] = Counter()
        for entry, chunk in zip(rows, chunks, strict=True):
            tokens[entry.work.cls] += len(chunk.tokens)
        self._observer.batch(tokens, len(rows), now - started)
        return Executed(entries, rows, sampled, now)

    def _shrink(self, rows: Sequence[Entry]) -> list[Entry]:
        """The first half of a batch; the requests of the rest are preempted."""
        kept = first_half(rows)
        staying = {entry.work for entry in kept}
        for entry in rows:
            if isinstance(entry.work, Request) and entry.work not in staying:
                self._requeue(entry.work, Event.PREEMPTED_RECOMPUTE, kept[0].work)
        return kept

    # Commit.

    def _commit(self, executed: Executed) -> None:
        for entry in executed.entries:
            if entry.source is not None and self._grouping is not None:
                self._grouping.read(cast(Request, entry.work), entry.source)
        for entry, sampled in zip(executed.rows, executed.sampled, strict=True):
            if isinstance(entry.work, Request):
                self._advance(entry.work, sampled, len(entry.drafts), executed.now)
        # Tapes last: whoever finished above did so at the version it read, and its successor sees the newest.
        for entry in executed.rows:
            if isinstance(entry.work, TapeAppend):
                self._commit_records(entry.work, entry.n)
        for entry in executed.entries:
            if isinstance(entry.work, Request) and entry.work.id in self.queues.requests:
                self._live.update(entry.work)

    def _advance(self, request: Request, sampled: SampledToken | None, drafted: int, now: int) -> None:
        """Account for a request's executed chunk; the executor has advanced its reader, over drafts, too."""
        if drafted and sampled is not None:
            accepted = len(sampled.accepted)
            request.verify(drafted, accepted)
            self._speculation.verified(request, drafted, accepted)
            self._observer.speculated(drafted, accepted)
        if request.remaining or not request.complete:
            return
        if request.events[-1][0] is Event.SCHEDULED:
            request.events.append((Event.KV_ON_GPU, now))
            if request.prompt_reader is not None:
                request.prompt_reader.save()
        if request.prefill_only:
            self._live.end(request, State.FINISHED)
        elif sampled is None:
            self._live.end(
                request, State.FAILED, Failure("engine", "the executor returned no row to sample from")
            )
        elif sampled.error is not None:
            self._live.end(request, State.FAILED, Failure("nan_logits", sampled.error))
        else:
            if not request.output and request.cls is PriorityClass.POOL:
                self._learn(now - request.last_chunk_ns)
            if any(request.accept(each) for each in (*sampled.accepted, sampled)):
                self._live.end(request, State.FINISHED)

    def _commit_records(self, append: TapeAppend, n: int) -> None:
        try:
            version = append.tape.commit(append.lengths(n), append.times(n))
        except Exception as error:
            log.exception("%s: commit failed", append.tape.name)
            self._live.fail(Entry(append, n), Failure("engine", f"{type(error).__name__}: {error}"))
            return
        records = self._live.take(append, n)
        for listener in self._live.listeners:
            call(partial(listener.on_commit, append.tape, version, records))
