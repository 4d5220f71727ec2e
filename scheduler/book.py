"""Where all live work stands, in order: kept up to date change by change, so that a plan sorts nothing.

Work has a rank: its lane, whether it generates, and its policy's key. Three sorted lines hold it: requests
that run (admitted), requests that wait, tapes. A walk merges them lazily and looks only at what it takes,
and once nobody else may be admitted those that wait are not looked at at all; so a step costs what its
batch costs, however many wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import gt, itemgetter, lt
from typing import NamedTuple, Protocol

from sortedcontainers import SortedDict

from scheduler.policies import Key, Policy, vllm
from scheduler.request import Append, Request, State, Work
from scheduler.types import PriorityClass

Rank = tuple[int, int, Key]

DUE = 2
"""Lane of tapes whose staleness bound is near: behind FLASH, before everybody else."""
LANES = {PriorityClass.FLASH: 0, PriorityClass.SESSION: 3, PriorityClass.POOL: 5, PriorityClass.STREAM: 7}
"""Lane of each class; the next one is for what only prefills."""
IN_LINE: Rank = (LANES[PriorityClass.POOL], 1, (2,))
"""Rank of all that stand in the waiting line: behind whoever was admitted or preempted."""


class WaitingLine(Protocol):
    """An order of waiting POOL requests that depends on more than themselves."""

    def add(self, request: Request) -> None:
        """It begins to wait, or waits already and its prompt changed."""

    def taken(self, request: Request) -> None:
        """It was admitted."""

    def discard(self, request: Request) -> None:
        """It ended."""

    def __iter__(self) -> Iterator[Request]: ...


class Place(NamedTuple):
    """How a piece of work stands in the book; equal places need no move."""

    rank: Rank
    state: State | None
    """None: a tape."""
    left: int
    """Tokens to compute; of a tape at least 1."""
    decoding: bool
    prefilling: bool
    resting: bool
    """All that came of its prompt is computed, and more is to come."""
    cells: int

    @property
    def line(self) -> tuple[Rank, State | None, bool, bool]:
        """What decides where it stands; the rest may change without a move."""
        return self.rank, self.state, self.left > 0, self.resting


class Book:
    """The order of all live work. `update` must be called whenever work may have changed."""

    def __init__(self, policy: Policy = vllm, line: WaitingLine | None = None) -> None:
        self.requests: dict[int, Request] = {}
        """Every live request, by number."""
        self.running: SortedDict[Rank, Request] = SortedDict()
        """Admitted requests: they hold memory, also when they have nothing to do."""
        self.resting: SortedDict[Rank, Request] = SortedDict()
        """Of them those that wait for input."""
        self.decodes = self.prefills = 0
        """Requests that could generate, and that could prefill."""
        self.cells = 0
        """Claimed by the admitted."""
        self.counts = dict.fromkeys(PriorityClass, 0)
        """Live work by class."""
        self.waits = dict.fromkeys(PriorityClass, 0)
        """Of it, by class, what could begin and is not admitted; tapes with records to take."""
        self.questioned = False
        """The last batch had a question (FLASH or SESSION): those below it have given way once."""
        self._ready: SortedDict[Rank, Request] = SortedDict()  # those of `running` with something to do
        self._waiting: SortedDict[Rank, Request] = SortedDict()
        self._appends: SortedDict[Rank, Append] = SortedDict()
        self._policy = policy
        self._line = line

    def rank(self, work: Work) -> Rank:
        """Where work stands in the order of everything; it must be in the book."""
        return place_of(work).rank

    def update(self, work: Work, *, prompt: bool = False) -> None:
        """Put work where it belongs, new or changed; ``prompt``: its prompt is another one."""
        place, before = _place(work, self._policy), work.place
        work.place = place
        if not isinstance(before, Place):
            self.counts[work.cls] += 1
            self._count(work, place, 1)
            self._insert(work, place)
        elif place != before:
            self._count(work, before, -1)
            self._count(work, place, 1)
            if place.line != before.line:
                self._remove(work, before, admitted=place.state is State.RUNNING)
                self._insert(work, place)
                return
        if prompt and isinstance(work, Request) and place.state is State.QUEUED and place.left:
            line = self._line_of(place)
            if line is not None:
                line.add(work)

    def remove(self, work: Work) -> None:
        """Forget work that has ended. Idempotent."""
        before, work.place = work.place, None
        if isinstance(before, Place):
            self.counts[work.cls] -= 1
            self._count(work, before, -1)
            self._remove(work, before, admitted=False)

    def walk(self) -> Walk:
        """All that have something to do, in order."""
        return Walk(self)

    def appends(self) -> list[Append]:
        """All tapes with records to take."""
        return list(self._appends.values())

    def blocks_below(self) -> Below:
        """Blocks that work may take from others."""
        return Below(self)

    def holders(self, work: Work) -> Iterator[Request]:
        """Admitted requests that make room for `work`, the first victim first.

        Those behind it, the last first; then, unless it is an unfinished prompt itself, unfinished prompts
        before it that wait for input: what has something to do does not wait for what has not.
        """
        rank = place_of(work).rank
        for key in self.running.irange(minimum=rank, inclusive=(False, True), reverse=True):
            yield self.running[key]
        if not _unfinished(work):
            for key in self.resting.irange(maximum=rank, inclusive=(True, False), reverse=True):
                yield self.resting[key]

    def holds_before(self, work: Work) -> bool:
        """Whether any request before `work` holds blocks."""
        keys = self.running.irange(maximum=place_of(work).rank, inclusive=(True, False))
        return any(self.running[key].blocks for key in keys)

    def holders_have(self, work: Work, cells: int) -> bool:
        """Whether the admitted that make room for `work` have so many cells together."""
        return any(found >= cells for found in accumulate(place_of(h).cells for h in self.holders(work)))

    def waiting(self) -> Iterator[tuple[Rank, Request]]:
        """Requests that may be admitted, in order, with the rank to merge them by."""
        line = self._line
        if line is None:
            yield from self._waiting.items()
            return
        for key in self._waiting.irange(maximum=IN_LINE):
            yield key, self._waiting[key]
        yield from ((IN_LINE, request) for request in line)
        for key in self._waiting.irange(minimum=IN_LINE):
            yield key, self._waiting[key]

    def runnable(self) -> Iterator[tuple[Rank, Work]]:
        """Admitted requests with something to do, and tapes, in order."""
        running: Iterator[tuple[Rank, Work]] = iter(self._ready.items())
        return heapq.merge(running, self._appends.items(), key=itemgetter(0)) if self._appends else running

    def _count(self, work: Work, place: Place, sign: int) -> None:
        self.waits[work.cls] += sign * (place.state is not State.RUNNING and place.left > 0)
        self.decodes += sign * place.decoding
        self.prefills += sign * place.prefilling
        self.cells += sign * place.cells

    def _insert(self, work: Work, place: Place) -> None:
        if isinstance(work, Append):
            self._appends[place.rank] = work
            return
        if place.state is State.RUNNING:
            self.running[place.rank] = work
            if place.left:
                self._ready[place.rank] = work
            elif place.resting:
                self.resting[place.rank] = work
        elif place.left:
            line = self._line_of(place)
            if line is None:
                self._waiting[place.rank] = work
            else:
                line.add(work)

    def _remove(self, work: Work, place: Place, *, admitted: bool) -> None:
        if isinstance(work, Append):
            del self._appends[place.rank]
            return
        if place.state is State.RUNNING:
            del self.running[place.rank]
            if place.left:
                del self._ready[place.rank]
            elif place.resting:
                del self.resting[place.rank]
        elif place.left:
            line = self._line_of(place)
            if line is None:
                del self._waiting[place.rank]
            elif admitted:
                line.taken(work)
            else:
                line.discard(work)

    def _line_of(self, place: Place) -> WaitingLine | None:
        """The line in which such a waiting request stands: that of those never admitted."""
        return self._line if place.rank[0] == IN_LINE[0] and place.rank[2] > IN_LINE[2] else None


class Walk:
    """One pass over the order. After `close` those that wait are passed over, and cost nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.admitting = True

    def close(self) -> None:
        """Nobody else is admitted in this plan."""
        self.admitting = False

    def __iter__(self) -> Iterator[Work]:
        runnable, waiting = self._book.runnable(), self._book.waiting()
        runs, waits = next(runnable, None), next(waiting, None)
        while waits is not None and self.admitting:
            if runs is not None and runs[0] < waits[0]:
                yield runs[1]
                runs = next(runnable, None)
            else:
                yield waits[1]
                waits = next(waiting, None)
        if runs is not None:
            yield runs[1]
        for _, work in runnable:
            yield work


