"""The GPU backend: Triton kernels that read extents in place, each in its own position frame.

Each layer launches `attend` once over the metadata's items and `merge` once; the first layer of a pass with a
rotation also computes its table of shifts. A call reads only static device tensors and never blocks, so a
forward pass can be captured in a CUDA graph and replayed after `TritonAttention.prepare`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from triton.runtime import driver  # type: ignore[import-untyped]  # ships no type information

from engine.attention.base import LayerCall
from engine.attention.device_metadata import (
    TILES,
    DeviceMetadata,
    Layout,
    ShapeBucket,
    View,
    lay_out,
)
from engine.attention.metadata import AttentionMetadata
from engine.attention.reads import Reads, reads_of
from engine.attention.rotary import FrameRotation
from engine.attention.triton_kernels import LOG2_E, attend, merge, rotation_table
from engine.graphs.static import round_up


@dataclass(frozen=True)
class Tiling:
    """Compile-time parameters of `attend`: keys per block, warps per program, stages of the load pipeline."""

    block: int
    warps: int
    stages: int


def largest_tile(groups: int, widest: int, element_size: int) -> int:
    """The largest of `TILES` whose accumulators fit the registers; fp32 has no matrix instructions."""
    if element_size == 4:
        return TILES[0] if groups <= TILES[0] else TILES[1]
    return TILES[2] if widest <= 128 else TILES[1]


HOPPER_BYTES = 227 << 10
"""Shared memory of a program on Hopper; from Ampere to Ada it is 99 to 163 KB."""


def tiling(tile: int, widest: int, element_size: int, shared: int = HOPPER_BYTES) -> Tiling:
    """The tiling for a query ``tile``, the wider padded head dim and the bytes of an element.

    ``shared``: memory of one program, bytes.

    Sized for Hopper's 227 KB of shared memory and 64k registers: a multiprocessor fits three programs of
    decode tiles, with two blocks each in flight, two programs of the middle tile, or one of the largest. Of
    59 tilings these were the fastest on an H200, or within 2 % of it: `docs/benchmarks.md`.
    """
    block = max(16, min(128, 16384 // (widest * element_size)))
    if tile == TILES[0]:
        return Tiling(block, 8 if element_size == 4 else 4, 3)
    if tile == TILES[1]:
        if element_size == 4 or widest > 128:
            return Tiling(block, 16 if element_size == 4 else 8, 2)
        return Tiling(block, 4, 3)
    return Tiling(min(128, 2 * block) if shared >= HOPPER_BYTES else block, 8, 3)


RESIDENT = dict(zip(TILES, (2, 2, 1), strict=True))
"""Programs of each tile that one multiprocessor runs at once, or fewer where more bring nothing."""


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; in the interpreter Hopper's."""
    if device.type != "cuda":
        return HOPPER_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def early(device: torch.device) -> Mapping[str, bool]:
    """The launch options by which a kernel starts before the one in front of it has ended, if it can."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def merge_shape(rows: int) -> tuple[int, int]:
    """Parts and columns that `merge` reads at once: with few rows each has many parts, with many rows few."""
    return (32, 64) if rows < 16 else (4, 512)


class TritonAttention:
    """Region attention on a GPU, or in Triton's interpreter if the kernels were imported under it.

    ``programs``: the target number of programs of a launch, by default as many as the device's
    multiprocessors run at once, see `RESIDENT`.
    """

    def __init__(self, *, programs: int | None = None) -> None:
        self._programs = None if programs is None else dict.fromkeys(TILES, programs)
        self._plans: dict[tuple[View, ShapeBucket], DeviceMetadata] = {}
        self._views: dict[View, torch.device] = {}
        self._tables: dict[tuple[DeviceMetadata, FrameRotation], torch.Tensor] = {}
        self._batch: AttentionMetadata | None = None
        self._reads: Reads | None = None
        self._filled: dict[View, DeviceMetadata] = {}
        self._filled_tables: set[tuple[DeviceMetadata, FrameRotation]] = set()

    def prepare(self, metadata: AttentionMetadata) -> tuple[ShapeBucket, ...]:
        """Fill the device tensors for ``metadata``, for every kind of layer seen in earlier passes.

        Passes with equal results launch the same kernels on the same addresses. To capture a graph, run one
        pass, which finds the kinds of layers and compiles, then call this and capture. To replay it, call
        this first.
        """
        self._begin(metadata)
        return tuple(self._fill(view, device).bucket for view, device in self._views.items())

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        if call.metadata is not self._batch:
            self._begin(call.metadata)
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        q_heads, _, key_dim = query.shape
        kv_heads, _, value_dim = call.values.shape
        key_padded, value_padded = _padded(key_dim), _padded(value_dim)
        widest = max(key_padded, value_padded)
        groups = q_heads // kv_heads
        view = View(call.window, kv_heads, groups, largest_tile(groups, widest, query.element_size()))
        metadata = self._filled.get(view) or self._fill(view, query.device)
        shape = tiling(metadata.bucket.tile, widest, query.element_size(), shared_bytes(query.device))
        scale = call.scale * LOG2_E
        part_out = query.new_empty((metadata.bucket.parts, q_heads, value_dim), dtype=torch.float32)
        part_lse = query.new_empty((metadata.bucket.parts, q_heads), dtype=torch.float32)
        attend[(metadata.bucket.items * kv_heads,)](
            query,
            call.keys,
            call.values,
            metadata.items,
            metadata.entries,
            metadata.targets,
            self._table(metadata, call.rotation),
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
            HALF=call.rotation.inv_freq.numel(),
            SOFTCAP=call.softcap is not None,
            TILE=metadata.bucket.tile,
            BLOCK=shape.block,
            **early(query.device),
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        return self._merged(call, metadata, part_out, part_lse)

    def _merged(
        self, call: LayerCall, metadata: DeviceMetadata, part_out: torch.Tensor, part_lse: torch.Tensor
    ) -> torch.Tensor:
        """The output of the parts."""
        rows, (_, q_heads, value_dim) = call.query.shape[1], part_out.shape
        out = call.query.new_empty((rows, q_heads, value_dim))
        parts, columns = merge_shape(rows)
        merge[(rows, -(-q_heads * value_dim // columns))](
            part_out,
            part_lse,
            metadata.offsets,
            part_lse if call.sinks is None else call.sinks,
            out,
            HEADS=q_heads,
            VALUE_DIM=value_dim,
            SINKS=call.sinks is not None,
            PARTS=parts,
            COLUMNS=columns,
            **early(call.query.device),
            num_warps=4,
        )
        return out.transpose(0, 1)

    def _begin(self, metadata: AttentionMetadata) -> None:
        self._batch, self._reads = metadata, None
        self._filled.clear()
        self._filled_tables.clear()

    def _fill(self, view: View, device: torch.device) -> DeviceMetadata:
        assert self._batch is not None
        self._views[view] = device
        if self._reads is None:
            self._reads = reads_of(self._batch)
        layout: Layout = lay_out(self._reads, self._batch.rows, view, self._wanted(device))
        metadata = self._plans.get((view, layout.bucket))
        if metadata is None:
            metadata = self._plans[view, layout.bucket] = DeviceMetadata(view, layout.bucket, device)
        metadata.fill(layout)
        self._filled[view] = metadata
        return metadata

    def _wanted(self, device: torch.device) -> Mapping[int, int]:
        if self._programs is None:
            processors = (
                torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
            )
            self._programs = {tile: resident * processors for tile, resident in RESIDENT.items()}
        return self._programs

    def _table(self, metadata: DeviceMetadata, rotation: FrameRotation) -> torch.Tensor:
        """The rotation's table for the metadata's shifts, computed once per pass."""
        half = rotation.inv_freq.numel()
        if not half:
            return metadata.items  # never read
        key = metadata, rotation
        table = self._tables.get(key)
        if table is None:
            table = torch.empty(metadata.bucket.items, 2, half, device=rotation.inv_freq.device)
            self._tables[key] = table
        if key not in self._filled_tables:
            self._filled_tables.add(key)
            rotation_table[(metadata.bucket.items,)](
                metadata.shifts, rotation.inv_freq, table, HALF=half, BLOCK=_padded(half), num_warps=1
            )
        return table


def _padded(dim: int) -> int:
    """The next power of two from ``dim``, at least the minimum of a matrix instruction."""
    return max(16, round_up(dim))
