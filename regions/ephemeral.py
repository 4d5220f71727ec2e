"""Ephemeral region: a question and its answer over an immutable past (snapshot isolation by references).

A fork holds its past as it was when it was taken, so the tape may move on, evict and be forked again
meanwhile. It replaces the in-place strip/extend/clear/restore of *Attention Once* section 3.9.3: nothing
has to be restored, and many forks run in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from regions.allocator import Run
from regions.block_table import Slots
from regions.context import Held, Past
from regions.extents import Extent, Placement, blocks_of, extend, keep_oldest, relay
from regions.offload.store import Store, Stored
from regions.pool import KVPool


class Fork:
    """Private tokens behind a shared, immutable past, which it holds from here on.

    With an empty past it is a stateless prompt. ``grows``: expect many more tokens (a window that is
    prefilled anew) and look for room to grow in.
    """

    def __init__(
        self, pool: KVPool, *, frame_limit: int, past: Past | None = None, grows: bool = False
    ) -> None:
        self.tokens: list[int] = []
        self._pool = pool
        self._past = (past or Past()).retain()
        self._origin = self._past.origin
        self._frame_limit = frame_limit
        self._slots = Slots(pool, grows=grows)
        self._extents: list[Extent] = []  # all private tokens, the fixed ones first
        self._fixed = 0  # oldest private tokens that others hold too; they lie outside the slots
        self._fixed_holds: list[Held] = []
        self._stored: Stored | None = None
        self._released = False

    @property
    def version(self) -> int:
        """The data version it reads; 0 without a tape."""
        return self._past.version

    @property
    def cached_tokens(self) -> int:
        """Tokens of the shared past."""
        return self._past.tokens

    @property
    def length(self) -> int:
        """Private tokens in KV."""
        return len(self.tokens)

    @property
    def context_tokens(self) -> int:
        """What the next token sees."""
        return self.cached_tokens + self.length

    @property
    def begins_at(self) -> int:
        """Stream coordinate of its first own token."""
        return self._past.coord

    @property
    def exclusive_tokens(self) -> int:
        """Private tokens that nobody else reads: those that swapping out would move."""
        return self._slots.length

    @property
    def blocks(self) -> int:
        """Blocks in the pool under its private tokens, those taken ahead included; 0 while swapped.

        What a cache or another prompt holds of them, too, counts: resetting the fork gives it up as well.
        """
        if self._stored is not None:
            return 0
        fixed = sum(run.blocks for held in self._fixed_holds for run in held.blocks)
        return fixed + sum(run.blocks for run in self._slots.held_blocks())

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more private tokens fit."""
        return self._slots.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more private tokens, swapping in what was swapped out.

        False, and nothing changed, when the pool cannot.
        """
        return self._slots.acquire(n) if self._stored is None else self._return(n)

    def place(self, n: int) -> Placement:
        """Where the next ``n`` tokens go. Raises RuntimeError if their blocks were not acquired."""
        coord = self._past.coord + self.length
        if coord + n - self._origin > self._frame_limit:
            self._origin = self._past.base
        return Placement(self.extents, self._slots.next(n), coord, self._origin)

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """The ``tokens`` of ``placement`` are in KV."""
        extend(self._extents, placement.slots, placement.coord, placement.origin)
        self._slots.advance(len(tokens))
        self.tokens.extend(tokens)

    @property
    def swapped(self) -> bool:
        """Its private tokens are not in the pool."""
        return self._stored is not None

    def swap_out(self, host: Store) -> bool:
        """Preemption by swapping: move the private tokens to ``host``; the past stays held.

        What others hold too stays where it is, for leaving would free nothing. False, and nothing changed,
        when the host has no room.
        """
        if self._stored is None and self._slots.length:
            self._stored = self._slots.swap_out(host)
            return self._stored is not None
        if self._stored is None:
            self._slots.release()
        return True

    def swap_in(self) -> bool:
        """Bring the private tokens back; False, and nothing changed, when the pool has no room."""
        return self._stored is None or self._return(0)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """What the next token sees, oldest first. Raises RuntimeError while swapped."""
        return (*self._past.extents, *self.private_extents)

    @property
    def private_extents(self) -> tuple[Extent, ...]:
        """Where its own tokens lie, oldest first. Raises RuntimeError while swapped."""
        if self._stored is not None:
            raise RuntimeError("a reader that is swapped out has no place in the pool")
        return tuple(self._extents)

    @property
    def private_blocks(self) -> list[Run]:
        """The blocks of the private tokens."""
        return [run for held in self._fixed_holds for run in held.blocks] + self._slots.live_runs()

    def keep(self, n: int) -> None:
        """Only the first ``n`` private tokens stay in KV: rejected drafts, a changed prompt.

        A block that others read is never written again: the next token then goes to a fresh block, and
        nothing is copied. While swapped the rest is freed on the host, and only what is kept comes back
        (*Stream2LLM* section 4.2). Raises ValueError when there are fewer than ``n``.
        """
        if n > self.length:
            raise ValueError(f"{n} tokens cannot be kept of {self.length}")
        keep_oldest(self._extents, n)
        del self.tokens[n:]
        self._origin = self._extents[-1].origin if self._extents else self._past.origin
        self._slots.keep(max(0, n - self._fixed))
        if n < self._fixed:
            self._hold_only(n)
        elif n > self._fixed and self._slots.tail_is_shared:
            self._fixed_holds.append(Held(self._pool, self._slots.live_runs()))
            self._slots.release()
            self._fixed = n
        if self._stored is not None:
            self._stored.keep(self._slots.live_blocks)
            self._stored = self._stored if self._slots.length else None

    def reset(self) -> None:
        """Preemption by recompute: drop the private KV, keep the past."""
        self.keep(0)

    def release(self) -> None:
        """Drop everything, the past included. Further calls do nothing."""
        if self._released:
            return
        self.reset()
        self._released = True
        self._past.release()
        self._past = Past()

    def surrender(self) -> tuple[Slots, list[Extent], int]:
        """Hand the private KV over to somebody else and release the rest: (slots, extents, origin).

        Raises RuntimeError when others hold some of it, or when it is swapped.
        """
        if self._fixed or self.swapped:
            raise RuntimeError("a reader that is swapped or that others hold tokens of cannot be taken over")
        slots, extents = self._slots, self._extents
        self._slots, self._extents = Slots(self._pool, grows=False), []
        self.tokens = []
        origin = self._origin
        self.release()
        return slots, extents, origin

    def prefix(self) -> Past:
        """All it sees as a past for others, held once more: the prefix stays when the fork goes.

        Raises ValueError for a fork of a tape, whose past moves.
        """
        if self._past.version or self._past.base:
            raise ValueError("only a prompt, not a fork of a tape, can become a prefix")
        extents = self.extents
        held = Held(self._pool, self.private_blocks)
        self._past.retain()
        return Past(
            extents,
            (*self._past.holds, held),
            self._past.coord + self.length,
            self._origin,
            self._past.base,
        )

    def _return(self, n: int) -> bool:
        assert self._stored is not None  # the callers asked
        if not self._slots.swap_in(self._stored, n):
            return False
        self._stored = None
        fixed = list(self._extents)
        keep_oldest(fixed, self._fixed)
        places = [(extent.slot, extent.length) for extent in fixed]
        self._extents = relay(self._extents, [*places, *self._slots.live_ranges()])
        return True

    def _hold_only(self, n: int) -> None:
        """Of what others hold too, hold the first ``n`` tokens, which are all that is left."""
        before = self._fixed_holds
        self._fixed_holds = [Held(self._pool, blocks_of(self._extents, self._pool.block_size))] if n else []
        self._fixed = n
        for held in before:
            held.release()
