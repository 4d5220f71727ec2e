"""A session's frozen and sliding regions (*Attention Once* sections 3.3 to 3.5).

The sliding region grows and is evicted by whole records, so the context never begins in the middle of a
bar. Every commit makes a new *data version*; forks read exactly one. Surviving records keep what they
absorbed from evicted ones (`carry` semantics) until a window that was prefilled anew is adopted (`exact`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from regions.extents import Extent, Step, anchor, drop_oldest, extend
from regions.fork import Fork
from regions.held import Held, Past
from regions.pool import KVPool
from regions.slots import Slots


@dataclass(frozen=True)
class Retention:
    """How much of the tape stays: at most ``tokens`` tokens and, unless 0, at most ``records`` records, none
    of them older than ``span_ns`` of event time before the newest.
    """

    tokens: int
    records: int = 0
    span_ns: int = 0


class LiveRecord(NamedTuple):
    """A record of the window: its tokens and its event time, ns."""

    tokens: Sequence[int]
    ts_event: int


class Tape:
    """One session's frozen prefix and sliding window. It takes the caller's hold of ``frozen`` over.

    ``frame_limit`` bounds local positions: frozen + retained tokens + one batch must fit below it. Raises
    ValueError when they cannot; the caller then keeps its hold.
    """

    def __init__(
        self, name: str, pool: KVPool, frozen: Past, retention: Retention, *, frame_limit: int
    ) -> None:
        self._frozen_tokens = frozen.tokens
        if self._frozen_tokens + retention.tokens >= frame_limit:
            raise ValueError(
                f"session {name}: {self._frozen_tokens} frozen and {retention.tokens} retained tokens leave "
                f"no room for a question below the frame limit of {frame_limit} positions"
            )
        self.name = name
        self.version = 0
        self.evicted_tokens = 0
        self.evicted_records = 0
        self._pool = pool
        self._frozen = frozen
        self._retention = retention
        self._frame_limit = frame_limit
        self._slots = Slots(pool, grows=True)
        self._extents: list[Extent] = []
        self._records: deque[LiveRecord] = deque()
        self._pending: list[int] = []  # tokens in KV that no record claims yet
        self._written = 0  # tokens ever in KV, the pending ones included
        self._origin = -self._frozen_tokens  # before the first eviction positions are exactly the dense ones
        self._committed = self._past(())

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
            (e.coord + e.length - e.origin - 1 for e in self._extents), default=self._frozen_tokens - 1
        )

    @property
    def records(self) -> tuple[LiveRecord, ...]:
        """The committed records of the window, oldest first."""
        return tuple(self._records)

    @property
    def window(self) -> list[int]:
        """The tokens of the committed records, oldest first."""
        return list(chain.from_iterable(record.tokens for record in self._records))

    @property
    def extents(self) -> tuple[Extent, ...]:
        """What the next record sees, oldest first."""
        return (*anchor(self._frozen.extents, self._base), *self._extents)

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit."""
        return self._slots.blocks_needed(n)

    def make_room(self, n_tokens: int, n_records: int, newest_ns: int = 0) -> int:
        """Evict whole records, oldest first, until the retention holds after the append.

        ``newest_ns``: event time of the newest record to come. Returns the evicted tokens. Readers see the
        eviction from the next commit on; until then the current version keeps its blocks. Raises ValueError
        when the append alone exceeds the retention.
        """
        limit = self._retention
        if n_tokens > limit.tokens:
            raise ValueError(f"session {self.name}: {n_tokens} tokens exceed the retention of {limit.tokens}")
        evicted = 0
        while self._records and (
            self.live_tokens - evicted + n_tokens > limit.tokens
            or (limit.records and len(self._records) + n_records > limit.records)
            or (limit.span_ns and self._records[0].ts_event < newest_ns - limit.span_ns)
        ):
            evicted += len(self._records.popleft().tokens)
            self.evicted_records += 1
        self._forget(evicted)
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
        extend(self._extents, step.slots, step.coord, step.origin)
        self._slots.advance(len(tokens))
        self._pending.extend(tokens)
        self._written += len(tokens)

    def commit(self, record_lengths: Sequence[int], times: Sequence[int] = ()) -> int:
        """The written tokens become visible as whole records; returns the new data version.

        ``times``: their event times, ns; needed when the retention has a span. Raises RuntimeError when the
        lengths do not add up to what was written.
        """
        if sum(record_lengths) != len(self._pending):
            raise RuntimeError(f"session {self.name}: committed records do not add up to the written tokens")
        start = 0
        for length, ts_event in zip(record_lengths, times or [0] * len(record_lengths), strict=True):
            self._records.append(LiveRecord(self._pending[start : start + length], ts_event))
            start += length
        self._pending = []
        self.version += 1
        self._publish()
        return self.version

    def fork(self) -> Fork:
        """A reader of exactly the current version: O(1) in the length of the context."""
        return Fork(self._pool, frame_limit=self._frame_limit, past=self._committed)

    def anew(self) -> Fork:
        """A reader of the frozen prefix alone, placed where the window begins.

        Who prefills `window` into it has the window as if nothing had ever been evicted: for `adopt`, and to
        measure how far the carried state is from it.
        """
        past = Past(
            anchor(self._frozen.extents, self._base),
            self._frozen.holds,
            self.evicted_tokens,
            self._base,
            self._base,
            self.version,
        )
        return Fork(self._pool, frame_limit=self._frame_limit, past=past, grows=True)

    def adopt(self, fresh: Fork) -> None:
        """Go on from a window that was prefilled anew; takes ``fresh`` over.

        Readers see it from the next commit on. Records evicted since it was begun are dropped from it.
        Raises ValueError, and changes nothing, unless it holds exactly the live tokens.
        """
        passed = self.evicted_tokens - fresh.begins_at
        if self._pending or passed < 0 or fresh.tokens[passed:] != self.window:
            raise ValueError(f"session {self.name}: what was prefilled anew is not the live window")
        self._slots.release()
        self._slots, self._extents, self._origin = fresh.surrender()
        drop_oldest(self._extents, passed)
        self._slots.drop_oldest(passed)

    def release(self) -> None:
        """Drop the sliding region and the hold of the frozen one."""
        self._committed.holds[-1].release()
        self._slots.release()
        self._frozen.release()

    def _forget(self, tokens: int) -> None:
        drop_oldest(self._extents, tokens)
        self._slots.drop_oldest(tokens)
        self.evicted_tokens += tokens

    def _publish(self) -> None:
        """Pin what a reader of this version sees: until the next commit an eviction takes nothing from it."""
        before = self._committed.holds[-1]
        self._committed = self._past(self.extents)
        before.release()

    def _past(self, extents: tuple[Extent, ...]) -> Past:
        window = Held(self._pool, self._slots.live_runs())
        extents = extents or anchor(self._frozen.extents, self._base)
        holds = (*self._frozen.holds, window)
        return Past(extents, holds, self._written, self._origin, self._base, self.version)

    @property
    def _base(self) -> int:
        """Stream coordinate of the frozen prefix's first token; its last is right before the tape."""
        return self.evicted_tokens - self._frozen_tokens
