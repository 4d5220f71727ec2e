"""Calls from other threads, queued until the next step; and timeouts of unfinished prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from regions.tape import Tape
from scheduler.request import Request
from scheduler.tapes import TapeItems

Change = Literal["extend", "replace", "finish"]
"""Changes of an unfinished prompt."""


@dataclass(frozen=True, slots=True)
class AppendRecords:
    """Append records to a tape."""

    tape: Tape
    records: TapeItems


@dataclass(frozen=True, slots=True)
class ChangePrompt:
    """Extend, replace or finish an unfinished prompt; ``at`` is the time of the call, ns."""

    id: int
    change: Change
    tokens: Sequence[int]
    at: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel a request."""

    id: int


Note = Request | AppendRecords | ChangePrompt | CancelRequest | Callable[[], None]
"""A new request, which has its id and queue time; a change; or a callback to run between two batches."""


class Inbox:
    """A thread-safe queue of notes; it numbers requests and appends in order of arrival.

    ``clock`` gives ns. After `close`, methods that return a bool return False and queue nothing.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._notes: deque[Note] = deque()
        self._seq = 0
        self._interrupted = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._notes)

    def submit(self, requests: Sequence[Request]) -> bool:
        """Queue requests, which the stepping thread takes all at once; each gets its id and first event."""
        with self._changed:
            for request in requests:
                self._seq += 1
                request.queue(self._seq, self._clock())
                self._put(request)
            return not self._closed

    def append(self, appends: Sequence[tuple[Tape, TapeItems]]) -> bool:
        """Queue records for tapes; the stepping thread takes all of them at once."""
        with self._changed:
            for tape, records in appends:
                self._seq += 1
                now = self._clock()
                for record in records:
                    record.queue(self._seq, now)
                self._put(AppendRecords(tape, records))
            return not self._closed

    def change_prompt(self, request_id: int, change: Change, tokens: Sequence[int] = ()) -> None:
        """Queue a change of an unfinished prompt."""
        with self._changed:
            self._put(ChangePrompt(request_id, change, tokens, self._clock()))

    def cancel(self, request_id: int) -> None:
        """Queue a cancellation."""
        with self._changed:
            self._put(CancelRequest(request_id))

    def call(self, callback: Callable[[], None]) -> bool:
        """Queue a callback."""
        with self._changed:
            return self._put(callback)

    def take(self) -> Sequence[Note]:
        """Remove and return all notes, oldest first."""
        with self._changed:
            notes, self._notes = self._notes, deque()
        return notes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a note arrives (True), or until `interrupt` or the timeout (False)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._notes) or self._interrupted, timeout_s)
            self._interrupted = False
            return bool(self._notes)

    def interrupt(self) -> None:
        """Wake the thread that blocks in `wait`, now or at its next call."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse everything from now on."""
        with self._changed:
            self._closed = True

    def _put(self, note: Note) -> bool:
        if not self._closed:
            self._notes.append(note)
            self._changed.notify_all()
        return not self._closed


class PromptTimeouts:
    """Unfinished prompts by the time of their newest input. Every operation takes constant time."""

    def __init__(self, timeout_ns: int) -> None:
        self._timeout = timeout_ns
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, request: Request) -> None:
        """Restart the timeout of a prompt: it got input at `last_chunk_ns`."""
        self._last[request.id] = request.last_chunk_ns
        self._last.move_to_end(request.id)

    def forget(self, request: Request) -> None:
        """Drop a prompt that is finished or ended."""
        self._last.pop(request.id, None)

    def expired(self, now: int) -> list[int]:
        """Ids of the requests whose prompts timed out."""
        expired = takewhile(lambda item: self._timeout <= now - item[1], self._last.items())
        return [number for number, _ in expired] if self._timeout else []

    def next_due(self, now: int) -> float | None:
        """Seconds until the next timeout, 0 if one has passed; None without prompts."""
        if not self._timeout or not self._last:
            return None
        return max(0, next(iter(self._last.values())) + self._timeout - now) * 1e-9
