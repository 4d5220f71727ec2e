"""Requests that must be answered by a time, or not at all."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from sortedcontainers import SortedDict

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
    """The deadlines of live requests. Every operation takes logarithmic time."""

    def __init__(self) -> None:
        self._times: SortedDict[tuple[int, int], None] = SortedDict()
        self._open: dict[int, Deadline] = {}

    def add(self, request_id: int, deadline: Deadline) -> None:
        """Watch a request until `forget`."""
        self._open[request_id] = deadline
        self._times.update(dict.fromkeys((time, request_id) for time in deadline))

    def forget(self, request_id: int) -> None:
        """It ended, with a deadline or without."""
        for time in self._open.pop(request_id, ()):
            self._times.pop((time, request_id), None)

    def passed(self, now: int) -> list[int]:
        """Ids of the requests one of whose times passed since the last call."""
        passed = list(takewhile(lambda each: each[0] < now, self._times))
        for each in passed:
            del self._times[each]
        return list(dict.fromkeys(request_id for _, request_id in passed))

    def next_due(self, now: int) -> float | None:
        """Seconds until the next time passes; None without one."""
        return max(0, self._times.peekitem(0)[0][0] + 1 - now) * 1e-9 if self._times else None
