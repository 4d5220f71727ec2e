"""What the scheduler tells about itself, and why requests wait. The daemon turns these calls into metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from scheduler.request import Event, Request, State
from scheduler.types import PriorityClass, Work

if TYPE_CHECKING:
    from engine.divergence import Divergence

STEP, RESTORE = "step", "restore"


class Observer:
    """No-op default; override what is of interest. Called on the stepping thread: be quick, never block."""

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        """Work of a class entered its first batch `ns` after it was queued."""

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A batch of `rows` ran in `forward_ns`, with this many tokens of each class."""

    def preempted(self, request: Request, how: Event, by: Work) -> None:
        """A request left the pool for other work: PREEMPTED_SWAP or PREEMPTED_RECOMPUTE."""

    def speculated(self, drafted: int, accepted: int) -> None:
        """Draft tokens were verified, and so many of them were right."""

    def ended(self, request: Request) -> None:
        """A request reached a final state: it carries its whole history."""

    def evicted(self, session: str, tokens: int) -> None:
        """A tape dropped its oldest records to make room."""

    def executor_failed(self, error: Exception) -> None:
        """A forward pass raised; its requests failed."""

    def out_of_memory(self, *, retried: bool) -> None:
        """A forward pass found no memory: half of its batch is tried again, or that failed, too."""

    def depth(self, waiting: Mapping[PriorityClass, int], live: Mapping[PriorityClass, int]) -> None:
        """After a step, of each class: work that waits to be admitted, and all that has not ended."""

    def refreshed(self, session: str) -> None:
        """An `exact` session goes on from a window that was prefilled again."""

    def refresh_restarted(self) -> None:
        """A window was evicted before it was prefilled again; it is begun again."""

    def compared(self, session: str, found: Sequence[Divergence]) -> None:
        """Standing questions were answered from the carried and from a fresh state."""


class WaitLedger:
    """Why requests wait: ns by class and reason; a request takes the difference over its own wait.

    A reason is the budget that ran out (`tokens`, `rows`, `cells`, `blocks`, `high_water`), `order` for work
    that only runs when nothing else does, `restore` for a session's lost KV, the class that came first
    (`behind flash`), or `step`: the batch under way had to end.
    """

    def __init__(self) -> None:
        self._spent: dict[PriorityClass, dict[str, int]] = {cls: {} for cls in PriorityClass}
        self._reason = dict.fromkeys(PriorityClass, STEP)
        self._since: dict[int, dict[str, int]] = {}  # the ledger as it was when a request began to wait
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
        first = min((cls for cls, reason in reasons.items() if reason != RESTORE), default=None)
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
        if waiting and request.id not in self._since:
            self._since[request.id] = dict(self._spent[request.cls])
        elif not waiting and request.id in self._since:
            self._charge(request, self._since.pop(request.id))

    def _charge(self, request: Request, since: dict[str, int]) -> None:
        for reason, spent in self._spent[request.cls].items():
            passed = spent - since.get(reason, 0)
            if passed:
                request.waits[reason] = request.waits.get(reason, 0) + passed
