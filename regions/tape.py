"""A session's frozen and sliding regions (*Attention Once* sections 3.3 to 3.5).

The sliding region grows and is evicted by whole records, so the context never begins in the middle of a
bar. Every commit makes a new *data version*; forks read exactly one. Surviving records keep what they
absorbed from evicted ones (`carry` semantics): nothing is recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from regions.allocator import Run
from regions.extents import Extent, Step, anchor, drop_oldest, extend
from regions.fork import Fork
from regions.pool import KVPool
from regions.slots import Slots


@dataclass(frozen=True)
class Frozen:
    """A prefilled instruction prefix, positions from 0; shared by every tape that opens with it."""

    extents: tuple[Extent, ...]
    blocks: list[Run]
    tokens: int


@dataclass(frozen=True)
class Retention:
    """How much of the tape stays: at most ``tokens`` tokens and, unless 0, at most ``records`` records."""

    tokens: int
    records: int = 0


@dataclass(frozen=True)
class _Committed:
    """A version as its readers see it; the tape holds one reference to each of its blocks."""

    extents: tuple[Extent, ...]
    blocks: list[Run]
    coord: int
    base: int


class Tape:
    """One session's frozen prefix and sliding window.

    ``frame_limit`` bounds local positions: frozen + retained tokens + one batch must fit below it.
    """

    def __init__(
        self, name: str, pool: KVPool, frozen: Frozen, retention: Retention, *, frame_limit: int
    ) -> None:
        if frozen.tokens + retention.tokens >= frame_limit:
            raise ValueError(
                f"session {name}: {frozen.tokens} frozen and {retention.tokens} retained tokens leave no "
                f"room for a question below the frame limit of {frame_limit} positions"
            )
        self.name = name
        self.version = 0
        self.evicted_tokens = 0
        self._pool = pool
        self._frozen = frozen
        self._retention = retention
        self._frame_limit = frame_limit
        self._slots = Slots(pool, grows=True)
        self._extents: list[Extent] = []
        self._records: deque[int] = deque()
        self._written = 0  # tokens in KV, the not yet committed included
        self._origin = -frozen.tokens  # before the first eviction positions are exactly the dense ones
        pool.blocks.share(frozen.blocks)
        self._committed = _Committed((), [], 0, 0)
        self._publish()

    @property
    def live_tokens(self) -> int:
        """Tokens in the sliding region."""
        return self._written - self.evicted_tokens

    @property
    def live_records(self) -> int:
        """Committed records in the sliding region."""
        return len(self._records)

    @property
    def append_tokens(self) -> int:
        """Most tokens of one append: what the retention keeps."""
        return self._retention.tokens

    @property
    def append_records(self) -> int:
        """Most records of one append; without a limit on records, as many as there are tokens."""
        return self._retention.records or self._retention.tokens

    @property
    def max_position(self) -> int:
        """The highest local position in use; never above the frame limit."""
        return max(
            (e.coord + e.length - e.origin - 1 for e in self._extents), default=self._frozen.tokens - 1
        )

    @property
    def extents(self) -> tuple[Extent, ...]:
        """What the next record sees, oldest first."""
        return (*anchor(self._frozen.extents, self._base), *self._extents)

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit."""
        return self._slots.blocks_needed(n)

    def make_room(self, n_tokens: int, n_records: int) -> int:
        """Evict whole records, oldest first, until the retention holds after the append.

        Returns the evicted tokens. Readers see the eviction from the next commit on; until then the current
        version keeps its blocks. Raises ValueError when the append alone exceeds the retention.
        """
        limit = self._retention
        if n_tokens > limit.tokens:
            raise ValueError(f"session {self.name}: {n_tokens} tokens exceed the retention of {limit.tokens}")
        evicted = 0
        while self._records and (
            self.live_tokens - evicted + n_tokens > limit.tokens
            or (limit.records and len(self._records) + n_records > limit.records)
        ):
            evicted += self._records.popleft()
        if evicted:
            drop_oldest(self._extents, evicted)
            self._slots.drop_oldest(evicted)
            self.evicted_tokens += evicted
        return evicted

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more tokens; False, and nothing changed, when the pool cannot."""
        return self._slots.acquire(n)

    def step(self, n: int) -> Step:
        """The step that appends ``n`` tokens. Raises RuntimeError if their blocks were not acquired."""
        if self._written + n - self._origin > self._frame_limit:
            self.new_frame()
        return Step(self.extents, self._slots.next(n), self._written, self._origin)

    def new_frame(self, at: int | None = None) -> None:
        """Begin a position frame: the next token's local position is ``at``, by default the anchored one."""
        self._origin = self._base if at is None else self._written - at

    def wrote(self, step: Step, tokens: Sequence[int]) -> None:
        """The ``tokens`` of ``step`` are in KV."""
        n = len(tokens)
        extend(self._extents, step.slots, step.coord, step.origin)
        self._slots.advance(n)
        self._written += n

    def commit(self, record_lengths: Sequence[int]) -> int:
        """The written tokens become visible as whole records; returns the new data version."""
        self._records.extend(record_lengths)
        if sum(self._records) != self.live_tokens:
            raise RuntimeError(f"session {self.name}: committed records do not add up to the written tokens")
        self.version += 1
        self._publish()
        return self.version

    def fork(self) -> Fork:
        """A reader of exactly the current version. Metadata only."""
        committed = self._committed
        return Fork(
            self._pool,
            frame_limit=self._frame_limit,
            version=self.version,
            past=committed.extents,
            past_blocks=committed.blocks,
            coord=committed.coord,
            origin=committed.extents[-1].origin,
            base=committed.base,
        )

    def release(self) -> None:
        """Drop the sliding region and the reference to the frozen one."""
        self._pool.blocks.release(self._committed.blocks)
        self._slots.release()
        self._pool.blocks.release(self._frozen.blocks)

    def _publish(self) -> None:
        """Pin what a reader of this version sees: until the next commit an eviction takes nothing from it."""
        blocks = self._frozen.blocks + self._slots.live_runs()
        self._pool.blocks.share(blocks)
        self._pool.blocks.release(self._committed.blocks)
        self._committed = _Committed(self.extents, blocks, self._written, self._base)

    @property
    def _base(self) -> int:
        """Stream coordinate of the frozen prefix's first token; its last is right before the tape."""
        return self.evicted_tokens - self._frozen.tokens


def freeze(fork: Fork) -> Frozen:
    """Turn a stateless prompt that has been prefilled into a frozen prefix; the prefix keeps its blocks."""
    if fork.past_tokens:
        raise ValueError("only a prompt without a past can be frozen")
    return Frozen(fork.extents, fork.private_blocks, fork.length)
