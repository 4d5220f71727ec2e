"""Phase 2: take the blocks a plan needs, preempting lower ranks by recompute where the pool is short.

Victims of an entry rank below it: first those the plan left out, from the tail, then the planned, from the
tail. An entry that still finds no blocks is deferred. Only for the first of the order more is done, so that
something always moves: it takes a smaller piece, then readers below it give up the versions they pin, and
at the very last it fails with the figures. (Swapping to a host tier will be another way to preempt; the
order of things stays.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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


def acquire(
    plan: Plan, order: Sequence[Work], memory: Memory, preempt: Callable[[Request], None]
) -> Acquired:
    """Take blocks for the plan's entries in order. `preempt` resets a request and queues it again.

    A request whose `open_reader` raises is failed with `open_failed`.
    """
    return _Acquisition(plan, order, memory, preempt).run()


class _Acquisition:
    def __init__(
        self, plan: Plan, order: Sequence[Work], memory: Memory, preempt: Callable[[Request], None]
    ) -> None:
        self.plan, self.order, self.memory, self.preempt = plan, order, memory, preempt
        self.rank = {work: place for place, work in enumerate(order)}
        self.planned = {entry.work for entry in plan.entries}
        self.lost: set[Work] = set()
        """Planned work that became a victim before its turn."""
        self.out = Acquired()

    def run(self) -> Acquired:
        for entry in self.plan.entries:
            if entry.work in self.lost or not self._open(entry):
                continue
            secured = self._secure(entry)
            if secured is None and self.rank[entry.work] == 0:
                secured = self._insist(entry)
            if secured is not None:
                self.out.entries.append(secured)
            elif isinstance(entry.work, Request) and entry.work.restartable and not entry.work.computed:
                entry.work.close()  # deferred before it read anything: pin nothing, read fresher data later
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
        victims = self._victims(entry.work)
        while not _take(entry):
            victim = next(victims, None)
            if victim is None:
                return None
            self.preempt(victim)
            self.lost.add(victim)
        return entry

    def _victims(self, work: Work) -> Iterator[Request]:
        """Admitted requests below `work` that hold blocks: the unplanned from the tail, then the planned."""
        below = [
            other
            for other in reversed(self.order[self.rank[work] + 1 :])
            if isinstance(other, Request) and other.state is State.RUNNING and other.computed
        ]
        yield from (other for other in below if other not in self.planned)
        yield from (other for other in below if other in self.planned)

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
        piece = replace(entry, n=n)
        return piece if n and _take(piece) else None

    def _pinning(self, work: Work) -> list[Request]:
        """Requests below `work` with an open reader: those that lose nothing first, each from the tail."""
        below = [
            other
            for other in reversed(self.order[self.rank[work] + 1 :])
            if isinstance(other, Request) and other.reader is not None
        ]
        return sorted(below, key=lambda other: not other.restartable)

    def _surrender(self, request: Request) -> None:
        """Let go of the version it reads: read a fresher one later, or fail if bound to this one."""
        self.lost.add(request)
        request.close()
        if not request.restartable:
            sentence = "the pool was full and the data version this answer reads had to be given up"
            self.out.failures.append((Entry(request, 0), Failure("no_memory", sentence)))

    def _no_memory(self, entry: Entry) -> Failure:
        name = entry.work.tape.name if isinstance(entry.work, Append) else entry.work.session
        memory = self.memory
        return Failure(
            "no_memory",
            f"{name}: the pool has {memory.free_blocks} of {memory.total_blocks} blocks "
            f"({memory.block_size} tokens each) free, not enough for one more step, "
            "and nothing else is left to preempt",
        )


def _take(entry: Entry) -> bool:
    work = entry.work
    if isinstance(work, Append):
        return work.tape.acquire(sum(work.lengths(entry.n)))
    assert work.reader is not None  # opened just before
    return work.reader.acquire(entry.n)
