"""Copies of blocks between pools while forward passes run, and the blocks they read."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from regions.allocator import Run
from regions.frozen import SharedBlocks
from regions.kv_tensors import KVPool


class Transfer(Protocol):
    """A running copy, with the interface of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has read all of its source; never blocks."""

    def synchronize(self) -> None:
        """Block until it has."""


Copies = Callable[[KVPool, Sequence[Run], KVPool, Sequence[Run]], Transfer | None]
"""Starts a copy to (pool, blocks) from (pool, as many blocks); None: the copy is done.

It reads what earlier passes and copies wrote; later passes and copies see it.
"""


def copy_at_once(target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> None:
    """`Copies` in host memory."""
    target.copy_from(source, blocks, to)


class StreamCopies:
    """`Copies` between a GPU and pinned memory, on their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Transfer:
        """Start a copy after the work queued on the calling thread's current stream."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_from(source, blocks, to)
            event: torch.cuda.Event = self._stream.record_event()
        if target.device.type == "cuda":
            computing.wait_event(event)
        return event


def copies_for(device: torch.device) -> Copies:
    """The `Copies` between the host and ``device``."""
    return StreamCopies(device) if device.type == "cuda" else copy_at_once


class Quarantine:
    """Blocks that running copies read and nothing may write yet. A `Reclaimer` of their pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pending: deque[tuple[Transfer, SharedBlocks]] = deque()
        pool.add_reclaimer(self)

    def add(self, blocks: Sequence[Run], transfer: Transfer | None) -> None:
        """Keep a reference to ``blocks`` until ``transfer`` is done."""
        if transfer is not None and not transfer.query():
            self._pending.append((transfer, SharedBlocks(self._pool, blocks)))

    def poll(self) -> None:
        """Release the blocks of finished copies; never blocks."""
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()[1].release()

    @property
    def reclaimable(self) -> int:
        """Blocks that become free when their copies are done."""
        references = self._pool.blocks.references
        return sum(
            int((references[start:stop] == 1).sum())
            for _, shared in tuple(self._pending)  # the metrics thread reads this
            for start, stop in shared.blocks
        )

    def reclaim(self, blocks: int) -> None:
        """Wait for copies, the oldest first, until ``blocks`` more blocks are free.

        Waiting takes less time than recomputing a preempted reader.
        """
        enough = self._pool.blocks.free_blocks + blocks
        self.poll()
        while self._pending and self._pool.blocks.free_blocks < enough:
            self._pending[0][0].synchronize()
            self._pending.popleft()[1].release()
