"""What the kernel does for one pass in layers of one kind: tasks, the runs that each reads, and its rows.

A run is as many consecutive keys as have the same readers and a frame. It ends where a fork's own keys begin,
so that one fork's sums are those of several. In which slots keys lie is kept beside it, and is in no result.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.attention.cpu_kernel.scratch import ENTRY_FIELDS, EXTENT_FIELDS, SEGMENT_FIELDS, TASK_FIELDS
from engine.attention.reads import Ints, Reads
from engine.cpu.vectors import MAX_LINES, TILE
from support.numba_kernel import kernel

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
class TaskPlan:
    """``tasks``, ``segments``, ``entries`` and ``extents``: int64, see `scratch`. ``shifts``: distinct ones.

    ``block_rows``: most rows of a block; ``blocks``, ``states``: the number of blocks, and of states of those
    cut into pieces. ``operations``: of all query heads.
    """

    tasks: Ints
    segments: Ints
    entries: Ints
    extents: Ints
    shifts: Ints
    block_rows: int
    blocks: int
    states: int
    operations: int


def plan(reads: Reads, rows: int, window: int | None, shape: Shape) -> TaskPlan:
    """Lay out ``reads`` of ``rows`` rows. Results depend on it, and it on no number of threads.

    Compiled, because a small pass would spend a tenth of its time here in numpy.
    """
    blocks = -(-rows // shape.block_rows)
    block_rows = -(-rows // blocks)
    blocks = -(-rows // block_rows)
    parts, starts, extents = _runs(np.stack(reads))
    reach = -1 if window is None else window
    entries, segments, shifts, seen = _grouped(parts, starts, reach, block_rows)
    tasks, cut, states = _tasks(segments, entries, rows, block_rows, blocks, shape.kv_heads, shape.groups)
    operations = 2 * seen * shape.kv_heads * shape.groups * (shape.key_dim + shape.value_dim)
    return TaskPlan(tasks, cut, entries, extents, shifts, block_rows, blocks, states, operations)


@kernel
def _runs(reads: Any) -> Any:
    """Who reads which part of which run, the first extent of each run, and the extents.

    Of a part: row, rows, coordinate of the first row, run, first key, stop, coordinate of the run's first
    key, shift. ``reads``: the members of `Reads`, as rows. Their slots are cut into *atoms* wherever one
    begins or ends.
    """
    bounds = np.unique(np.concatenate((reads[3], reads[4])))
    firsts, stops = np.searchsorted(bounds, reads[3]), np.searchsorted(bounds, reads[4])
    following = _following(reads, firsts, stops, len(bounds))
    run, key, starts = np.full(len(bounds), -1), np.empty_like(bounds), np.empty_like(bounds)
    extents = np.empty((2 * len(bounds), EXTENT_FIELDS), np.int64)
    parts = np.empty(((stops - firsts).sum(), 8), np.int64)
    count = runs = used = 0
    before = -1
    for i in range(reads.shape[1]):
        if i == 0 or reads[0, i] != reads[0, i - 1]:
            before = -1
        for atom in range(firsts[i], stops[i]):
            if run[atom] < 0:
                starts[runs], length, last, at = used, 0, -2, atom
                while at >= 0:
                    run[at], key[at] = runs, length
                    if at != last + 1:
                        extents[used, 0], extents[used, 1] = length, bounds[at]
                        used += 1
                    length += bounds[at + 1] - bounds[at]
                    last, at = at, following[at]
                extents[used, 0], extents[used, 1] = length, -1
                used, runs = used + 1, runs + 1
            if before < 0 or following[before] != atom:
                own = parts[count]
                own[0], own[1], own[2] = reads[0, i], reads[1, i], reads[2, i]
                own[3], own[4], own[7] = run[atom], key[atom], reads[6, i]
                own[6] = reads[5, i] + bounds[atom] - reads[3, i] - key[atom]
                count += 1
            parts[count - 1, 5] = key[atom] + bounds[atom + 1] - bounds[atom]
            before = atom
    return parts[:count], starts[:runs], extents[:used]


@kernel
def _following(reads: Any, firsts: Any, stops: Any, atoms: int) -> Any:
    """The atom that every reader of an atom reads next, in the same frame, if it has no other readers; or -1.

    ``firsts``, ``stops``: of the atoms of each read.
    """
    following, newest = np.full(atoms, -1), np.full(atoms, -1)
    readers, joined = np.zeros(atoms, np.int64), np.zeros(atoms, np.int64)
    reader, before = 0, -1
    for i in range(reads.shape[1]):
        linked = False
        if i == 0 or reads[0, i] != reads[0, i - 1]:
            before = -1
            if not _goes_on(reads, i):
                reader += 1
        elif reads[6, i] == reads[6, i - 1] and reads[7, i] == reads[7, i - 1]:
            linked = reads[5, i] - reads[5, i - 1] == reads[4, i - 1] - reads[3, i - 1]
        for atom in range(firsts[i], stops[i]):
            first = newest[atom] != reader
            if first:
                newest[atom] = reader
                readers[atom] += 1
            if before >= 0:
                if linked and (following[before] == -1 or following[before] == atom):
                    following[before] = atom
                    joined[before] += first
                else:
                    following[before] = -2
            before, linked = atom, True
    for atom in range(atoms):
        after = following[atom]
        if after < 0 or joined[atom] != readers[atom] or joined[atom] != readers[after]:
            following[atom] = -1
    return following


@kernel
def _goes_on(reads: Any, first: int) -> bool:
    """Whether the sequence that begins with read ``first`` reads the newest key of the one before.

    They are then one reader, cut where its context changes.
    """
    if first == 0:
        return False
    newest = reads[4, first - 1] - 1
    coord = newest - reads[3, first - 1] + reads[5, first - 1]
    for i in range(first, reads.shape[1]):
        if reads[0, i] != reads[0, first]:
            return False
        if reads[3, i] <= newest < reads[4, i] and reads[6, i] == 0:
            return bool(newest - reads[3, i] + reads[5, i] == coord)
    return False


@kernel
def _grouped(parts: Any, starts: Any, window: int, block_rows: int) -> Any:
    """Entries by block and run, a segment for each such group, the distinct shifts, and the keys seen.

    ``window``: -1 for none. ``parts``, ``starts``: see `_runs`.
    """
    shifts = np.unique(parts[:, 7])
    entries = np.empty((parts[:, 1].sum(), ENTRY_FIELDS), np.int64)
    groups = np.empty(len(entries), np.int64)
    count = seen = 0
    for i in range(len(parts)):
        row, run, start, stop, shift = parts[i, 0], parts[i, 3], parts[i, 4], parts[i, 5], parts[i, 7]
        rotation = -1 if shift == 0 else np.searchsorted(shifts, shift)
        for ahead in range(parts[i, 1]):
            behind = parts[i, 2] + ahead - parts[i, 6]  # newest key the row may see, within the run
            low = start if window < 0 else max(behind - window + 1, start)
            high = min(behind + 1, stop)
            if low < high:
                groups[count] = (row + ahead) // block_rows * len(starts) + run
                entries[count, 0], entries[count, 1] = row + ahead, rotation
                entries[count, 2], entries[count, 3] = low, high
                seen += high - low
                count += 1
    order = np.argsort(groups[:count], kind="mergesort")
    entries, groups = entries[order], groups[order]
    segments = np.empty((count, SEGMENT_FIELDS), np.int64)
    used = 0
    for i in range(count):
        low, high = entries[i, 2], entries[i, 3]
        if i == 0 or groups[i] != groups[i - 1]:
            used += 1
            own = segments[used - 1]
            own[0], own[1], own[2], own[3] = i, 0, low, high
            own[4] = starts[groups[i] % len(starts)]
        own = segments[used - 1]
        own[1], own[2], own[3] = own[1] + 1, min(own[2], low), max(own[3], high)
    return entries, segments[:used].copy(), shifts, seen


@kernel
def _tasks(
    segments: Any, entries: Any, rows: int, block_rows: int, blocks: int, kv_heads: int, groups: int
) -> Any:
    """Tasks, the longest first, their segments, and the states of blocks that are cut."""
    tiles = (segments[:, 3] - segments[:, 2] + TILE - 1) // TILE
    cost = tiles * (segments[:, 1] * groups + MAX_LINES)
    bounds = np.searchsorted(entries[segments[:, 0], 0] // block_rows, np.arange(blocks + 1))
    pieces, share = np.empty(blocks, np.int64), np.empty(blocks)
    for block in range(blocks):
        own = slice(bounds[block], bounds[block + 1])
        wanted = int(np.rint(_WANTED_TASKS / kv_heads * cost[own].sum() / cost.sum()))
        pieces[block] = max(min(wanted, tiles[own].sum() // _LEAST_TILES), 1)
        share[block] = -cost[own].sum() / pieces[block]
    tasks = np.empty((pieces.sum(), TASK_FIELDS), np.int64)
    cut = np.empty((len(segments) + pieces.sum(), SEGMENT_FIELDS), np.int64)
    count = used = states = 0
    for block in range(blocks):
        own, first = slice(bounds[block], bounds[block + 1]), count
        for size in _cut(segments[own], tiles[own], cost[own], pieces[block], cut[used:]):
            task = tasks[count]
            task[0], task[1] = block * block_rows, min(block_rows, rows - block * block_rows)
            task[2], task[3], task[4], task[5] = used, size, block, count - first
            used += size
            count += 1
        tasks[first:count, 6], tasks[first:count, 7] = count - first, states
        if count - first > 1:
            states += (count - first) * kv_heads
    order = np.argsort(share[tasks[:count, 4]], kind="mergesort")
    return tasks[order], cut[:used].copy(), states


@kernel
def _cut(segments: Any, tiles: Any, cost: Any, pieces: int, into: Any) -> Any:
    """Write ``segments`` in at most ``pieces`` pieces of about equal ``cost``, cut between tiles.

    Returns the segments of each piece; ``into`` has room for one more a piece.
    """
    sizes, total, before = np.zeros(pieces, np.int64), cost.sum(), 0
    piece = written = done = 0
    for i in range(len(segments)):
        each, at = cost[i] // tiles[i], 0
        while at < tiles[i]:
            # above what is done
            limit = (total * (done + 1) + pieces - 1) // pieces
            stop = min(tiles[i], (limit - before + each - 1) // each)
            if before + cost[i] <= limit:
                stop = tiles[i]
            into[written] = segments[i]
            into[written, 2] = segments[i, 2] + at * TILE
            into[written, 3] = min(segments[i, 2] + stop * TILE, segments[i, 3])
            written += 1
            sizes[piece] += 1
            at = stop
            if before + stop * each >= limit:
                piece += 1
                done = (before + stop * each) * pieces // total
        before += cost[i]
    return sizes[:piece]
