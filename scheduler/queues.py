"""The queues of all live work, kept in scheduling order on every change, so that planning sorts nothing.

The scheduling key of work is its priority, whether it generates, and its policy's key. Sorted queues hold
running (admitted) requests, waiting requests, and tapes. A walk merges them lazily: its cost depends on the
batch, not on how many wait.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.policies import Key, Policy, vllm
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import Request, State
from scheduler.tapes import TapeAppend, Work

SchedulingKey = tuple[int, int, Key]

DUE = 2
"""Priority of tapes near their staleness bound: after FLASH, before all else."""
PRIORITIES = {
    PriorityClass.FLASH: 0,
    PriorityClass.SESSION: 3,
    PriorityClass.POOL: 5,
    PriorityClass.STREAM: 7,
}
"""Priority of each class; background work has the next number, and so have requests of the tapes' class."""
NEVER_ADMITTED: SchedulingKey = (PRIORITIES[PriorityClass.POOL], 1, (2,))
"""Key of everything in the waiting order: after all that were ever admitted or preempted."""


class QueuePosition(NamedTuple):
    """The state that decides the queues of work; equal positions need no move."""

    key: SchedulingKey
    state: State | None
    """None: a tape."""
    left: int
    """Tokens to compute; for a tape at least 1."""
    decoding: bool
    prefilling: bool
    starved: bool
    """All input so far is computed, and the prompt is unfinished."""
    cells: int

    @property
    def standing(self) -> tuple[SchedulingKey, State | None, bool, bool]:
        """The part that decides its queues and its position in them; the rest may change without a move."""
        return self.key, self.state, self.left > 0, self.starved


