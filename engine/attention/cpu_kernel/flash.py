"""Flash attention over extents in place: the compiled half. A worker runs tasks until none is left.

A *line* is one row of the batch under one query head. All lines that share a KV head and read a run of keys
meet it tile by tile: a tile of 64 keys is transposed once for all of them, and six lines at a time multiply
it in registers. The state of a line (output, sum and maximum of the online softmax) stays in the task's
memory from run to run, so nothing is merged. Each line is computed by itself: what is not finite stays in its
line. No result depends on the number of threads, nor on the slots in which a run lies.

A task is a block of rows under one KV head. With few blocks, each is cut along its keys into pieces with a
state of their own; whoever finishes a block's last piece merges them in order.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types

from engine.attention.cpu_kernel.attention_products import AHEAD, dots, product, summed
from engine.attention.cpu_kernel.scratch import (
    CALL,
    ENTRY_FIELDS,
    EXTENT_FIELDS,
    LONG,
    SEGMENT_FIELDS,
    SUM_FLOATS,
    TASK_FIELDS,
    Scratch,
)
from engine.attention.cpu_kernel.softmax import blended, cleared, finished, soften
from engine.attention.cpu_kernel.tile_loads import copied, rotated, scaled, turn
from engine.cpu.emit import float_at, integer_at, put_float, put_integer, take
from engine.cpu.vectors import FLOAT, LANES, MAX_LINES, TILE, TILE_BYTES, VECTOR_BYTES, WIDTHS
from support.numba_kernel import callback

F = TypeVar("F", bound=Callable[..., object])

_LOG2_E = math.log2(math.e)
_FETCHED = AHEAD * VECTOR_BYTES


def _part(function: F) -> F:
    """A part of `_work`, compiled with it: numba would else compile each function again in every caller."""
    return cast(F, numba.njit(inline="always")(function))


@_part
def _multiply(
    lines: int,
    width: int,
    left: int,
    left_step: int,
    right: int,
    step: int,
    depth: int,
    targets: int,
    add: int,
    ahead: int,
) -> None:
    """`product` over ``width`` vectors, as many at a time as registers hold."""
    column = 0
    while column < width:
        wide = 1
        for most in WIDTHS[::-1]:
            if column + most <= width:
                wide = most
        place = column * LANES * FLOAT
        product((8 * lines + wide, left, left_step, right + place, step, depth, targets, place, add, ahead))
        ahead += depth * _FETCHED
        column += wide


@_part
def _lines(call: Any, head: int, entry: int, rows: int, block_row: int, state: int, room: Scratch) -> None:
    """Load queries and numbers of the lines of ``rows`` entries from ``entry`` on."""
    queries, numbers = room.queries, room.numbers
    groups, lines = call.groups, rows * call.groups
    for i in range(rows):
        at = call.entries + (entry + i) * ENTRY_FIELDS * LONG
        row, shift = integer_at(at, 0), integer_at(at, 1)
        for g in range(groups):
            line = i * groups + g
            source = call.query + (head * groups + g) * call.query_head + row * call.query_row
            query = queries + line * call.key_dim * FLOAT
            scaled((source, query, call.key_dim // LANES, call.query_half, call.factor))
            if shift >= 0:
                rotated((query, call.rotations + shift * 2 * call.rotary * FLOAT, call.rotary))
            put_integer(numbers, line, integer_at(at, 2))
            put_integer(numbers, lines + line, integer_at(at, 3))
            own = (row - block_row) * groups + g
            put_integer(numbers, 2 * lines + line, state + own * (call.value_dim + LANES) * FLOAT)
            put_integer(numbers, 3 * lines + line, own)


@_part
def _extent_of(extent: int, key: int, stop: int) -> int:
    """The extent of a run's ``key``, or of the last one before ``stop``; ``extent`` is not behind it."""
    while integer_at(extent, EXTENT_FIELDS) <= min(key, stop - 1):
        extent += EXTENT_FIELDS * LONG
    return extent


@_part
def _slot(extent: int, key: int) -> int:
    """Where ``key`` lies if it is in ``extent``."""
    return int(integer_at(extent, 1) + key - integer_at(extent, 0))


@_part
def _copy(
    pool: int, step: int, kind: int, width: int, extent: int, start: int, stop: int, target: int
) -> None:
    """A run's keys from ``start`` to ``stop``, or their values, as floats."""
    while start < stop:
        until = min(integer_at(extent, EXTENT_FIELDS), stop)
        copied((pool + _slot(extent, start) * step, step, until - start, width, kind, target))
        target += (until - start) * width * VECTOR_BYTES
        start = until
        extent += EXTENT_FIELDS * LONG


