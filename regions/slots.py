"""The slots of one growing token sequence: blocks taken ahead, filled at the tail, given back at the head."""

from __future__ import annotations

from regions.allocator import Run
from regions.extents import SlotRange
from regions.pool import KVPool


class Slots:
    """A first-in, first-out sequence of slots over blocks of the pool."""

    def __init__(self, pool: KVPool, *, grows: bool) -> None:
        self._pool = pool
        self._grows = grows
        self._runs: list[Run] = []
        self._head = 0  # slots before the oldest live one, counted from the first run's start
        self._tail = 0  # slots before the next one to write
        self._capacity = 0

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit."""
        return max(0, -(-(self._tail + n - self._capacity) // self._pool.block_size))

    def acquire(self, n: int) -> bool:
        """Take the blocks for ``n`` more tokens; False, and nothing changed, when too few are free."""
        needed = self.blocks_needed(n)
        if not needed:
            return True
        behind = self._runs[-1].stop if self._runs else None
        runs = self._pool.blocks.take(needed, behind=behind, grows=self._grows)
        if runs is None:
            return False
        if behind is not None and runs[0].start == behind:
            self._runs[-1] = Run(self._runs[-1].start, runs.pop(0).stop)
        self._runs += runs
        self._capacity += needed * self._pool.block_size
        return True

    def next(self, n: int) -> tuple[SlotRange, ...]:
        """The ranges of the next ``n`` slots; their blocks must have been acquired."""
        if self._tail + n > self._capacity:
            raise RuntimeError(f"{n} tokens were not acquired: {self._capacity - self._tail} slots are ready")
        return self._ranges(self._tail, n)

    def advance(self, n: int) -> None:
        """The next ``n`` slots are written."""
        self._tail += n

    def drop_oldest(self, n: int) -> None:
        """The oldest ``n`` slots are dead: give back the blocks that hold nothing else."""
        self._head += n
        passed = self._head // self._pool.block_size
        freed: list[Run] = []
        while passed:
            run = self._runs[0]
            blocks = min(passed, run.blocks)
            freed.append(Run(run.start, run.start + blocks))
            self._runs[0:1] = [Run(run.start + blocks, run.stop)] if blocks < run.blocks else []
            slots = blocks * self._pool.block_size
            self._head -= slots
            self._tail -= slots
            self._capacity -= slots
            passed -= blocks
        self._pool.blocks.release(freed)

    def live_runs(self) -> list[Run]:
        """The blocks that hold a live token."""
        size = self._pool.block_size
        return [
            Run(slot // size, -(-(slot + count) // size))
            for slot, count in self._ranges(self._head, self._tail - self._head)
        ]

    def release(self) -> None:
        """Give every block back."""
        self._pool.blocks.release(self._runs)
        self._runs = []
        self._head = self._tail = self._capacity = 0

    def _ranges(self, first: int, n: int) -> tuple[SlotRange, ...]:
        ranges: list[SlotRange] = []
        size = self._pool.block_size
        before = 0
        for run in self._runs:
            length = run.blocks * size
            low, high = max(first, before), min(first + n, before + length)
            if low < high:
                ranges.append((run.start * size + low - before, high - low))
            before += length
        return tuple(ranges)
