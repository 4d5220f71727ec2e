"""A device that only counts: the same protocols as the engine, in virtual time.

A pass takes what the cost model says. Swapping goes over one copy stream, a transfer after the other; the
next pass begins when the transfers are done. That is what it needs anyway: blocks are swapped out to be
written by this pass, and swapped in to be read by it. It errs to the slow side where a deferred entry had
its blocks brought back already.

Readers know how many tokens they have in KV and which tokens their prompt has (`Segments`), so aliasing,
invalidation and the prefix cache are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.step import Chunk, SampledToken
from regions.extents import Placement
from scheduler.simulation.prefixes import Node, SimCache
from scheduler.simulation.tokens import EMPTY, segments
from scheduler.types import Costs

NOWHERE = Placement((), (), 0, 0)


class DeviceCosts(Costs, Protocol):
    """A cost model that also knows the two directions of a swap."""

    def swap_out_ns(self, blocks: int) -> int:
        """Moving so many blocks to the host."""

    def swap_in_ns(self, blocks: int) -> int:
        """Moving so many blocks back."""


class SimClock:
    """Virtual time, ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        """What the scheduler reads."""
        return self.now


class SimMemory:
    """A pool of ``total_blocks``. What the cache could give up counts as free."""

    def __init__(self, total_blocks: int, block_size: int, cache: SimCache) -> None:
        self.total_blocks, self.block_size = total_blocks, block_size
        self.peak = 0
        """Most blocks in use at once, those that could be reclaimed left out."""
        self._unused = total_blocks
        self._cache = cache

    @property
    def free_blocks(self) -> int:
        """Blocks nobody reads."""
        return self._unused + self._cache.reclaimable

    def take(self, n: int) -> bool:
        """Take `n` blocks, out of the cache if need be. False, and nothing changed, without them."""
        if n > self.free_blocks:
            return False
        while self._unused < n:
            self._unused += self._cache.evict()
        self._unused -= n
        self.peak = max(self.peak, self.total_blocks - self.free_blocks)
        return True

    def give(self, n: int) -> None:
        """Give `n` blocks back."""
        self._unused += n


class CopyStream:
    """Transfers between pool and host, one after the other."""

    def __init__(self, clock: SimClock) -> None:
        self.done_at = 0
        self._clock = clock

    def add(self, ns: int) -> None:
        """A transfer that takes `ns`."""
        self.done_at = max(self.done_at, self._clock.now) + ns


class SimTier:
    """``blocks`` blocks of host memory."""

    def __init__(self, blocks: int, costs: DeviceCosts, copies: CopyStream) -> None:
        self.free_blocks = blocks
        self._costs, self._copies = costs, copies

    def swap_out(self, reader: SimReader) -> bool:
        """See `scheduler.types.Tier`."""
        blocks = reader.blocks
        if blocks > self.free_blocks:
            return False
        self.free_blocks -= blocks
        self._copies.add(self._costs.swap_out_ns(blocks))
        reader.leave(blocks)
        return True

    def fetch(self, blocks: int) -> None:
        """Blocks go back to the pool."""
        self.free_blocks += blocks
        self._copies.add(self._costs.swap_in_ns(blocks))

    def give(self, blocks: int) -> None:
        """Blocks are given up."""
        self.free_blocks += blocks


