"""Copies of blocks between pools while forward passes run, and the blocks they read."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from regions.allocator import Run
from regions.frozen import SharedBlocks
from regions.kv_tensors import KVPool


class Transfer(Protocol):
    """A running copy."""

    def query(self) -> bool:
        """Whether it has read all of its source; never blocks."""

    def synchronize(self) -> None:
        """Block until it has."""

    @property
    def took_ns(self) -> int:
        """Time of the copy itself, without what it waited for; only of one that is done."""


Copies = Callable[[KVPool, Sequence[Run], KVPool, Sequence[Run]], Transfer]
"""Starts a copy to (pool, blocks) from (pool, as many blocks).

It reads what earlier passes and copies wrote; later passes and copies see it.
"""


@dataclass(frozen=True)
class Done:
    """A `Transfer` that is done."""

    took_ns: int

    def query(self) -> bool:
        """See `Transfer`."""
        return True

    def synchronize(self) -> None:
        """See `Transfer`."""


class DirectCopies:
    """`Copies` in host memory, done at once. ``clock``: ns."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock

    def __call__(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Done:
        """Copy on the calling thread."""
        began = self._clock()
        target.copy_from(source, blocks, to)
        return Done(self._clock() - began)


class StreamCopies:
    """`Copies` between a GPU and pinned memory, on their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Transfer:
        """Start a copy after the work queued on the calling thread's current stream."""
        computing = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            self._stream.record_event(began)
            target.copy_from(source, blocks, to)
            self._stream.record_event(ended)
        if target.device.type == "cuda":
            computing.wait_event(ended)
        return _Queued(began, ended)


class _Queued:
    """A `Transfer` between two events of a stream."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def query(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def synchronize(self) -> None:
        self._ended.synchronize()

    @property
    def took_ns(self) -> int:
        milliseconds: float = self._began.elapsed_time(self._ended)
        return round(milliseconds * 1e6)


def copies_for(device: torch.device) -> Copies:
    """The `Copies` between the host and ``device``."""
    return StreamCopies(device) if device.type == "cuda" else DirectCopies()


class Quarantine:
    """Blocks that running copies read and nothing may write yet. A `Reclaimer` of their pool.

    ``copied``: called after each copy with its blocks and its time, ns.
    """

    def __init__(self, pool: KVPool, copied: Callable[[int, int], None]) -> None:
        self._pool, self._copied = pool, copied
        self._pending: deque[tuple[Transfer, SharedBlocks]] = deque()
        pool.add_reclaimer(self)

    def add(self, blocks: Sequence[Run], transfer: Transfer) -> None:
        """Keep a reference to ``blocks`` until ``transfer`` is done."""
        if transfer.query():
            self._copied(sum(run.blocks for run in blocks), transfer.took_ns)
        else:
            self._pending.append((transfer, SharedBlocks(self._pool, blocks)))

    def poll(self) -> None:
        """Release the blocks of finished copies; never blocks."""
        while self._pending and self._pending[0][0].query():
            self._finish()

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
            self._finish()

    def _finish(self) -> None:
        """Note the oldest copy, which is done, and release its blocks."""
        transfer, shared = self._pending.popleft()
        self._copied(sum(run.blocks for run in shared.blocks), transfer.took_ns)
        shared.release()
