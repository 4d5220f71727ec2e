"""The GPU backend: Triton kernels that read extents in place, each in its own position frame.

Per layer there is one launch of `attend` over the plan's items and one of `merge`; the first layer of a pass
that has a turner also makes its table of turns. A call reads static device tensors only and waits for
nothing, so a forward pass can be captured in a CUDA graph and replayed after `TritonAttention.prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import LayerCall
from engine.attention.device_metadata import TILES, Bucket, DevicePlan, Layout, Reads, View, lay_out, reads_of
from engine.attention.metadata import BatchPlan
from engine.attention.rotary import FrameTurner
from engine.attention.triton_kernels import LOG2_E, attend, merge, turn_table
from engine.graphs.static import round_up


@dataclass(frozen=True)
class Tiling:
    """How `attend` is compiled: keys of one block, warps of a program, depth of the load pipeline."""

    block: int
    warps: int
    stages: int


def largest_tile(groups: int, widest: int, element_size: int) -> int:
    """The largest of `TILES` whose accumulators stay in registers; fp32 has no matrix instructions."""
    if element_size == 4:
        return TILES[0] if groups <= TILES[0] else TILES[1]
    return TILES[2] if widest <= 128 else TILES[1]


def tiling(tile: int, widest: int, element_size: int) -> Tiling:
    """The tiling for a query ``tile``, the wider padded head dim and the bytes of an element.

    Sized for Hopper's 227 KB of shared memory and 64k registers: three programs of decode tiles fit a
    multiprocessor, with two blocks each in flight; two of the middle tile; one of the largest.
    """
    block = max(16, min(128, 16384 // (widest * element_size)))
    if tile == TILES[0]:
        return Tiling(block, 8 if element_size == 4 else 4, 3)
    if tile == TILES[1]:
        return Tiling(block, 16 if element_size == 4 else 8 if widest > 128 else 4, 2)
    return Tiling(block, 8, 3)


def merge_shape(rows: int) -> tuple[int, int]:
    """Parts and columns `merge` reads at once: a few rows have many parts each, many rows have few."""
    return (16, 128) if rows < 16 else (4, 512)


class TritonAttention:
    """Region attention on a GPU (or in Triton's interpreter, where kernels were imported under it).

    ``programs``: how many programs a launch should have if there is work enough; by default a few waves of
    the device's multiprocessors.
    """

    def __init__(self, *, programs: int | None = None) -> None:
        self._programs = programs
        self._plans: dict[tuple[View, Bucket], DevicePlan] = {}
        self._views: dict[View, torch.device] = {}
        self._tables: dict[tuple[DevicePlan, FrameTurner], torch.Tensor] = {}
        self._batch: BatchPlan | None = None
        self._reads: Reads | None = None
        self._filled: dict[View, DevicePlan] = {}
        self._tabled: set[tuple[DevicePlan, FrameTurner]] = set()

    def prepare(self, plan: BatchPlan) -> tuple[Bucket, ...]:
        """Fill the device tensors for ``plan``, for every kind of layer seen in earlier passes.

        Passes for which it returns the same buckets run the same launches on the same addresses. To capture
        a graph, run one pass (which shows what kinds of layers there are and compiles), then call this and
        capture; to replay it, call this before.
        """
        self._begin(plan)
        return tuple(self._fill(view, device).bucket for view, device in self._views.items())

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        if call.plan is not self._batch:
            self._begin(call.plan)
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        q_heads, rows, key_dim = query.shape
        kv_heads, _, value_dim = call.values.shape
        key_padded, value_padded = _padded(key_dim), _padded(value_dim)
        widest = max(key_padded, value_padded)
        groups = q_heads // kv_heads
        view = View(call.window, kv_heads, groups, largest_tile(groups, widest, query.element_size()))
        plan = self._filled.get(view) or self._fill(view, query.device)
        shape = tiling(plan.bucket.tile, widest, query.element_size())
        scale = call.scale * LOG2_E
        part_out = query.new_empty((plan.bucket.parts, q_heads, value_dim), dtype=torch.float32)
        part_lse = query.new_empty((plan.bucket.parts, q_heads), dtype=torch.float32)
        out = query.new_empty((rows, q_heads, value_dim))
        attend[(plan.bucket.items * kv_heads,)](
            query,
            call.keys,
            call.values,
            plan.items,
            plan.entries,
            plan.targets,
            self._table(plan, call.turner),
            part_out,
            part_lse,
            *query.stride()[:2],
            *call.keys.stride()[:2],
            *call.values.stride()[:2],
            scale if call.softcap is None else 2 * scale / call.softcap,
            (call.softcap or 0.0) * LOG2_E,
            KV_HEADS=kv_heads,
            GROUPS=view.groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PADDED=key_padded,
            VALUE_PADDED=value_padded,
            HALF=call.turner.inv_freq.numel(),
            SOFTCAP=call.softcap is not None,
            TILE=plan.bucket.tile,
            BLOCK=shape.block,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        parts, columns = merge_shape(rows)
        merge[(rows, -(-q_heads * value_dim // columns))](
            part_out,
            part_lse,
            plan.offsets,
            part_lse if call.sinks is None else call.sinks,
            out,
            HEADS=q_heads,
            VALUE_DIM=value_dim,
            SINKS=call.sinks is not None,
            PARTS=parts,
            COLUMNS=columns,
            num_warps=4,
        )
        return out.transpose(0, 1)

    def _begin(self, plan: BatchPlan) -> None:
        self._batch, self._reads = plan, None
        self._filled.clear()
        self._tabled.clear()

    def _fill(self, view: View, device: torch.device) -> DevicePlan:
        assert self._batch is not None
        self._views[view] = device
        if self._reads is None:
            self._reads = reads_of(self._batch)
        layout: Layout = lay_out(self._reads, self._batch.rows, view, self._wanted(device))
        plan = self._plans.get((view, layout.bucket))
        if plan is None:
            plan = self._plans[view, layout.bucket] = DevicePlan(view, layout.bucket, device)
        plan.fill(layout)
        self._filled[view] = plan
        return plan

    def _wanted(self, device: torch.device) -> int:
        if self._programs is None:
            # three programs fit a multiprocessor while decoding, and two rounds of them even out the ends
            multiprocessors = (
                torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
            )
            self._programs = 6 * multiprocessors
        return self._programs

    def _table(self, plan: DevicePlan, turner: FrameTurner) -> torch.Tensor:
        """The turner's table for the plan's turns, made once a pass."""
        half = turner.inv_freq.numel()
        if not half:
            return plan.items  # never read
        key = plan, turner
        table = self._tables.get(key)
        if table is None:
            table = torch.empty(plan.bucket.items, 2, half, device=turner.inv_freq.device)
            self._tables[key] = table
        if key not in self._tabled:
            self._tabled.add(key)
            turn_table[(plan.bucket.items,)](
                plan.turns, turner.inv_freq, table, HALF=half, BLOCK=_padded(half), num_warps=1
            )
        return table


def _padded(dim: int) -> int:
    """The power of two that holds ``dim``, at least what a matrix instruction takes."""
    return max(16, round_up(dim))
