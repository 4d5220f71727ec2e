"""A whole pass through decoder layers as one compiled call on torch's own threads.

A layer has three steps: before its attention, the attention, and after it. Where attention is compiled as
well, the call runs all of them; else it returns at each attention (`PASS`).

Many rows are split between the threads, each of which takes its rows through the whole call. Few rows are all
taken by every thread, which has its share of the weights; then threads wait for each other between products.
A row's result depends neither on the rows beside it nor on the number of threads.

Weights are packed in panels: float32 or bfloat16 (as uint16) [panels, inputs, PANEL], or pairs of bfloat16
(as uint32) [panels, inputs / 2, PANEL], whose inputs are rounded to bfloat16; or quantised, in blocks of
codes (`packed_products`), and then a product is to the bit that with the same weights expanded. All else is
float32; rows are padded to whole panels.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from engine.compiled.packed_products import (
    BLOCK_BYTES,
    BYTE_PAIRS,
    BYTES,
    FLOATS,
    GROUP,
    HALF,
    PAIRS,
    PANEL,
    code_pointer,
    expand,
    expand_pairs,
    float_pointer,
    gated,
    half_pointer,
    integer_pointer,
    invoke,
    invoke_with,
    number_from,
    pair_product,
    panel_product,
    pointer_to,
    squares,
    weighted,
    word_pointer,
)
from engine.cpu.vectors import CODES, KINDS, LANES, MAX_LINES
from regions.kv_codes import SCALE
from support.numba_kernel import callback, kernel

DEPTH = 1024
"""Inputs at a time, so that a panel's weights (256 KiB) stay in the second cache for all rows."""
EXPANDED = 256
"""Steps at a time that are expanded from codes for more rows than `MAX_LINES`: 64 KiB."""
_CODES = KINDS.index(CODES)
_BYTE_BLOCK, _NIBBLE_BLOCK = BLOCK_BYTES[8], BLOCK_BYTES[4]

_PER_PASS = (
    # the pass: states [rows, width], and scratch [threads, rows, width] of as many rows
    ("hidden", "normed", "rows", "by_rows"),
    # OpenMP's functions, 0 on one thread
    ("barrier", "thread_number", "thread_count"),
    # before attention: scratch; angles [positions, half], and int64 [rows] which of them and which slots
    ("joint", "cos", "sin", "angles", "half", "positions", "slots"),
    # [heads, rows, dim]; pools, numbers between heads, and what these are: `KINDS`
    ("query", "key", "value"),
    ("keys", "values", "pool_head", "pool_kind"),
    # after attention: [rows, heads * dim], and scratch [rows, mixed_width]
    ("attended", "mixed"),
)
_PER_LAYER = (
    ("width", "inputs", "norm", "second_norm"),
    ("queries", "queries_kind", "queries_panels", "bias", "heads", "kv_heads", "dim"),
    ("query_norm", "key_norm"),
    ("out", "out_kind", "out_panels", "gates", "gates_kind", "gates_panels", "gates_bias"),
    ("down", "down_kind", "inner", "mixed_width"),
)
PASS_FIELDS = sum(map(len, _PER_PASS))
"""How many words of a `LAYER` belong to the pass; those of the layer follow."""
LAYER = np.dtype(
    [(name, np.int64) for group in _PER_PASS + _PER_LAYER for name in group] + [("epsilon", np.float32)],
    align=True,
)
"""Arguments of one layer's steps: addresses, and sizes in floats or rows."""
BEFORE, ATTENTION, AFTER, STEPS = range(4)
"""The steps of a layer, and how many there are. The head's step follows those of all layers."""
_PASS = (
    # steps to run; LAYER [layers + 2]: the head, and the last layer for the rows kept, come last
    ("first", "stop", "layers", "arguments"),
    # int64 [rows], and the states that they begin as: [vocabulary, inputs] of floats or half, or panels of
    # codes; set by `forward` if a token is not in the vocabulary
    ("tokens", "embedding", "embedding_kind", "vocabulary", "strange"),
    # the attention's worker and its arguments, in bytes a layer
    ("worker", "calls", "call_bytes"),
    # int64: the rows whose logits are read; whether the last layer is for them alone
    ("kept", "trims"),
)
PASS = np.dtype([(name, np.int64) for group in _PASS for name in group])
"""Arguments of `forward`."""
_LAYER_BYTES = LAYER.itemsize
_layer_pointer = pointer_to(numba.from_dtype(LAYER))


