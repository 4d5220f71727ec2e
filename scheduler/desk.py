"""Where work comes in and where it ends: everything a scheduler does but choosing and executing.

Any thread may submit, append and cancel: such calls only put a note in the inbox. Everything else belongs to
the one thread that steps, so no lock is held while anything is decided.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

from scheduler.admission import refusal
from scheduler.book import Book
from scheduler.lines import waiting_line
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.request import Append, Event, Failure, Pending, Record, Request, State
from scheduler.streams import Streams
from scheduler.types import Limits, Memory, PrefixIndex, Tape
from scheduler.waits import WaitLedger

log = logging.getLogger(__name__)

Input = Literal["extend", "replace", "finish"]
"""What may happen to a prompt that comes in pieces."""


class TapeListener(Protocol):
    """Hears of every change of every tape, on the stepping thread, before the next batch is planned."""

    def on_commit(self, tape: Tape, version: int, records: Sequence[Record]) -> None:
        """`records` became visible together as `version`. What is submitted here is in the next batch."""

    def on_drop(self, tape: Tape, records: Sequence[Record], failure: Failure) -> None:
        """`records` will never be on the tape: the data has a gap."""


class Desk:
    """Live work, and the ways in and out. `clock` gives ns and never runs backwards."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer,
        ordering: Ordering,
        index: PrefixIndex | None,
        rng: random.Random | None,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self._observer = observer
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

    @property
    def live(self) -> int:
        """Requests and tapes with work that have not ended."""
        return sum(self._book.counts.values())

    def next_due(self) -> float | None:
        """Seconds until an unfinished prompt is given up, unless input comes; None while there is none."""
        return self._streams.next_due(self._clock())

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
            self._update(request, prompt=True)

    def _abandon(self, request: Request) -> None:
        seconds = self._limits.stream_timeout_ns / 1e9
        message = f"the prompt was not finished, and nothing of it came for {seconds:g} s"
        self._end(request, State.FAILED, Failure("abandoned", message))

    def _update(self, request: Request, *, prompt: bool = False) -> None:
        """Something about a live request changed; ``prompt``: its prompt."""
        self._waits.track(request)
        self._book.update(request, prompt=prompt)

    def _enqueue(self, tape: Tape, pending: list[Pending]) -> None:
        limit = min(self._limits.max_batch_tokens, tape.append_tokens)
        fitting = [item for item in pending if len(item.record.tokens) <= limit]
        if len(fitting) < len(pending):
            too_long = [item.record for item in pending if len(item.record.tokens) > limit]
            message = f"a record has {max(len(r.tokens) for r in too_long)} tokens, an append holds {limit}"
            self._dropped(tape, too_long, Failure("too_long", message))
        if fitting:
            append = self._appends.setdefault(tape, Append(tape))
            append.queue.extend(fitting)
            self._book.update(append)

    def _cancel(self, request_id: int) -> None:
        request = self._book.requests.get(request_id)
        if request is not None:
            self._end(request, State.CANCELLED)

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
        log.error("%s: %d records dropped: %s", tape.name, len(records), failure.message)
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