@_part
def _transpose(call: Any, keys: int, step: int, kind: int, count: int, room: Scratch) -> None:
    """Transpose ``count`` keys from ``keys`` on, ``step`` bytes apart; ``kind``: the number of `KINDS`."""
    size = FLOAT >> kind
    for i in range(0, count, LANES):
        for d in range(0, call.key_dim, LANES):
            source, target = keys + i * step + d * size, room.tile + (d * TILE + i) * FLOAT
            turn((source, step, count - 1 - i, kind, (call.key_dim - d) * size, target))


@_part
def _few(
    call: Any, lines: int, pools: tuple[int, int], extent: int, start: int, stop: int, room: Scratch
) -> None:
    """The scores of few lines with a tile's keys where they lie: transposing them would take longer."""
    keys, values = pools
    step, width = call.key_slot, call.key_dim // LANES
    key, end, soon = start, min(start + TILE, stop), extent
    while key < end:
        extent, soon = _extent_of(extent, key, stop), _extent_of(soon, key + TILE, stop)
        group = (key - start) // LANES * LANES
        until = min(end, start + group + LANES, integer_at(extent, EXTENT_FIELDS))
        if key + TILE < stop:
            until = min(until, integer_at(soon, EXTENT_FIELDS) - TILE)
        own, near = keys + _slot(extent, key) * step, _slot(soon, key + TILE)
        sums = room.sums + (key - start - group) * VECTOR_BYTES
        read = room.queries, call.key_dim * FLOAT, own, step, until - key, width, sums
        dots((lines, call.kind, *read, keys + near * step, values + near * call.value_slot))
        key = until
        if key == end or (key - start) % LANES == 0:
            summed((lines, room.sums, room.scores + group * FLOAT))


@_part
def _seen(numbers: int, lines: int, some: int, start: int, count: int) -> tuple[int, int, int]:
    """The keys of a tile that ``some`` lines see, from a low to a high one, and whether each sees all 64."""
    low, high, whole = TILE, 0, int(count == TILE)
    for i in range(some):
        sees, stops = integer_at(numbers, i) - start, integer_at(numbers, lines + i) - start
        low, high = min(low, sees), max(high, stops)
        if sees > 0 or stops < TILE:
            whole = 0
    return max(low, 0), min(high, count), whole


