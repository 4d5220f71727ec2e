"""The CPU attention kernel alone, beside torch's flash kernel on the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.figures import Figure, Setting
from bench.run import SuiteRun, Turns
from engine.attention.base import LayerCall
from engine.attention.cpu_kernel.backend import CpuKernelAttention
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.rotary import FrameRotation
from regions.extents import Extent, Placement

_HEADS, _DIM = 4, 64
_POOLS = 6
"""Read in turn, as a model's layers are: together more than the caches hold."""
_LONG_ROWS = 500
"""From here on one pool is enough, as arithmetic decides."""


def kernel(run: SuiteRun) -> Iterator[Figure]:
    """One layer's attention on the CPU: new rows over one extent and each other, four heads of 64, float32
    and bfloat16. The reference is torch's own flash kernel on the same extent in the same run. Several pools
    take turns, as a model's layers do. The fastest round by each one's operations, and by its keys and values
    read once.
    """
    torch.set_num_threads(run.threads)
    rows, keys, repeats = run.sized(((1, 3, 18, 102, 612, 2970), (2_900, 10_000), 9), ((1, 18), (200,), 2))
    for dtype in (torch.float32, torch.bfloat16):
        pools = [torch.randn(2, _HEADS, max(keys) + max(rows), _DIM).to(dtype) for _ in range(_POOLS)]
        for length in keys:
            for count in rows:
                yield from _measured(pools[: 1 if count > _LONG_ROWS else _POOLS], count, length, repeats)


def _measured(pools: list[torch.Tensor], rows: int, keys: int, repeats: int) -> Iterator[Figure]:
    attention, dtype = CpuKernelAttention(), pools[0].dtype
    query = torch.randn(_HEADS, rows, _DIM).to(dtype)
    sequence = PackedRows(0, rows, Placement((Extent(0, keys, 0, 0),), ((keys, rows),), keys, 0))
    metadata = AttentionMetadata([sequence])  # planned once, as for the layers of a pass
    calls = [_call(query, pool, metadata) for pool in pools]

    def ours() -> None:
        for call in calls:
            attention(call)

    def theirs() -> None:
        for pool in pools:
            own, values = pool[:, None, :, :keys]
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query[None], own, values)

    turns = Turns(ours, theirs)
    for _ in range(repeats + 1):
        turns()
    ns = [min(each[1:]) / len(pools) for each in turns.ns]
    setting: Setting = {"": str(dtype).removeprefix("torch."), "rows": rows, "keys": keys}
    figure = partial(Figure, setting=setting, against="torch's kernel", n=repeats)
    met, read = rows * (keys + (rows + 1) / 2), keys + rows
    operations, size = 4 * _HEADS * _DIM, 2 * _HEADS * _DIM * dtype.itemsize
    for name, unit, own, other in (
        ("arithmetic", "GFLOP/s", operations * met, operations * rows * keys),
        ("reading", "GB/s", size * read, size * keys),
    ):
        yield figure(name, own / ns[0], unit, reference=other / ns[1])


def _call(query: torch.Tensor, pool: torch.Tensor, metadata: AttentionMetadata) -> LayerCall:
    """``query`` [heads, rows, dim] over ``pool`` [2, heads, slots, dim]."""
    keys, values = pool
    new = slice(0, query.shape[1])  # the kernel reads them from the pool
    rotation = FrameRotation(torch.empty(0))
    return LayerCall(
        query, keys[:, new], values[:, new], keys, values, _DIM**-0.5, None, None, metadata, rotation
    )
