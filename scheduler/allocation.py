"""Phase 2: allocate the blocks that a plan needs, and preempt lower ranks where the pool is short.

The victims of an entry rank below it: first those the plan left out, then the planned, each from the tail
(*Stream2LLM* section 4.1). An entry that still finds no blocks is deferred. The first entry of the order must
make progress, so it has three more ways: it takes a smaller piece; then readers below it release the versions
they pin; at last it fails, and the message gives the figures. While sessions leave the pool for it, it waits.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from regions.pool_metadata import BlockPool
from scheduler.interfaces import Costs, Eviction
from scheduler.planner import Entry, Plan
from scheduler.queues import Queues
from scheduler.request import Failure, Request
from scheduler.tapes import Work

Preempt = Callable[[Request, Work], None]
"""Preempt the first argument to make room for the second, and queue it again."""


@dataclass(slots=True)
class Allocation:
    """Outcome of phase 2."""

    entries: list[Entry] = field(default_factory=list)
    """Entries that hold their blocks, in policy order."""
    failures: list[tuple[Entry, Failure]] = field(default_factory=list)
    """Work that can never run; the scheduler ends it."""
    evicted: bool = False
    """Whether tokens of a tape were evicted to make room."""
    preempted: set[Work] = field(default_factory=set)
    """Requests that lost their blocks or the version they pinned."""

    @property
    def changed(self) -> bool:
        """Whether phase 2 changed anything. If not, only new input or time can free memory."""
        return bool(self.entries or self.failures or self.evicted or self.preempted)


def allocate(plan: Plan, queues: Queues, memory: BlockPool, preempt: Preempt) -> Allocation:
    """Allocate blocks for the plan's entries in order.

    A request whose reader cannot be opened fails with `open_failed`.
    """
    return _Allocator(plan, queues, memory, preempt).run()


def prefers_swap(victim: Request, eviction: Eviction, costs: Costs | None) -> bool:
    """Whether to try the host tier first (*Stream2LLM* section 4.3); the tier may still be full.

    Both costs are the *victim's*. A prompt that may still change saves only the part of its KV that an update
    usually keeps. Without costs, `cost` never swaps.
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
        """Scheduling keys as of the plan: preemption changes them."""
        self.taken: set[Work] = set()
        self.out = Allocation()

    def run(self) -> Allocation:
        for number, entry in enumerate(self.plan.entries):
            work = entry.work
            if work in self.out.preempted or not self._open(entry):
                continue
            # the prefix cache may have supplied some of the planned tokens
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
            failure = Failure("open_failed", f"{type(error).__name__}: {error}")
            self.out.failures.append((entry, failure))
            return False
        self.out.evicted |= bool(evicted)
        return True

    def _allocate(self, entry: Entry, *, first: bool) -> Entry | None:
        """The entry with its blocks; the first entry may get a smaller piece."""
        if entry.work.allocate(entry.n) or self._preempt_for(entry):
            return entry
        if entry.work.away or not first:
            return None
        # While prompts ahead of it hold blocks and wait for input, it takes only what is free.
        behind = self.queues.any_blocks_before(entry.work)
        return self._smaller(entry) if behind else self._force(entry)

    def _preempt_for(self, entry: Entry) -> bool:
        """Preempt victims until it fits: those the plan left out, then the planned, each from the tail."""
        holders = [other for other in self.queues.victims(entry.work) if other.blocks]
        for victim in sorted(holders, key=lambda other: other in self.keys):
            if entry.work.away:  # its KV is read back, which begins once there is room for it
                return False
            self.preempt(victim, entry.work)
            self.out.preempted.add(victim)
            if entry.work.allocate(entry.n):
                return True
        return False

    def _force(self, entry: Entry) -> Entry | None:
        """For the first entry: take a smaller piece, release others' pinned versions, or fail."""
        smaller = self._smaller(entry)
        if smaller is None and self.memory.leaving:
            return None
        for other in self._pinning(entry.work):
            if smaller is not None or entry.work.away:
                return smaller
            self._release_version(other)
            smaller = self._smaller(entry)
        if smaller is None and not entry.work.away:
            self.out.failures.append((entry, self._no_memory(entry)))
        return smaller

    def _smaller(self, entry: Entry) -> Entry | None:
        """The largest piece of the entry that fits the free blocks."""
        work, free, size = entry.work, self.memory.free_blocks, self.memory.block_size
        n = bisect_right(range(1, entry.n + 1), free, key=lambda k: work.blocks_needed(k, size))
        return entry._replace(n=n) if n and work.allocate(n) else None

    def _pinning(self, work: Work) -> list[Request]:
        """Requests below ``work`` with an open reader: the restartable ones first, each from the tail."""
        key, key_of = self.keys[work], self.queues.key
        opened = (other for other in self.queues.requests.values() if other.reader is not None)
        below = sorted((other for other in opened if key_of(other) > key), key=key_of, reverse=True)
        return sorted(below, key=lambda other: not other.restartable)

    def _release_version(self, request: Request) -> None:
        """Release the version it reads. It reads a newer one later, or fails if it must read this one."""
        self.out.preempted.add(request)
        request.close()
        if not request.restartable:
            message = "the pool was full, so the data version that this answer reads was released; ask again"
            self.out.failures.append((Entry(request, 0), Failure("no_memory", message)))

    def _no_memory(self, entry: Entry) -> Failure:
        memory = self.memory
        return Failure(
            "no_memory",
            f"{entry.work.session}: the pool has {memory.free_blocks} of {memory.total_blocks} blocks "
            f"({memory.block_size} tokens each) free, not enough for one more step, "
            "and nothing else is left to preempt",
        )
