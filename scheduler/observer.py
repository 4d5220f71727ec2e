"""What the scheduler tells about itself. The composition root turns these calls into metrics."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.request import Event, Request, Work
from scheduler.types import PriorityClass


class Observer:
    """No-op default; override what is of interest. Called on the stepping thread: be quick, never block."""

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        """Work of a class entered its first batch `ns` after it was queued."""

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A batch of `rows` ran in `forward_ns`, with this many tokens of each class."""

    def preempted(self, request: Request, how: Event, by: Work) -> None:
        """A request left the pool for other work: PREEMPTED_SWAP or PREEMPTED_RECOMPUTE."""

    def speculated(self, drafted: int, accepted: int) -> None:
        """Guessed tokens were verified, and so many of them were right."""

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
