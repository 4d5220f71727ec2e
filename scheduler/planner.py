"""Phase 1: which work, and how much of each, goes into the next batch. Pure: nothing is touched.

The walk goes down the policy's order once. Its estimate of memory is what is free plus what the requests
ranked *below* the current one hold, since phase 2 may take that; so a high rank is never refused for the
sake of a low one, and a low rank whose blocks are already spoken for is left out and thereby becomes the
first victim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from scheduler.request import Append, Request, State, Work
from scheduler.types import Limits, Memory, PriorityClass


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a batch: `n` tokens of a request or `n` records of an append."""

    work: Work
    n: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in policy order."""

    entries: tuple[Entry, ...] = ()


def plan(order: Sequence[Work], memory: Memory, limits: Limits) -> Plan:
    """Choose the next batch from work in policy order.

    The first of the order always gets an entry whatever the memory estimate says, because phase 2 can
    always make room for it or end it: this is what rules out a deadlock.
    """
    walk = _Walk.begin(order, memory, limits)
    entries = []
    for work, below in zip(order, _held_below(order, memory.block_size), strict=True):
        n = walk.consider(work, below)
        if n:
            entries.append(Entry(work, n))
    return Plan(tuple(entries))


def adaptive_chunk(order: Sequence[Work], limits: Limits) -> int:
    """Prefill tokens per request and batch: clamp(n_batch / N, chunk_min, chunk_max), section 3.7.

    n_batch leaves out the running answers' tokens, so that prefills do not starve them within an iteration.
    """
    decodes = sum(work.decoding for work in order)
    prefills = sum(
        isinstance(work, Request) and not work.decoding and not work.prefill_only for work in order
    )
    share = (limits.max_batch_tokens - decodes) // max(1, prefills)
    return min(max(share, limits.chunk_min), limits.chunk_max)


def cell_budget(memory: Memory, limits: Limits) -> int:
    """Tokens that admitted requests may claim together (section 3.7)."""
    return int(memory.total_blocks * memory.block_size * limits.cell_budget_fraction)


def _held_below(order: Sequence[Work], block_size: int) -> list[int]:
    """For each place of the order, the private blocks held by admitted requests after it."""
    held = [
        -(-work.computed // block_size) if isinstance(work, Request) and work.state is State.RUNNING else 0
        for work in order
    ]
    total = sum(held)
    return [total - so_far for so_far in accumulate(held)]


@dataclass(slots=True)
class _Walk:
    """What is left while the order is walked."""

    tokens: int
    rows: int
    cells: int
    free: int
    """Free blocks less those planned; below zero it counts blocks to be taken from lower ranks."""
    reserve: int
    """Blocks that prefill chunks leave alone (the high-water mark)."""
    chunk: int
    limits: Limits
    block_size: int
    first: bool = field(default=True)
    admitting: bool = field(default=True)
    asked: bool = field(default=False)
    """A request has a row in this batch."""

    @classmethod
    def begin(cls, order: Sequence[Work], memory: Memory, limits: Limits) -> _Walk:
        return cls(
            tokens=limits.max_batch_tokens,
            rows=limits.max_batch_requests,
            cells=cell_budget(memory, limits),
            free=memory.free_blocks,
            reserve=memory.total_blocks - int(memory.total_blocks * limits.high_water),
            chunk=adaptive_chunk(order, limits),
            limits=limits,
            block_size=memory.block_size,
        )

    def consider(self, work: Work, below: int) -> int:
        """Tokens (of a request) or records (of an append) to take; 0 leaves it out."""
        if isinstance(work, Append):
            n, tokens, blocks = self._records(work, below)
        elif work.state is State.QUEUED and not self._may_admit(work):
            # Nobody starts before an earlier one of its class, so the door closes for everybody behind.
            self.admitting = False
            return 0
        else:
            # The cells of an admitted request count even when it gets no row this time.
            self.cells -= work.cells
            n, tokens, blocks = self._prompt(work, below)
            if not n and work.state is State.QUEUED:
                self.admitting = False
            self.asked |= n > 0 and not work.prefill_only
        if n:
            self.first = False
            self.rows -= 1
            self.tokens -= tokens
            self.free -= blocks
        return n

    def _may_admit(self, request: Request) -> bool:
        return self.admitting and request.cells <= self.cells

    def _prompt(self, request: Request, below: int) -> tuple[int, int, int]:
        n = self._wanted(request)
        if n and not self.first:
            room = self.free + below - (0 if request.decoding else self.reserve)
            n = bisect_right(range(1, n + 1), room, key=lambda k: request.blocks_needed(k, self.block_size))
        return n, n, request.blocks_needed(n, self.block_size) if n else 0

    def _wanted(self, request: Request) -> int:
        if not self.rows:
            return 0
        if request.prefill_only:
            chunk = 0 if self.asked else self.limits.chunk_min
        elif request.cls is PriorityClass.FLASH:
            # It is short and its wait is the product: no chunking, all that fit go together.
            chunk = request.remaining
        else:
            chunk = self.chunk
        return min(request.remaining, chunk, self.tokens)

    def _records(self, append: Append, below: int) -> tuple[int, int, int]:
        """Whole records only; memory bounds them from the second on: eviction makes room for the first."""
        n = tokens = blocks = 0
        if not self.rows:
            return 0, 0, 0
        most = min(self.tokens, append.tape.append_tokens)
        # Beside questions the tape gets the smallest chunk (or one record): they wait for the whole pass.
        share = min(most, self.limits.chunk_min) if self.asked else most
        oldest = newest = append.queue[0].record.ts_event
        span = append.tape.append_span_ns
        for pending in islice(append.queue, append.tape.append_records):
            after = tokens + len(pending.record.tokens)
            if after > most or (n and after > share):
                break
            oldest, newest = min(oldest, pending.record.ts_event), max(newest, pending.record.ts_event)
            if span and newest - oldest > span:
                break
            need = append.tape.blocks_needed(after)
            if n and need > self.free + below:
                break
            n, tokens, blocks = n + 1, after, need
        return n, tokens, blocks
