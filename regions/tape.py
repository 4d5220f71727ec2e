"""A session's frozen and sliding regions (*Attention Once* sections 3.3 to 3.5).

The sliding region grows and is evicted by whole records, so the context never begins in the middle of a bar.
Every commit makes a new *data version*; forks read exactly one. Surviving records keep what they absorbed
from evicted ones (`carry` semantics) until the tape adopts a window that was prefilled again (`exact`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Literal, NamedTuple, Protocol

from regions.allocator import Run
from regions.block_table import BlockTable, split
from regions.ephemeral import Fork
from regions.extents import Extent, Placement, SlotRange, anchor, between
from regions.frozen import Context, SharedBlocks
from regions.offload.kv_store import NotResident, Store, StoredBlocks, StoredLost
from regions.pool_metadata import BlockPool
from regions.sliding import KVState, LiveRecord, Retention, TapeState

__all__ = ["KVState", "LiveRecord", "ResidencyManager", "Retention", "Tape", "compact_one"]


Condition = Literal["lost", "arriving", "leaving"]
"""See the properties of a `Tape` that are named so."""


class ResidencyManager(Protocol):
    """Decides which tapes stay in the pool."""

    def use(self, tape: Tape, n: int) -> bool:
        """Bring ``tape`` into the pool, with room for ``n`` more tokens, before it is read or written.

        False when the pool has no room, the tape is lost, or it is on its way.
        """

    def rebuilt(self, tape: Tape) -> None:
        """Called when ``tape`` is resident again without having been read back."""

    def prefix_changed(self, tape: Tape) -> None:
        """Called when ``tape`` has another frozen prefix."""


class _Append(NamedTuple):
    """An append that is not committed: its tokens in KV, and from which of them on how many are evicted."""

    tokens: list[int]
    windows: list[tuple[int, int]]


class Tape:
    """One session's frozen prefix and sliding window. It takes over the caller's reference to ``frozen``.

    ``frame_limit`` bounds local positions: frozen + retained tokens + one batch must stay below it. Raises
    ValueError when they cannot; the caller then keeps its reference.
    """

    def __init__(
        self, name: str, pool: BlockPool, frozen: Context, retention: Retention, *, frame_limit: int
    ) -> None:
        self.name = name
        self.retention = retention
        """Also bounds every append."""
        self._frame_limit = frame_limit
        self.check_prefix(frozen.tokens)
        self._keeper: ResidencyManager | None = None
        self.version = 0
        self.staleness_ns = 0
        self.evicted_tokens = 0
        self.evicted_records = 0
        self.kv = KVState()
        self.condition: Condition | None = None
        """None: its KV is in the pool, or stored outside of it."""
        self._pool = pool
        self._frozen = frozen
        # while offloaded, evicted tokens stay stored: the version comes back whole
        self._table = BlockTable(pool, grows=True)
        self._records: deque[LiveRecord] = deque()
        self._written = 0  # tokens ever in KV, including pending ones
        self._origin = self._base  # positions equal the dense model's until the first eviction
        self._adopted: Context | None = None
        """A window that was adopted, as it was then, until readers see it: from the next commit on."""
        self._committed = self._current()
        self._growing = False  # blocks are acquired for an uncommitted append
        self._append = _Append([], [])

    def attach(self, keeper: ResidencyManager | None) -> None:
        """Have ``keeper`` decide whether it stays in the pool; None: it stays."""
        self._keeper = keeper

    def check_prefix(self, tokens: int, retention: Retention | None = None) -> None:
        """Raise ValueError when a frozen prefix of that many tokens leaves no room below the frame limit.

        ``retention``: by default its own.
        """
        retained = (retention or self.retention).tokens
        if tokens + retained >= self._frame_limit:
            raise ValueError(
                f"session {self.name}: {tokens} frozen and {retained} retained tokens leave "
                f"no room for a question below the frame limit of {self._frame_limit} positions"
            )

    def retain(self, retention: Retention, more: int = 0) -> None:
        """Keep another window from the next append on; the prefix may grow by ``more`` tokens.

        Raises ValueError, with nothing changed, as `check_prefix` does.
        """
        self.check_prefix(len(self.prefix) + more, retention)
        self.retention = retention

    def bound_staleness(self, ns: int) -> None:
        """Records must be committed within this time of being queued; 0: no bound."""
        self.staleness_ns = ns

    def count_from(self, version: int) -> None:
        """Go on counting versions from ``version``, unless it is behind."""
        self.version = max(self.version, version)

    def continue_from(self, version: int) -> None:
        """An empty window stands for ``version``: its readers say so, and the next version follows."""
        self.version = version
        self._committed = replace(self._committed, version=version)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens of the frozen prefix that the next record sees, if whoever made it told them."""
        return self._frozen.prefix

    @property
    def live_tokens(self) -> int:
        """Tokens in the sliding region."""
        return self._written - self.evicted_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens that the next record sees, without the frozen prefix."""
        return self.live_tokens

    @property
    def live_records(self) -> int:
        """Committed records in the sliding region."""
        return len(self._records)

    @property
    def window(self) -> list[int]:
        """The tokens of the committed records, oldest first."""
        return list(chain.from_iterable(record.tokens for record in self._records))

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Extents that the next record sees, oldest first. Raises RuntimeError while it is not resident."""
        if self.lost:
            raise RuntimeError("a lost window has no extents in the pool")
        return (*anchor(self._frozen.extents, self._base), *self._table.extents)

    def blocks_needed(self, n: int) -> int:
        """Blocks to acquire before ``n`` more tokens fit."""
        return self._table.blocks_needed(n)

    def make_room(self, lengths: Sequence[int], times: Sequence[int] = ()) -> int:
        """Evict whole records, oldest first, until the retention holds after an append of such records.

        Each of them sees what it would see if it came alone: what is evicted for the ones behind it, too.
        ``lengths``: their tokens; ``times``: their event times, ns. Returns the evicted tokens. Readers see
        the eviction from the next commit on; until then the current version keeps its blocks. Raises
        ValueError when the append alone exceeds the retention.
        """
        limit, n_tokens = self.retention, sum(lengths)
        if n_tokens > limit.tokens:
            raise ValueError(f"session {self.name}: {n_tokens} tokens exceed the retention of {limit.tokens}")
        before, written, newest = self.evicted_tokens, 0, 0
        windows = self._append.windows
        windows.clear()
        for number, length in enumerate(lengths):
            newest = max(newest, times[number]) if times else 0
            while self._records and (
                self.live_tokens + written + length > limit.tokens
                or (limit.records and len(self._records) + number + 1 > limit.records)
                or (limit.span_ns and self._records[0].ts_event < newest - limit.span_ns)
            ):
                self.evicted_tokens += len(self._records.popleft().tokens)
                self.evicted_records += 1
            if not windows or windows[-1][1] < self.evicted_tokens:
                windows.append((written, self.evicted_tokens))
            written += length
        if self.resident:
            self._drop_evicted()
        return self.evicted_tokens - before

    def acquire(self, n: int) -> bool:
        """See `BlockTable.acquire`; also False when the tape is lost."""
        if not self.bring_back(n):
            return False
        growing, self._growing = self._growing, True  # so that reclaiming never offloads this tape
        acquired = self._table.acquire(n)
        self._growing = acquired or growing
        return acquired

    def next_slots(self, n: int) -> Placement:
        """The placement of the next ``n`` tokens. Raises RuntimeError if their blocks were not acquired."""
        if self._written + n - self._origin > self._frame_limit:
            self.new_frame()
        slots = self._table.next_slots(n)
        return Placement(self.extents, slots, self._written, self._origin, self._seen())

    def new_frame(self, at: int | None = None) -> None:
        """Start a position frame; the next token's local position is ``at``, by default the anchored one."""
        self._origin = self._base if at is None else self._written - at

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """Record that the ``tokens`` of ``placement`` are in KV."""
        self._table.wrote(placement, len(tokens))
        self._append.tokens.extend(tokens)
        self._written += len(tokens)

    def commit(self, record_lengths: Sequence[int], times: Sequence[int] = ()) -> int:
        """Make the written tokens visible as whole records; returns the new data version.

        ``times``: their event times, ns; required when the retention has a span. Raises RuntimeError, with
        nothing changed, when the lengths do not add up to the written tokens or times are missing.
        """
        times = times or [0] * len(record_lengths)
        pending = self._append.tokens
        if sum(record_lengths) != len(pending) or len(times) != len(record_lengths):
            raise RuntimeError(f"session {self.name}: committed records do not add up to the written tokens")
        start = 0
        for length, ts_event in zip(record_lengths, times, strict=True):
            self._records.append(LiveRecord(pending[start : start + length], ts_event))
            start += length
        self._append, self._growing = _Append([], []), False
        self.kv = self.kv._replace(records=self.kv.records + len(record_lengths))
        self.version += 1
        self._publish()
        return self.version

    def fork(self) -> Fork:
        """A reader of the current version, O(1) in the length of its context.

        Raises NotResident when the KV is lost, or stored and the pool has no room to bring it back.
        """
        self._need()
        return Fork(self._pool, frame_limit=self._frame_limit, context=self._committed)

    def fresh_window(self, frozen: Context | None = None, leaving: int = 0) -> Fork:
        """A reader of the frozen prefix alone (by default its own), positioned where the window begins.

        After `window` is prefilled into it, it is as if nothing had ever been evicted. ``leaving``: the
        window begins that many records later, see `adopt_prefix`.
        """
        frozen = frozen or self._frozen
        begins = self.evicted_tokens + sum(len(record.tokens) for record in islice(self._records, leaving))
        base = begins - frozen.tokens
        context = Context(
            anchor(frozen.extents, base),
            frozen.blocks,
            begins,
            base,
            base,
            self.version,
            frozen.prefix,
        )
        return Fork(self._pool, frame_limit=self._frame_limit, context=context, grows=True)

    def adopt(self, fresh: Fork) -> None:
        """Replace the window by one that was prefilled again, and take ``fresh`` over.

        Readers see it from the next commit on, and at once if the tape was lost. Records evicted since the
        prefill began are dropped from it. Raises ValueError, with nothing changed, unless it has exactly the
        live tokens; NotResident when the version that readers still see cannot be brought back.
        """
        self._check_fresh(fresh, self._frozen, self.evicted_tokens, self.window)
        if not self.lost:
            self._need()
        self._replace(fresh)

    def adopt_prefix(self, fresh: Fork, frozen: Context, records: Sequence[LiveRecord] | None = None) -> None:
        """As `adopt`, behind another frozen prefix, whose reference it takes over; ``records``: a new window.

        Readers see it from the next commit on, and at once if the tape is not resident: the version that they
        would see is then dropped. Without ``records``, what is older than the first of ``fresh`` is evicted.
        """
        if records is None:
            leaving = max(0, fresh.begins_at - self.evicted_tokens)
            begins = self.evicted_tokens + leaving
            self._check_fresh(fresh, frozen, begins, self.window[leaving:])
            while self.evicted_tokens < begins:
                self.evicted_tokens += len(self._records.popleft().tokens)
                self.evicted_records += 1
        else:
            begins, window = fresh.begins_at, list(chain.from_iterable(r.tokens for r in records))
            self._check_fresh(fresh, frozen, begins, window)
            self._records = deque(records)
            self.evicted_tokens, self._written = begins, begins + len(window)
        self._frozen.release()
        self._frozen = frozen
        self._replace(fresh)
        if self._keeper is not None:
            self._keeper.prefix_changed(self)

    @property
    def resident(self) -> bool:
        """Its KV is in the pool."""
        return self._table.stored is None and not self.lost

    @property
    def lost(self) -> bool:
        """Its stored KV cannot be read back: `window` must be prefilled again, see `adopt`."""
        return self.condition == "lost"

    @property
    def arriving(self) -> bool:
        """Its stored KV is being read back."""
        return self.condition == "arriving"

    @property
    def leaving(self) -> bool:
        """Its KV is being stored for want of blocks: records wait, so that it stays what it is."""
        return self.condition == "leaving"

    @property
    def away(self) -> bool:
        """Its KV is not in the pool, and is on its way there or has to be prefilled again."""
        return self.lost or self.arriving

    @property
    def stored(self) -> StoredBlocks | None:
        """Its KV outside the pool."""
        return self._table.stored

    @property
    def movable(self) -> bool:
        """Its KV is in the pool and is exactly the current version: no append or eviction is under way."""
        return (
            self.resident
            and not self._growing
            and self.live_tokens > 0
            and self._committed.extents == self.extents
        )

    @property
    def settled(self) -> bool:
        """Its KV is in the pool, not empty, and no append or eviction is under way.

        Unlike a `movable` one, it may have adopted a window that readers see from the next commit on.
        """
        return self.resident and not self._growing and not self._append.tokens and self.live_tokens > 0

    def hold(self) -> SharedBlocks:
        """A new reference to each block of the window; the caller releases them."""
        return SharedBlocks(self._pool, self._table.live_runs())

    @property
    def has_readers(self) -> bool:
        """The current version has readers, so offloading would not free its blocks."""
        return self.resident and self._committed.blocks[-1].readers > 1

    @property
    def live_ranges(self) -> tuple[SlotRange, ...]:
        """Slots of the sliding region, oldest token first."""
        return self._table.live_ranges()

    @property
    def runs(self) -> int:
        """Number of runs of blocks of the window; 0 when it is outside the pool."""
        return len(self.live_ranges)

    def swap_out(self, host: Store) -> bool:
        """Move the window to ``host``; False, with nothing changed, when that is full or not `movable`."""
        stored = host.put(self._table.live_runs()) if self.movable else None
        if stored is not None:
            self.offload(stored)
        return stored is not None

    def offload(self, stored: StoredBlocks) -> None:
        """Release the window's blocks: ``stored`` has its KV now. Raises RuntimeError unless `movable`."""
        if not self.movable:
            raise RuntimeError(f"session {self.name} cannot be offloaded: empty, changing or not in the pool")
        self._retract()
        self._table.offload(stored)

    def swap_in(self, n: int = 0) -> bool:
        """Bring the window back, as the same version, with room for ``n`` more tokens.

        False, with nothing changed, when the pool has no room or the tape is lost. Raises StoredLost when
        this call finds it lost.
        """
        if self.resident:
            return True
        try:
            if self.lost or not self._table.swap_in(n):
                return False
        except StoredLost:
            self.lose()
            raise
        self._show()
        return True

    def reserve(self, n: int = 0) -> tuple[SharedBlocks, list[Run]] | None:
        """Take blocks to bring a stored window back to, and for ``n`` more tokens; None without room.

        The second are those that the stored KV is to be copied to, before `arrive`.
        """
        runs = self._table.reserve(n)
        if runs is None:
            return None
        reserved = SharedBlocks(self._pool, runs)
        self._pool.blocks.release(runs)
        return reserved, split(runs, self._table.live_blocks)[0]

    def arrive(self, reserved: SharedBlocks) -> None:
        """The window is back, as the same version, in the blocks of `reserve`; the caller releases those."""
        self.condition = None
        self._pool.blocks.share(reserved.blocks)
        self._table.arrive(list(reserved.blocks))
        self._show()

    def lose(self) -> None:
        """What is stored cannot be read back."""
        self._table.release()
        self.condition = "lost"

    def _show(self) -> None:
        """Let readers see the version that is back in the pool."""
        self._committed = replace(
            self._committed,
            extents=(*anchor(self._frozen.extents, self._committed.base), *self._table.extents),
            blocks=(*self._frozen.retain().blocks, self.hold()),
        )
        self._drop_evicted()

    def bring_back(self, n: int = 0) -> bool:
        """Bring the current version into the pool, with room for ``n`` more tokens.

        False when the pool has no room, the tape is lost, or it is on its way.
        """
        if self.lost and not self._records:
            self.adopt(self.fresh_window())  # everything was evicted: there is nothing to prefill
        return self.swap_in(n) if self._keeper is None else self._keeper.use(self, n)

    def compact(self) -> bool:
        """Copy the window to one run of blocks, if it is in several and one is free; frames do not change."""
        if not self.movable or not self._table.compact():
            return False
        self._publish()
        return True

    @property
    def state(self) -> TapeState:
        """The current version without its KV."""
        return TapeState(
            self.version,
            self.evicted_tokens,
            self.evicted_records,
            self._origin,
            tuple(LiveRecord([int(token) for token in r.tokens], int(r.ts_event)) for r in self._records),
            self._table.stretches,
            self.kv,
        )

    def resume(self, state: TapeState, stored: StoredBlocks) -> None:
        """Continue from the state of another tape, whose KV is in ``stored``.

        Raises ValueError, with nothing changed, when this tape is not new, when positions exceed the frame
        limit, or when records and stretches do not add up.
        """
        if self._written:
            raise ValueError(f"session {self.name} has a window of its own")
        state.check(self._frame_limit)
        self._committed.release()
        self.version, self._origin = state.version, state.origin
        self.evicted_tokens, self.evicted_records = state.evicted_tokens, state.evicted_records
        self._written = state.evicted_tokens + state.tokens
        self._records = deque(state.records)
        self.kv = state.kv
        self._table.expect(state.stretches, stored)
        self._committed = self._context((), ())

    def release(self) -> None:
        """Release the sliding region and the reference to the frozen one."""
        self._retract()
        self._table.release()
        self._frozen.release()

    def _check_fresh(self, fresh: Fork, frozen: Context, begins_at: int, window: list[int]) -> None:
        """Raise ValueError unless ``fresh`` has ``window``, from ``begins_at`` on, behind ``frozen``."""
        evicted = begins_at - fresh.begins_at
        alike = fresh.prefix == frozen.prefix and fresh.tokens[max(0, evicted) :] == window
        if self._append.tokens or evicted < 0 or not alike:
            raise ValueError(f"session {self.name}: what was prefilled again is not the live window")

    def _replace(self, fresh: Fork) -> None:
        resident = self.resident
        self._table.release()
        self._table, self._origin = fresh.detach()
        left = self._table.length > self.live_tokens
        self.kv = KVState(self.kv.number + 1, len(self._records), left)
        self.condition = None
        self._keep_adopted(self._context(self._table.extents, (self.hold(),)))
        self._drop_evicted()
        if not resident:  # readers see it at once: their version is not in the pool
            self._committed = self._current()
            if self._keeper is not None:
                self._keeper.rebuilt(self)

    def _keep_adopted(self, window: Context | None) -> None:
        before, self._adopted = self._adopted, window
        if before is not None:
            before.release()

    def _seen(self) -> tuple[tuple[int, tuple[Extent, ...]], ...]:
        """What the records of an append see, if some see more than the ones behind them; see `Placement`.

        What is evicted is still in the blocks of the current version, or of a window adopted since.
        """
        windows = self._append.windows
        if len(windows) < 2:
            return ()
        borders, kept = [evicted for _, evicted in windows], self._adopted or self._committed
        leaving = [between(kept.extents, *each) for each in pairwise(borders)]
        return tuple(
            (
                first,
                (
                    *anchor(self._frozen.extents, evicted - self._frozen.tokens),
                    *chain.from_iterable(leaving[number:]),
                    *self._table.extents,
                ),
            )
            for number, (first, evicted) in enumerate(windows)
        )

    def _drop_evicted(self) -> None:
        """Release the KV of evicted tokens."""
        self._table.drop_oldest(self._table.length - self.live_tokens)

    def _need(self) -> None:
        if not self.bring_back():
            if self.lost:
                raise NotResident(f"session {self.name} lost its stored KV and must be prefilled again")
            if self.arriving:
                raise NotResident(f"session {self.name} is being read back into the pool")
            raise NotResident(
                f"session {self.name} is stored outside the pool, which has {self._pool.free_blocks} of "
                f"{self._pool.total_blocks} blocks free, not enough to bring it back"
            )

    def _publish(self) -> None:
        """Make a context of the current window, with references to its blocks until the next commit."""
        before = self._committed
        self._committed = self._current()
        before.release()

    def _retract(self) -> None:
        """Release the references of the current version, before it leaves the pool."""
        self._keep_adopted(None)
        self._committed.release()
        self._committed = replace(self._committed, extents=(), blocks=())

    def _current(self) -> Context:
        self._keep_adopted(None)
        return self._context(self.extents, (*self._frozen.retain().blocks, self.hold()))

    def _context(self, extents: tuple[Extent, ...], blocks: tuple[SharedBlocks, ...]) -> Context:
        return Context(
            extents, blocks, self._written, self._origin, self._base, self.version, self._frozen.prefix
        )

    @property
    def _base(self) -> int:
        """Stream coordinate of the frozen prefix's first token; its last token is right before the tape."""
        return self.evicted_tokens - self._frozen.tokens


def compact_one(tapes: Iterable[Tape]) -> bool:
    """Compact one window, preferring the one in most runs; False when none could be compacted.

    Attention reads each run with one call, and a tape that grows among others is spread over several runs.
    """
    spread = sorted((tape for tape in tapes if tape.runs > 1), key=lambda tape: -tape.runs)
    return any(tape.compact() for tape in spread)