class Below:
    """Blocks held by those that `Book.holders` names, for any work; made for one plan."""

    def __init__(self, book: Book) -> None:
        running, resting = book.running, book.resting
        self._behind = _Tally(((key, running[key]) for key in reversed(running)), gt)
        self._resting = _Tally(iter(resting.items()), lt)

    def __call__(self, work: Work, needed: int) -> int:
        """Blocks that phase 2 may take for `work`; with ``needed`` of them or more, no fewer than these."""
        rank = place_of(work).rank
        behind = self._behind(rank, needed)
        if behind >= needed or _unfinished(work):
            return behind
        return behind + self._resting(rank, needed - behind)


class _Tally:
    """Blocks of requests in a row, counted from its beginning, and only as far as somebody asked."""

    def __init__(self, row: Iterator[tuple[Rank, Request]], ahead: Callable[[Rank, Rank], bool]) -> None:
        self._row, self._ahead = row, ahead
        self._ranks: list[Rank] = []  # counted so far
        self._held = [0]  # blocks of the first so many of these

    def __call__(self, rank: Rank, needed: int) -> int:
        """Blocks of those ahead of ``rank``; where these are ``needed`` or more, no fewer than ``needed``."""
        ranks, held, ahead = self._ranks, self._held, self._ahead
        while held[-1] < needed and (not ranks or ahead(ranks[-1], rank)):
            item = next(self._row, None)
            if item is None:
                break
            key, request = item
            ranks.append(key)
            held.append(held[-1] + request.blocks)
        return held[bisect_left(ranks, True, key=lambda other: not ahead(other, rank))]


def place_of(work: Work) -> Place:
    """Where work stands; it must be in the book."""
    assert isinstance(work.place, Place), "not in the book"
    return work.place


def _unfinished(work: Work) -> bool:
    return isinstance(work, Request) and not work.complete


def _place(work: Work, policy: Policy) -> Place:
    if isinstance(work, Append):
        if work.due:
            return Place((DUE, 0, (work.deadline or 0, work.seq)), None, 1, False, False, False, 0)
        return Place((LANES[work.cls], 1, (work.seq,)), None, 1, False, False, False, 0)
    running = work.state is State.RUNNING
    left = work.remaining
    decoding = left == 1 and bool(work.output)
    key = policy(work) if work.cls is PriorityClass.POOL else (work.id,)
    rank: Rank = (LANES[work.cls] + work.prefill_only, int(not decoding), key)
    prefilling = left > 0 and not decoding and not work.prefill_only
    resting = running and not left and not work.complete
    return Place(rank, work.state, left, decoding, prefilling, resting, work.cells if running else 0)
