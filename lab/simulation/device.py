"""A simulated device: the engine's own block metadata, without tensors, in virtual time.

Prompts, block tables, allocator and prefix cache are the daemon's. Only time is simulated: a pass takes what
the cost model predicts; swaps use one copy stream, one transfer after the other; and the next pass begins
when the transfers are done, because it writes the blocks that were swapped out and reads those that were
swapped in. This is too slow where a deferred entry was swapped in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.step import Chunk, SampledToken
from regions.allocator import Run
from regions.offload.kv_store import Steps, StoredBlocks
from regions.pool_metadata import BlockPool
from regions.prefix_index import PrefixIndex
from regions.radix import RadixCache
from regions.streaming_kv import StreamingPrompt
from scheduler.costs import spans_of
from scheduler.interfaces import Costs

NO_FRAME_LIMIT = 1 << 62


class DeviceCosts(Costs, Protocol):
    """A cost model with the two directions of a swap."""

    def swap_out_ns(self, blocks: int) -> int:
        """Moving ``blocks`` blocks to the host."""

    def swap_in_ns(self, blocks: int) -> int:
        """Moving ``blocks`` blocks back."""


class SimClock:
    """Virtual time, ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        """The current time, ns."""
        return self.now


class SimTier:
    """``free_blocks`` blocks of host memory: a `scheduler.interfaces.Tier`, and the `Store` of its prompts.

    Transfers run one after the other; the last one ends at ``done_at`` (ns).
    """

    def __init__(self, blocks: int, costs: DeviceCosts, clock: SimClock) -> None:
        self.free_blocks = blocks
        self.done_at = 0
        self._costs, self._clock = costs, clock

    def swap_out(self, reader: StreamingPrompt) -> bool:
        """See `scheduler.interfaces.Tier`. Also False when others read all of its KV."""
        return bool(reader.exclusive_tokens) and reader.swap_out(self)

    def put(self, blocks: Sequence[Run]) -> SimStored | None:
        """See `Store`."""
        n = sum(run.blocks for run in blocks)
        if n > self.free_blocks:
            return None
        self.free_blocks -= n
        self._transfer(self._costs.swap_out_ns(n))
        return SimStored(self, n)

    def load(self, blocks: int) -> None:
        """Start moving ``blocks`` blocks back to the pool."""
        self._transfer(self._costs.swap_in_ns(blocks))

    def _transfer(self, ns: int) -> None:
        self.done_at = max(self.done_at, self._clock.now) + ns


class SimStored(StoredBlocks):
    """One prompt's blocks on the host."""

    def __init__(self, tier: SimTier, blocks: int) -> None:
        self._tier, self._blocks = tier, blocks

    def loading(self, blocks: Sequence[Run]) -> Steps:
        """See `StoredBlocks`."""
        self._tier.load(self._blocks)
        yield

    def keep(self, blocks: int) -> None:
        """See `StoredBlocks`."""
        self._tier.free_blocks += self._blocks - blocks
        self._blocks = blocks

    def release(self) -> None:
        """See `StoredBlocks`."""
        self.keep(0)


class SimDevice:
    """Pool, prefix cache, host tier and clock of one device, and an `Executor` on them.

    A pass takes ``costs.batch_ns``; ``elapse`` advances the clock and may deliver input. ``keep_prefixes``:
    cache prompts in free blocks, for later prompts with the same beginning.
    """

    def __init__(
        self,
        costs: DeviceCosts,
        elapse: Callable[[int], None],
        *,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        keep_prefixes: bool = False,
    ) -> None:
        self.clock = SimClock()
        self.pool = BlockPool(blocks, block_size=block_size)
        self.cache = RadixCache(self.pool, blocks * block_size if keep_prefixes else 0)
        self.index = PrefixIndex(self.cache)
        self.tier = SimTier(host_blocks, costs, self.clock)
        self.passes = self.tokens = self.busy_ns = self.copying_ns = 0
        """Passes run, tokens computed, time in passes, and time that passes waited for transfers; ns."""
        self.peak_blocks = 0
        """Most blocks in use in a pass, without those that the cache could free."""
        self._costs, self._elapse = costs, elapse

    def open_prompt(self) -> StreamingPrompt:
        """The reader of a new request."""
        return StreamingPrompt(self.pool, self.cache, frame_limit=NO_FRAME_LIMIT)

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `engine.step.Executor`. A token is a hash of its position; every draft is rejected."""
        begin = max(self.clock.now, self.tier.done_at)
        took = self._costs.batch_ns(spans_of(batch))
        self.passes += 1
        self.tokens += sum(len(chunk.tokens) for chunk in batch)
        self.busy_ns += took
        self.copying_ns += begin - self.clock.now
        self.peak_blocks = max(self.peak_blocks, self.pool.total_blocks - self.pool.free_blocks)
        sampled = [_run(chunk) for chunk in batch]
        self._elapse(begin + took)
        return sampled


def _run(chunk: Chunk) -> SampledToken | None:
    target = chunk.target
    target.wrote(target.next_slots(len(chunk.tokens)), chunk.tokens)
    if not chunk.sample:
        return None
    token = target.context_tokens * 0x9E3779B1 & 0x7FFFFFFF
    return SampledToken(chunk.choices[token % len(chunk.choices)] if chunk.choices else token, 1.0, 0.0)
