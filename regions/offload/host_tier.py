"""The host tier: a bounded pool in host memory for KV that leaves the device.

Preemption by swapping (*Stream2LLM* sections 4.2 and 4.3) copies blocks to the host and back while forward
passes run, instead of computing them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from regions.allocator import Run
from regions.block_table import split
from regions.ephemeral import Fork
from regions.kv_tensors import KVPool
from regions.offload.copies import Copies, DirectCopies, Quarantine, copies_for
from regions.offload.kv_store import Copied, Steps, StoredBlocks
from regions.offload.staging import copying


class HostTier:
    """``blocks`` blocks of host memory for a ``device`` pool; pinned if that is on a GPU.

    ``copied``: called on the stepping thread, once it is noticed that a copy is done.
    """

    def __init__(
        self,
        device: KVPool,
        blocks: int,
        copies: Copies | None = None,
        copied: Copied = lambda way, blocks, ns: None,
    ) -> None:
        self.pool = KVPool(
            device.layers,
            blocks,
            block_size=device.block_size,
            dtype=device.dtype,
            pin=device.device.type == "cuda",
        )
        self.swapped_out = 0
        """Sequences copied to the host so far."""
        self.swapped_in = 0
        """Sequences copied back so far."""
        self._device = device
        self._copies = copies or copies_for(device.device)
        self._outgoing = Quarantine(device, partial(copied, "out"))
        self._incoming = Quarantine(self.pool, partial(copied, "in"))

    def swap_out(self, reader: Fork) -> bool:
        """Move the reader's private KV to the host; False, with nothing changed, when the host is full.

        Also False when others read all of it, because swapping would free nothing.
        """
        return bool(reader.exclusive_tokens) and reader.swap_out(self)

    def put(self, blocks: Sequence[Run]) -> HostCopy | None:
        """Start copying ``blocks`` of the device pool; None, with nothing changed, when the host is full.

        The caller may release the blocks at once: they are not reused before the copy is done.
        """
        self.poll()
        taken = self._room_for(blocks)
        if taken is None:
            return None
        self._outgoing.add(blocks, self._copies(self.pool, taken, self._device, blocks))
        self.swapped_out += 1
        return HostCopy(self, taken)

    @property
    def queues(self) -> bool:
        """Copies are queued on a device: starting one takes no time."""
        return not isinstance(self._copies, DirectCopies)

    def take(self, blocks: Sequence[Run]) -> tuple[HostCopy, Steps] | None:
        """As `put` where nothing is queued: the caller takes the steps, and keeps ``blocks`` meanwhile."""
        taken = self._room_for(blocks)
        if taken is None:
            return None
        self.swapped_out += 1
        return HostCopy(self, taken), copying(self.pool, taken, self._device, blocks)

    def copying_back(self, source: Sequence[Run], blocks: Sequence[Run]) -> Steps:
        """As `fetch`, in steps: one where copies are queued."""
        if self.queues:
            self.fetch(source, blocks)
            yield
            return
        yield from copying(self._device, blocks, self.pool, source)
        self.swapped_in += 1

    def fetch(self, source: Sequence[Run], blocks: Sequence[Run]) -> None:
        """Start copying ``source`` of the host pool to ``blocks`` of the device pool.

        Later passes see the copy; the host blocks may be released at once.
        """
        self._incoming.add(source, self._copies(self._device, blocks, self.pool, source))
        self.swapped_in += 1

    def _room_for(self, blocks: Sequence[Run]) -> list[Run] | None:
        """As many host blocks. Where copies are queued they are one run: each tensor is one transfer."""
        taken = self.pool.take(sum(run.blocks for run in blocks))
        if taken is not None and self.queues and len(taken) > 1:
            self.pool.blocks.release(taken)
            return None
        return taken

    def wait_for(self, blocks: int) -> None:
        """Wait until finished copies have freed ``blocks`` device blocks, or no copy is left."""
        self._outgoing.reclaim(blocks)

    def poll(self) -> None:
        """Release the blocks of finished copies on both sides; never blocks."""
        self._outgoing.poll()
        self._incoming.poll()


class HostCopy(StoredBlocks):
    """One sequence's KV on the host."""

    def __init__(self, tier: HostTier, taken: list[Run]) -> None:
        self._tier = tier
        self._blocks = taken
        tier.pool.owners.add(self)

    def referenced_blocks(self) -> list[Run]:
        """Its host blocks."""
        return self._blocks

    def load(self, blocks: Sequence[Run]) -> None:
        """See `StoredBlocks.load`."""
        self._tier.fetch(self._blocks, blocks)

    def loading(self, blocks: Sequence[Run]) -> Steps:
        """See `StoredBlocks.loading`."""
        return self._tier.copying_back(self._blocks, blocks)

    def keep(self, blocks: int) -> None:
        """Keep only the oldest ``blocks`` blocks and free the rest on the host."""
        kept, freed = split(self._blocks, blocks)
        self._tier.pool.blocks.release(freed)
        self._blocks = kept

    def release(self) -> None:
        """Free all of it."""
        self.keep(0)
