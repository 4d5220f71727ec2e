"""Requests that must be answered by a time, or not at all; and unfinished prompts that get no input."""

from itertools import takewhile
from typing import NamedTuple

from sortedcontainers import SortedList

LATE = "late"
"""Failure code of a request that could not be answered in time."""


class Deadline(NamedTuple):
    """By the scheduler's clock, ns: what is in no batch by ``start`` is late, or not answered by ``end``."""

    start: int
    end: int

    def missed(self, now: int, *, started: bool) -> bool:
        """Whether a request that has been in a batch, or not, can no longer be answered in time."""
        return now > (self.end if started else self.start)


class Deadlines:
    """Times of live requests, ns. Every operation takes logarithmic time."""

    def __init__(self) -> None:
        self._times: SortedList[tuple[int, int]] = SortedList()
        self._watched: dict[int, set[int]] = {}

    def watch(self, request_id: int, *times: int) -> None:
        """Watch these times of a request, in place of those before, until `forget`."""
        self.forget(request_id)
        self._watched[request_id] = set(times)
        self._times.update((time, request_id) for time in self._watched[request_id])

    def forget(self, request_id: int) -> None:
        """Watch nothing of a request. Idempotent."""
        for time in self._watched.pop(request_id, ()):
            self._times.discard((time, request_id))

    def passed(self, now: int) -> list[int]:
        """Ids of the requests one of whose times passed since the last call."""
        passed = list(takewhile(lambda each: each[0] < now, self._times))
        del self._times[: len(passed)]
        return list(dict.fromkeys(request_id for _, request_id in passed))

    def next_due(self, now: int) -> float | None:
        """Seconds until the next time passes; None without one."""
        return max(0, self._times[0][0] + 1 - now) * 1e-9 if self._times else None
