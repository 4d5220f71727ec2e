"""The queues of all live work, kept in scheduling order change by change, so that a plan sorts nothing.

Work has a scheduling key: its priority, whether it generates, and its policy's key. Sorted queues hold
running (admitted) requests, waiting requests, and tapes. A walk merges them lazily: a step costs what its
batch costs, however many wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import gt, itemgetter, lt
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from regions.tape import Tape
from scheduler.policies import Key, Policy, vllm
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import Request, State
from scheduler.tapes import TapeAppend
from scheduler.types import PriorityClass, Work

SchedulingKey = tuple[int, int, Key]

DUE = 2
"""Priority of tapes whose staleness bound is near: behind FLASH, before everybody else."""
PRIORITIES = {
    PriorityClass.FLASH: 0,
    PriorityClass.SESSION: 3,
    PriorityClass.POOL: 5,
    PriorityClass.STREAM: 7,
}
"""Priority of each class; the next number is for what runs in the background."""
NEVER_ADMITTED: SchedulingKey = (PRIORITIES[PriorityClass.POOL], 1, (2,))
"""Key of all in the waiting order: behind whoever was admitted or preempted."""


class Position(NamedTuple):
    """Where a piece of work stands; equal positions need no move."""

    key: SchedulingKey
    state: State | None
    """None: a tape."""
    left: int
    """Tokens to compute; of a tape at least 1."""
    decoding: bool
    prefilling: bool
    starved: bool
    """All that came of its prompt is computed, and more is to come."""
    cells: int

    @property
    def standing(self) -> tuple[SchedulingKey, State | None, bool, bool]:
        """What decides in which queues it stands and where; the rest may change without a move."""
        return self.key, self.state, self.left > 0, self.starved


class Queues:
    """The order of all live work. `update` must be called whenever work may have changed.

    ``order`` is that of POOL requests which were never admitted, where their keys alone do not decide it.
    """

    def __init__(self, policy: Policy = vllm, order: PrefixQueue | None = None) -> None:
        self.requests: dict[int, Request] = {}
        """Every live request, by number."""
        self.appends: dict[Tape, TapeAppend] = {}
        """The records that wait, by tape."""
        self.running: SortedDict[SchedulingKey, Request] = SortedDict()
        """Admitted requests: they hold memory, also when they have nothing to do."""
        self.decodes = self.prefills = 0
        """Requests that could generate, and that could prefill."""
        self.cells = 0
        """Claimed by the admitted."""
        self.live = dict.fromkeys(PriorityClass, 0)
        """Live work by class."""
        self.waiting = dict.fromkeys(PriorityClass, 0)
        """Of it, by class, what could begin and is not admitted; tapes with records to take."""
        self.starved: SortedDict[SchedulingKey, Request] = SortedDict()
        """Of `running`: they wait for input."""
        self._ready: SortedDict[SchedulingKey, Request] = SortedDict()  # of `running`: with something to do
        self._waiting: SortedDict[SchedulingKey, Request] = SortedDict()
        self._appends: SortedDict[SchedulingKey, TapeAppend] = SortedDict()
        self._positions: dict[Work, Position] = {}
        self._policy = policy
        self.order = order

    def position(self, work: Work) -> Position:
        """Where work stands. Raises KeyError for work that is not in the queues."""
        return self._positions[work]

    def key(self, work: Work) -> SchedulingKey:
        """Where work stands in the order of everything."""
        return self._positions[work].key

    def update(self, work: Request | TapeAppend, *, prompt: bool = False) -> None:
        """Put work where it belongs, new or changed; ``prompt``: its prompt is another one."""
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

    def remove(self, work: Request | TapeAppend) -> None:
        """Forget work that has ended. Idempotent."""
        before = self._positions.pop(work, None)
        if before is not None:
            self.live[work.cls] -= 1
            self._count(work, before, -1)
            self._remove(work, before, admitted=False)

    def walk(self, admitting: Callable[[], bool] = lambda: True) -> Iterator[Request | TapeAppend]:
        """All that have something to do, in order. Once not ``admitting`` the waiting cost nothing."""
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
        """All tapes with records to take, in order."""
        return list(self._appends.values())

    def victims(self, work: Work) -> Iterator[Request]:
        """Admitted requests that make room for ``work``, the first victim first.

        Those behind it, the last first; then, unless it is an unfinished prompt itself, unfinished prompts
        before it that wait for input: what has something to do does not wait for what has not.
        """
        key = self.key(work)
        for other in self.running.irange(minimum=key, inclusive=(False, True), reverse=True):
            yield self.running[other]
        if work.complete:
            for other in self.starved.irange(maximum=key, inclusive=(True, False), reverse=True):
                yield self.starved[other]

    def victims_have(self, work: Work, cells: int) -> bool:
        """Whether the victims of ``work`` have so many cells together."""
        claimed = (self._positions[victim].cells for victim in self.victims(work))
        return any(found >= cells for found in accumulate(claimed))

    def any_blocks_before(self, work: Work) -> bool:
        """Whether any request before ``work`` holds blocks."""
        keys = self.running.irange(maximum=self.key(work), inclusive=(True, False))
        return any(self.running[key].blocks for key in keys)

    def _admittable(self) -> Iterator[tuple[SchedulingKey, Request]]:
        """Requests that may be admitted, in order, with the key to merge them by."""
        for key in self._waiting.irange(maximum=NEVER_ADMITTED):
            yield key, self._waiting[key]
        if self.order is not None:
            yield from ((NEVER_ADMITTED, request) for request in self.order)
        for key in self._waiting.irange(minimum=NEVER_ADMITTED):
            yield key, self._waiting[key]

    def _runnable(self) -> Iterator[tuple[SchedulingKey, Request | TapeAppend]]:
        """Admitted requests with something to do, and tapes, in order."""
        ready: Iterator[tuple[SchedulingKey, Request | TapeAppend]] = iter(self._ready.items())
        return heapq.merge(ready, self._appends.items(), key=itemgetter(0)) if self._appends else ready

    def _count(self, work: Work, position: Position, sign: int) -> None:
        self.waiting[work.cls] += sign * (position.state is not State.RUNNING and position.left > 0)
        self.decodes += sign * position.decoding
        self.prefills += sign * position.prefilling
        self.cells += sign * position.cells

    def _insert(self, work: Any, position: Position) -> None:
        if self.order is not None and self._ordered(position):
            self.order.add(work)
            return
        for queue in self._queues_of(position):
            queue[position.key] = work

    def _remove(self, work: Any, position: Position, *, admitted: bool) -> None:
        if self.order is not None and self._ordered(position):
            if admitted:
                self.order.admitted(work)
            else:
                self.order.discard(work)
            return
        for queue in self._queues_of(position):
            del queue[position.key]

    def _queues_of(self, position: Position) -> Iterator[SortedDict[SchedulingKey, Any]]:
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

    def _ordered(self, position: Position) -> bool:
        """Whether the waiting order holds it: a POOL request that was never admitted."""
        key, never = position.key, NEVER_ADMITTED
        waits = position.state is State.QUEUED and position.left > 0
        return self.order is not None and waits and key[0] == never[0] and key[2] > never[2]


class PreemptableBlocks:
    """Blocks of the requests that `Queues.victims` names, for any work; made for one plan."""

    def __init__(self, queues: Queues) -> None:
        running = queues.running
        self._key = queues.key
        self._behind = _RunningSum(((key, running[key]) for key in reversed(running)), gt)
        self._starved = _RunningSum(iter(queues.starved.items()), lt)

    def __call__(self, work: Work, needed: int) -> int:
        """Blocks that phase 2 may take for ``work``; with ``needed`` of them or more, no fewer than these."""
        key = self._key(work)
        behind = self._behind(key, needed)
        if behind >= needed or not work.complete:
            return behind
        return behind + self._starved(key, needed - behind)


class _RunningSum:
    """Blocks of requests in a row, counted from its beginning, and only as far as somebody asked."""

    def __init__(
        self,
        row: Iterator[tuple[SchedulingKey, Request]],
        ahead: Callable[[SchedulingKey, SchedulingKey], bool],
    ) -> None:
        self._row, self._ahead = row, ahead
        self._keys: list[SchedulingKey] = []  # counted so far
        self._sums = [0]  # blocks of the first so many of these

    def __call__(self, key: SchedulingKey, needed: int) -> int:
        """Blocks of those ahead of ``key``; where these are ``needed`` or more, no fewer than ``needed``."""
        keys, sums, ahead = self._keys, self._sums, self._ahead
        while sums[-1] < needed and (not keys or ahead(keys[-1], key)):
            item = next(self._row, None)
            if item is None:
                break
            keys.append(item[0])
            sums.append(sums[-1] + item[1].blocks)
        return sums[bisect_left(keys, True, key=lambda other: not ahead(other, key))]


def _position(work: Request | TapeAppend, policy: Policy) -> Position:
    if isinstance(work, TapeAppend):
        at: SchedulingKey = (PRIORITIES[work.cls], 1, (work.seq,))
        if work.due:
            at = DUE, 0, (work.deadline or 0, work.seq)
        return Position(at, None, 1, decoding=False, prefilling=False, starved=False, cells=0)
    running = work.state is State.RUNNING
    left = work.remaining
    decoding = left == 1 and bool(work.output)
    key: Key = policy(work) if work.cls is PriorityClass.POOL else (work.id,)
    return Position(
        (PRIORITIES[work.cls] + work.background, int(not decoding), key),
        work.state,
        left,
        decoding,
        prefilling=left > 0 and not decoding and not work.background,
        starved=running and not left and not work.complete,
        cells=work.cells if running else 0,
    )
