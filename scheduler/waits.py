"""Why requests wait: time by reason, kept per class so that a step costs the same however many wait.

A reason is the budget that ran out (`tokens`, `rows`, `cells`, `blocks`, `high_water`), `order` for work
that only runs when nothing else does, the class that came first (`behind flash`), or `step` where nothing
stood in the way: the batch under way had to end.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.request import Request, State
from scheduler.types import PriorityClass

STEP = "step"


class WaitLedger:
    """Nanoseconds by class and reason since the start; a request takes the difference over its own wait."""

    def __init__(self) -> None:
        self._spent: dict[PriorityClass, dict[str, int]] = {cls: {} for cls in PriorityClass}
        self._reason = dict.fromkeys(PriorityClass, STEP)
        self._last = 0

    def advance(self, now: int) -> None:
        """Charge the time until `now` (ns) to the reasons of the plan before."""
        passed, self._last = now - self._last, now
        for cls, spent in self._spent.items():
            reason = self._reason[cls]
            spent[reason] = spent.get(reason, 0) + passed

    def note(self, waits: Iterable[tuple[PriorityClass, str]]) -> None:
        """A plan was made: from here on each class waits for the reason it gave."""
        reasons = dict(waits)
        first = min(reasons, default=None)
        for cls in PriorityClass:
            behind = STEP if first is None or cls < first else f"behind {first.name.lower()}"
            self._reason[cls] = reasons.get(cls, behind)

    def arrived(self, request: Request, queued_ns: int) -> None:
        """It came at `queued_ns`, and the batch under way had to end first."""
        if self._last > queued_ns:
            request.waits[STEP] = self._last - queued_ns

    def track(self, request: Request) -> None:
        """A request may have changed: its wait begins or ends, as of the last `advance`."""
        waiting = request.state is State.QUEUED and request.remaining > 0
        if waiting and request.since is None:
            request.since = dict(self._spent[request.cls])
        elif not waiting and request.since is not None:
            self._settle(request, request.since)
            request.since = None

    def _settle(self, request: Request, since: dict[str, int]) -> None:
        for reason, spent in self._spent[request.cls].items():
            passed = spent - since.get(reason, 0)
            if passed:
                request.waits[reason] = request.waits.get(reason, 0) + passed
