"""The metadata of one pass for the Triton kernels: static tensors on the device, refilled in place.

Every row of the batch sees one interval of each run of slots it reads, its own new ones included. Rows that
read the same run are processed together in tiles, and tiles are split along their keys until the device has
enough programs (split-K, as in flash decoding). Sizes are rounded up to a `ShapeBucket`: passes with equal
buckets use the same tensors and grids, so a captured CUDA graph can be replayed for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.reads import Ints, Reads, intervals, spans
from engine.attention.triton_kernels import ENTRY_FIELDS, ITEM_FIELDS
from engine.graphs.static import Staging, round_up

TILES = (16, 64, 128)
"""Query rows times grouped heads of one program; matrix instructions need at least 16."""
STEP = 128
"""Splits are multiples of this many keys, so that only the tile's own edges cut a block."""
LEAST_PARTS = 1024
"""Least number of parts: up to here they are cheap (16 MiB at 32 heads of 128), and fewer buckets mean fewer
captured graphs."""
_READ_COST = 128
"""Cost of reading a key, in rows multiplied with it: 512 bytes against 512 operations on Hopper."""


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

    ``programs``: by tile, about how many of them a launch should have.
    """
    low, high, row, shift, run = intervals(reads, view.window)
    order = np.argsort(run, kind="stable")
    low, high, row, shift, run = low[order], high[order], row[order], shift[order], run[order]
    run_first = np.flatnonzero(np.diff(run, prepend=-1))
    run_count = np.diff(run_first, append=len(run))
    keys = np.maximum.reduceat(high, run_first) - np.minimum.reduceat(low, run_first)
    tile = _choose_tile(run_count * view.groups, keys, view)

    within = np.arange(len(run)) - np.repeat(run_first, run_count)
    first = np.flatnonzero(within % (tile // view.groups) == 0)
    count = np.diff(first, append=len(run))
    start, stop = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
    common = np.maximum.reduceat(low, first), np.minimum.reduceat(high, first)

    of_tile, item_start, item_stop = _split(start, stop, programs[tile] // view.kv_heads)
    items = np.zeros((len(of_tile), ITEM_FIELDS), np.int64)
    items[:, 0], items[:, 1] = first[of_tile], count[of_tile]
    items[:, 2], items[:, 3] = item_start, item_stop
    items[:, 4], items[:, 5] = common[0][of_tile], common[1][of_tile]
    items[:, 6] = np.cumsum(items[:, 1]) - items[:, 1]

    # parts are in the order of their rows, so merging a row reads contiguous memory
    part_row = row[spans(items[:, 0], items[:, 1])]
    targets = np.empty(len(part_row), np.int64)
    targets[np.argsort(part_row, kind="stable")] = np.arange(len(part_row))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(part_row, minlength=rows))))
    shifts, shift_index = np.unique(shift, return_inverse=True)
    return Layout(tile, items, np.stack((row, shift_index, low, high), 1), targets, offsets, shifts)


def _choose_tile(members: Ints, keys: Ints, view: View) -> int:
    """The tile with the least cost of reading and multiplying, including padding and repeated reads."""
    tiles = [tile for tile in TILES if view.groups <= tile <= view.largest_tile]
    return min(tiles, key=lambda tile: int(np.sum(-(-members // tile) * keys)) * (_READ_COST + tile))


def _split(start: Ints, stop: Ints, wanted: int) -> tuple[Ints, Ints, Ints]:
    """Cut tiles into about ``wanted`` items of even length; tile, start and stop of each, longest first."""
    length = stop - start
    target = max(STEP, int(length.sum()) // max(wanted, 1))
    size = -(-length // np.maximum(1, (length + target // 2) // target))
    size = -(-size // STEP) * STEP
    pieces = -(-length // size)
    of_tile = np.repeat(np.arange(len(start)), pieces)
    item_start = start[of_tile] + spans(np.zeros_like(pieces), pieces) * size[of_tile]
    item_stop = np.minimum(item_start + size[of_tile], stop[of_tile])
    order = np.argsort(item_start - item_stop, kind="stable")
    return of_tile[order], item_start[order], item_stop[order]


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
