"""Reference-counted blocks, allocated in runs that are as contiguous as the pool allows.

Attention reads each run with one call. Tapes grow for hours and continue after their last block; forks live
for milliseconds and fill the smallest hole.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32]


class Run(NamedTuple):
    """Blocks ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.stop - self.start


class OwnReferences:
    """One owner's references to each block, and how many blocks have no other owner.

    A cache can free exactly those blocks. The allocator reports every change of the counts, so reading them
    is free. The owner calls `add` after it shared blocks and `remove` before it releases them; in between,
    `sole` and `idle` are wrong.
    """

    def __init__(self, references: Counts) -> None:
        self.own: Counts = np.zeros_like(references)
        """The owner's references to each block, int32 [blocks]."""
        self.sole = 0
        """Blocks without another owner."""
        self._references = references

    def add(self, runs: Iterable[Run]) -> None:
        """Count one more reference of the owner to each block of ``runs``."""
        for start, stop in runs:
            self.own[start:stop] += 1
            self.sole += self._sole_of(start, stop)

    def remove(self, runs: Iterable[Run]) -> None:
        """Count one reference less of the owner to each block of ``runs``, before it is released."""
        for start, stop in runs:
            self.sole -= self._sole_of(start, stop)
            self.own[start:stop] -= 1

    def before_share(self, start: int, stop: int) -> None:
        """Called before the allocator adds a reference to each block from ``start`` to ``stop``."""
        self.sole -= self._sole_of(start, stop)

    def after_release(self, start: int, stop: int) -> None:
        """Called after the allocator removed a reference to each block from ``start`` to ``stop``."""
        self.sole += self._sole_of(start, stop)

    def idle(self) -> npt.NDArray[np.bool_]:
        """Whether the owner has all references to each block, bool [blocks]."""
        idle: npt.NDArray[np.bool_] = self.own == self._references
        return idle

    def check_integrity(self) -> None:
        """Raise AssertionError unless the count of sole blocks is right."""
        sole = self._sole_of(0, len(self.own))
        assert sole == self.sole, f"{self.sole} blocks are counted as referred to by one owner, not {sole}"

    def _sole_of(self, start: int, stop: int) -> int:
        own = self.own[start:stop]
        return int(np.count_nonzero((own == self._references[start:stop]) & (own > 0)))


