"""Hooks that report the scheduler's work, and why requests wait. The daemon turns them into metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from scheduler.interfaces import PriorityClass
from scheduler.request import LifecycleEvent, Request, State
from scheduler.tapes import Work

if TYPE_CHECKING:
    from engine.divergence import Divergence

STEP, RESTORE = "step", "restore"


class Observer:
    """No-op hooks to override. They run on the stepping thread: be quick, never block."""

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        """Work of a class entered its first batch `ns` after it was queued."""

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A batch of `rows` ran in `forward_ns`, with this many tokens of each class."""

    def preempted(self, request: Request, how: LifecycleEvent, by: Work) -> None:
        """A request left the pool for other work: PREEMPTED_SWAP or PREEMPTED_RECOMPUTE."""

    def decoded(self, cls: PriorityClass, drafted: int, accepted: int) -> None:
        """A pass gave a running answer of this class its next token, and ``accepted`` ones of ``drafted``."""

    def ended(self, request: Request) -> None:
        """A request reached a final state; it has its whole history."""

    def out_of_memory(self, *, retried: bool) -> None:
        """A forward pass ran out of memory: half of its batch is retried, or the retry failed, too."""

    def depth(self, waiting: Mapping[PriorityClass, int], live: Mapping[PriorityClass, int]) -> None:
        """After each step, by class: work waiting for admission, and all work that has not ended."""

    def refreshed(self, session: str) -> None:
        """A session adopted a freshly prefilled window."""

    def refresh_restarted(self) -> None:
        """A refresh restarted: its window was evicted, or records of another session waited for theirs."""

    def refresh_failed(self, session: str) -> None:
        """A refresh failed: the session keeps its window and prefix. A replaced prefix is tried again."""

    def compared(self, session: str, found: Sequence[Divergence]) -> None:
        """A session's standing questions were answered from its carried and from a fresh state."""


class WaitLedger:
    """Why requests wait: ns by class and reason. A request subtracts the totals at the start of its wait.

    A reason is the budget that ran out (`tokens`, `rows`, `cells`, `blocks`, `high_water`), `order` for
    background work, `restore` for KV that is lost or replaced, the class that came first (`behind flash`), or
    `step`: the batch under way had to end.
    """

    def __init__(self) -> None:
        self._spent: dict[PriorityClass, dict[str, int]] = {cls: {} for cls in PriorityClass}
        self._reason = dict.fromkeys(PriorityClass, STEP)
        self._since: dict[int, dict[str, int]] = {}  # totals when each request began to wait
        self._last = 0

    def advance(self, now: int) -> None:
        """Charge the time until `now` (ns) to the reasons of the previous plan."""
        passed, self._last = now - self._last, now
        for cls, spent in self._spent.items():
            reason = self._reason[cls]
            spent[reason] = spent.get(reason, 0) + passed

    def note(self, waits: Iterable[tuple[PriorityClass, str]]) -> None:
        """Record a new plan's reasons; each class is charged to its reason from now on."""
        reasons = dict(waits)
        first = min((cls for cls, reason in reasons.items() if reason != RESTORE), default=None)
        for cls in PriorityClass:
            behind = STEP if first is None or cls < first else f"behind {first.name.lower()}"
            self._reason[cls] = reasons.get(cls, behind)

    def arrived(self, request: Request, queued_ns: int) -> None:
        """Record a request that came at `queued_ns` and waited for the batch under way."""
        if self._last > queued_ns:
            request.waits[STEP] = self._last - queued_ns

    def track(self, request: Request) -> None:
        """Begin or end a request's wait after it may have changed, as of the last `advance`."""
        waiting = request.state is State.QUEUED and request.remaining > 0
        if waiting and request.id not in self._since:
            self._since[request.id] = dict(self._spent[request.cls])
        elif not waiting and request.id in self._since:
            self._charge(request, self._since.pop(request.id))

    def _charge(self, request: Request, since: dict[str, int]) -> None:
        for reason, spent in self._spent[request.cls].items():
            passed = spent - since.get(reason, 0)
            if passed:
                request.waits[reason] = request.waits.get(reason, 0) + passed
