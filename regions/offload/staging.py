"""KV copied in chunks, by steps that any thread may take: between a pool and a file, or between two pools.

Nothing here waits for the stepping thread, and that thread takes none of the steps while it serves.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from regions.allocator import Run
from regions.extents import SlotRange
from regions.kv_tensors import KVPool, pieces
from regions.offload.kv_store import Steps

CHUNK = 1 << 20
"""Most bytes of one step; at least one token of a head, or one block."""


class _Chunk(NamedTuple):
    """Heads and tokens of a tensor that follow each other in a file."""

    heads: tuple[int, int]
    tokens: tuple[int, int]


class Staging:
    """The buffer between a pool's KV and a file, pinned for a GPU, which copies on a stream of its own.

    ``ranges``: the slots, oldest token first. Make it on the thread that copies: passes queued until then
    are waited for.
    """

    def __init__(self, pool: KVPool, ranges: Sequence[SlotRange]) -> None:
        on_gpu = pool.device.type == "cuda"
        self._rows = [tensor.view(torch.uint8) for tensor in pool.tensors]  # [kv_heads, slots, bytes]
        self._ranges, self._tokens = ranges, sum(count for _, count in ranges)
        longest = max(rows.shape[2] for rows in self._rows)
        self._buffer = torch.empty(max(CHUNK, longest), dtype=torch.uint8, pin_memory=on_gpu)
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]  # untyped in torch
            self._stream.wait_stream(torch.cuda.default_stream(pool.device))

    def read(self) -> Iterator[memoryview]:
        """The bytes in the order of a file, a chunk at a time, each until the next."""
        for rows in self._rows:
            for chunk in _chunks(rows.shape[0], self._tokens, rows.shape[2]):
                buffer = self._view(chunk, rows.shape[2])
                self._copy((part, rows[at]) for part, at in self._parts(chunk, buffer))
                yield buffer.numpy().data.cast("B")

    def write(self) -> Iterator[memoryview]:
        """As `read`: what the caller puts into each chunk is copied to the slots before the next."""
        for rows in self._rows:
            for chunk in _chunks(rows.shape[0], self._tokens, rows.shape[2]):
                buffer = self._view(chunk, rows.shape[2])
                yield buffer.numpy().data.cast("B")
                self._copy((rows[at], part) for part, at in self._parts(chunk, buffer))

    def _view(self, chunk: _Chunk, row: int) -> torch.Tensor:
        heads, tokens = (stop - start for start, stop in chunk)
        return self._buffer[: heads * tokens * row].view(heads, tokens, row)

    def _parts(self, chunk: _Chunk, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, slice]]]:
        """Each part of ``buffer`` that is contiguous in the pool, too, and its head and slots there."""
        (first, last), (start, stop) = chunk
        before = 0
        for slot, count in self._ranges:
            low, high = max(start, before), min(stop, before + count)
            if low < high:
                slots = slice(slot + low - before, slot + high - before)
                for head in range(first, last):
                    yield buffer[head - first, low - start : high - start], (head, slots)
            before += count

    def _copy(self, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each second tensor to the first."""
        if self._stream is None:
            for to, of in pairs:
                np.copyto(to.numpy(), of.numpy())  # torch would begin a team of threads beside the worker's
            return
        with torch.cuda.stream(self._stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        self._stream.synchronize()


def copying(target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Steps:
    """Copy ``blocks`` of ``source`` to as many of ``target``, both in host memory, in order."""
    size = source.block_size
    most = max(1, CHUNK // KVPool.block_bytes(source.layers, size, source.dtype))
    for src, dst, count in pieces(blocks, to):
        for first in range(0, count, most):
            n = min(most, count - first)
            there = slice((src + first) * size, (src + first + n) * size)
            here = slice((dst + first) * size, (dst + first + n) * size)
            for mine, theirs in zip(target.tensors, source.tensors, strict=True):
                np.copyto(_bytes(mine[:, here]), _bytes(theirs[:, there]))
            yield


def _bytes(kv: torch.Tensor) -> np.ndarray:
    """The same memory: NumPy has no bfloat16."""
    return kv.view(torch.uint8).numpy()


def _chunks(heads: int, tokens: int, row: int) -> Iterator[_Chunk]:
    """Cut ``[heads, tokens, row]`` bytes: whole heads, or where one is too large, some tokens of it."""
    if tokens * row > CHUNK:
        most = max(1, CHUNK // row)
        for head in range(heads):
            for first in range(0, tokens, most):
                yield _Chunk((head, head + 1), (first, min(first + most, tokens)))
        return
    most = CHUNK // (tokens * row)
    for head in range(0, heads, most):
        yield _Chunk((head, min(head + most, heads)), (0, tokens))
