"""The attention backend alone: how near reading KV comes to the bandwidth of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu.shapes import Plan
from engine.attention.base import LayerCall
from engine.attention.metadata import AttentionMetadata, Packed
from engine.attention.triton import TritonAttention
from engine.engine import Engine
from engine.graphs.runner import CudaCapture
from regions.extents import Extent, Placement


def measure(engine: Engine, plan: Plan) -> Iterator[tuple[int, int, float]]:
    """(rows, context, GB/s of KV read) for one reader of contexts of the plan's curve.

    All layers' pools are read in turn, so that no cache of the device holds what is read next.
    """
    for rows in plan.attention_rows:
        for context in plan.curve:
            if context + rows <= engine.pool.total_blocks * engine.pool.block_size:
                yield rows, context, _bandwidth(engine, rows, context)


@torch.inference_mode()
def _bandwidth(engine: Engine, rows: int, context: int) -> float:
    model, pool = engine.model, engine.pool
    heads = int(model.model.config.num_attention_heads)
    placement = Placement((Extent(0, context, 0, 0),), ((context, rows),), context, 0)
    plan = AttentionMetadata([Packed(0, rows, placement)], model.device)
    calls = []
    for keys, values, rotation in zip(pool.keys, pool.values, model.rotations, strict=True):
        keys.normal_()
        values.normal_()
        query = torch.randn(heads, rows, keys.shape[-1], dtype=model.dtype, device=model.device)
        new = slice(context, context + rows)
        scale = keys.shape[-1] ** -0.5
        calls.append(
            LayerCall(query, keys[:, new], values[:, new], keys, values, scale, None, None, plan, rotation)
        )
    seconds = _seconds(engine, calls)
    read = sum(
        context
        * call.keys.shape[0]
        * (call.keys.shape[-1] + call.values.shape[-1])
        * call.keys.element_size()
        for call in calls
    )
    return read / seconds / 1e9


def _seconds(engine: Engine, calls: list[LayerCall], repeats: int = 7) -> float:
    """The median time of all calls one behind the other; on a GPU replayed from a graph, by its own clock."""

    def run() -> torch.Tensor:
        for call in calls:
            output = engine.attention(call)
        return output

    run()
    if engine.model.device.type != "cuda":
        return sorted(_host_seconds(run) for _ in range(repeats))[repeats // 2]
    if isinstance(engine.attention, TritonAttention):
        engine.attention.prepare(calls[0].metadata)
        run = CudaCapture()(run)
    return sorted(_device_seconds(run) for _ in range(repeats))[repeats // 2]


def _host_seconds(run: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _device_seconds(run: Callable[[], torch.Tensor]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
