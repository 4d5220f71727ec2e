"""Whose batch is next: the schedulers of several models take turns on one thread.

A batch is of one model, so what is one walk over all work for one model is here a choice before each batch.
FLASH of any model goes before all else, and other work of several models alternates: as tapes have their
share of each batch beside questions, a model has its batch behind each one of another. So what arrives at
one model, and FLASH above all, waits for one batch of each other model at most.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scheduler.inbox import Inbox
from scheduler.interfaces import PriorityClass
from scheduler.observer import Observer
from scheduler.scheduler import Scheduler

FLASH_BATCHES = 3
"""Batches for which FLASH of other models may keep a model's work waiting: a quarter is left to that, as
`Limits.stream_share` leaves tapes a quarter of a batch.
"""


class Turn(NamedTuple):
    """The highest class of a model's work, None without any, and the batches of others while it waited."""

    first: PriorityClass | None
    passed: int


def order_of(turns: Sequence[Turn]) -> list[int]:
    """The models with work, by their numbers, in the order in which they may run the next batch."""
    waiting = [number for number, turn in enumerate(turns) if turn.first is not None]
    has_flash = any(turn.first is PriorityClass.FLASH for turn in turns)
    patience = FLASH_BATCHES if has_flash else 1

    def key(number: int) -> tuple[int, int, int, int]:
        first, passed = turns[number]
        assert first is not None
        return (0, 0, -passed, first) if passed >= patience else (1, first, -passed, 0)

    return sorted(waiting, key=key)


class Turns:
    """Steps ``schedulers``, which share an ``inbox``, as one; used by the worker's thread.

    ``clock``: monotonic, ns. ``observer`` hears how much work there is of all models together.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        inbox: Inbox,
        clock: Callable[[], int],
        observer: Observer | None = None,
    ) -> None:
        self._schedulers, self._inbox, self._clock = schedulers, inbox, clock
        self._observer = observer or Observer()
        self._passed = [0] * len(schedulers)

    @property
    def has_questions(self) -> bool:
        """As `Scheduler.has_questions`, of any model."""
        return any(each.has_questions for each in self._schedulers)

    def step(self) -> bool:
        """Run one batch of one model; False when there was nothing to do."""
        now = self._clock()
        for each in self._schedulers:  # before any call, which may be about work of any of them
            each.charge_waits(now)
        received = sum(each.receive(now) for each in self._schedulers) > 0
        turns = [Turn(each.first, n) for each, n in zip(self._schedulers, self._passed, strict=True)]
        runs = self._advance(turns, now)
        if runs is not None:
            self._passed = [
                0 if n == runs or turn.first is None else turn.passed + 1 for n, turn in enumerate(turns)
            ]
        if received or runs is not None:
            self._observe()
        return received or runs is not None or len(self._inbox) > 0

    def _advance(self, turns: Sequence[Turn], now: int) -> int | None:
        """Run one batch of the first model that has one, by its index. One that raises is last then."""
        for n in order_of(turns):
            try:
                if self._schedulers[n].advance(now):
                    return n
            except Exception:
                self._passed = [each + (other != n) for other, each in enumerate(self._passed)]
                raise
        return None

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `Scheduler.wait`."""
        return self._inbox.wait(timeout_s)

    def interrupt(self) -> None:
        """As `Scheduler.interrupt`."""
        self._inbox.interrupt()

    def next_due(self) -> float | None:
        """As `Scheduler.next_due`."""
        due = (each.next_due() for each in self._schedulers)
        return min((wait for wait in due if wait is not None), default=None)

    def close(self) -> None:
        """Refuse new work, and end all live work with `stopping`."""
        for each in self._schedulers:
            each.close()

    def _observe(self) -> None:
        waiting, live = Counter[PriorityClass](), Counter[PriorityClass]()
        for each in self._schedulers:
            waiting.update(each.queues.waiting)
            live.update(each.queues.live)
        self._observer.depth(waiting, live)