@_part
def _segment(
    call: Any, pools: tuple[int, int], read: tuple[int, int, int, int], tops: int, room: Scratch
) -> None:
    """The lines that `_lines` loaded meet the keys of a run from the first to the stop.

    Tiles are counted from the first key on, whatever extents a tile lies in.
    """
    lines, first, stop, extent = read
    keys, values = pools
    query_step, width = call.key_dim * FLOAT, call.value_dim // LANES
    # as few groups as possible, of equal size
    per_round = -(-lines // -(-lines // MAX_LINES))
    for start in range(first, stop, TILE):
        count = min(TILE, stop - start)
        extent = _extent_of(extent, start, stop)
        apart = integer_at(extent, EXTENT_FIELDS) < start + count
        slot, soon = _slot(extent, start), _slot(_extent_of(extent, start + TILE, stop), start + TILE)
        # what of the next tile remains to be prefetched
        ahead, far = keys + soon * call.key_slot, values + soon * call.value_slot
        until, end = ahead + TILE * call.key_slot, far + TILE * call.value_slot
        if lines <= MAX_LINES:
            _few(call, lines, pools, extent, start, stop, room)
        elif apart:
            depth = call.key_dim // LANES
            _copy(keys, call.key_slot, call.kind, depth, extent, start, start + count, room.keys)
            _transpose(call, room.keys, query_step, 0, count, room)
        else:
            _transpose(call, keys + slot * call.key_slot, call.key_slot, call.kind, count, room)
        seen, seen_step = values + slot * call.value_slot, call.value_slot
        in_place = not call.kind and (lines <= MAX_LINES or not apart)
        if not in_place:
            _copy(values, seen_step, call.kind, width, extent, start, start + count, room.values)
            seen, seen_step = room.values, call.value_dim * FLOAT
        for line in range(0, lines, per_round):
            some = min(per_round, lines - line)
            numbers = room.numbers + line * LONG
            low, high, whole = _seen(numbers, lines, some, start, count)
            if low >= high:
                continue
            query, scores = room.queries + line * query_step, room.scores
            if lines > MAX_LINES:
                columns = -(-high // LANES)
                near = ahead if ahead < until else scores
                tile, depth = room.tile, call.key_dim
                _multiply(some, columns, query, query_step, tile, TILE_BYTES, depth, room.targets, 0, near)
                ahead += depth * _FETCHED
            soften((some, scores, numbers, lines * LONG, start, count, whole, tops, width, call.cap))
            near = far if far < end and lines > MAX_LINES else room.scores
            outputs = numbers + 2 * lines * LONG
            while low < high:
                rows, depth = seen + low * seen_step, high - low
                if in_place and apart:
                    extent = _extent_of(extent, start + low, stop)
                    rows = values + _slot(extent, start + low) * seen_step
                    depth = min(depth, integer_at(extent, EXTENT_FIELDS) - start - low)
                left = scores + low * FLOAT
                _multiply(some, width, left, TILE_BYTES, rows, seen_step, depth, outputs, 1, near)
                low += depth
                far += depth * _FETCHED


@_part
def _finish(call: Any, head: int, row: int, rows: int, state: int, tops: int) -> None:
    """Write the output of ``rows`` rows from their state, under all query heads of KV head ``head``."""
    width = call.value_dim // LANES
    for i in range(rows):
        for g in range(call.groups):
            line, query_head = i * call.groups + g, head * call.groups + g
            output = state + line * (call.value_dim + LANES) * FLOAT
            total, top = 0.0, float(float_at(tops, line))
            for lane in range(LANES):
                total += float_at(output, call.value_dim + lane)
            factor = 1.0 / total
            if call.sinks:
                sink = float_at(call.sinks, query_head) * _LOG2_E
                most = max(top, sink)
                factor = 2.0 ** (top - most) / (total * 2.0 ** (top - most) + 2.0 ** (sink - most))
            target = call.out + query_head * call.out_head + (row + i) * call.out_row
            finished((output, target, width, call.out_half, np.float32(factor)))


@_part
def _merge(call: Any, lines: int, states: int, step: int, count: int) -> None:
    """Merge ``count`` states of ``lines`` lines, ``step`` bytes apart, into the first, in order."""
    width = call.value_dim // LANES + 1
    own = (call.value_dim + LANES) * FLOAT
    tops = lines * own
    for piece in range(1, count):
        other = states + piece * step
        for line in range(lines):
            kept, added = float_at(states + tops, line), float_at(other + tops, line)
            top = max(kept, added)
            put_float(states + tops, line, top)
            blended((
                other + line * own,
                states + line * own,
                width,
                np.float32(2.0 ** (float(added) - float(top))),
                np.float32(2.0 ** (float(kept) - float(top))),
            ))  # fmt: skip


@_part
def _attend(call: Any, task: int, head: int, memory: int) -> None:
    """One task under one KV head. ``memory``: the thread's own."""
    at = call.tasks + task * TASK_FIELDS * LONG
    row, rows, first, count = integer_at(at, 0), integer_at(at, 1), integer_at(at, 2), integer_at(at, 3)
    block, piece, pieces = integer_at(at, 4), integer_at(at, 5), integer_at(at, 6)
    key_dim, value_dim = call.key_dim, call.value_dim
    lines = rows * call.groups
    targets, scores = memory, memory + LANES * LONG
    tile = scores + MAX_LINES * TILE * FLOAT
    tile_keys = tile + TILE * key_dim * FLOAT
    sums = tile_keys + TILE * key_dim * FLOAT
    values = sums + SUM_FLOATS * FLOAT
    numbers = values + TILE * value_dim * FLOAT
    queries = numbers + 4 * -(-lines // LANES) * LANES * LONG
    state = queries + lines * key_dim * FLOAT
    room = Scratch(queries, numbers, tile, tile_keys, sums, values, scores, targets)
    for i in range(MAX_LINES):
        put_integer(targets, i, scores + i * TILE * FLOAT)
    states = call.states + (integer_at(at, 7) + head * pieces) * call.state_bytes
    if pieces > 1:
        state = states + piece * call.state_bytes
    own = (value_dim + LANES) * FLOAT
    for line in range(lines):
        cleared((state + line * own, value_dim // LANES + 1, state + lines * own + line * FLOAT))
    pools = call.keys + head * call.key_head, call.values + head * call.value_head
    for index in range(first, first + count):
        segment = call.segments + index * SEGMENT_FIELDS * LONG
        entries = integer_at(segment, 1)
        _lines(call, head, integer_at(segment, 0), entries, row, state, room)
        extent = call.extents + integer_at(segment, 4) * EXTENT_FIELDS * LONG
        read = entries * call.groups, integer_at(segment, 2), integer_at(segment, 3), extent
        _segment(call, pools, read, state + lines * own, room)
    if pieces > 1:
        counter = call.pending + (block * call.kv_heads + head) * LONG
        if take(counter) < pieces - 1:
            return
        put_integer(counter, 0, 0)
        state = states
        _merge(call, lines, states, call.state_bytes, pieces)
    _finish(call, head, row, rows, state, state + lines * own)


def _work(pointer: Any) -> None:
    """Run tasks of the `CALL` at ``pointer`` until none is left; any number of threads may do so at once."""
    call = numba.carray(pointer, 1)[0]
    room = call.rooms + take(call.next_room) * call.room_bytes
    while True:
        taken = take(call.next_task)
        if taken >= call.task_count * call.kv_heads:
            break
        _attend(call, taken // call.kv_heads, taken % call.kv_heads, room)


@cache
def worker() -> Any:
    """The compiled `_work`, a C function of a `CALL`'s address; a machine's first start compiles it."""
    return callback(_work, types.void(types.CPointer(numba.from_dtype(CALL))))
