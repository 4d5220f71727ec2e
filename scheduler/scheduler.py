"""One iteration: plan, acquire, execute, commit.

Any thread may submit, append and cancel: such calls only put a note in the inbox. Everything else belongs
to the one thread that calls `step`, so the core needs no lock and equal inputs (work, clock, executor) give
equal decisions. The scheduler yields after every batch: whatever arrives meanwhile waits for one batch at
most before it is ranked (*Attention Once* section 3.6).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from scheduler.acquisition import acquire
from scheduler.halving import upper_half
from scheduler.observer import Observer
from scheduler.planner import Entry, cell_budget, plan
from scheduler.policy import Policy, by_class
from scheduler.request import Append, Event, Failure, Pending, Record, Request, State, Work
from scheduler.types import Chunk, Executor, Limits, Memory, OutOfMemory, PriorityClass, Row, Tape

log = logging.getLogger(__name__)


class TapeListener(Protocol):
    """Hears of every change of every tape, on the stepping thread, before the next batch is planned."""

    def on_commit(self, tape: Tape, version: int, records: Sequence[Record]) -> None:
        """`records` became visible together as `version`. What is submitted here is in the next batch."""

    def on_drop(self, tape: Tape, records: Sequence[Record], failure: Failure) -> None:
        """`records` will never be on the tape: the data has a gap."""


class Scheduler:
    """Priority classes over one executor; see the module. `clock` gives ns and never runs backwards."""

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer | None = None,
        policy: Policy = by_class,
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self._observer = observer or Observer()
        self._policy = policy
        self._listeners: list[TapeListener] = []

        self._changed = threading.Condition()
        # Guarded by _changed:
        self._inbox: deque[Callable[[], None]] = deque()
        self._seq = 0
        self._interrupted = False
        self._closed = False
        # Owned by the stepping thread:
        self._requests: dict[int, Request] = {}
        self._appends: dict[Tape, Append] = {}

    # Any thread.

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Refusals, too, arrive by `on_done`: code `too_long`.

        After `close` the request ends at once with `stopping`, on the caller's thread.
        """
        with self._changed:
            self._seq += 1
            request.id = self._seq
            request.events.append((Event.QUEUED, self._clock()))
            if not self._closed:
                self._post(partial(self._admit, request))
                return request.id
        self._end(request, State.FAILED, Failure("stopping", "the engine is shutting down"))
        return request.id

    def append(self, tape: Tape, records: Sequence[Record]) -> None:
        """Queue whole records for a tape. Raises ValueError, before anything is queued, for an empty record.

        A record that no batch can hold is reported to `on_drop` with `too_long`, after `close` with
        `stopping`.
        """
        if any(not record.tokens for record in records):
            raise ValueError(f"{tape.name}: a record needs at least one token")
        if not records:
            return
        with self._changed:
            self._seq += 1
            seq, now = self._seq, self._clock()
            if not self._closed:
                self._post(partial(self._enqueue, tape, [Pending(seq, record, now) for record in records]))
                return
        self._dropped(tape, list(records), Failure("stopping", "the engine is shutting down"))

    def cancel(self, request_id: int) -> None:
        """End a live request as CANCELLED before the next batch; unknown and ended ids are ignored."""
        with self._changed:
            self._post(partial(self._cancel, request_id))

    def run_between(self, callback: Callable[[], None]) -> bool:
        """Call `callback` on the stepping thread before the next batch is planned: nothing is half done then.

        After `close` it is not called, and False is returned.
        """
        with self._changed:
            if not self._closed:
                self._post(partial(self._call, callback))
            return not self._closed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the inbox has something (True), or `interrupt` or the time limit (False)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._inbox) or self._interrupted, timeout_s)
            self._interrupted = False
            return bool(self._inbox)

    def interrupt(self) -> None:
        """Wake a thread that blocks in `wait`, now or at its next call."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    # The stepping thread, or before it starts.

    def subscribe(self, listener: TapeListener) -> None:
        """Tell `listener` of commits and drops, after those subscribed earlier."""
        self._listeners.append(listener)

    def step(self) -> bool:
        """One iteration. False when there was nothing to do."""
        worked = self._read_inbox()
        order = self._policy(self._live())
        if order:
            acquired = acquire(plan(order, self._memory, self._limits), order, self._memory, self._preempt)
            for session, tokens in acquired.evicted:
                self._observer.evicted(session, tokens)
            for entry, failure in acquired.failures:
                self._give_up(entry, failure)
            if acquired.entries:
                self._launch(acquired.entries)
                self._run(acquired.entries)
            worked = True
        if worked:
            counts = Counter(work.cls for work in self._live())
            self._observer.waiting({cls: counts[cls] for cls in PriorityClass})
        return worked

    def close(self) -> None:
        """Refuse new work and end all live work with `stopping`."""
        with self._changed:
            self._closed = True
        self._read_inbox()
        failure = Failure("stopping", "the engine is shutting down")
        for request in list(self._requests.values()):
            self._end(request, State.FAILED, failure)
        for append in list(self._appends.values()):
            self._give_up(Entry(append, len(append.queue)), failure)

    def _live(self) -> list[Work]:
        return [*self._requests.values(), *self._appends.values()]

    # Inbox.

    def _post(self, note: Callable[[], None]) -> None:
        self._inbox.append(note)
        self._changed.notify_all()

    def _read_inbox(self) -> bool:
        with self._changed:
            notes, self._inbox = self._inbox, deque()
        for note in notes:
            note()
        return bool(notes)

    def _admit(self, request: Request) -> None:
        refusal = self._refusal(request)
        if refusal is None:
            self._requests[request.id] = request
        else:
            self._end(request, State.FAILED, refusal)

    def _refusal(self, request: Request) -> Failure | None:
        """Why the request can never run, with the numbers."""
        limits, prompt, new = self._limits, len(request.prompt), request.max_tokens
        budget = cell_budget(self._memory, limits)
        if request.prefill_only:
            return None
        if prompt > limits.max_prompt_tokens:
            sentence = f"the prompt has {prompt} tokens, the limit is {limits.max_prompt_tokens}"
        elif new > limits.max_new_tokens:
            sentence = f"{new} new tokens were asked for, the limit is {limits.max_new_tokens}"
        elif request.cells > budget:
            sentence = (
                f"prompt ({prompt} tokens) and answer (up to {new}) need {request.cells} cells; requests may "
                f"claim {budget} of the pool's {self._memory.total_blocks * self._memory.block_size}"
            )
        else:
            return None
        return Failure("too_long", sentence)

    def _enqueue(self, tape: Tape, pending: list[Pending]) -> None:
        limit = min(self._limits.max_batch_tokens, tape.append_tokens)
        fitting = [item for item in pending if len(item.record.tokens) <= limit]
        if len(fitting) < len(pending):
            too_long = [item.record for item in pending if len(item.record.tokens) > limit]
            sentence = f"a record has {max(len(r.tokens) for r in too_long)} tokens, an append holds {limit}"
            self._dropped(tape, too_long, Failure("too_long", sentence))
        if fitting:
            self._appends.setdefault(tape, Append(tape)).queue.extend(fitting)

    def _cancel(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, State.CANCELLED)

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
                work.state = State.RUNNING
                work.events.append((Event.SCHEDULED, now))

    def _run(self, entries: Sequence[Entry], *, again: bool = False) -> None:
        """One forward pass and what follows from it. ``again``: the rest of one that found no memory."""
        started = self._clock()
        chunks = [_chunk(entry) for entry in entries]
        try:
            rows = self._executor.execute(chunks)
            if len(rows) != len(chunks):
                raise RuntimeError(f"the executor returned {len(rows)} rows for {len(chunks)} chunks")
        except OutOfMemory as error:
            self._out_of_memory(entries, error, again)
            return
        except Exception as error:
            log.exception("forward pass failed; ending its %d rows", len(entries))
            self._observer.executor_failed(error)
            self._lose(entries, Failure("engine", f"{type(error).__name__}: {error}"))
            return
        now = self._clock()
        tokens: Counter[PriorityClass] = Counter()
        for entry, chunk in zip(entries, chunks, strict=True):
            tokens[entry.work.cls] += len(chunk.tokens)
        self._observer.batch(tokens, len(entries), now - started)
        for entry, row in zip(entries, rows, strict=True):
            if isinstance(entry.work, Request):
                self._advance(entry.work, row, now)
        # Tapes last: whoever finished above did so at the version it read, and its successor sees the newest.
        for entry in entries:
            if isinstance(entry.work, Append):
                self._commit(entry.work, entry.n)

    def _out_of_memory(self, entries: Sequence[Entry], error: OutOfMemory, again: bool) -> None:
        """Preempt the lower half of the batch and try the upper once; if it was that already, it is lost."""
        log.warning("no memory for a batch of %d rows: %s", len(entries), error)
        self._observer.out_of_memory(retried=not again)
        if again:
            sentence = f"the device has no memory left for one more step, not even a smaller one: {error}"
            self._lose(entries, Failure("no_memory", sentence))
            return
        kept = upper_half(entries)
        staying = {entry.work for entry in kept}
        for entry in entries:
            if isinstance(entry.work, Request) and entry.work not in staying:
                self._preempt(entry.work)
        self._run(kept, again=True)

    def _advance(self, request: Request, row: Row | None, now: int) -> None:
        """Account for a request's executed chunk; the executor has advanced its reader."""
        if request.remaining:
            return
        if request.events[-1][0] is Event.SCHEDULED:
            request.events.append((Event.KV_ON_GPU, now))
        if request.prefill_only:
            self._end(request, State.FINISHED)
        elif row is None:
            self._end(request, State.FAILED, Failure("engine", "the executor returned no row to sample from"))
        elif row.error is not None:
            self._end(request, State.FAILED, Failure("nan_logits", row.error))
        elif request.accept(row):
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

    def _preempt(self, request: Request) -> None:
        request.preempt(self._clock())
        self._observer.preempted(request)

    # Endings.

    def _end(self, request: Request, state: State, failure: Failure | None = None) -> None:
        self._requests.pop(request.id, None)
        request.end(state, self._clock(), failure)
        self._call(partial(request.on_done, request))

    def _forget_if_empty(self, append: Append) -> None:
        if not append.queue:
            del self._appends[append.tape]

    def _dropped(self, tape: Tape, records: Sequence[Record], failure: Failure) -> None:
        log.error("%s: %d records dropped: %s", tape.name, len(records), failure.sentence)
        for listener in self._listeners:
            self._call(partial(listener.on_drop, tape, records, failure))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run somebody else's code; its errors are its own and must not disturb the batch."""
        try:
            callback()
        except Exception:
            log.exception("a callback raised")


def _chunk(entry: Entry) -> Chunk:
    work, tokens = entry.work, entry.work.next_tokens(entry.n)
    if isinstance(work, Append):
        return Chunk(work.tape, tokens, sample=False)
    assert work.reader is not None  # acquisition opened it
    sample = entry.n == work.remaining and not work.prefill_only
    return Chunk(work.reader, tokens, sample, work.choices, work.sampling)