class SimReader:
    """A prompt of a POOL request (`scheduler.types.PromptReader`): tokens and blocks in numbers."""

    version = 0

    def __init__(self, memory: SimMemory, cache: SimCache, tier: SimTier, salt: str = "") -> None:
        self.length = self.cached_tokens = 0
        self.blocks = 0
        self._on_host = 0
        self._shared = 0  # tokens whose KV lies in the cache's blocks: found there, or shared since
        self._node: Node | None = None
        self._prompt = EMPTY
        self._memory, self._cache, self._tier, self._salt = memory, cache, tier, salt

    @property
    def swapped(self) -> bool:
        """Its private KV is on the host."""
        return self._on_host > 0

    def blocks_needed(self, n: int) -> int:
        """See `Reader`."""
        return max(0, self._room_for(self.length + n) - self.blocks)

    def acquire(self, n: int) -> bool:
        """See `Reader`."""
        needed = self.blocks_needed(n)
        if not self._memory.take(needed):
            return False
        self.blocks += needed
        if self._on_host:
            self._tier.fetch(self._on_host)
            self._on_host = 0
        return True

    def release(self) -> None:
        """See `Reader`."""
        self.reset()

    def reset(self) -> None:
        """See `Reader`; what was aliased is let go as well, for the cache gives it again."""
        self.keep(0)

    def keep(self, n: int) -> None:
        """See `Reader`."""
        self.length = min(self.length, n)
        self.cached_tokens = min(self.cached_tokens, n)
        if n < self._shared:
            self._adopt(None if n == 0 or self._node is None else self._cache.cut(self._node, n))
        own = self._room_for(self.length)
        if self._on_host:
            self._tier.give(self._on_host - own)
            self._on_host = own
        elif self.blocks > own:
            self._memory.give(self.blocks - own)
            self.blocks = own

    def leave(self, blocks: int) -> None:
        """Its private blocks are on the host by now."""
        self._memory.give(blocks)
        self.blocks, self._on_host = 0, blocks

    @property
    def context_tokens(self) -> int:
        """See `Target`."""
        return self.length

    def place(self, n: int) -> Placement:
        """See `Target`; blocks are only counted."""
        return NOWHERE

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """See `Target`."""
        self.length += len(tokens)
        assert self.blocks >= self._room_for(self.length), "written without blocks"

    def update(self, tokens: Sequence[int]) -> int:
        """See `PromptReader`."""
        before, wanted = self.length, segments(tokens)
        kept = min(before, self._prompt.common(wanted))
        self._prompt = wanted
        self.keep(kept)
        return before - kept

    def match(self) -> int:
        """See `PromptReader`."""
        if not self._cache.keep:
            return 0
        node, matched = self._cache.find(self._prompt, self._salt, len(self._prompt) - 1)
        gained = matched - self.length
        if gained <= 0:
            return 0
        self._read(self._cache.cut(node, matched))
        return gained

    def follow(self, leader: SimReader, n: int) -> None:
        """See `PromptReader`."""
        self._read(leader.publish(n))

    def save(self) -> None:
        """See `PromptReader`."""
        if self._cache.keep:
            self.publish(min(self.length, len(self._prompt)))

    def publish(self, n: int) -> Node:
        """The first `n` tokens as a node of the cache: their blocks become the cache's."""
        if n > self._shared:
            moved = self.blocks - -(-(self.length - n) // self._memory.block_size)
            node, spare = self._cache.insert(self._prompt[:n], self._salt, moved)
            self.blocks -= moved
            self._memory.give(spare)
            self._adopt(node)
        assert self._node is not None  # shared tokens lie on the path to it
        return self._cache.cut(self._node, n)

    def _read(self, node: Node) -> None:
        """Go on behind `node`; what it had of its own before goes."""
        self._adopt(node)
        self._memory.give(self.blocks)
        self._tier.give(self._on_host)
        self.blocks = self._on_host = 0
        self.length = self.cached_tokens = node.end

    def _adopt(self, node: Node | None) -> None:
        """Hold another node's path. The new one first: without readers a node may go at once."""
        before, self._node = self._node, node
        self._shared = 0 if node is None else node.end
        if node is not None:
            self._cache.hold(node)
        if before is not None:
            self._memory.give(self._cache.drop(before))

    def _room_for(self, tokens: int) -> int:
        """Private blocks that the first `tokens` tokens take."""
        return -(-(tokens - self._shared) // self._memory.block_size)


class SimExecutor:
    """One forward pass takes ``costs.batch_ns``; ``elapse`` moves the clock on, and may bring input."""

    def __init__(
        self, costs: DeviceCosts, clock: SimClock, copies: CopyStream, elapse: Callable[[int], None]
    ) -> None:
        self.passes = self.tokens = self.busy_ns = self.copying_ns = 0
        """Passes run, tokens computed, time in passes, and time that passes waited for transfers."""
        self._costs, self._clock, self._copies, self._elapse = costs, clock, copies, elapse

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `scheduler.types.Executor`. A token is a hash of its position; no draft proves right."""
        now = self._clock.now
        begin = max(now, self._copies.done_at)
        spans: list[tuple[int, int]] = []
        rows: list[SampledToken | None] = []
        for chunk in batch:
            reader, n = chunk.target, len(chunk.tokens)
            assert isinstance(reader, SimReader)  # no others are opened
            spans.append((reader.length, n))
            reader.wrote(NOWHERE, chunk.tokens)
            rows.append(_row(reader.length, chunk.choices) if chunk.sample else None)
            self.tokens += n
        took = self._costs.batch_ns(spans)
        self.passes += 1
        self.busy_ns += took
        self.copying_ns += begin - now
        self._elapse(begin + took)
        return rows


def _row(position: int, choices: tuple[int, ...] | None) -> SampledToken:
    token = position * 0x9E3779B1 & 0x7FFFFFFF
    return SampledToken(choices[token % len(choices)] if choices else token, 1.0, 0.0)
