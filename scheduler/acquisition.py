"""Phase 2: take the blocks a plan needs, preempting lower ranks where the pool is short.

Victims of an entry rank below it: first those the plan left out, from the tail, then the planned, from the
tail (*Stream2LLM* section 4.1); how one leaves is decided in `eviction`. An entry that still finds no
blocks is deferred. Only for the first of the order more is done, so that something always moves: it takes a
smaller piece, then readers below it give up the versions they pin, and at the very last it fails with the
figures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.book import Book
from scheduler.planner import Entry, Plan
from scheduler.request import Append, Failure, Request, State, Work
from scheduler.types import Memory


@dataclass(slots=True)
class Acquired:
    """Outcome of phase 2."""

    entries: list[Entry] = field(default_factory=list)
    """Entries that hold their blocks, in policy order."""
    failures: list[tuple[Entry, Failure]] = field(default_factory=list)
    """Work that cannot be done at all; the scheduler ends it."""
    evicted: list[tuple[str, int]] = field(default_factory=list)
    """(tape, tokens) evicted to make room."""


Preempt = Callable[[Request, Work], None]
"""Make a request (the first) leave the pool for the sake of other work, and queue it again."""


def acquire(plan: Plan, book: Book, memory: Memory, preempt: Preempt) -> Acquired:
    """Take blocks for the plan's entries in order.

    A request whose reader cannot be opened is failed with `open_failed`.
    """
    return _Acquisition(plan, book, memory, preempt).run()


class _Acquisition:
    def __init__(self, plan: Plan, book: Book, memory: Memory, preempt: Preempt) -> None:
        self.plan, self.book, self.memory, self.preempt = plan, book, memory, preempt
        self.ranks = {entry.work: book.rank(entry.work) for entry in plan.entries}
        """Of the planned, as it was planned: being preempted changes it."""
        self.lost: set[Work] = set()
        """Planned work that became a victim before its turn."""
        self.taken: set[Work] = set()
        self.out = Acquired()

    def run(self) -> Acquired:
        for place, entry in enumerate(self.plan.entries):
            work = entry.work
            if work in self.lost or not self._open(entry):
                continue
            if isinstance(work, Request):
                # the prefix cache may have had some of what was planned
                entry = entry._replace(n=min(entry.n, work.remaining))
            if entry.leader is not None:
                secured = entry if entry.leader in self.taken else None
            else:
                secured = self._secure(entry)
                if secured is None and place == 0:
                    # Behind prompts that wait for input it takes what is free, and waits for them.
                    waits = self.book.holds_before(work)
                    secured = self._smaller(entry) if waits else self._insist(entry)
            if secured is not None:
                self.out.entries.append(secured)
                self.taken.add(work)
            elif isinstance(work, Request) and work.restartable and _holds_nothing(work):
                work.close()  # deferred before it read anything: pin nothing, read fresher data later
        return self.out

    def _open(self, entry: Entry) -> bool:
        """Make the target ready to take blocks: open a request's reader, evict from a tape."""
        work = entry.work
        if isinstance(work, Append):
            lengths = work.lengths(entry.n)
            evicted = work.tape.make_room(sum(lengths), len(lengths), max(work.times(entry.n)))
            if evicted:
                self.out.evicted.append((work.tape.name, evicted))
            return True
        try:
            work.open()
        except Exception as error:
            self.out.failures.append((entry, Failure("open_failed", f"{type(error).__name__}: {error}")))
            return False
        return True

    def _secure(self, entry: Entry) -> Entry | None:
        """The entry with its blocks, taking them from victims if need be."""
        if _take(entry):
            return entry
        for victim in self._victims(entry.work):
            self.preempt(victim, entry.work)
            self.lost.add(victim)
            if _take(entry):
                return entry
        return None

    def _victims(self, work: Work) -> list[Request]:
        """Who makes room for `work` and holds blocks: the unplanned from the tail, then the planned."""
        holders = [other for other in self.book.holders(work) if other.blocks]
        return sorted(holders, key=lambda other: other in self.ranks)

    def _insist(self, entry: Entry) -> Entry | None:
        """For the first of the order: a smaller piece, then others' pinned versions, then the end."""
        smaller = self._smaller(entry)
        for other in self._pinning(entry.work):
            if smaller is not None:
                return smaller
            self._surrender(other)
            smaller = self._smaller(entry)
        if smaller is None:
            self.out.failures.append((entry, self._no_memory(entry)))
        return smaller

    def _smaller(self, entry: Entry) -> Entry | None:
        """As much of the entry as the free blocks hold."""
        work, free = entry.work, self.memory.free_blocks
        if isinstance(work, Append):
            lengths = work.lengths(entry.n)
            n = bisect_right(
                range(1, entry.n + 1), free, key=lambda k: work.tape.blocks_needed(sum(lengths[:k]))
            )
        else:
            size = self.memory.block_size
            n = bisect_right(range(1, entry.n + 1), free, key=lambda k: work.blocks_needed(k, size))
        piece = entry._replace(n=n)
        return piece if n and _take(piece) else None

    def _pinning(self, work: Work) -> list[Request]:
        """Requests below `work` with an open reader: those that lose nothing first, each from the tail."""
        rank = self.ranks[work]
        below = [
            (self.book.rank(other), other)
            for other in self.book.requests.values()
            if other.reader is not None and self.book.rank(other) > rank
        ]
        below.sort(key=lambda item: item[0], reverse=True)
        return sorted((other for _, other in below), key=lambda other: not other.restartable)

    def _surrender(self, request: Request) -> None:
        """Let go of the version it reads: read a fresher one later, or fail if bound to this one."""
        self.lost.add(request)
        request.close()
        if not request.restartable:
            message = "the pool was full and the data version this answer reads had to be given up"
            self.out.failures.append((Entry(request, 0), Failure("no_memory", message)))

    def _no_memory(self, entry: Entry) -> Failure:
        name = entry.work.tape.name if isinstance(entry.work, Append) else entry.work.session
        memory = self.memory
        return Failure(
            "no_memory",
            f"{name}: the pool has {memory.free_blocks} of {memory.total_blocks} blocks "
            f"({memory.block_size} tokens each) free, not enough for one more step, "
            "and nothing else is left to preempt",
        )


def _holds_nothing(request: Request) -> bool:
    """It waits, with a reader that has nothing of its own yet, in the pool or on the host."""
    reader = request.reader
    return request.state is State.QUEUED and reader is not None and not reader.blocks and not reader.swapped


def _take(entry: Entry) -> bool:
    work = entry.work
    if isinstance(work, Append):
        return work.tape.acquire(sum(work.lengths(entry.n)))
    assert work.reader is not None  # opened just before
    return work.reader.acquire(entry.n)
