"""KV copied in chunks, by steps that any thread may take: between a pool and a file, or between two pools.

Nothing here waits for the stepping thread, and that thread takes none of the steps while it serves.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from regions.allocator import Run
from regions.extents import SlotRange
from regions.kv_tensors import KVPool, pieces, slots_on
from regions.offload.kv_store import Steps

CHUNK = 1 << 20
"""Most bytes of one step on a CPU; at least one token of a head, or one block."""


class _Part(NamedTuple):
    """Heads and tokens of a tensor that follow each other in a file."""

    heads: tuple[int, int]
    tokens: tuple[int, int]


class Staging:
    """The buffer between a pool's KV and a file, pinned for a GPU, which copies on a stream of its own.

    A GPU gathers and scatters, and the buffer has room for the largest tensor: each is one transfer.
    ``ranges``: the slots, oldest token first. Make it on the thread that copies: passes queued until then
    are waited for.
    """

    def __init__(self, pool: KVPool, ranges: Sequence[SlotRange]) -> None:
        on_gpu = pool.device.type == "cuda"
        # [kv_heads, slots, numbers or bytes]
        self._rows = pool.tensors if on_gpu else [tensor.view(torch.uint8) for tensor in pool.tensors]
        self._ranges, self._tokens = ranges, sum(count for _, count in ranges)
        largest = max(rows.shape[0] * self._tokens * _row_bytes(rows) for rows in self._rows)
        self._most = largest if on_gpu else CHUNK
        longest = max(_row_bytes(rows) for rows in self._rows)
        self._buffer = torch.empty(max(self._most, longest), dtype=torch.uint8, pin_memory=on_gpu)
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]  # untyped in torch
            self._stream.wait_stream(torch.cuda.default_stream(pool.device))
            with torch.cuda.stream(self._stream):
                self._slots = slots_on(self._rows[0].device, ranges)

    def read(self) -> Iterator[memoryview]:
        """The bytes in the order of a file, a chunk at a time, each until the next."""
        for rows in self._rows:
            for part in _cut(rows, self._tokens, self._most):
                buffer = self._view(rows, part)
                self._gather(rows, part, buffer)
                yield from _chunks(buffer)

    def write(self) -> Iterator[memoryview]:
        """As `read`: what the caller puts into the chunks is in the slots once the steps have ended."""
        for rows in self._rows:
            for part in _cut(rows, self._tokens, self._most):
                buffer = self._view(rows, part)
                yield from _chunks(buffer)
                self._scatter(rows, part, buffer)

    def _view(self, rows: torch.Tensor, part: _Part) -> torch.Tensor:
        heads, tokens = (stop - start for start, stop in part)
        size = heads * tokens * _row_bytes(rows)
        return self._buffer[:size].view(rows.dtype).view(heads, tokens, rows.shape[2])

    def _gather(self, rows: torch.Tensor, part: _Part, buffer: torch.Tensor) -> None:
        if self._stream is None:
            for here, there in self._pieces(rows, part, buffer):
                np.copyto(here, there)  # torch would begin a team of threads beside the worker's
            return
        with torch.cuda.stream(self._stream):
            buffer.copy_(rows.index_select(1, self._slots), non_blocking=True)
        self._stream.synchronize()

    def _scatter(self, rows: torch.Tensor, part: _Part, buffer: torch.Tensor) -> None:
        if self._stream is None:
            for here, there in self._pieces(rows, part, buffer):
                np.copyto(there, here)
            return
        with torch.cuda.stream(self._stream):
            packed = torch.empty_like(buffer, device=rows.device).copy_(buffer, non_blocking=True)
            rows.index_copy_(1, self._slots, packed)
        self._stream.synchronize()

    def _pieces(
        self, rows: torch.Tensor, part: _Part, buffer: torch.Tensor
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each piece of ``buffer`` that is contiguous in the pool, too, and the same there."""
        (first, last), (start, stop) = part
        before = 0
        for slot, count in self._ranges:
            low, high = max(start, before), min(stop, before + count)
            if low < high:
                slots = slice(slot + low - before, slot + high - before)
                for head in range(first, last):
                    yield buffer[head - first, low - start : high - start].numpy(), rows[head, slots].numpy()
            before += count


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


def _row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one token of a head."""
    return rows.shape[2] * rows.element_size()


def _cut(rows: torch.Tensor, tokens: int, most: int) -> Iterator[_Part]:
    """Cut ``tokens`` of each head: whole heads in at most ``most`` bytes, or some tokens of a larger one."""
    heads, row = rows.shape[0], _row_bytes(rows)
    if tokens * row > most:
        step = max(1, most // row)
        for head in range(heads):
            for first in range(0, tokens, step):
                yield _Part((head, head + 1), (first, min(first + step, tokens)))
        return
    step = most // (tokens * row)
    for head in range(0, heads, step):
        yield _Part((head, min(head + step, heads)), (0, tokens))


def _chunks(buffer: torch.Tensor) -> Iterator[memoryview]:
    whole = buffer.view(torch.uint8).numpy().data.cast("B")
    for start in range(0, len(whole), CHUNK):
        yield whole[start : start + CHUNK]
