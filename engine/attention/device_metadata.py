"""The metadata of one pass for the Triton kernels: static tensors on the device, refilled in place.

Every row of the batch sees one interval of each run of slots it reads, its own new ones included. These are
cut into items (`engine.attention.layout`). Sizes are rounded up to a `ShapeBucket`: passes with equal
buckets use the same tensors and grids, so a captured CUDA graph can be replayed for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.layout.cut import laid_out
from engine.attention.reads import Ints, Reads
from engine.attention.triton_kernels import ENTRY_FIELDS, ITEM_FIELDS
from engine.graphs.static import Staging, round_up

TILES = (16, 64, 128)
"""Query rows times grouped heads of one program; matrix instructions need at least 16."""
LEAST_PARTS = 1024
"""Least number of parts: up to here they are cheap (16 MiB at 32 heads of 128), and fewer buckets mean fewer
captured graphs."""


@dataclass(frozen=True)
class View:
    """How layers of one kind read a batch; ``groups``: query heads per KV head.

    ``largest_tile``: the largest of `TILES` that fits the registers at the layer's head size. Raises
    ValueError when one row's grouped heads do not fit it.
    """

    window: int | None
    kv_heads: int
    groups: int
    largest_tile: int

    def __post_init__(self) -> None:
        if self.groups > self.largest_tile:
            raise ValueError(f"{self.groups} query heads share a KV head: at most {self.largest_tile} can")


class ShapeBucket(NamedTuple):
    """The sizes that determine tensors and grids.

    ``rows`` of the batch, work ``items``, rows of a ``tile``, and ``parts``: the rows of all items together.
    """

    rows: int
    items: int
    tile: int
    parts: int


@dataclass(frozen=True)
class Layout:
    """Metadata laid out for one view; all int64.

    ``items`` [., ITEM_FIELDS], the longest first; ``entries`` [., ENTRY_FIELDS]; ``targets``: the part that
    each entry of each item writes; ``offsets`` [rows + 1]: start of each row's parts; ``shifts``: distinct
    shifts.
    """

    tile: int
    items: Ints
    entries: Ints
    targets: Ints
    offsets: Ints
    shifts: Ints

    @cached_property
    def bucket(self) -> ShapeBucket:
        """The smallest bucket that fits it."""
        items = max(32, len(self.items), len(self.shifts))
        parts = max(LEAST_PARTS, len(self.targets))
        return ShapeBucket(round_up(len(self.offsets) - 1), round_up(items), self.tile, round_up(parts))


def lay_out(reads: Reads, rows: int, view: View, programs: Mapping[int, int]) -> Layout:
    """Cut the reads of ``rows`` rows into items, if there is enough work.

    ``programs``: by tile, how many of them the device runs at once.
    """
    tiles = [tile for tile in TILES if view.groups <= tile <= view.largest_tile]
    resident = [programs[tile] // view.kv_heads for tile in tiles]
    window = -1 if view.window is None else view.window
    sizes = np.array(tiles), np.array(resident)
    return Layout(*laid_out(np.array(reads), rows, window, view.groups, *sizes, ITEM_FIELDS))


class DeviceMetadata:
    """The tensors of one view and bucket; `fill` rewrites them in place with a single copy to the device."""

    def __init__(self, view: View, bucket: ShapeBucket, device: torch.device) -> None:
        self.view = view
        self.bucket = bucket
        sizes = {
            "items": bucket.items * ITEM_FIELDS,
            "entries": bucket.parts * ENTRY_FIELDS,
            "targets": bucket.parts,
            "shifts": bucket.items,
            "offsets": bucket.rows + 1,
        }
        self._staging = Staging(sizes, torch.int32, device)
        self.items, self.entries, self.targets, self.shifts, self.offsets = self._staging.parts.values()

    def fill(self, layout: Layout) -> None:
        """Load ``layout``, which must have this bucket. The copy is queued on the current stream."""
        self._staging.fill(
            items=(layout.items.ravel(), 0),  # surplus items have no entries
            entries=(layout.entries.ravel(), 0),
            targets=(layout.targets, 0),
            shifts=(layout.shifts, 0),
            offsets=(layout.offsets, int(layout.offsets[-1])),  # rows of padding have no parts
        )
