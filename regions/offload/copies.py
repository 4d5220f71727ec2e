"""Copies of blocks between pools that run while forward passes do, and the blocks they keep from reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from regions.allocator import Run
from regions.frozen import SharedBlocks
from regions.pool import KVPool


class Transfer(Protocol):
    """A copy under way, as `torch.cuda.Event` tells of it."""

    def query(self) -> bool:
        """It has read all of its source; never waits."""

    def synchronize(self) -> None:
        """Wait until it has."""


Copies = Callable[[KVPool, Sequence[Run], KVPool, Sequence[Run]], Transfer | None]
"""Begins to copy to (pool, blocks) from (pool, as many blocks); None: the copy is done.

It reads what the passes and copies begun so far have written; those begun from here on see it.
"""


def copy_at_once(target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> None:
    """`Copies` within the host's memory."""
    target.copy_from(source, blocks, to)


class StreamCopies:
    """`Copies` between a GPU and pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Transfer:
        """The calling thread's current stream is the one that computes."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_from(source, blocks, to)
            event: torch.cuda.Event = self._stream.record_event()
        if target.device.type == "cuda":
            computing.wait_event(event)
        return event


def copies_for(device: torch.device) -> Copies:
    """The way to copy between the host and ``device``."""
    return StreamCopies(device) if device.type == "cuda" else copy_at_once


class Quarantine:
    """Blocks that a copy still reads: not to be written before it is done. A `Reclaimer` of their pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pending: deque[tuple[Transfer, SharedBlocks]] = deque()
        pool.add_reclaimer(self)

    def add(self, blocks: Sequence[Run], transfer: Transfer | None) -> None:
        """Keep one more reference to ``blocks`` until ``transfer`` is done."""
        if transfer is not None and not transfer.query():
            self._pending.append((transfer, SharedBlocks(self._pool, blocks)))

    def poll(self) -> None:
        """Release what was copied meanwhile; never waits."""
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()[1].release()

    @property
    def reclaimable(self) -> int:
        """Blocks that will be free when their copies are done."""
        references = self._pool.blocks.references
        return sum(
            int((references[start:stop] == 1).sum())
            for _, shared in tuple(self._pending)  # the metrics thread reads this
            for start, stop in shared.blocks
        )

    def reclaim(self, blocks: int) -> None:
        """Wait for copies, the oldest first, until ``blocks`` more blocks are free.

        That takes less than computing again what a preempted reader loses.
        """
        enough = self._pool.blocks.free_blocks + blocks
        self.poll()
        while self._pending and self._pool.blocks.free_blocks < enough:
            self._pending[0][0].synchronize()
            self._pending.popleft()[1].release()