@kernel
def in_pairs(kind: int) -> bool:
    """Whether inputs of such weights are in bfloat16."""
    return kind == PAIRS or kind >= BYTE_PAIRS


@kernel
def _block_of(kind: int) -> Any:
    """Of a panel: steps and bytes of what lies together."""
    if kind == HALF:
        return 1, PANEL * 2
    if kind < BYTES:
        return 1, PANEL * 4
    steps = GROUP // 2 if kind >= BYTE_PAIRS else GROUP
    return steps, _BYTE_BLOCK if kind in (BYTES, BYTE_PAIRS) else _NIBBLE_BLOCK


@kernel
def _expanded(kind: int, weights: int, depth: int, out: int) -> None:
    if kind >= BYTE_PAIRS:
        expand_pairs((kind, weights, depth, out))
    else:
        expand((kind, weights, depth, out))


@kernel
def linear(
    rows: int, x: int, x_step: int, depth: int, weights: int, kind: int, first: int, last: int, start: int,
    start_step: int, out: int, out_step: int, gate: bool,
) -> None:  # fmt: skip
    """out[:, panel] = start[:, panel] + x[:, :depth] @ weights[panel], for panels ``first`` to ``last``.

    ``kind`` of the weights, and of x if that is of pairs. ``start_step``: 0 for a bias. ``gate``: `gated`
    follows, so half as many columns.

    `MAX_LINES` rows read codes as they are; for more they are expanded first, once for all.
    """
    pairs, most, read = in_pairs(kind), DEPTH, kind
    if pairs:
        depth = (depth + 1) // 2
    columns = PANEL * 4
    if gate:
        columns = PANEL if pairs else PANEL * 2
    expands = kind >= BYTES and rows > MAX_LINES
    if expands:
        most, read = EXPANDED, PAIRS if pairs else FLOATS
    steps, size = _block_of(kind)
    sums = np.empty((rows if gate else 0, PANEL), np.float32)
    scratch = np.empty(EXPANDED * PANEL if expands else 0, np.float32)
    for panel in range(first, last):
        w, begin, begin_step = (
            weights + panel * (-(-depth // steps)) * size,
            start + panel * PANEL * 4,
            start_step,
        )
        place, step = out + panel * columns, out_step
        if gate:
            place, step = sums.ctypes.data, PANEL * 4
        for k in range(0, depth, most):
            count, taken = min(most, depth - k), w + k // steps * size
            if expands:
                _expanded(kind, taken, count, scratch.ctypes.data)
                taken = scratch.ctypes.data
            for r in range(0, rows, MAX_LINES):
                values = (
                    min(MAX_LINES, rows - r), read, x + r * x_step + 4 * k, x_step, count, taken,
                    begin + r * begin_step, begin_step, place + r * step, step,
                )  # fmt: skip
                if pairs:
                    pair_product(values)
                else:
                    panel_product(values)
            begin, begin_step = place, step
        if gate:
            gated((rows, place, out + panel * columns, out_step, int(pairs)))


@kernel
def rms_norm(
    rows: int, x: int, step: int, inputs: int, weight: int, epsilon: Any, out: int, half: bool
) -> None:
    """out = x / rms * weight; rows of ``inputs`` floats, ``step`` bytes apart and padded with zeros.

    ``half``: out is in bfloat16, its rows as far apart.
    """
    vectors = step // (4 * LANES)
    for r in range(rows):
        mean = squares(x + r * step, vectors) / np.float32(inputs)
        factor = np.float32(1) / np.sqrt(mean + epsilon)
        weighted((x + r * step, weight, out + r * step, vectors, int(half), factor))


@kernel
def rotated_heads(
    joint: Any, column: int, cos: Any, sin: Any, at: Any, norm: Any, epsilon: Any, out: Any, rows: Any
) -> None:
    """Heads of ``rows`` of ``joint`` [all rows, width] from ``column`` on to ``out`` [heads, all rows, dim]:
    normed if ``norm`` has entries, then rotated by ``cos[at]``, halves of the first 2 * cos.shape[1] dims."""
    heads, _, dim = out.shape
    half = cos.shape[1]
    for r in range(rows[0], rows[1]):
        angle = at[r]
        for h in range(heads):
            begin = column + h * dim
            scale = np.float32(1)
            if len(norm):
                total = np.float32(0)
                for i in range(dim):
                    total += joint[r, begin + i] * joint[r, begin + i]
                scale = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
                for i in range(dim):
                    joint[r, begin + i] *= scale * norm[i]
            for i in range(half):
                a, b = joint[r, begin + i], joint[r, begin + half + i]
                out[h, r, i] = a * cos[angle, i] - b * sin[angle, i]
                out[h, r, half + i] = b * cos[angle, i] + a * sin[angle, i]
            for i in range(2 * half, dim):
                out[h, r, i] = joint[r, begin + i]


@kernel
def _rounded(word: Any) -> Any:
    """The bits of a float as those of bfloat16, rounded to nearest even; NaN stays NaN."""
    if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel
def _put_codes(
    new: int, pool: int, heads: int, rows: int, dim: int, head_step: int, slots: Any, some: Any
) -> None:
    """As `_put` into a pool of codes, to the bit what `regions.kv_codes.stored` makes of each row."""
    source = numba.carray(float_pointer(new), (heads, rows, dim), np.float32)
    words = numba.carray(word_pointer(new), (heads, rows, dim), np.uint32)
    target = numba.carray(code_pointer(pool), (heads, head_step), np.int8)
    word = np.empty(1, np.float32)
    bits = word.view(np.uint32)
    for h in range(heads):
        for r in range(some[0], some[1]):
            first, top = slots[r] * (dim + SCALE), np.uint32(0)
            for i in range(dim):
                # as whole numbers, the bits of sizes are in the order of sizes, and NaN is the greatest
                top = max(top, words[h, r, i] & np.uint32(0x7FFFFFFF))
            bits[0] = top
            word[0] = word[0] / np.float32(127)
            short = np.uint16(0x7FC0) if top >= np.uint32(0x7F800000) else _rounded(bits[0])
            bits[0] = np.uint32(short) << np.uint32(16)
            scale = word[0]
            for i in range(dim):
                code = np.float32(scale != scale)
                if scale > 0:
                    code = min(max(np.rint(source[h, r, i] / scale), np.float32(-127)), np.float32(127))
                target[h, first + i] = np.int8(code)
            target[h, first + dim] = np.int8(short & np.uint16(0xFF))
            target[h, first + dim + 1] = np.int8(short >> np.uint16(8))


@kernel
def _put(
    new: int, pool: int, kind: int, heads: int, rows: int, dim: int, head_step: int, slots: Any, some: Any
) -> None:
    """pool[:, slots] = new [heads, rows, dim], for the rows ``some``; ``kind``: number of `KINDS`."""
    if kind == _CODES:
        _put_codes(new, pool, heads, rows, dim, head_step, slots, some)
        return
    source = numba.carray(word_pointer(new), (heads, rows, dim), np.uint32)
    full = numba.carray(word_pointer(pool), (heads, head_step), np.uint32)
    short = numba.carray(half_pointer(pool), (heads, head_step), np.uint16)
    for h in range(heads):
        for r in range(some[0], some[1]):
            first = slots[r] * dim
            if kind:
                for i in range(dim):
                    short[h, first + i] = _rounded(source[h, r, i])
            else:
                for i in range(dim):
                    full[h, first + i] = source[h, r, i]


@kernel
def _share(count: int, team: Any) -> Any:
    """The part of ``count`` things of a thread, ``team`` = its number and that of all."""
    return count * team[0] // team[1], count * (team[0] + 1) // team[1]


@kernel
def _rows(call: Any, team: Any) -> Any:
    """The thread's rows, in whole tiles."""
    if call.by_rows:
        first, last = _share(-(-call.rows // MAX_LINES), team)
        return min(first * MAX_LINES, call.rows), min(last * MAX_LINES, call.rows)
    return 0, call.rows


@kernel
def _panels(call: Any, panels: int, team: Any) -> Any:
    """The thread's panels."""
    if call.by_rows:
        return 0, panels
    return _share(panels, team)


@kernel
def _scratch(call: Any, first: int, team: Any) -> int:
    """The address of normed rows from ``first`` on; where threads share rows, each has its own."""
    number = 0 if call.by_rows else team[0] * call.rows
    address: int = call.normed + (number + first) * call.width * 4
    return address


@kernel
def _wait(call: Any) -> None:
    """For the other threads, where they share rows."""
    if call.barrier and not call.by_rows:
        invoke(call.barrier)


@kernel
def _project(call: Any, team: Any) -> None:
    """The states of the thread's rows, normed, through ``queries`` to ``joint``."""
    first, last = _rows(call, team)
    step, joint_step = call.width * 4, call.queries_panels * PANEL * 4
    x, normed = call.hidden + first * step, _scratch(call, first, team)
    rms_norm(last - first, x, step, call.inputs, call.norm, call.epsilon, normed, in_pairs(call.queries_kind))
    panels = _panels(call, call.queries_panels, team)
    linear(
        last - first, normed, step, call.inputs, call.queries, call.queries_kind, panels[0], panels[1],
        call.bias, 0, call.joint + first * joint_step, joint_step, False,
    )  # fmt: skip


@kernel
def _split(call: Any, some: Any) -> None:
    """The rows ``some`` of ``joint`` as rotated queries and keys, and values; these two go to the pool."""
    heads, kv_heads, dim, rows = call.heads, call.kv_heads, call.dim, call.rows
    joint = numba.carray(float_pointer(call.joint), (rows, call.queries_panels * PANEL), np.float32)
    cos = numba.carray(float_pointer(call.cos), (call.angles, call.half), np.float32)
    sin = numba.carray(float_pointer(call.sin), (call.angles, call.half), np.float32)
    positions = numba.carray(integer_pointer(call.positions), (rows,), np.int64)
    slots = numba.carray(integer_pointer(call.slots), (rows,), np.int64)
    for part in range(2):
        address, norm_of, number, column = call.query, call.query_norm, heads, 0
        if part == 1:
            address, norm_of, number, column = call.key, call.key_norm, kv_heads, heads * dim
        out = numba.carray(float_pointer(address), (number, rows, dim), np.float32)
        norm = numba.carray(float_pointer(norm_of), (dim if norm_of else 0,), np.float32)
        rotated_heads(joint, column, cos, sin, positions, norm, call.epsilon, out, some)
    value = numba.carray(float_pointer(call.value), (kv_heads, rows, dim), np.float32)
    for r in range(some[0], some[1]):
        for h in range(kv_heads):
            begin = (heads + kv_heads + h) * dim
            for i in range(dim):
                value[h, r, i] = joint[r, begin + i]
    for new, pool in ((call.key, call.keys), (call.value, call.values)):
        _put(new, pool, call.pool_kind, kv_heads, rows, dim, call.pool_head, slots, some)


@kernel
def _mix(call: Any, team: Any) -> None:
    """Add the attention's output and then the feed-forward part to the states of the thread's rows."""
    first, last = _rows(call, team)
    rows, step, mixed_step = last - first, call.width * 4, call.mixed_width * 4
    joined, x, mixed = call.heads * call.dim, call.hidden + first * step, call.mixed + first * mixed_step
    panels, gates = _panels(call, call.out_panels, team), _panels(call, call.gates_panels, team)
    joined_step = joined * 2 if in_pairs(call.out_kind) else joined * 4
    attended, normed = call.attended + first * joined_step, _scratch(call, first, team)
    linear(
        rows, attended, joined_step, joined, call.out, call.out_kind, panels[0], panels[1], x, step, x, step,
        False,
    )  # fmt: skip
    _wait(call)
    rms_norm(rows, x, step, call.inputs, call.second_norm, call.epsilon, normed, in_pairs(call.gates_kind))
    linear(
        rows, normed, step, call.inputs, call.gates, call.gates_kind, gates[0], gates[1], call.gates_bias, 0,
        mixed, mixed_step, True,
    )  # fmt: skip
    _wait(call)
    linear(
        rows, mixed, mixed_step, call.inner, call.down, call.down_kind, panels[0], panels[1], x, step, x,
        step, False,
    )  # fmt: skip
    _wait(call)


@kernel
def _team(call: Any) -> Any:
    """The thread's number, and how many there are."""
    if call.thread_count:
        return number_from(call.thread_number), number_from(call.thread_count)
    return 0, 1


@kernel
def _embed(run: Any, call: Any, some: Any) -> None:
    """Begin the states of the rows ``some``, padded with zeros."""
    tokens = numba.carray(integer_pointer(run.tokens), (call.rows,), np.int64)
    coded = run.embedding_kind >= BYTES
    scratch = np.empty((call.inputs if coded else 0, PANEL), np.uint32)
    for r in range(some[0], some[1]):
        token = tokens[r]
        if token < 0 or token >= run.vocabulary:
            run.strange, token = 1, 0
        first = token * call.inputs
        words = numba.carray(word_pointer(call.hidden + r * call.width * 4), (call.width,), np.uint32)
        if coded:
            steps, size = _block_of(run.embedding_kind)
            panel = run.embedding + token // PANEL * (-(-call.inputs // steps)) * size
            _expanded(run.embedding_kind, panel, call.inputs, scratch.ctypes.data)
            for i in range(call.inputs):
                words[i] = scratch[i, token % PANEL]
        elif run.embedding_kind == HALF:
            short = numba.carray(half_pointer(run.embedding + first * 2), (call.inputs,), np.uint16)
            for i in range(call.inputs):
                words[i] = np.uint32(short[i]) << np.uint32(16)
        else:
            full = numba.carray(word_pointer(run.embedding + first * 4), (call.inputs,), np.uint32)
            for i in range(call.inputs):
                words[i] = full[i]
        for i in range(call.inputs, call.width):
            words[i] = np.uint32(0)


@kernel
def _gather(source: int, target: int, width: int, kept: Any, some: Any) -> None:
    """target[i] = source[kept[i]] for the rows ``some``, each of ``width`` floats."""
    for i in range(some[0], some[1]):
        read = numba.carray(float_pointer(source + kept[i] * width * 4), (width,), np.float32)
        written = numba.carray(float_pointer(target + i * width * 4), (width,), np.float32)
        for j in range(width):
            written[j] = read[j]


@kernel
def _barrier(call: Any) -> None:
    """For the other threads."""
    if call.barrier:
        invoke(call.barrier)


@kernel
def _call_of(run: Any, number: int) -> Any:
    return numba.carray(_layer_pointer(run.arguments + number * _LAYER_BYTES), 1)[0]


def _forward(pointer: Any) -> None:
    run = numba.carray(pointer, 1)[0]
    tail = _call_of(run, run.layers + 1)
    team = _team(tail)
    kept = numba.carray(integer_pointer(run.kept), (tail.rows,), np.int64)
    some = _share(tail.rows, team)
    for step in range(run.first, run.stop):
        number, part = step // STEPS, step % STEPS
        call = _call_of(run, number)
        trims = run.trims and number == run.layers - 1
        if number == run.layers:
            _barrier(call)
            if not run.trims:
                states = _call_of(run, 0)
                _gather(states.hidden, call.hidden, call.width, kept, some)
                _barrier(call)
            _project(call, team)  # the last norm and the logits
        elif part == BEFORE:
            if step == 0:
                _embed(run, call, _share(call.rows, team))
                _barrier(call)
            _project(call, team)
            _wait(call)
            if call.by_rows or team[0] == 0:
                _split(call, _rows(call, team))
        elif part == ATTENTION:
            _barrier(call)
            if trims:
                size = call.dim * 4
                for h in range(call.heads):
                    source, target = call.query + h * call.rows * size, tail.query + h * tail.rows * size
                    _gather(source, target, call.dim, kept, some)
                _barrier(call)
            invoke_with(run.worker, run.calls + number * run.call_bytes)
            _barrier(call)
        elif trims:
            _gather(call.hidden, tail.hidden, call.width, kept, some)
            _barrier(call)
            _mix(tail, team)
        else:
            _mix(call, team)


@cache
def forward() -> int:
    """The address of a C function that runs the steps of the `PASS` at an address.

    Every thread of a team calls it. The rows that are read are gathered at the last layer's attention if the
    pass ``trims``, else at the head.
    """
    address: int = callback(_forward, types.void(types.CPointer(numba.from_dtype(PASS)))).address
    return address
