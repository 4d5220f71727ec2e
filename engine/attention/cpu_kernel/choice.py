"""Chooses the CPU backend for a model at start: the compiled kernel, if it serves and proves itself."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from engine.attention.base import Attention, LayerCall
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_kernel.backend import CpuKernelAttention, serves
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.reference import ReferenceAttention
from engine.attention.rotary import FrameRotation
from regions.extents import Extent, Placement
from regions.kv_codes import numbers, stored
from regions.kv_tensors import LayerShape

log = logging.getLogger(__name__)

_WRONG = 2.0**-12
"""A difference to the reference, relative to the largest value, that no order of float32 sums explains:
sums of a hundred terms differ by 2^-20."""


def cpu_attention(
    layers: Iterable[LayerShape], dtype: torch.dtype, kernel: Callable[[], Attention] = CpuKernelAttention
) -> Attention:
    """``kernel`` or, where that does not serve these ``layers`` with KV of ``dtype``, `CpuAttention`."""
    shapes = set(layers)
    if not all(serves(shape.key_dim, shape.value_dim, dtype) for shape in shapes):
        log.info("attention runs on torch's kernels: heads of %s in %s", shapes, dtype)
        return CpuAttention()
    try:
        chosen = kernel()
        wrong = max(disagreement(chosen, shape, dtype) for shape in shapes)
    except Exception:
        log.exception("attention runs on torch's kernels: our own does not compile or run here")
        return CpuAttention()
    if not wrong <= _WRONG:
        log.error("attention runs on torch's kernels: our own is off by %.2g on this machine", wrong)
        return CpuAttention()
    return chosen


def disagreement(attention: Attention, shape: LayerShape, dtype: torch.dtype) -> float:
    """The largest difference to the definition on a small pass, relative to the largest value."""
    call = _small_pass(shape, dtype)
    names = "new_key", "new_value", "keys", "values"
    exact: dict[str, Any] = {name: numbers(getattr(call, name)).float() for name in names}
    worst = 0.0
    for softcap in (None, 3.0):
        ours = attention(replace(call, softcap=softcap))
        theirs = ReferenceAttention()(replace(call, softcap=softcap, **exact))
        off = (ours - theirs).abs().max() / theirs.abs().max()
        worst = max(worst, float(off.nan_to_num(torch.inf)))
    return worst


def _small_pass(shape: LayerShape, dtype: torch.dtype) -> LayerCall:
    """Nine rows of two readers over a shared context in another frame, and their own new keys."""
    heads, groups, length = min(2, shape.kv_heads), 2, 150
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        stored(torch.randn(heads, length + 20, dim, generator=generator), dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    context = (Extent(3, length - 3, 0, 0),)
    sequences = [
        PackedRows(0, 5, Placement(context, ((length, 5),), length, 7)),
        PackedRows(5, 9, Placement(context, ((length + 9, 4),), length, 0)),
    ]
    new = [*range(length, length + 5), *range(length + 9, length + 13)]
    return LayerCall(
        torch.randn(heads * groups, len(new), shape.key_dim, generator=generator),
        numbers(keys[:, new]),
        numbers(values[:, new]),
        keys,
        values,
        shape.key_dim**-0.5,
        None,
        None,
        AttentionMetadata(sequences),
        FrameRotation(0.7 ** torch.arange(shape.key_dim // 2)),
    )
