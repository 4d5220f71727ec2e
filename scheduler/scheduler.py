"""One iteration: plan, acquire, execute, commit.

Work comes in and goes out at the `Desk`. All of this belongs to the one thread that calls `step`: equal
inputs (work, clock, executor) give equal decisions. The scheduler yields after every batch: whatever arrives
meanwhile waits for one batch at most before it is ranked (*Attention Once* section 3.6).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from engine.step import Chunk, Executor, OutOfMemory, SampledToken
from scheduler.acquisition import acquire
from scheduler.deadlines import due
from scheduler.desk import Desk
from scheduler.drafting import with_drafts
from scheduler.eviction import prefers_swap
from scheduler.followers import follow
from scheduler.halving import upper_half
from scheduler.observer import Observer
from scheduler.planner import Entry, plan
from scheduler.policies import Ordering
from scheduler.request import Append, Event, Failure, Request, State, Work
from scheduler.types import Costs, Limits, Memory, PrefixIndex, PriorityClass, Tier

log = logging.getLogger(__name__)

FIFO = Ordering()


class Scheduler(Desk):
    """Priority classes over one executor; see the module. `clock` gives ns and never runs backwards.

    ``ordering`` is that of POOL requests; one by prefix needs the ``index``, an adaptive one draws from
    ``rng``. Without ``costs`` every session bound is due at once and `cost` never swaps; without a ``tier``
    nothing does.
    """

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer | None = None,
        ordering: Ordering = FIFO,
        *,
        costs: Costs | None = None,
        tier: Tier | None = None,
        index: PrefixIndex | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(memory, limits, clock, observer or Observer(), ordering, index, rng)
        self._executor = executor
        self._costs = costs
        self._tier = tier
        self._admissions = self._preemptions = 0

    def step(self) -> bool:
        """One iteration. False when there was nothing to do."""
        now = self._clock()
        self._waits.advance(now)
        worked = self._read_inbox()
        for request_id in self._streams.expired(now):
            self._abandon(self._book.requests[request_id])
            worked = True
        for append in due(self._book.appends(), now, self._limits, self._costs):
            append.due = True
            self._book.update(append)
        chosen = plan(self._book, self._memory, self._limits)
        self._book.questioned = chosen.question
        self._waits.note(chosen.waits)
        if chosen.entries:
            preempted = self._preemptions
            acquired = acquire(chosen, self._book, self._memory, self._preempt)
            for session, tokens in acquired.evicted:
                self._observer.evicted(session, tokens)
            for entry, failure in acquired.failures:
                self._give_up(entry, failure)
            if acquired.entries:
                entries = with_drafts(acquired.entries, self._memory, self._limits)
                self._launch(entries)
                self._run(entries)
            # with none of these, all that could run waits for memory that only input or time will free
            moved = self._preemptions > preempted
            worked |= bool(acquired.entries or acquired.failures or acquired.evicted or moved)
        if worked:
            self._observer.depth(self._book.waits, self._book.counts)
        return worked

    def close(self) -> None:
        """Refuse new work and end all live work with `stopping`."""
        with self._changed:
            self._closed = True
        self._read_inbox()
        failure = Failure("stopping", "the engine is shutting down")
        for request in list(self._book.requests.values()):
            self._end(request, State.FAILED, failure)
        for append in list(self._appends.values()):
            self._give_up(Entry(append, len(append.queue)), failure)

    # Execute and commit.

    def _launch(self, entries: Sequence[Entry]) -> None:
        """Requests of a batch are admitted; how long its work waited is told."""
        now = self._clock()
        for entry in entries:
            work = entry.work
            if isinstance(work, Append):
                if not work.failures:
                    for queued_ns in work.queued_ns(entry.n):
                        self._observer.queue_wait(work.cls, now - queued_ns)
            elif work.state is State.QUEUED:
                if work.first(Event.SCHEDULED) is None and not work.prefill_only:
                    self._observer.queue_wait(work.cls, now - work.events[0][1])
                self._admissions += 1
                work.state, work.admitted = State.RUNNING, self._admissions
                work.events.append((Event.SCHEDULED, now))
                self._update(work)

    def _run(self, entries: Sequence[Entry], *, again: bool = False) -> None:
        """One forward pass and what follows from it. ``again``: the rest of one that found no memory."""
        started = self._clock()
        # without a row are followers, and unfinished prompts that the prefix cache had all of
        rowed = [entry for entry in entries if entry.n]
        chunks = [_chunk(entry) for entry in rowed]
        if not chunks:
            self._settle(entries)
            return
        try:
            rows = self._executor.execute(chunks)
            if len(rows) != len(chunks):
                raise RuntimeError(f"the executor returned {len(rows)} rows for {len(chunks)} chunks")
        except OutOfMemory as error:
            self._out_of_memory(rowed, error, again)
            return
        except Exception as error:
            log.exception("forward pass failed; ending its %d rows", len(rowed))
            self._observer.executor_failed(error)
            self._lose(rowed, Failure("engine", f"{type(error).__name__}: {error}"))
            return
        now = self._clock()
        tokens: Counter[PriorityClass] = Counter()
        for entry, chunk in zip(rowed, chunks, strict=True):
            tokens[entry.work.cls] += len(chunk.tokens)
        self._observer.batch(tokens, len(rowed), now - started)
        for entry in entries:
            if entry.leader is not None:
                follow(entry.work, entry.leader)
        for entry, row in zip(rowed, rows, strict=True):
            if isinstance(entry.work, Request):
                self._advance(entry.work, row, len(entry.drafts), now)
        # Tapes last: whoever finished above did so at the version it read, and its successor sees the newest.
        for entry in rowed:
            if isinstance(entry.work, Append):
                self._commit(entry.work, entry.n)
        self._settle(entries)

    def _settle(self, entries: Sequence[Entry]) -> None:
        """The book learns what a batch made of its requests."""
        for entry in entries:
            if isinstance(entry.work, Request) and entry.work.id in self._book.requests:
                self._update(entry.work)

    def _out_of_memory(self, entries: Sequence[Entry], error: OutOfMemory, again: bool) -> None:
        """Preempt the lower half of the batch and try the upper once; if it was that already, it is lost."""
        log.warning("no memory for a batch of %d rows: %s", len(entries), error)
        self._observer.out_of_memory(retried=not again)
        if again:
            message = f"the device has no memory left for one more step, not even a smaller one: {error}"
            self._lose(entries, Failure("no_memory", message))
            return
        kept = upper_half(entries)
        staying = {entry.work for entry in kept}
        for entry in entries:
            if isinstance(entry.work, Request) and entry.work not in staying:
                self._leave(entry.work, Event.PREEMPTED_RECOMPUTE, kept[0].work)
        self._run(kept, again=True)

    def _advance(self, request: Request, row: SampledToken | None, drafted: int, now: int) -> None:
        """Account for a request's executed chunk; the executor has advanced its reader, over drafts, too."""
        if drafted and row is not None and request.reader is not None:
            right = len(row.accepted)
            request.reader.keep(request.reader.length - drafted + right)
            request.drafted, request.accepted = request.drafted + drafted, request.accepted + right
            if request.lookup is not None:
                request.lookup.verified(drafted, right)
            self._observer.speculated(drafted, right)
        if request.remaining or not request.complete:
            return
        if request.events[-1][0] is Event.SCHEDULED:
            request.events.append((Event.KV_ON_GPU, now))
            if request.prompt_reader is not None:
                request.prompt_reader.save()
        if request.prefill_only:
            self._end(request, State.FINISHED)
        elif row is None:
            self._end(request, State.FAILED, Failure("engine", "the executor returned no row to sample from"))
        elif row.error is not None:
            self._end(request, State.FAILED, Failure("nan_logits", row.error))
        else:
            if not request.output and request.cls is PriorityClass.POOL:
                self._learn(now - request.last_chunk_ns)
            if any(request.accept(each) for each in (*row.accepted, row)):
                self._end(request, State.FINISHED)

    def _commit(self, append: Append, n: int) -> None:
        try:
            version = append.tape.commit(append.lengths(n), append.times(n))
        except Exception as error:
            log.exception("%s: commit failed", append.tape.name)
            self._give_up(Entry(append, n), Failure("engine", f"{type(error).__name__}: {error}"))
            return
        records = [pending.record for pending in append.take(n)]
        self._forget_if_empty(append)
        for listener in self._listeners:
            self._call(partial(listener.on_commit, append.tape, version, records))

    def _lose(self, entries: Sequence[Entry], failure: Failure) -> None:
        """A batch failed: its requests end, its records get one more chance."""
        for entry in entries:
            if isinstance(entry.work, Append) and not entry.work.failures:
                entry.work.failures = 1
            else:
                self._give_up(entry, failure)

    def _give_up(self, entry: Entry, failure: Failure) -> None:
        """End a request, or drop an append's first records."""
        if isinstance(entry.work, Request):
            self._end(entry.work, State.FAILED, failure)
            return
        records = [pending.record for pending in entry.work.take(entry.n)]
        self._forget_if_empty(entry.work)
        self._dropped(entry.work.tape, records, failure)

    def _preempt(self, victim: Request, by: Work) -> None:
        """Make room: to the host if that is cheaper and it has room, else computed again later."""
        tier, reader = self._tier, victim.reader
        swapped = (
            tier is not None
            and reader is not None
            and prefers_swap(victim, self._limits.eviction, self._costs)
            and tier.swap_out(reader)
        )
        self._leave(victim, Event.PREEMPTED_SWAP if swapped else Event.PREEMPTED_RECOMPUTE, by)

    def _leave(self, victim: Request, how: Event, by: Work) -> None:
        self._preemptions += 1
        victim.displaced = self._preemptions
        victim.drop(how, self._clock(), by.seq)
        self._update(victim)
        self._observer.preempted(victim, how, by)


def _chunk(entry: Entry) -> Chunk:
    work, tokens = entry.work, entry.work.next_tokens(entry.n)
    if isinstance(work, Append):
        return Chunk(work.tape, tokens, sample=False)
    assert work.reader is not None  # acquisition opened it
    sample = entry.n == work.remaining and work.complete and not work.prefill_only
    if entry.drafts:
        tokens = [*tokens, *entry.drafts]
    return Chunk(work.reader, tokens, sample, work.choices, work.sampling, len(entry.drafts))
