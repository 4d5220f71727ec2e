"""Copies of blocks between pools that run while forward passes do, and the blocks they keep from reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from regions.allocator import Run
from regions.frozen import SharedBlocks
from regions.pool import KVPool


class Transfer(Protocol):
    """A copy that was begun."""

    @property
    def done(self) -> bool:
        """It has read all of its source; never waits."""

    def wait(self) -> None:
        """Block until it is done."""


class Copies(Protocol):
    """Begins copies and keeps their order: a later one sees what an earlier one wrote."""

    def start(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run], /) -> Transfer:
        """Copy ``blocks`` of ``source`` to as many blocks ``to`` of ``target``.

        The copy reads what the passes queued so far have written; passes queued from here on see it.
        """


class Completed:
    """A transfer that was over when it was begun."""

    done = True

    def wait(self) -> None:
        """Nothing to wait for."""


class DirectCopies:
    """Copies within the host's memory: made at once."""

    def start(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run], /) -> Transfer:
        """See `Copies.start`."""
        target.copy_from(source, blocks, to)
        return Completed()


class _StreamTransfer:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch gives it no types

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopies:
    """Copies between a GPU and pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def start(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run], /) -> Transfer:
        """See `Copies.start`; the calling thread's current stream is the one that computes."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_from(source, blocks, to)
            event = self._stream.record_event()
        if target.device.type == "cuda":
            computing.wait_event(event)
        return _StreamTransfer(event)


def copies_for(device: torch.device) -> Copies:
    """The way to copy between the host and ``device``."""
    return StreamCopies(device) if device.type == "cuda" else DirectCopies()


class Quarantine:
    """Blocks that a copy still reads: nobody writes them before it is done. A `Reclaimer` of their pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pending: deque[tuple[Transfer, SharedBlocks]] = deque()
        pool.add_reclaimer(self)

    def add(self, blocks: Sequence[Run], transfer: Transfer) -> None:
        """Keep one more reference to ``blocks`` until ``transfer`` is done."""
        if not transfer.done:
            self._pending.append((transfer, SharedBlocks(self._pool, blocks)))

    def poll(self) -> None:
        """Release what was copied meanwhile; never waits."""
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()[1].release()

    @property
    def reclaimable(self) -> int:
        """Blocks that only a copy under way keeps from being free."""
        references = self._pool.blocks.references
        return sum(
            int((references[start:stop] == 1).sum())
            for _, shared in tuple(self._pending)  # the metrics thread reads this
            for start, stop in shared.blocks
        )

    def reclaim(self, blocks: int) -> None:
        """Wait for as many copies as free ``blocks`` blocks, the oldest first.

        Waiting for a copy under way takes less than computing again what a preempted reader loses.
        """
        enough = self._pool.blocks.free_blocks + blocks
        self.poll()
        while self._pending and self._pool.blocks.free_blocks < enough:
            self._pending[0][0].wait()
            self._pending.popleft()[1].release()