class BlockAllocator:
    """Allocates runs of blocks below a limit, and counts the references to each block.

    The limit is ``n_blocks``, the most there can be, until `resize` moves it.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {n_blocks}")
        self.total_blocks = n_blocks
        """Blocks that are free or in use; the latter may lie above the limit."""
        self.free_blocks = n_blocks
        self.retired: list[Run] = []
        """Blocks above the limit that have become free; the caller empties it."""
        self._limit = n_blocks
        self._references = np.zeros(n_blocks, np.int32)
        self._free: list[Run] = [Run(0, n_blocks)]  # sorted, never adjacent
        self._owners: list[OwnReferences] = []

    @property
    def capacity(self) -> int:
        """The highest limit."""
        return len(self._references)

    def resize(self, limit: int) -> None:
        """Take only blocks below ``limit`` from now on; one above it is in use until it is released.

        Raises ValueError for a limit that is not between 1 and the capacity.
        """
        if not 0 < limit <= self.capacity:
            raise ValueError(f"a pool of at most {self.capacity} blocks cannot have {limit}")
        before, self._limit = self._limit, limit
        for start, stop in _free_runs(self._references, before, limit):
            self.total_blocks += stop - start
            self._free_run(start, stop)
        above = [run for run in self._free if run.stop > limit]
        for start, stop in above:
            self._free.remove(Run(start, stop))
            self.free_blocks -= stop - start
            self._free_run(start, stop)

    def own_references(self) -> OwnReferences:
        """A new count of one owner's references, which the allocator keeps current."""
        self._owners.append(OwnReferences(self._references))
        return self._owners[-1]

    def take(self, blocks: int, *, behind: int | None = None, grows: bool = False) -> list[Run] | None:
        """Take ``blocks`` blocks with one reference each; None, with nothing changed, if too few are free.

        ``behind``: continue at this block if it is free. ``grows``: the owner will need more blocks, so open
        a new run where there is room to grow.
        """
        if blocks > self.free_blocks:
            return None
        taken: list[Run] = []
        if behind is not None and blocks:
            index = bisect_left(self._free, Run(behind, 0))
            if index < len(self._free) and self._free[index].start == behind:
                taken.append(self._cut(index, behind, min(blocks, self._free[index].blocks)))
                blocks -= taken[0].blocks
        while blocks:
            run = self._open(blocks) if grows else self._fit(blocks)
            blocks -= run.blocks
            if taken and taken[-1].stop == run.start:
                taken[-1] = Run(taken[-1].start, run.stop)
            else:
                taken.append(run)
        return taken

    def share(self, runs: list[Run]) -> None:
        """Add a reference to every block of ``runs``."""
        for start, stop in runs:
            for owner in self._owners:
                owner.before_share(start, stop)
            self._references[start:stop] += 1

    def release(self, runs: list[Run]) -> None:
        """Remove a reference to every block of ``runs``; blocks without references become free."""
        for start, stop in runs:
            references = self._references[start:stop]
            references -= 1
            shared = np.count_nonzero(references)
            if not shared:
                self._free_run(start, stop)
                continue
            for owner in self._owners:
                owner.after_release(start, stop)
            if shared == stop - start:
                continue
            for first, last in _free_runs(self._references, start, stop):
                self._free_run(first, last)

    @property
    def references(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """References to each block; read-only."""
        return self._references

    @property
    def largest_free_run(self) -> int:
        """Blocks of the longest free run."""
        return max((run.blocks for run in self._free), default=0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, free list and references agree."""
        free = np.zeros(self.capacity, bool)
        for previous, run in zip([None, *self._free], self._free, strict=False):
            assert run.blocks > 0, f"empty free run {run}"
            assert previous is None or previous.stop < run.start, f"{previous} touches {run}"
            free[run.start : run.stop] = True
        assert int(free.sum()) == self.free_blocks, "the free count differs from the free list"
        usable = self._references[: self._limit]
        assert bool(((usable == 0) == free[: self._limit]).all()), (
            "a block is free and referenced, or neither"
        )
        assert not free[self._limit :].any(), f"a block above {self._limit} is free"
        above = int(np.count_nonzero(self._references[self._limit :]))
        assert self.total_blocks == self._limit + above, f"{self.total_blocks} blocks are not those there are"

    def _open(self, blocks: int) -> Run:
        """A run in the middle of the largest hole, so that the run before the hole can still grow."""
        index = max(range(len(self._free)), key=lambda i: self._free[i].blocks)
        hole = self._free[index]
        spare = hole.blocks - blocks
        start = hole.start if hole.start == 0 or spare <= 0 else hole.start + spare // 2
        return self._cut(index, start, min(blocks, hole.blocks))

    def _fit(self, blocks: int) -> Run:
        """The end of the smallest hole that fits, else the whole of the largest."""
        sizes = [stop - start for start, stop in self._free]
        fitting = min((size for size in sizes if size >= blocks), default=0)
        index = sizes.index(fitting or max(sizes))
        start, stop = self._free[index]
        return self._cut(index, stop - blocks, blocks) if fitting else self._cut(index, start, stop - start)

    def _cut(self, index: int, start: int, blocks: int) -> Run:
        hole, taken = self._free[index], Run(start, start + blocks)
        rest = [Run(hole.start, taken.start), Run(taken.stop, hole.stop)]
        self._free[index : index + 1] = [run for run in rest if run.blocks]
        self._references[taken.start : taken.stop] = 1
        self.free_blocks -= blocks
        return taken

    def _free_run(self, start: int, end: int) -> None:
        stop = min(end, self._limit)
        if stop < end:
            retired = Run(max(start, stop), end)
            self.retired.append(retired)
            self.total_blocks -= retired.blocks
        if stop <= start:
            return
        self.free_blocks += stop - start
        index = bisect_right(self._free, Run(start, stop))
        if index < len(self._free) and self._free[index].start == stop:
            stop = self._free.pop(index).stop
        if index and self._free[index - 1].stop == start:
            index -= 1
            start = self._free.pop(index).start
        insort(self._free, Run(start, stop))


def _free_runs(references: Counts, start: int, stop: int) -> Iterator[Run]:
    """Runs of blocks from ``start`` to ``stop`` to which there is no reference."""
    edges = np.flatnonzero(np.diff(np.concatenate(([1], references[start:stop], [1])) == 0)) + start
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield Run(first, last)
