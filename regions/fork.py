"""Ephemeral region: a question and its answer over an immutable past (snapshot isolation by references).

A fork holds references to the blocks of its past as they were when it was taken, so the tape may move on,
evict and be forked again meanwhile. It replaces the in-place strip/extend/clear/restore of
*Attention Once* section 3.9.3: nothing has to be restored, and many forks run in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from regions.allocator import Run
from regions.extents import Extent, Step, extend
from regions.pool import KVPool
from regions.slots import Slots


class Fork:
    """Private tokens behind a shared, immutable past. With an empty past it is a stateless prompt.

    ``base``: stream coordinate at which the anchored frozen prefix begins (the origin of a fresh frame).
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        frame_limit: int,
        version: int = 0,
        past: tuple[Extent, ...] = (),
        past_blocks: list[Run] | None = None,
        coord: int = 0,
        origin: int = 0,
        base: int = 0,
    ) -> None:
        self.version = version
        self.past_tokens = sum(extent.length for extent in past)
        self.length = 0
        self._pool = pool
        self._past = past
        self._past_blocks = past_blocks or []
        self._coord = coord
        self._shared_origin = self._origin = origin
        self._base = base
        self._frame_limit = frame_limit
        self._slots = Slots(pool, grows=False)
        self._extents: list[Extent] = []
        self._released = False
        pool.blocks.share(self._past_blocks)

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more private tokens fit."""
        return self._slots.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more private tokens; False, and nothing changed, when the pool cannot."""
        return self._slots.acquire(n)

    def step(self, n: int) -> Step:
        """The step that appends ``n`` tokens. Raises RuntimeError if their blocks were not acquired."""
        coord = self._coord + self.length
        if coord + n - self._origin > self._frame_limit:
            self._origin = self._base
        return Step(self.extents, self._slots.next(n), coord, self._origin)

    def wrote(self, step: Step, tokens: Sequence[int]) -> None:
        """The ``tokens`` of ``step`` are in KV."""
        n = len(tokens)
        extend(self._extents, step.slots, step.coord, step.origin)
        self._slots.advance(n)
        self.length += n

    @property
    def extents(self) -> tuple[Extent, ...]:
        """What the next token sees, oldest first."""
        return (*self._past, *self._extents)

    @property
    def private_blocks(self) -> list[Run]:
        """The blocks of the private tokens."""
        return self._slots.live_runs()

    def reset(self) -> None:
        """Preemption by recompute: drop the private KV, keep the past."""
        self._slots.release()
        self._extents.clear()
        self._origin = self._shared_origin
        self.length = 0

    def release(self) -> None:
        """Drop everything, the references to the past included. Further calls do nothing."""
        if self._released:
            return
        self._released = True
        self.reset()
        self._pool.blocks.release(self._past_blocks)
        self._past, self._past_blocks = (), []
