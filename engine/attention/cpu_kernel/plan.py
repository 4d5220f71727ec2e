"""What the kernel does for one pass in layers of one kind: tasks, the runs that each reads, and its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.attention.cpu_kernel.memory import ENTRY_FIELDS, SEGMENT_FIELDS
from engine.attention.reads import Ints, Reads, intervals
from engine.cpu.vectors import MOST_LINES, TILE

_BLOCK_FLOATS = 1 << 16
"""Queries and outputs of a block: 256 KiB stay in a core's second cache while tiles of keys go by."""
_WANTED_TASKS = 32
"""Enough for threads to share evenly; with fewer, blocks are cut along their keys."""
_LEAST_TILES = 8
"""Of a piece of a block: a piece costs each of its lines another state."""


class Shape(NamedTuple):
    """Sizes of a layer; ``groups``: query heads per KV head, dims in numbers."""

    kv_heads: int
    groups: int
    key_dim: int
    value_dim: int

    @property
    def block_rows(self) -> int:
        """Most rows of a block."""
        return max(1, _BLOCK_FLOATS // (self.groups * (self.key_dim + self.value_dim)))


@dataclass(frozen=True)
class Plan:
    """``tasks``, ``segments`` and ``entries``: int64, see the kernel. ``shifts``: distinct ones.

    ``block_rows``: most rows of a block; ``blocks``, ``states``: the number of blocks, and of states of those
    cut into pieces. ``operations``: of all query heads.
    """

    tasks: Ints
    segments: Ints
    entries: Ints
    shifts: Ints
    block_rows: int
    blocks: int
    states: int
    operations: int


def plan(reads: Reads, rows: int, window: int | None, shape: Shape) -> Plan:
    """Lay out ``reads`` of ``rows`` rows. Results depend on it, and it on no number of threads."""
    low, high, row, shift, run = intervals(reads, window)
    blocks = -(-rows // shape.block_rows)
    block_rows = -(-rows // blocks)
    blocks = -(-rows // block_rows)
    group = row // block_rows * (int(run.max()) + 1) + run
    order = np.argsort(group, kind="stable")
    low, high, row, group = low[order], high[order], row[order], group[order]
    shifts, rotation = np.unique(shift[order], return_inverse=True)
    entries = np.empty((len(row), ENTRY_FIELDS), np.int64)
    entries[:, 0], entries[:, 2], entries[:, 3] = row, low, high
    entries[:, 1] = np.where(shift[order] == 0, -1, rotation)

    first = np.flatnonzero(np.diff(group, prepend=-1))
    segments = np.empty((len(first), SEGMENT_FIELDS), np.int64)
    segments[:, 0], segments[:, 1] = first, np.diff(first, append=len(group))
    segments[:, 2], segments[:, 3] = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
    bounds = np.searchsorted(row[first] // block_rows, np.arange(blocks + 1))

    tiles = -(-(segments[:, 3] - segments[:, 2]) // TILE)
    cost = tiles * (segments[:, 1] * shape.groups + MOST_LINES)
    block_cost, block_tiles = np.add.reduceat(cost, bounds[:-1]), np.add.reduceat(tiles, bounds[:-1])
    wanted = _WANTED_TASKS / shape.kv_heads * block_cost / block_cost.sum()
    pieces = np.maximum(np.minimum(np.rint(wanted).astype(np.int64), block_tiles // _LEAST_TILES), 1)
    tasks: list[tuple[int, ...]] = []
    cut: list[Ints] = []
    count = states = 0
    for block in range(blocks):
        own, at, n = slice(bounds[block], bounds[block + 1]), block * block_rows, int(pieces[block])
        parts = list(_cut(segments[own], tiles[own], cost[own], n)) if n > 1 else [segments[own]]
        for i, part in enumerate(parts):
            size = min(block_rows, rows - at)
            tasks.append((at, size, count, len(part), block, i, len(parts), states))
            cut.append(part)
            count += len(part)
        states += len(parts) * shape.kv_heads if len(parts) > 1 else 0
    # the longest first
    share = block_cost / pieces
    table = np.array(tasks, np.int64)
    table = np.ascontiguousarray(table[np.argsort(-share[table[:, 4]], kind="stable")])
    operations = (
        2 * int((high - low).sum()) * shape.kv_heads * shape.groups * (shape.key_dim + shape.value_dim)
    )
    return Plan(table, np.concatenate(cut), entries, shifts, block_rows, blocks, states, operations)


def _cut(segments: Ints, tiles: Ints, cost: Ints, pieces: int) -> Iterator[Ints]:
    """``segments`` in at most ``pieces`` pieces of about equal ``cost``, cut between tiles."""
    ends = np.cumsum(cost)
    piece: list[tuple[int, ...]] = []
    done = 1
    for (entry, entries, low, high), count, each, end in zip(
        segments.tolist(), tiles.tolist(), (cost // tiles).tolist(), ends.tolist(), strict=True
    ):
        begin, at = end - count * each, 0
        while at < count:
            limit = -(-int(ends[-1]) * done // pieces)  # above what is done
            stop = min(count, -(-(limit - begin) // each)) if limit < end else count
            piece.append((entry, entries, low + at * TILE, min(low + stop * TILE, high)))
            at = stop
            if begin + stop * each >= limit:
                yield np.array(piece, np.int64)
                piece = []
                done = (begin + stop * each) * pieces // int(ends[-1]) + 1
    if piece:
        yield np.array(piece, np.int64)
