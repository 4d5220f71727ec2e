"""The slots of one growing token sequence: blocks taken ahead, filled at the tail, given back at the head."""

from __future__ import annotations

from collections.abc import Sequence

from regions.allocator import Run
from regions.block_pool import BlockPool
from regions.extents import SlotRange
from regions.offload.store import Store, Stored


class BlockTable:
    """A first-in, first-out sequence of slots over blocks of the pool."""

    def __init__(self, pool: BlockPool, *, grows: bool) -> None:
        self._pool = pool
        self._grows = grows
        self._runs: list[Run] = []
        self._head = 0  # slots before the oldest live one, counted from the first run's start
        self._tail = 0  # slots before the next one to write
        self._capacity = 0
        pool.owners.add(self)

    @property
    def length(self) -> int:
        """Live slots."""
        return self._tail - self._head

    def referenced_blocks(self) -> list[Run]:
        """The blocks it has a reference to, those taken ahead included."""
        return self._runs

    @property
    def blocks(self) -> int:
        """How many blocks that is."""
        return self._capacity // self._pool.block_size

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit."""
        return max(0, -(-(self._tail + n - self._capacity) // self._pool.block_size))

    def acquire(self, n: int) -> bool:
        """Take the blocks for ``n`` more tokens; False, and nothing changed, when too few are free."""
        needed = self.blocks_needed(n)
        if not needed:
            return True
        behind = self._runs[-1].stop if self._runs else None
        runs = self._pool.take(needed, behind=behind, grows=self._grows)
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
        """The oldest ``n`` slots are dead: give back the blocks with nothing else in them."""
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

    def keep(self, n: int) -> None:
        """Only the oldest ``n`` live slots stay; every block behind them is given back."""
        self._tail = self._head + n
        kept, freed = split(self._runs, -(-self._tail // self._pool.block_size) if n else 0)
        self._pool.blocks.release(freed)
        self._runs = kept
        self._capacity = sum(run.blocks for run in kept) * self._pool.block_size
        if not n:
            self._head = self._tail = 0

    @property
    def tail_is_shared(self) -> bool:
        """Somebody else refers to the block of the newest live slot."""
        if not self.length or not self._runs:
            return False
        last = self._ranges(self._tail - 1, 1)[0][0] // self._pool.block_size
        return int(self._pool.blocks.references[last]) > 1

    def remap(self, runs: list[Run]) -> None:
        """The live slots now lie on ``runs``: blocks that were taken for this sequence and copied to.

        The blocks before are given back.
        """
        self._pool.blocks.release(self._runs)
        length, size = self.length, self._pool.block_size
        self._head %= size
        self._tail = self._head + length
        self._runs = runs
        self._capacity = sum(run.blocks for run in runs) * size
        if self._capacity < self._tail:
            raise ValueError(f"{len(runs)} runs have {self._capacity} slots, {self._tail} are needed")

    def unmap(self) -> None:
        """Give every block back but remember the live slots, for a later `remap`."""
        self._pool.blocks.release(self._runs)
        self._runs = []
        self._capacity = 0
        length = self.length
        self._head %= self._pool.block_size
        self._tail = self._head + length

    def swap_out(self, store: Store) -> Stored | None:
        """Move the live slots to ``store``; None, and nothing changed, when that has no room."""
        stored = store.put(self.live_runs())
        if stored is not None:
            self.unmap()
        return stored

    def swap_in(self, stored: Stored, n: int = 0) -> bool:
        """Fetch the live slots from ``stored`` and release it; take blocks for ``n`` more tokens as well.

        False, and nothing changed, when too few blocks are free. Raises StoredLost, and nothing changed.
        """
        runs = self._pool.take(self.blocks_needed(n), grows=self._grows)
        if runs is None:
            return False
        try:
            stored.load(split(runs, self.live_blocks)[0])
        except BaseException:
            self._pool.blocks.release(runs)
            raise
        self.remap(runs)
        stored.release()
        return True

    def compact(self) -> bool:
        """Copy the live slots to one run, when they lie in several and one that long is free."""
        runs, blocks = self.live_runs(), self.live_blocks
        if len(runs) < 2 or self._pool.blocks.largest_free_run < blocks:
            return False
        target = self._pool.blocks.take(blocks, grows=self._grows)
        assert target is not None  # they fit the longest free run
        self._pool.move(runs, target)
        self.remap(target)
        return True

    def expect(self, n: int) -> None:
        """There are ``n`` live slots, to be fetched by `swap_in`. For a sequence that has none yet."""
        if self._capacity or self._tail:
            raise RuntimeError("a block table in use cannot expect slots to be fetched")
        self._tail = n

    @property
    def live_blocks(self) -> int:
        """How many blocks the live slots take, wherever they are."""
        size = self._pool.block_size
        return -(-self._tail // size) - self._head // size if self.length else 0

    def live_ranges(self) -> tuple[SlotRange, ...]:
        """The live slots, oldest first."""
        return self._ranges(self._head, self.length)

    def live_runs(self) -> list[Run]:
        """The blocks with a live token."""
        size = self._pool.block_size
        return [Run(slot // size, -(-(slot + count) // size)) for slot, count in self.live_ranges()]

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


def split(runs: Sequence[Run], blocks: int) -> tuple[list[Run], list[Run]]:
    """The first ``blocks`` blocks of ``runs`` (all, when there are fewer), and those behind them."""
    first: list[Run] = []
    rest: list[Run] = []
    for start, stop in runs:
        border = min(stop, start + blocks)
        blocks -= border - start
        if border > start:
            first.append(Run(start, border))
        if border < stop:
            rest.append(Run(border, stop))
    return first, rest
