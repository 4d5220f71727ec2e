"""One iteration: plan, acquire, execute, commit.

Any thread may submit, append and cancel: such calls only put a note in the inbox. Everything else belongs
to the one thread that calls `step`, so the core needs no lock and equal inputs (work, clock, executor) give
equal decisions. The scheduler yields after every batch: whatever arrives meanwhile waits for one batch at
most before it is ranked (*Attention Once* section 3.6).
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

from scheduler.acquisition import acquire
from scheduler.admission import refusal
from scheduler.book import Book
from scheduler.deadlines import due
from scheduler.drafting import with_drafts
from scheduler.eviction import prefers_swap
from scheduler.followers import follow
from scheduler.halving import upper_half
from scheduler.lines import waiting_line
from scheduler.observer import Observer
from scheduler.planner import Entry, plan
from scheduler.policies import Ordering
from scheduler.request import Append, Event, Failure, Pending, Record, Request, State, Work
from scheduler.streams import Streams
from scheduler.types import (
    Chunk,
    Costs,
    Executor,
    Limits,
    Memory,
    OutOfMemory,
    PrefixIndex,
    PriorityClass,
    Row,
    Tape,
    Tier,
)
from scheduler.waits import WaitLedger

log = logging.getLogger(__name__)

FIFO = Ordering()

Input = Literal["extend", "replace", "finish"]
"""What may happen to a prompt that comes in pieces."""


class TapeListener(Protocol):
    """Hears of every change of every tape, on the stepping thread, before the next batch is planned."""

    def on_commit(self, tape: Tape, version: int, records: Sequence[Record]) -> None:
        """`records` became visible together as `version`. What is submitted here is in the next batch."""

    def on_drop(self, tape: Tape, records: Sequence[Record], failure: Failure) -> None:
        """`records` will never be on the tape: the data has a gap."""


class Scheduler:
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
        self._executor = executor
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self._observer = observer or Observer()
        self._costs = costs
        self._tier = tier
        self._listeners: list[TapeListener] = []

        self._changed = threading.Condition()
        # Guarded by _changed:
        self._inbox: deque[Callable[[], None]] = deque()
        self._seq = 0
        self._interrupted = False
        self._closed = False
        # Owned by the stepping thread:
        line, self._learn = waiting_line(ordering, index, rng)
        self._book = Book(ordering.key, line)
        self._appends: dict[Tape, Append] = {}
        self._waits = WaitLedger()
        self._streams = Streams(limits.stream_timeout_ns)
        self._admissions = self._preemptions = 0

    # Any thread.

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Refusals, too, arrive by `on_done`: code `too_long`.

        After `close` the request ends at once with `stopping`, on the caller's thread.
        """
        with self._changed:
            self._seq += 1
            request.id = self._seq
            now = request.last_chunk_ns = self._clock()
            request.events.append((Event.QUEUED, now))
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

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """More of an unfinished prompt (append mode, *Stream2LLM* section 4.2).

        Like `replace` and `finish` it comes into force before the next batch, and is ignored for a request
        that has ended or whose prompt is finished.
        """
        self._stream(request_id, "extend", tokens)

    def replace(self, request_id: int, tokens: Sequence[int]) -> None:
        """Another prompt in place of the unfinished one: KV of the common prefix stays (update mode)."""
        self._stream(request_id, "replace", tokens)

    def finish(self, request_id: int) -> None:
        """The prompt is all there: generate. An empty one fails with `bad_prompt`."""
        self._stream(request_id, "finish")

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

    def _stream(self, request_id: int, what: Input, tokens: Sequence[int] = ()) -> None:
        with self._changed:
            self._post(partial(self._input, request_id, what, tokens, self._clock()))

    # The stepping thread, or before it starts.

    def subscribe(self, listener: TapeListener) -> None:
        """Tell `listener` of commits and drops, after those subscribed earlier."""
        self._listeners.append(listener)

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
            self._observer.waiting({cls: self._book.counts[cls] for cls in PriorityClass})
        return worked

    @property
    def live(self) -> int:
        """Requests and tapes with work that have not ended."""
        return self._book.counts.total()

    def next_due(self) -> float | None:
        """Seconds until an unfinished prompt is given up, unless input comes; None while there is none."""
        return self._streams.next_due(self._clock())

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
        failure = refusal(request, self._limits, self._memory)
        if failure is not None:
            self._end(request, State.FAILED, failure)
            return
        self._book.requests[request.id] = request
        self._waits.arrived(request, request.events[0][1])
        if not request.complete:
            self._streams.touch(request)
        self._update(request)

    def _input(self, request_id: int, what: Input, tokens: Sequence[int], now: int) -> None:
        """A piece of a prompt, another prompt, or its end."""
        request = self._book.requests.get(request_id)
        if request is None or request.complete:
            return
        if what == "finish":
            request.complete, request.last_chunk_ns = True, now
            self._streams.forget(request)
        else:
            request.replace(joined(request.prompt, tokens) if what == "extend" else tokens, now)
            self._streams.touch(request)
        if request.complete and not request.prompt:
            self._end(request, State.FAILED, Failure("bad_prompt", "the prompt was finished without a token"))
        elif (failure := refusal(request, self._limits, self._memory)) is not None:
            self._end(request, State.FAILED, failure)
        else:
            self._waits.track(request)
            self._book.update(request, prompt=True)

    def _abandon(self, request: Request) -> None:
        seconds = self._limits.stream_timeout_ns / 1e9
        sentence = f"the prompt was not finished, and nothing of it came for {seconds:g} s"
        self._end(request, State.FAILED, Failure("abandoned", sentence))

    def _update(self, request: Request) -> None:
        """Something about a live request changed."""
        self._waits.track(request)
        self._book.update(request)

    def _enqueue(self, tape: Tape, pending: list[Pending]) -> None:
        limit = min(self._limits.max_batch_tokens, tape.append_tokens)
        fitting = [item for item in pending if len(item.record.tokens) <= limit]
        if len(fitting) < len(pending):
            too_long = [item.record for item in pending if len(item.record.tokens) > limit]
            sentence = f"a record has {max(len(r.tokens) for r in too_long)} tokens, an append holds {limit}"
            self._dropped(tape, too_long, Failure("too_long", sentence))
        if fitting:
            append = self._appends.setdefault(tape, Append(tape))
            append.queue.extend(fitting)
            self._book.update(append)

    def _cancel(self, request_id: int) -> None:
        request = self._book.requests.get(request_id)
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
                self._admissions += 1
                work.state, work.admitted = State.RUNNING, self._admissions
                work.events.append((Event.SCHEDULED, now))
                self._update(work)

    def _run(self, entries: Sequence[Entry], *, again: bool = False) -> None:
        """One forward pass and what follows from it. ``again``: the rest of one that found no memory."""
        started = self._clock()
        rowed = [entry for entry in entries if entry.leader is None]
        chunks = [_chunk(entry) for entry in rowed]
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
        for entry in entries:
            if isinstance(entry.work, Request) and entry.work.id in self._book.requests:
                self._update(entry.work)

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
                self._leave(entry.work, Event.PREEMPTED_RECOMPUTE, kept[0].work)
        self._run(kept, again=True)

    def _advance(self, request: Request, row: Row | None, drafted: int, now: int) -> None:
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

    # Endings.

    def _end(self, request: Request, state: State, failure: Failure | None = None) -> None:
        if self._book.requests.pop(request.id, None) is not None:
            self._book.remove(request)
            self._streams.forget(request)
        request.end(state, self._clock(), failure)
        self._waits.track(request)
        self._observer.ended(request)
        self._call(partial(request.on_done, request))

    def _forget_if_empty(self, append: Append) -> None:
        if append.queue:
            self._book.update(append)
        else:
            self._book.remove(append)
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


def joined(prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Both, one after the other; of the same kind, and by its own means, when they are of one kind."""
    if type(prompt) is type(tokens):
        return cast(Any, prompt) + tokens  # type: ignore[no-any-return] # every sequence of tokens here can add
    return [*prompt, *tokens]


def _chunk(entry: Entry) -> Chunk:
    work, tokens = entry.work, entry.work.next_tokens(entry.n)
    if isinstance(work, Append):
        return Chunk(work.tape, tokens, sample=False)
    assert work.reader is not None  # acquisition opened it
    sample = entry.n == work.remaining and work.complete and not work.prefill_only
    if entry.drafts:
        tokens = [*tokens, *entry.drafts]
    return Chunk(work.reader, tokens, sample, work.choices, work.sampling, len(entry.drafts))
