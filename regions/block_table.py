"""The KV of one token sequence: blocks are taken ahead, filled at the tail and released at the head."""

from collections.abc import Iterable, Sequence

from regions.allocator import Run
from regions.extents import Extent, Placement, Segment, SlotRange, drop_oldest, extend, keep_oldest, relay
from regions.offload.kv_store import Store, StoredBlocks
from regions.pool_metadata import BlockPool


class BlockTable:
    """A first-in, first-out sequence of tokens in blocks of the pool, or in ``stored`` while offloaded.

    ``grows``: expect many more tokens, and look for room to grow.
    """

    def __init__(self, pool: BlockPool, *, grows: bool) -> None:
        self.stored: StoredBlocks | None = None
        self._pool = pool
        self._grows = grows
        self._runs: list[Run] = []
        self._extents: list[Extent] = []  # of the live slots; while offloaded, of their former slots
        self._head = 0  # slots before the oldest live one, from the first run's start
        self._tail = 0  # slots before the next one to write
        pool.owners.add(self)

    @property
    def length(self) -> int:
        """Live tokens."""
        return self._tail - self._head

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Extents of the live slots, oldest token first. Raises RuntimeError while offloaded."""
        if self.stored is not None:
            raise RuntimeError("KV that is swapped out has no extents in the pool")
        return tuple(self._extents)

    @property
    def stretches(self) -> tuple[Segment, ...]:
        """The extents without their slots; also while offloaded."""
        return tuple(Segment(e.length, e.coord, e.origin) for e in self._extents)

    def referenced_blocks(self) -> list[Run]:
        """Its blocks, including those taken ahead."""
        return self._runs

    @property
    def blocks(self) -> int:
        """Number of its blocks; asked for every row of every plan."""
        total = 0
        for start, stop in self._runs:
            total += stop - start
        return total

    def blocks_needed(self, n: int) -> int:
        """Blocks to acquire before ``n`` more tokens fit."""
        return max(0, -(-(self._tail + n) // self._pool.block_size) - self.blocks)

    def acquire(self, n: int) -> bool:
        """Take the blocks for ``n`` more tokens, and swap in what was swapped out.

        False, with nothing changed, when too few blocks are free.
        """
        if self.stored is not None:
            return self.swap_in(n)
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
        return True

    def next_slots(self, n: int) -> tuple[SlotRange, ...]:
        """The slots of the next ``n`` tokens; their blocks must have been acquired."""
        ready = self.blocks * self._pool.block_size - self._tail
        if n > ready:
            raise RuntimeError(f"{n} tokens were not acquired: {ready} slots are ready")
        return self._ranges(self._tail, n)

    def wrote(self, placement: Placement, n: int) -> None:
        """Record that the ``n`` tokens of ``placement`` are in KV."""
        extend(self._extents, placement.slots, placement.coord, placement.origin)
        self._tail += n

    def drop_oldest(self, n: int) -> None:
        """Drop the oldest ``n`` tokens and release the blocks that become empty."""
        drop_oldest(self._extents, n)
        self._head += n
        size = self._pool.block_size
        freed, self._runs = split(self._runs, self._head // size)
        slots = self._head // size * size
        self._head -= slots
        self._tail -= slots
        self._pool.blocks.release(freed)

    def keep(self, n: int) -> None:
        """Keep only the oldest ``n`` tokens and release the blocks after them, also where stored."""
        keep_oldest(self._extents, n)
        self._tail = self._head + n
        self._runs, freed = split(self._runs, -(-self._tail // self._pool.block_size) if n else 0)
        self._pool.blocks.release(freed)
        if not n:
            self._head = self._tail = 0
        if self.stored is not None and n:
            self.stored.keep(self.live_blocks)
        elif self.stored is not None:
            self.stored.release()
            self.stored = None

    @property
    def tail_is_shared(self) -> bool:
        """The block of the newest token has other references."""
        if not self.length or not self._runs:
            return False
        last = self._ranges(self._tail - 1, 1)[0][0] // self._pool.block_size
        return int(self._pool.blocks.references[last]) > 1

    def swap_out(self, store: Store) -> bool:
        """Move the live tokens to ``store``; False, with nothing changed, when it is full."""
        if self.stored is not None:
            return True
        if not self.length:
            self.release()  # blocks taken ahead
            return True
        stored = store.put(self.live_runs())
        if stored is not None:
            self.offload(stored)
        return stored is not None

    def offload(self, stored: StoredBlocks) -> None:
        """Release every block: ``stored`` has the live tokens now."""
        self._map([])
        self.stored = stored

    def swap_in(self, n: int = 0) -> bool:
        """Bring the live tokens back, and take blocks for ``n`` more.

        False, with nothing changed, when too few blocks are free. Raises StoredLost, with nothing changed.
        """
        if self.stored is None:
            return True
        runs = self.reserve(n)
        if runs is None:
            return False
        try:
            self.stored.load(split(runs, self.live_blocks)[0])
        except BaseException:
            self._pool.blocks.release(runs)
            raise
        self.arrive(runs)
        return True

    def reserve(self, n: int = 0) -> list[Run] | None:
        """Take blocks to bring the live tokens back to, and for ``n`` more; None where too few are free."""
        return self._pool.take(self.blocks_needed(n), grows=self._grows)

    def arrive(self, runs: list[Run]) -> None:
        """Take over ``runs`` of `reserve`, where what was stored is now."""
        assert self.stored is not None
        self.stored.release()
        self.stored = None
        self._map(runs)

    def compact(self) -> bool:
        """Copy the live slots to one run, if they are in several and one that long is free."""
        runs, blocks = self.live_runs(), self.live_blocks
        if len(runs) < 2 or self._pool.blocks.largest_free_run < blocks:
            return False
        target = self._pool.blocks.take(blocks, grows=self._grows)
        assert target is not None  # they fit the longest free run
        self._pool.move(runs, target)
        self._map(target)
        return True

    def expect(self, stretches: Iterable[Segment], stored: StoredBlocks) -> None:
        """Begin offloaded: ``stored`` has the tokens of ``stretches``. Raises RuntimeError unless new."""
        if self._runs or self._tail:
            raise RuntimeError("only a new block table can begin with stored tokens")
        self._extents = [Extent(0, *stretch) for stretch in stretches]
        self._tail = sum(extent.length for extent in self._extents)
        self.stored = stored

    @property
    def live_blocks(self) -> int:
        """Blocks that the live slots take, in the pool or where stored."""
        size = self._pool.block_size
        return -(-self._tail // size) - self._head // size if self.length else 0

    def live_ranges(self) -> tuple[SlotRange, ...]:
        """Ranges of the live slots, oldest first."""
        return self._ranges(self._head, self.length)

    def live_runs(self) -> list[Run]:
        """The blocks with live tokens."""
        size = self._pool.block_size
        return [Run(slot // size, -(-(slot + count) // size)) for slot, count in self.live_ranges()]

    def release(self) -> None:
        """Release everything, in the pool and where stored."""
        self.keep(0)

    def _map(self, runs: list[Run]) -> None:
        """Map the live tokens to ``runs``, in order, and release the former blocks; [] unmaps them."""
        self._pool.blocks.release(self._runs)
        length, size = self.length, self._pool.block_size
        self._head %= size
        self._tail = self._head + length
        self._runs = runs
        if runs:
            self._extents = relay(self._extents, self.live_ranges())

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
    """The first ``blocks`` blocks of ``runs`` (or all, if fewer), and the rest."""
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
