"""The scheduler: one iteration is plan, allocate, execute, commit.

Any thread adds work through an `Inbox`. Everything else belongs to the one thread that calls `step`, and
equal inputs (work, clock, executor) give equal decisions. The scheduler yields after every batch, so new work
waits for at most one batch before it is ranked (*Attention Once* section 3.6).
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast

from engine.step import Chunk, Executor, OutOfMemory, SampledToken, pass_timer
from regions.pool_metadata import BlockPool
from regions.prefix_index import PrefixIndex
from regions.tape import Tape
from scheduler.allocation import Allocation, allocate, prefers_swap
from scheduler.grouping import Grouping
from scheduler.inbox import Inbox
from scheduler.interfaces import Costs, Limits, OffloadTier, PriorityClass
from scheduler.lifecycle import STOPPING, PromptChange, RequestLifecycle, call
from scheduler.observer import Observer
from scheduler.planner import Entry, Plan, first_half, plan
from scheduler.policies import Ordering
from scheduler.prefix_queue import waiting_order
from scheduler.queues import Queues
from scheduler.refresh_policy import Replacement
from scheduler.request import Failure, LifecycleEvent, Request, State
from scheduler.speculation import Speculation
from scheduler.tapes import OnCommit, OnDrop, TapeAppend, TapeItems, Work, due

log = logging.getLogger(__name__)

FIFO = Ordering()


@dataclass(frozen=True, slots=True)
class Executed:
    """The entries of one forward pass and its results."""

    entries: Sequence[Entry]
    """Includes those without a row, which read a shared prefill."""
    rows: Sequence[Entry]
    sampled: Sequence[SampledToken | None]
    """One result a row, None where nothing was sampled."""
    now: int
    """End of the pass, ns."""


class Scheduler:
    """Schedules priority classes on one executor; see the module. `clock` gives ns and must be monotonic.

    ``ordering`` applies to POOL requests; by prefix it needs the ``index``, an adaptive one draws from
    ``rng``. Without ``costs`` every staleness bound is due at once and `cost` never swaps; without a ``tier``
    nothing swaps. Schedulers that take turns (`scheduler.turns`) share one ``inbox``.
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
        tier: OffloadTier | None = None,
        index: PrefixIndex | None = None,
        rng: random.Random | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self._executor, self._memory, self._limits, self._clock = executor, memory, limits, clock
        self._took = pass_timer(executor)
        self._observer = observer or Observer()
        self._costs, self._tier = costs, tier
        self._inbox = Inbox(clock) if inbox is None else inbox  # an empty one is false
        self._grouping = Grouping() if limits.grouping else None
        self._speculation = Speculation(limits, memory, costs)
        forget = [self._speculation.forget] + ([self._grouping.forget] if self._grouping else [])
        order, self._learn = waiting_order(ordering, index, rng, memory.block_size)
        self.queues = Queues(ordering.key, order)
        self._live = RequestLifecycle(self.queues, memory, limits, clock, self._observer, forget)
        self._on_lost: list[Callable[[Tape], None]] = []
        self._on_refresh: list[Callable[[Tape, Replacement], None]] = []
        self._awaited: dict[Tape, list[Callable[[], None]]] = {}
        self._admissions = self._preemptions = 0
        self._after_question = False

    # Any thread.

    def submit(self, request: Request) -> int:
        """`submit_together` of one request; returns its id."""
        self.submit_together([request])
        return request.id

    def submit_together(self, requests: Sequence[Request]) -> None:
        """Queue requests to be planned together: what their prompts share is computed once.

        Refusals, such as `too_long`, also arrive by `on_done`. After `close` the requests end at once with
        `stopping`, on the caller's thread.
        """
        arrived = ((partial(self._live.enter, request), [request]) for request in requests)
        if not self._inbox.put_together(arrived):
            for request in requests:
                self._live.end(request, State.FAILED, STOPPING, request.last_chunk_ns)

    def append(self, *appends: tuple[Tape, TapeItems]) -> None:
        """Queue whole records for tapes, to be planned together: they share passes where they fit.

        Raises ValueError for an empty record and then queues nothing. TapeItems too long for any batch are
        reported to `on_drop` (`too_long`), and after `close` all are.
        """
        for tape, records in appends:
            if any(not record.tokens for record in records):
                raise ValueError(f"{tape.name}: every record needs at least one token")
        given = [(tape, records) for tape, records in appends if records]
        arrived = ((partial(self._live.enqueue, tape, records), records) for tape, records in given)
        if not self._inbox.put_together(arrived):
            for tape, records in given:
                self._live.dropped(tape, list(records), STOPPING)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """Append to an unfinished prompt (append mode, *Stream2LLM* section 4.2).

        Ignored, as are `replace` and `finish`, when the request has ended or its prompt is finished.
        """
        self._change_prompt(request_id, "extend", tokens)

    def replace(self, request_id: int, tokens: Sequence[int]) -> None:
        """Replace an unfinished prompt; KV of the common prefix stays (update mode)."""
        self._change_prompt(request_id, "replace", tokens)

    def finish(self, request_id: int) -> None:
        """Finish the prompt and generate. An empty prompt fails with `bad_prompt`."""
        self._change_prompt(request_id, "finish", ())

    def _change_prompt(self, request_id: int, change: PromptChange, tokens: Sequence[int]) -> None:
        self._inbox.put(partial(self._live.change_prompt, request_id, change, tokens, self._clock()))

    def refresh(
        self,
        tape: Tape,
        frozen: Sequence[int],
        window: TapeItems | None = None,
        *,
        first: int = 0,
        adopted: Callable[[], None] | None = None,
    ) -> None:
        """Replace a tape's frozen prefix, in the background; the newest call wins.

        The live records are prefilled behind it again, or ``window``, which must have all records appended so
        far: records appended later then wait until it is adopted. Questions read the old version until then.
        Without ``window``, live records before number ``first`` (of all that the tape ever had, from 0) stay
        readable until then and leave with it. ``adopted`` is called between two batches.
        Raises ValueError, with nothing changed, when prefix or window are too long.
        """
        tape.check_prefix(len(frozen))
        tokens = sum(len(record.tokens) for record in window or ())
        if tokens > tape.retention.tokens:
            raise ValueError(f"{tape.name}: {tokens} tokens exceed the retention of {tape.retention.tokens}")
        for callback in self._on_refresh:
            self.run_between(partial(callback, tape, Replacement(tuple(frozen), window, first, adopted)))

    def cancel(self, request_id: int) -> None:
        """End a live request as CANCELLED before the next batch; ignores unknown and ended ids."""
        self._inbox.put(partial(self._live.cancel, request_id))

    def run_between(self, callback: Callable[[], None]) -> bool:
        """Call `callback` on the stepping thread between two batches; after `close` return False instead."""
        return self._inbox.put(partial(call, callback))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until work arrives (True), or until `interrupt` or the timeout (False)."""
        return self._inbox.wait(timeout_s)

    def interrupt(self) -> None:
        """Wake the thread that blocks in `wait`, now or at its next call."""
        self._inbox.interrupt()

    # The stepping thread, or before it starts.

    def subscribe(self, on_commit: OnCommit, on_drop: OnDrop | None = None) -> None:
        """Call back for every tape's commits and drops, after earlier subscribers, on the stepping thread.

        The next batch is planned afterwards.
        """
        self._live.on_commit.append(on_commit)
        if on_drop is not None:
            self._live.on_drop.append(on_drop)

    def on_lost(self, callback: Callable[[Tape], None]) -> None:
        """Call `callback` at every step with each tape whose lost KV blocks work."""
        self._on_lost.append(callback)

    def when_resident(self, tape: Tape, callback: Callable[[], None]) -> None:
        """Call `callback` between two batches once ``tape`` is in the pool, or has no room there now."""
        self._awaited.setdefault(tape, []).append(callback)

    def on_refresh(self, callback: Callable[[Tape, Replacement], None]) -> None:
        """Call `callback` between two batches with what each `refresh` asks for."""
        self._on_refresh.append(callback)

    def remove(self, tape: Tape, failure: Failure) -> None:
        """End all work on ``tape`` with ``failure``. Nothing may be submitted for it afterwards."""
        self._live.remove(tape, failure)
        for callback in self._awaited.pop(tape, ()):
            call(callback)

    @property
    def live(self) -> int:
        """Unfinished requests, and tapes with records to append."""
        return sum(self.queues.live.values())

    def next_due(self) -> float | None:
        """Seconds until the next unfinished prompt times out or a deadline passes; None without one."""
        return self._live.next_due(self._clock())

    @property
    def first(self) -> PriorityClass | None:
        """The highest class of all live work; None without any."""
        return min((cls for cls, number in self.queues.live.items() if number), default=None)

    @property
    def has_questions(self) -> bool:
        """Whether a question is asked or answered, or may be among the calls of other threads."""
        live = self.queues.live
        return bool(live[PriorityClass.FLASH] or live[PriorityClass.SESSION]) or len(self._inbox) > 0

    def step(self) -> bool:
        """Run one iteration; False when there was nothing to do."""
        now = self._clock()
        self.charge_waits(now)
        received = self.receive(now)
        worked = self.advance(now) or received
        if worked:
            self._observer.depth(self.queues.waiting, self.queues.live)
        return worked or len(self._inbox) > 0

    def charge_waits(self, now: int) -> None:
        """Charge the time until ``now`` (ns) to what work waited for, before `receive`."""
        self._live.waits.advance(now)

    def receive(self, now: int) -> bool:
        """Carry out the calls of other threads.

        Returns whether there was one, a prompt timed out, or a deadline passed.
        """
        calls = self._inbox.take()
        for arrived in calls:
            arrived()
        return self._live.expire(now) or bool(calls)

    def advance(self, now: int) -> bool:
        """Plan, allocate, execute and commit one batch; False when nothing could run."""
        called = self._call_awaiting()
        planned = self._plan(now)
        allocation = self._allocate(planned)
        executed = self._execute(self._speculation.draft(allocation.entries))
        if executed is not None:
            self._commit(executed)
        return called or allocation.changed

    def close(self) -> None:
        """Refuse new work, and end all live work with `stopping`."""
        self._inbox.close()
        for arrived in self._inbox.take():
            arrived()
        self._live.close()
        for callback in chain.from_iterable(list(self._awaited.values())):
            call(callback)

    # Plan.

    def _plan(self, now: int) -> Plan:
        for append in due(self.queues.sorted_appends(), now, self._limits, self._costs):
            append.promote()
            self.queues.update(append)
        planned = plan(
            self.queues, self._memory, self._limits, self._grouping, after_question=self._after_question
        )
        self._after_question = planned.question
        self._live.waits.note(planned.waits)
        for tape in planned.lost:
            self._rebuild(tape)
        return planned

    def _rebuild(self, tape: Tape) -> None:
        for callback in self._on_lost:
            call(partial(callback, tape))

    def _call_awaiting(self) -> bool:
        """Call back for the tapes that are there; whether there was one."""
        waiting = len(self._awaited)
        for tape in list(self._awaited):
            if tape.lost:
                self._rebuild(tape)
            elif tape.bring_back() or not (tape.away or self._memory.leaving):
                for callback in self._awaited.pop(tape):
                    call(callback)
        return len(self._awaited) < waiting

    # Allocate.

    def _allocate(self, planned: Plan) -> Allocation:
        allocation = allocate(planned, self.queues, self._memory, self._preempt)
        for entry, failure in allocation.failures:
            self._live.fail(entry, failure)
        return allocation

    def _preempt(self, victim: Request, by: Work) -> None:
        """Preempt a request: swap it out if that is cheaper and the host has room, or recompute it later."""
        tier, reader = self._tier, victim.reader
        swapped = (
            tier is not None
            and reader is not None
            and prefers_swap(victim, self._limits.eviction, self._costs)
            and tier.swap_out(reader)
        )
        self._requeue(
            victim, LifecycleEvent.PREEMPTED_SWAP if swapped else LifecycleEvent.PREEMPTED_RECOMPUTE, by
        )

    def _requeue(self, victim: Request, how: LifecycleEvent, by: Work) -> None:
        self._preemptions += 1
        victim.preempt(how, self._preemptions, self._clock(), by.seq)
        self._live.update(victim)
        self._observer.preempted(victim, how, by)

    # Execute.

    def _execute(self, entries: Sequence[Entry]) -> Executed | None:
        """Run one forward pass; when memory runs out, retry once with half of it. None: nothing ran."""
        if not entries:
            return None
        self._admit(entries)
        try:
            return self._forward(entries)
        except OutOfMemory as error:
            log.warning("out of memory in a batch of %d entries: %s", len(entries), error)
            self._observer.out_of_memory(retried=True)
        smaller = self._shrink([entry for entry in entries if entry.n])
        try:
            return self._forward(smaller)
        except OutOfMemory as error:
            self._observer.out_of_memory(retried=False)
            message = f"the device ran out of memory, even for half of the batch: {error}"
            self._live.lose(smaller, Failure("no_memory", message))
            return None

    def _admit(self, entries: Sequence[Entry]) -> None:
        """Admit the requests of a batch and report how long its work waited."""
        now = self._clock()
        for entry in entries:
            work = entry.work
            if isinstance(work, TapeAppend):
                if not work.failures:
                    for item in work.head(entry.n):
                        self._observer.queue_wait(work.cls, now - item.queued_ns)
            elif work.state is State.QUEUED:
                if work.first(LifecycleEvent.SCHEDULED) is None and not work.prefill_only:
                    self._observer.queue_wait(work.cls, now - work.events[0][1])
                if not work.admitted:
                    self._live.admitted(work)
                self._admissions += 1
                work.admit(self._admissions, now)
                self._live.update(work)

    def _forward(self, entries: Sequence[Entry]) -> Executed | None:
        started = self._clock()
        # no row: readers of a shared prefill, and unfinished prompts that the prefix cache has in full
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
            self._live.lose(rows, Failure("engine", f"{type(error).__name__}: {error}"))
            return None
        now = self._clock()
        tokens: Counter[PriorityClass] = Counter()
        for entry, chunk in zip(rows, chunks, strict=True):
            tokens[entry.work.cls] += len(chunk.tokens)
        took = self._took(now - started)
        _attribute(rows, chunks, took)
        self._observer.batch(tokens, len(rows), took)
        return Executed(entries, rows, sampled, now)

    def _shrink(self, rows: Sequence[Entry]) -> list[Entry]:
        """The first half of a batch; the other requests are preempted."""
        kept = first_half(rows)
        staying = {entry.work for entry in kept}
        for entry in rows:
            if isinstance(entry.work, Request) and entry.work not in staying:
                self._requeue(entry.work, LifecycleEvent.PREEMPTED_RECOMPUTE, kept[0].work)
        return kept

    # Commit.

    def _commit(self, executed: Executed) -> None:
        for entry in executed.entries:
            if entry.source is not None and self._grouping is not None:
                self._grouping.read(cast(Request, entry.work), entry.source)
        for entry, sampled in zip(executed.rows, executed.sampled, strict=True):
            if isinstance(entry.work, Request):
                self._advance(entry.work, sampled, len(entry.drafts), executed.now)
        # Tapes last: requests that finish here read their own version, and what they trigger sees the newest.
        for entry in executed.rows:
            if isinstance(entry.work, TapeAppend):
                self._commit_records(entry.work, entry.n)
        for entry in executed.entries:
            if isinstance(entry.work, Request) and entry.work.id in self.queues.requests:
                self._live.update(entry.work)

    def _advance(self, request: Request, sampled: SampledToken | None, drafted: int, now: int) -> None:
        """Apply the results of a request's chunk; the executor has advanced its reader, over drafts, too."""
        if request.output and sampled is not None:
            accepted = len(sampled.accepted)
            if drafted:
                request.verify(drafted, accepted)
                self._speculation.verified(request, drafted, accepted)
            self._observer.decoded(request.cls, drafted, accepted)
        if request.remaining or not request.complete:
            return
        if request.events[-1][0] is LifecycleEvent.SCHEDULED:
            request.events.append((LifecycleEvent.KV_ON_GPU, now))
            if sampled is None or sampled.error is None:
                request.remember()
        if request.prefill_only:
            self._live.end(request, State.FINISHED)
        elif sampled is None:
            self._live.end(
                request, State.FAILED, Failure("engine", "the executor returned no token for this request")
            )
        elif sampled.error is not None:
            self._live.end(request, State.FAILED, Failure("nan_logits", sampled.error))
        else:
            if not request.output and request.cls is PriorityClass.POOL:
                self._learn(now - request.last_chunk_ns)
            if any(request.accept(each) for each in (*sampled.accepted, sampled)):
                if len(request.output) > 1:  # with one token nothing new is in KV
                    request.remember()
                self._live.end(request, State.FINISHED)

    def _commit_records(self, append: TapeAppend, n: int) -> None:
        try:
            version = append.tape.commit(append.lengths(n), append.times(n))
        except Exception as error:
            log.exception("%s: commit failed", append.tape.name)
            self._live.fail(Entry(append, n), Failure("engine", f"{type(error).__name__}: {error}"))
            return
        records = self._live.take(append, n)
        for on_commit in self._live.on_commit:
            call(partial(on_commit, append.tape, version, records))


def _attribute(rows: Sequence[Entry], chunks: Sequence[Chunk], took_ns: int) -> None:
    """Each request's part of a pass, by its tokens; a tape's own part belongs to no request."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    for entry, chunk in zip(rows, chunks, strict=True):
        if isinstance(entry.work, Request):
            entry.work.engine_ns += took_ns * len(chunk.tokens) // total
