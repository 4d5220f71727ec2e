"""Flash attention over extents in place: the compiled half. A worker runs tasks until none is left.

A *line* is one row of the batch under one query head. All lines that share a KV head and read a run of slots
meet its keys tile by tile: a tile of 64 keys is transposed once for all of them, and six lines at a time
multiply it in registers. The state of a line (output, sum and maximum of the online softmax) stays in the
task's memory from run to run, so nothing is gathered or merged. Each line is computed by itself: what is not
finite stays in its line, and no result depends on the number of threads.

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

from engine.attention.cpu_kernel.attention_products import AHEAD, dots, product
from engine.attention.cpu_kernel.scratch import (
    CALL,
    ENTRY_FIELDS,
    LONG,
    SEGMENT_FIELDS,
    SUM_FLOATS,
    TASK_FIELDS,
    Scratch,
)
from engine.attention.cpu_kernel.softmax import blended, cleared, finished, soften
from engine.attention.cpu_kernel.tile_loads import rotated, scaled, turn, widened
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
def _transpose(call: Any, keys: int, count: int, room: Scratch) -> None:
    """Transpose ``count`` keys from ``keys`` on."""
    half, step = call.half, call.key_slot
    size = 2 if half else FLOAT
    for i in range(0, count, LANES):
        for d in range(0, call.key_dim, LANES):
            source, target = keys + i * step + d * size, room.tile + (d * TILE + i) * FLOAT
            turn((source, step, count - 1 - i, half, target))


@_part
def _few(call: Any, lines: int, keys: int, values: int, count: int, room: Scratch) -> None:
    """The scores of few lines with ``count`` keys: transposing them would take longer."""
    step, width, half = call.key_slot, call.key_dim // LANES, call.half
    for i in range(0, count, LANES):
        source, scores = keys + i * step, room.scores + i * FLOAT
        ahead, far = source + TILE * step, values + (TILE + i) * call.value_slot
        read = (source, step, count - 1 - i, half, width)
        dots((lines, room.queries, call.key_dim * FLOAT, *read, room.sums, scores, ahead, far))


@_part
def _segment(call: Any, keys: int, values: int, read: tuple[int, int, int], tops: int, room: Scratch) -> None:
    """The lines that `_lines` loaded meet the keys of the slots from the first to the stop."""
    lines, first, stop = read
    query_step, width = call.key_dim * FLOAT, call.value_dim // LANES
    # as few groups as possible, of equal size
    per_round = -(-lines // -(-lines // MAX_LINES))
    for start in range(first, stop, TILE):
        count = min(TILE, stop - start)
        source = keys + start * call.key_slot
        seen, seen_step = values + start * call.value_slot, call.value_slot
        if lines <= MAX_LINES:
            _few(call, lines, source, seen, count, room)
        else:
            _transpose(call, source, count, room)
        # what of the next tile remains to be prefetched
        ahead, far = source + TILE * call.key_slot, seen + TILE * call.value_slot
        until, end = ahead + TILE * call.key_slot, far + TILE * call.value_slot
        if call.half:
            widened((seen, seen_step, count, width, room.values))
            seen, seen_step = room.values, call.value_dim * FLOAT
        for line in range(0, lines, per_round):
            some = min(per_round, lines - line)
            numbers = room.numbers + line * LONG
            low, high, whole = TILE, 0, 1
            for i in range(some):
                sees, stops = integer_at(numbers, i) - start, integer_at(numbers, lines + i) - start
                low, high = min(low, sees), max(high, stops)
                if sees > 0 or stops < TILE:
                    whole = 0
            low, high = max(low, 0), min(high, count)
            if low >= high:
                continue
            if count < TILE:
                whole = 0
            query, scores = room.queries + line * query_step, room.scores
            if lines > MAX_LINES:
                columns = -(-high // LANES)
                near = ahead if ahead < until else scores
                tile, depth = room.tile, call.key_dim
                _multiply(some, columns, query, query_step, tile, TILE_BYTES, depth, room.targets, 0, near)
                ahead += depth * _FETCHED
            soften((some, scores, numbers, lines * LONG, start, count, whole, tops, width, call.cap))
            near = far if far < end and lines > MAX_LINES else scores
            scores, rows, depth = scores + low * FLOAT, seen + low * seen_step, high - low
            outputs = numbers + 2 * lines * LONG
            _multiply(some, width, scores, TILE_BYTES, rows, seen_step, depth, outputs, 1, near)
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
    sums = tile + TILE * key_dim * FLOAT
    values = sums + SUM_FLOATS * FLOAT
    numbers = values + TILE * value_dim * FLOAT
    queries = numbers + 4 * -(-lines // LANES) * LANES * LONG
    state = queries + lines * key_dim * FLOAT
    room = Scratch(queries, numbers, tile, sums, values, scores, targets)
    for i in range(MAX_LINES):
        put_integer(targets, i, scores + i * TILE * FLOAT)
    states = call.states + (integer_at(at, 7) + head * pieces) * call.state_bytes
    if pieces > 1:
        state = states + piece * call.state_bytes
    own = (value_dim + LANES) * FLOAT
    for line in range(lines):
        cleared((state + line * own, value_dim // LANES + 1, state + lines * own + line * FLOAT))
    head_keys, head_values = call.keys + head * call.key_head, call.values + head * call.value_head
    for index in range(first, first + count):
        segment = call.segments + index * SEGMENT_FIELDS * LONG
        entries = integer_at(segment, 1)
        _lines(call, head, integer_at(segment, 0), entries, row, state, room)
        read = entries * call.groups, integer_at(segment, 2), integer_at(segment, 3)
        _segment(call, head_keys, head_values, read, state + lines * own, room)
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
