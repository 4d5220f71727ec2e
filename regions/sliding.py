"""The KV of a tape's sliding region: where it lies in the pool, or who has it meanwhile."""

from __future__ import annotations

from regions.allocator import Run
from regions.block_table import Slots
from regions.context import Held
from regions.ephemeral import Fork
from regions.extents import Extent, Placement, SlotRange, drop_oldest, extend, relay
from regions.offload.store import Stored
from regions.pool import KVPool
from regions.records import Stretch, TapeState


class WindowKV:
    """Slots that grow at the tail and are given back at the head, and the extents over them.

    While it is `stored` it has no slots. What is evicted meanwhile is noted and dropped once it is back, for
    the version that is stored stays whole until the next one is committed.
    """

    def __init__(self, pool: KVPool) -> None:
        self.stored: Stored | None = None
        self._pool = pool
        self._slots = Slots(pool, grows=True)
        self._extents: list[Extent] = []
        self._evicted = 0

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Oldest first. Raises RuntimeError while stored."""
        if self.stored is not None:
            raise RuntimeError("a window that is stored outside the pool has no place in it")
        return tuple(self._extents)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The extents without their places."""
        return tuple(Stretch(e.length, e.coord, e.origin) for e in self._extents)

    @property
    def live_ranges(self) -> tuple[SlotRange, ...]:
        """Its slots, oldest token first; none while stored."""
        return self._slots.live_ranges()

    @property
    def live_runs(self) -> list[Run]:
        """The blocks that hold a live token."""
        return self._slots.live_runs()

    def hold(self) -> Held:
        """One more reference to each of those blocks."""
        return Held(self._pool, self.live_runs)

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit, those to come back to included."""
        return self._slots.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more tokens; False, and nothing changed, when the pool cannot."""
        return self._slots.acquire(n)

    def next(self, n: int) -> tuple[SlotRange, ...]:
        """The ranges of the next ``n`` slots; their blocks must have been acquired."""
        return self._slots.next(n)

    def wrote(self, placement: Placement, n: int) -> None:
        """The ``n`` tokens of ``placement`` are in KV."""
        extend(self._extents, placement.slots, placement.coord, placement.origin)
        self._slots.advance(n)

    def drop_oldest(self, tokens: int) -> None:
        """The oldest ``tokens`` tokens leave, at once or once it is back."""
        if self.stored is not None:
            self._evicted += tokens
            return
        drop_oldest(self._extents, tokens)
        self._slots.drop_oldest(tokens)

    def leave(self, stored: Stored) -> None:
        """``stored`` has all of it from here on."""
        self._slots.vacate()
        self.stored = stored

    def swap_in(self, n: int) -> bool:
        """Fetch it as it left, with room for ``n`` more tokens; `settle` then drops what was evicted.

        False, and nothing changed, when the pool has no room. Raises StoredLost, and nothing changed.
        """
        assert self.stored is not None  # the caller asked
        if not self._slots.swap_in(self.stored, n):
            return False
        self.stored = None
        self._extents = relay(self._extents, self._slots.live_ranges())
        return True

    def settle(self) -> None:
        """Drop what was evicted while it was away."""
        evicted, self._evicted = self._evicted, 0
        self.drop_oldest(evicted)

    def gather(self) -> bool:
        """Copy it to one run of blocks, if it lies in several and one is free; tokens keep their frames."""
        if not self._slots.gather():
            return False
        self._extents = relay(self._extents, self._slots.live_ranges())
        return True

    def replace(self, fresh: Fork) -> int:
        """What ``fresh`` has takes its place; returns the origin of its newest frame."""
        slots, extents, origin = fresh.surrender()
        self.release()
        self._slots, self._extents = slots, extents
        return origin

    def expect(self, state: TapeState, stored: Stored) -> None:
        """``stored`` has the window of ``state``. For one that has nothing yet."""
        self._slots.expect(state.tokens)
        self._extents = [Extent(0, s.length, s.coord, s.origin) for s in state.stretches]
        self.stored = stored

    def release(self) -> None:
        """Give everything back, here and where it is stored."""
        if self.stored is not None:
            self.stored.release()
            self.stored = None
        self._evicted = 0
        self._slots.release()