class Queues:
    """The order of all live work. Call `update` whenever work may have changed.

    ``order`` is that of never-admitted POOL requests, when their keys alone do not decide it.
    """

    def __init__(self, policy: Policy = vllm, order: PrefixQueue | None = None) -> None:
        self.requests: dict[int, Request] = {}
        """Every live request, by number."""
        self.appends: dict[Tape, TapeAppend] = {}
        """Waiting records, by tape."""
        self.barriers: dict[Tape, int] = {}
        """Records numbered above its barrier wait until the tape's refresh is adopted."""
        self.running: SortedDict[SchedulingKey, Request] = SortedDict()
        """Admitted requests, which hold memory even when they have nothing to do."""
        self.decodes = self.prefills = 0
        """How many requests could generate, and how many could prefill."""
        self.cells = 0
        """Cells of admitted requests."""
        self.live = dict.fromkeys(PriorityClass, 0)
        """Live work by class."""
        self.waiting = dict.fromkeys(PriorityClass, 0)
        """Of these, work that could run and is not admitted, and tapes with records."""
        self.starved: SortedDict[SchedulingKey, Request] = SortedDict()
        """Those of `running` that wait for input."""
        self._ready: SortedDict[SchedulingKey, Request] = SortedDict()  # those of `running` with work to do
        self._waiting: SortedDict[SchedulingKey, Request] = SortedDict()
        self._appends: SortedDict[SchedulingKey, TapeAppend] = SortedDict()
        self._positions: dict[Work, QueuePosition] = {}
        self._policy = policy
        self.order = order

    def position(self, work: Work) -> QueuePosition:
        """The position of work. Raises KeyError when it is not in the queues."""
        return self._positions[work]

    def key(self, work: Work) -> SchedulingKey:
        """The scheduling key of work."""
        return self._positions[work].key

    def update(self, work: Work, *, prompt: bool = False) -> None:
        """Insert or move work; ``prompt``: its prompt was replaced."""
        position, before = _position(work, self._policy), self._positions.get(work)
        self._positions[work] = position
        if before is None:
            self.live[work.cls] += 1
            self._count(work, position, 1)
            self._insert(work, position)
            return
        if position != before:
            self._count(work, before, -1)
            self._count(work, position, 1)
            if position.standing != before.standing:
                self._remove(work, before, admitted=position.state is State.RUNNING)
                self._insert(work, position)
                return
        if prompt and self._ordered(position):
            self._insert(work, position)

    def remove(self, work: Work) -> None:
        """Remove ended work. Idempotent."""
        before = self._positions.pop(work, None)
        if before is not None:
            self.live[work.cls] -= 1
            self._count(work, before, -1)
            self._remove(work, before, admitted=False)

    def walk(self, admitting: Callable[[], bool] = lambda: True) -> Iterator[Work]:
        """Work with something to do, in order. Once ``admitting`` is false, waiting requests cost nothing."""
        runnable, admittable = self._runnable(), self._admittable()
        runs, waits = next(runnable, None), next(admittable, None)
        while waits is not None and admitting():
            if runs is not None and runs[0] < waits[0]:
                yield runs[1]
                runs = next(runnable, None)
            else:
                yield waits[1]
                waits = next(admittable, None)
        if runs is not None:
            yield runs[1]
        for _, work in runnable:
            yield work

    def sorted_appends(self) -> list[TapeAppend]:
        """Tapes with waiting records, in order."""
        return list(self._appends.values())

    def victims(self, work: Work) -> Iterator[Request]:
        """Admitted requests to preempt for ``work``, the first victim first.

        First those ranked below it, from the tail. Then, unless ``work`` is itself an unfinished prompt,
        unfinished prompts ranked above it that wait for input: runnable work does not wait for them.
        """
        key = self.key(work)
        for other in self.running.irange(minimum=key, inclusive=(False, True), reverse=True):
            yield self.running[other]
        if work.complete:
            for other in self.starved.irange(maximum=key, inclusive=(True, False), reverse=True):
                yield self.starved[other]

    def victims_have(self, work: Work, cells: int) -> bool:
        """Whether the victims of ``work`` have at least ``cells`` cells together."""
        cells_of = (self._positions[victim].cells for victim in self.victims(work))
        return any(found >= cells for found in accumulate(cells_of))

    def victims_blocks(self, work: Work, needed: int) -> int:
        """Blocks of the victims of ``work``; a result of at least ``needed`` is a lower bound."""
        found = 0
        for victim in self.victims(work):
            if found >= needed:
                break
            found += victim.blocks
        return found

    def any_blocks_before(self, work: Work) -> bool:
        """Whether any request before ``work`` holds blocks."""
        keys = self.running.irange(maximum=self.key(work), inclusive=(True, False))
        return any(self.running[key].blocks for key in keys)

    def _admittable(self) -> Iterator[tuple[SchedulingKey, Request]]:
        """Waiting requests in order of admission, with the key to merge them by."""
        for key in self._waiting.irange(maximum=NEVER_ADMITTED):
            yield key, self._waiting[key]
        if self.order is not None:
            yield from ((NEVER_ADMITTED, request) for request in self.order)
        for key in self._waiting.irange(minimum=NEVER_ADMITTED):
            yield key, self._waiting[key]

    def _runnable(self) -> Iterator[tuple[SchedulingKey, Work]]:
        """Admitted requests with something to do, and tapes, in order."""
        ready: Iterator[tuple[SchedulingKey, Work]] = iter(self._ready.items())
        return heapq.merge(ready, self._appends.items(), key=itemgetter(0)) if self._appends else ready

    def _count(self, work: Work, position: QueuePosition, sign: int) -> None:
        self.waiting[work.cls] += sign * (position.state is not State.RUNNING and position.left > 0)
        self.decodes += sign * position.decoding
        self.prefills += sign * position.prefilling
        self.cells += sign * position.cells

    def _insert(self, work: Any, position: QueuePosition) -> None:
        if self.order is not None and self._ordered(position):
            self.order.add(work)
            return
        for queue in self._queues_of(position):
            queue[position.key] = work

    def _remove(self, work: Any, position: QueuePosition, *, admitted: bool) -> None:
        if self.order is not None and self._ordered(position):
            if admitted:
                self.order.admitted(work)
            else:
                self.order.discard(work)
            return
        for queue in self._queues_of(position):
            del queue[position.key]

    def _queues_of(self, position: QueuePosition) -> Iterator[SortedDict[SchedulingKey, Any]]:
        if position.state is None:
            yield self._appends
        elif position.state is State.RUNNING:
            yield self.running
            if position.left:
                yield self._ready
            elif position.starved:
                yield self.starved
        elif position.left:
            yield self._waiting

    def _ordered(self, position: QueuePosition) -> bool:
        """Whether the waiting order has it: a POOL request that was never admitted."""
        key, never = position.key, NEVER_ADMITTED
        waits = position.state is State.QUEUED and position.left > 0
        return self.order is not None and waits and key[0] == never[0] and key[2] > never[2]


def _position(work: Work, policy: Policy) -> QueuePosition:
    if isinstance(work, TapeAppend):
        at: SchedulingKey = (PRIORITIES[work.cls], 1, (work.seq,))
        if work.due:
            at = DUE, 0, (work.deadline or 0, work.seq)
        return QueuePosition(at, None, 1, decoding=False, prefilling=False, starved=False, cells=0)
    running = work.state is State.RUNNING
    left = work.remaining
    decoding = left == 1 and bool(work.output)
    behind = work.background or work.cls is PriorityClass.STREAM
    key: Key = policy(work) if work.cls is PriorityClass.POOL else (work.start, work.id)
    return QueuePosition(
        (PRIORITIES[work.cls] + behind, int(not decoding), key),
        work.state,
        left,
        decoding,
        prefilling=left > 0 and not decoding and not work.background,
        starved=running and not left and not work.complete,
        cells=work.cells if running else 0,
    )
