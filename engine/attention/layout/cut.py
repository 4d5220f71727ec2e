"""Cuts what a batch reads into items, compiled: in numpy it took half a millisecond of every pass.

Rows that read the same run of slots are processed together in tiles, and tiles are split along their keys
until the device is full (split-K, as in flash decoding).
"""

import numpy as np

from engine.attention.reads import Ints
from support.numba_kernel import kernel

STEP = 128
"""Splits are multiples of this many keys, so that only the tile's own edges cut a block."""
READ_COST = 48
"""Cost of reading a key, in rows multiplied with it; so measured on an H200, where tiles of one run share the
reads in L2."""
START_COST = 192
"""Cost of a program besides its keys, in keys: its queries, its part in fp32, and the merge of that."""
MAX_WAVES = 4
"""Most programs that follow each other on the device, if shorter ones fill it better."""


@kernel
def entries_of(reads: Ints, window: int) -> tuple[Ints, Ints, Ints]:
    """What each row sees of each run, run by run.

    ``reads``: `Reads` [8, reads]. ``window``: -1 for none. Returns ``entries`` [., 4] (row, shift, first and
    end slot), the first entry of each run with any and their end, and the distinct shifts.
    """
    row, rows, coord, slot, stop, key_coord, shift = reads[:7]
    order = np.argsort((slot << 32) | stop, kind="mergesort")
    entries = np.empty((rows.sum(), 4), np.int64)
    firsts = np.empty(len(row) + 1, np.int64)
    runs = count = 0
    for at, read in enumerate(order):
        before = order[at - 1]
        if at == 0 or slot[read] != slot[before] or stop[read] != stop[before]:
            # a run of which no row sees anything has no entries
            runs += runs == 0 or firsts[runs - 1] < count
            firsts[runs - 1] = count
        for ahead in range(rows[read]):
            behind = coord[read] + ahead - key_coord[read]  # newest key the row may see, within the run
            low = slot[read]
            if window >= 0:
                low += max(behind - window + 1, 0)
            high = min(slot[read] + behind + 1, stop[read])
            if low < high:
                entries[count] = row[read] + ahead, shift[read], low, high
                count += 1
    if firsts[runs - 1] == count:
        runs -= 1
    firsts[runs] = count
    shifts = np.unique(entries[:count, 1])
    entries[:count, 1] = np.searchsorted(shifts, entries[:count, 1])
    return entries[:count], firsts[: runs + 1], shifts


@kernel
def tile_of(entries: Ints, firsts: Ints, groups: int, tiles: Ints) -> int:
    """The tile with the least cost of reading and multiplying, including padding and repeated reads."""
    best, least = tiles[0], -1
    for tile in tiles:
        cost = 0
        for run in range(len(firsts) - 1):
            seen = entries[firsts[run] : firsts[run + 1]]
            keys = seen[:, 3].max() - seen[:, 2].min()
            cost += -(-len(seen) * groups // tile) * keys * (READ_COST + tile)
        if least < 0 or cost < least:
            best, least = tile, cost
    return int(best)


@kernel
def item_keys(lengths: Ints, resident: int) -> int:
    """Most keys of an item, so that the waves of ``resident`` items are over first.

    The last wave should be as full as the others. Of equal costs the fewest items.
    """
    longest = -(-lengths.max() // STEP) * STEP
    size = max(1, lengths.sum() // (MAX_WAVES * resident * STEP)) * STEP
    best, least = longest, -1
    while size <= longest:
        items = gaps = 0
        for length in lengths:
            if 2 * length > size:
                items += -(-length // size)
            else:  # fills gaps
                gaps += length + START_COST
        cost = -(-items // resident) * (size + START_COST) + gaps // resident
        if least < 0 or cost <= least:
            best, least = size, cost
        size += STEP
    return int(best)


@kernel
def items_of(entries: Ints, firsts: Ints, readers: int, resident: int, fields: int) -> Ints:
    """Items [., fields], the longest first, of tiles of ``readers`` entries; see the Triton kernel."""
    tiles = 0
    for run in range(len(firsts) - 1):
        tiles += -((firsts[run] - firsts[run + 1]) // readers)
    cut = np.empty((tiles, 6), np.int64)
    at = 0
    for run in range(len(firsts) - 1):
        for start in range(firsts[run], firsts[run + 1], readers):
            seen = entries[start : min(start + readers, firsts[run + 1])]
            low, high = seen[:, 2], seen[:, 3]
            cut[at] = start, len(seen), low.min(), high.max(), low.max(), high.min()
            at += 1
    most = item_keys(cut[:, 3] - cut[:, 2], resident)
    sizes = np.empty(tiles, np.int64)
    total = 0
    for tile in range(tiles):
        length = cut[tile, 3] - cut[tile, 2]
        even = -(-length // -(-length // most))
        sizes[tile] = -(-even // STEP) * STEP
        total += -(-length // sizes[tile])
    items = np.zeros((total, fields), np.int64)
    at = 0
    for tile in range(tiles):
        for start in range(cut[tile, 2], cut[tile, 3], sizes[tile]):
            items[at, :6] = cut[tile]
            items[at, 2], items[at, 3] = start, min(start + sizes[tile], cut[tile, 3])
            at += 1
    items = items[np.argsort(items[:, 2] - items[:, 3], kind="mergesort")]
    items[:, 6] = np.cumsum(items[:, 1]) - items[:, 1]
    return items


@kernel
def parts_of(items: Ints, entries: Ints, rows: int) -> tuple[Ints, Ints]:
    """The part that each entry of each item writes, and the start of each row's parts [rows + 1].

    Parts are in the order of their rows, so merging a row reads contiguous memory.
    """
    offsets = np.zeros(rows + 1, np.int64)
    for first, count in items[:, :2]:
        for entry in range(first, first + count):
            offsets[entries[entry, 0] + 1] += 1
    offsets = np.cumsum(offsets)
    following, targets = offsets.copy(), np.empty(offsets[-1], np.int64)
    at = 0
    for first, count in items[:, :2]:
        for entry in range(first, first + count):
            row = entries[entry, 0]
            targets[at] = following[row]
            following[row] += 1
            at += 1
    return targets, offsets


@kernel
def laid_out(
    reads: Ints, rows: int, window: int, groups: int, tiles: Ints, resident: Ints, fields: int
) -> tuple[int, Ints, Ints, Ints, Ints, Ints]:
    """The tile, items, entries, targets, offsets and shifts; see `Layout`.

    ``tiles``: those that fit, and of each how many items are ``resident`` together.
    """
    entries, firsts, shifts = entries_of(reads, window)
    tile = tile_of(entries, firsts, groups, tiles)
    together = max(1, resident[np.flatnonzero(tiles == tile)[0]])
    items = items_of(entries, firsts, tile // groups, together, fields)
    targets, offsets = parts_of(items, entries, rows)
    return tile, items, entries, targets, offsets, shifts
