"""What the kernel is given and where it keeps things: fields of the plan, arguments of a call, memory."""

from typing import NamedTuple

import numpy as np

from engine.cpu.vectors import LANES, MAX_LINES, TILE

TASK_FIELDS, SEGMENT_FIELDS, ENTRY_FIELDS, EXTENT_FIELDS = 8, 5, 4, 2
"""Of a task: first row, rows, first segment, segments, block, piece, pieces of the block, first of its
states. Of a segment, which is a run of keys and who reads it: first entry, entries, first key, stop, and the
first of the run's extents. Of an entry: row, row of `rotations` (-1: none), first key that the row sees,
stop. Of an extent: its first key, slot. Keys are counted within their run; behind a run's last extent, its
length stands for the next one's first key."""
LONG, LONGS = 8, 2
"""Bytes and floats of an int64."""
SUM_FLOATS = MAX_LINES * LANES * LANES
"""The sums of `dots`."""

_ADDRESSES = (
    # tensors: the address, and steps in bytes; the innermost dimension is tight
    ("query", "query_head", "query_row", "query_half"),
    ("keys", "key_head", "key_slot", "values", "value_head", "value_slot", "kind"),
    ("out", "out_head", "out_row", "out_half", "sinks"),
    # sizes; dims in floats, `rotary` half of what is rotated
    ("kv_heads", "groups", "key_dim", "value_dim", "rotary"),
    # the plan, int64, and its rotations, float [shifts, 2, rotary]
    ("tasks", "task_count", "segments", "entries", "extents", "rotations"),
    # memory, and counters that every call leaves at 0
    ("states", "state_bytes", "rooms", "room_bytes", "pending", "next_task", "next_room"),
)
CALL = np.dtype(
    [(name, np.int64) for group in _ADDRESSES for name in group]
    + [("factor", np.float32), ("cap", np.float32)],
    align=True,
)
"""Arguments of `worker`: what one layer of one pass needs.

``kind``: what keys and values are stored as (`KINDS`). ``factor``: by which queries are multiplied; with
``cap``, both as `soften` takes them. ``sinks``: 0: none. ``rooms``: one per thread, `room_floats` each.
"""


def state_floats(lines: int, value_dim: int) -> int:
    """Memory of the states of ``lines`` lines: output, `LANES` partial sums and the maximum of each."""
    return lines * (value_dim + LANES) + -(-lines // LANES) * LANES


def room_floats(lines: int, key_dim: int, value_dim: int) -> int:
    """A thread's own memory: tiles, queries, scores, four numbers a line, and the state."""
    tiles = 2 * TILE * key_dim + SUM_FLOATS + TILE * (value_dim + MAX_LINES) + LONGS * LANES
    numbers = 4 * LONGS * -(-lines // LANES) * LANES
    return tiles + numbers + lines * key_dim + state_floats(lines, value_dim)


class Scratch(NamedTuple):
    """Addresses in a thread's own memory.

    ``queries`` [lines, key_dim]; ``numbers``: int64, of each line the first key it sees, then of each the
    stop, the address of its output, and its number in the block; ``tile``: keys [key_dim, TILE]; ``keys``,
    ``values`` [TILE, dim]: copies; ``sums``: of `dots`; ``scores`` [MAX_LINES, TILE]; ``targets``: their
    addresses.
    """

    queries: int
    numbers: int
    tile: int
    keys: int
    sums: int
    values: int
    scores: int
    targets: int
