"""Phase 2: allocate the blocks a plan needs, preempting lower ranks where the pool is short.

Victims of an entry rank below it: first those the plan left out, from the tail, then the planned, from the
tail (*Stream2LLM* section 4.1). An entry that still finds no blocks is deferred. Only for the first of the
order more is done, so that something always moves: it takes a smaller piece, then readers below it release
the versions they pin, and at the very last it fails with the figures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from regions.block_pool import BlockPool
from scheduler.planner import Entry, Plan
from scheduler.queues import Queues
from scheduler.request import Failure, Request
from scheduler.tapes import TapeAppend
from scheduler.types import Costs, Eviction, Work

Preempt = Callable[[Request, Work], None]
"""Preempt a request (the first) for other work, and queue it again."""


@dataclass(slots=True)
class Allocation:
    """Outcome of phase 2."""

    entries: list[Entry] = field(default_factory=list)
    """Entries that hold their blocks, in policy order."""
    failures: list[tuple[Entry, Failure]] = field(default_factory=list)
    """Work that cannot be done at all; the scheduler ends it."""
    evicted: list[tuple[str, int]] = field(default_factory=list)
    """(tape, tokens) evicted to make room."""
    preempted: set[Work] = field(default_factory=set)
    """Requests that lost their blocks or the version they pinned."""

    @property
    def changed(self) -> bool:
        """Whether anything moved: if not, what could run waits for memory that only input or time frees."""
        return bool(self.entries or self.failures or self.evicted or self.preempted)


def allocate(plan: Plan, queues: Queues, memory: BlockPool, preempt: Preempt) -> Allocation:
    """Take blocks for the plan's entries in order.

    A request whose reader cannot be opened is failed with `open_failed`.
    """
    return _Allocator(plan, queues, memory, preempt).run()


def prefers_swap(victim: Request, eviction: Eviction, costs: Costs | None) -> bool:
    """Whether to try the host tier first, which may still have no room (*Stream2LLM* section 4.3).

    Both costs are the *victim's*. A prompt that is still changing saves only what an update usually leaves of
    its KV. Without costs `cost` never swaps.
    """
    if eviction != "cost":
        return eviction == "swap"
    if costs is None:
        return False
    saved = costs.recompute_ns(victim.private) * (1.0 if victim.complete else victim.survival)
    return costs.swap_ns(victim.blocks) < saved


class _Allocator:
    def __init__(self, plan: Plan, queues: Queues, memory: BlockPool, preempt: Preempt) -> None:
        self.plan, self.queues, self.memory, self.preempt = plan, queues, memory, preempt
        self.keys = {entry.work: queues.key(entry.work) for entry in plan.entries}
        """Of the planned, as it was planned: being preempted changes it."""
        self.taken: set[Work] = set()
        self.out = Allocation()

    def run(self) -> Allocation:
        for number, entry in enumerate(self.plan.entries):
            work = entry.work
            if work in self.out.preempted or not self._open(entry):
                continue
            # the prefix cache may have had some of what was planned
            entry = entry._replace(n=min(entry.n, work.remaining))
            if entry.source is not None:
                allocated = entry if entry.source in self.taken else None
            else:
                allocated = self._allocate(entry, first=number == 0)
            if allocated is not None:
                self.out.entries.append(allocated)
                self.taken.add(work)
            else:
                work.defer()
        return self.out

    def _open(self, entry: Entry) -> bool:
        try:
            evicted = entry.work.open(entry.n)
        except Exception as error:
            if not entry.work.lost:  # what has just been found to be lost waits for the next plan
                failure = Failure("open_failed", f"{type(error).__name__}: {error}")
                self.out.failures.append((entry, failure))
            return False
        if evicted:
            self.out.evicted.append((entry.work.session, evicted))
        return True

    def _allocate(self, entry: Entry, *, first: bool) -> Entry | None:
        """The entry with its blocks, or, of the first, a piece of it."""
        if entry.work.allocate(entry.n) or self._preempt_for(entry):
            return entry
        if entry.work.lost or not first:
            return None
        # With prompts before it that wait for input it takes what is free, and waits for them.
        behind = self.queues.any_blocks_before(entry.work)
        return self._smaller(entry) if behind else self._force(entry)

    def _preempt_for(self, entry: Entry) -> bool:
        """Take the blocks from victims: those the plan left out, then the planned, each from the tail."""
        holders = [other for other in self.queues.victims(entry.work) if other.blocks]
        for victim in sorted(holders, key=lambda other: other in self.keys):
            if entry.work.lost:  # only reading its stored KV shows that, and only once there was room for it
                return False
            self.preempt(victim, entry.work)
            self.out.preempted.add(victim)
            if entry.work.allocate(entry.n):
                return True
        return False

    def _force(self, entry: Entry) -> Entry | None:
        """For the first of the order: a smaller piece, then others' pinned versions, then the end."""
        smaller = self._smaller(entry)
        for other in self._pinning(entry.work):
            if smaller is not None or entry.work.lost:
                return smaller
            self._release_version(other)
            smaller = self._smaller(entry)
        if smaller is None and not entry.work.lost:
            self.out.failures.append((entry, self._no_memory(entry)))
        return smaller

    def _smaller(self, entry: Entry) -> Entry | None:
        """As much of the entry as the free blocks hold."""
        work, free, size = entry.work, self.memory.free_blocks, self.memory.block_size
        n = bisect_right(range(1, entry.n + 1), free, key=lambda k: work.blocks_needed(k, size))
        return entry._replace(n=n) if n and work.allocate(n) else None

    def _pinning(self, work: Request | TapeAppend) -> list[Request]:
        """Requests below ``work`` with an open reader: those that lose nothing first, each from the tail."""
        key, key_of = self.keys[work], self.queues.key
        opened = (other for other in self.queues.requests.values() if other.reader is not None)
        below = sorted((other for other in opened if key_of(other) > key), key=key_of, reverse=True)
        return sorted(below, key=lambda other: not other.restartable)

    def _release_version(self, request: Request) -> None:
        """Let go of the version it reads: read a fresher one later, or fail if bound to this one."""
        self.out.preempted.add(request)
        request.close()
        if not request.restartable:
            message = "the pool was full and the data version this answer reads had to be given up"
            self.out.failures.append((Entry(request, 0), Failure("no_memory", message)))

    def _no_memory(self, entry: Entry) -> Failure:
        memory = self.memory
        return Failure(
            "no_memory",
            f"{entry.work.session}: the pool has {memory.free_blocks} of {memory.total_blocks} blocks "
            f"({memory.block_size} tokens each) free, not enough for one more step, "
            "and nothing else is left to preempt",
        )
