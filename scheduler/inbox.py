"""What other threads ask of the scheduler, kept until the next step; and prompts that stopped coming."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from regions.tape import Tape
from scheduler.request import Event, Request
from scheduler.tapes import Pending, Records

Change = Literal["extend", "replace", "finish"]
"""What may happen to a prompt that comes in pieces."""


@dataclass(frozen=True, slots=True)
class AppendRecords:
    """Records for a tape."""

    tape: Tape
    records: list[Pending]


@dataclass(frozen=True, slots=True)
class ChangePrompt:
    """A piece of an unfinished prompt, another prompt, or its end, at time ``at`` (ns)."""

    id: int
    change: Change
    tokens: Sequence[int]
    at: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is to end."""

    id: int


Note = Request | AppendRecords | ChangePrompt | Cancel | Callable[[], None]
"""A new request, with its id and the time it was queued; a change; code to run between two batches."""


class Inbox:
    """A thread-safe queue of notes; it numbers requests and appends in order of arrival.

    ``clock`` gives ns. Those that return a bool return False, and keep nothing, after `close`.
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

    def submit(self, request: Request) -> bool:
        """Queue a request: it gets its id and its first event here."""
        with self._changed:
            self._seq += 1
            request.id = self._seq
            request.last_chunk_ns = self._clock()
            request.events.append((Event.QUEUED, request.last_chunk_ns))
            return self._put(request)

    def append(self, tape: Tape, records: Records) -> bool:
        """Queue records for a tape."""
        with self._changed:
            self._seq += 1
            now = self._clock()
            return self._put(AppendRecords(tape, [Pending(self._seq, record, now) for record in records]))

    def change_prompt(self, request_id: int, change: Change, tokens: Sequence[int] = ()) -> None:
        """Queue a change of an unfinished prompt."""
        with self._changed:
            self._put(ChangePrompt(request_id, change, tokens, self._clock()))

    def cancel(self, request_id: int) -> None:
        """Queue the end of a request."""
        with self._changed:
            self._put(Cancel(request_id))

    def call(self, callback: Callable[[], None]) -> bool:
        """Queue a callback."""
        with self._changed:
            return self._put(callback)

    def take(self) -> Sequence[Note]:
        """Everything since the last call, in order."""
        with self._changed:
            notes, self._notes = self._notes, deque()
        return notes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there is something (True), or `interrupt` or the time limit (False)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._notes) or self._interrupted, timeout_s)
            self._interrupted = False
            return bool(self._notes)

    def interrupt(self) -> None:
        """Wake a thread that blocks in `wait`, now or at its next call."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take nothing from here on."""
        with self._changed:
            self._closed = True

    def _put(self, note: Note) -> bool:
        if not self._closed:
            self._notes.append(note)
            self._changed.notify_all()
        return not self._closed


class PromptTimeouts:
    """Unfinished prompts by their newest input, the oldest first. Every operation takes constant time."""

    def __init__(self, timeout_ns: int) -> None:
        self._timeout = timeout_ns
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, request: Request) -> None:
        """Input came for it, at `last_chunk_ns`."""
        self._last[request.id] = request.last_chunk_ns
        self._last.move_to_end(request.id)

    def forget(self, request: Request) -> None:
        """Its prompt is finished, or it ended."""
        self._last.pop(request.id, None)

    def expired(self, now: int) -> list[int]:
        """Numbers of those without input for the whole timeout."""
        expired = takewhile(lambda item: self._timeout <= now - item[1], self._last.items())
        return [number for number, _ in expired] if self._timeout else []

    def next_due(self, now: int) -> float | None:
        """Seconds until the next expires, 0 if it has; None without any."""
        if not self._timeout or not self._last:
            return None
        return max(0, next(iter(self._last.values())) + self._timeout - now) * 1e-9
