"""Calls from other threads, queued until the next step."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Arrival(Protocol):
    """A request or a record."""

    def queue(self, seq: int, now: int) -> None:
        """Note its number in order of arrival, and when it came, ns."""


Call = Callable[[], None]


class Inbox:
    """A thread-safe queue of calls; it numbers what arrives with them. ``clock`` gives ns."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._calls: deque[Call] = deque()
        self._seq = 0
        self._interrupted = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> bool:
        """Queue a call; after `close` return False instead."""
        return self.put_together([(call, ())])

    def put_together(self, calls: Iterable[tuple[Call, Sequence[Arrival]]]) -> bool:
        """Queue calls that the stepping thread takes all at once; after `close` return False instead.

        The arrivals of one call get one number, also after `close`.
        """
        with self._changed:
            for call, arrivals in calls:
                if arrivals:
                    self._seq += 1
                    now = self._clock()
                for arrival in arrivals:
                    arrival.queue(self._seq, now)
                if not self._closed:
                    self._calls.append(call)
            self._changed.notify_all()
            return not self._closed

    def take(self) -> Sequence[Call]:
        """Remove and return all calls, oldest first."""
        with self._changed:
            calls, self._calls = self._calls, deque()
        return calls

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a call arrives (True), or until `interrupt` or the timeout (False)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._calls) or self._interrupted, timeout_s)
            self._interrupted = False
            return bool(self._calls)

    def interrupt(self) -> None:
        """Wake the thread that blocks in `wait`, now or at its next call."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse everything from now on."""
        with self._changed:
            self._closed = True
