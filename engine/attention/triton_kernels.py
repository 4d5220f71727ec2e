# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# Kernels are written in Triton's own language, which type checkers do not know.
"""Triton kernels of region attention: shift tables, split-K attention over slots, and the merge of its parts.

`attend` processes one *item* for one KV head: a tile of readers (rows that read the same run of slots, with
all query heads of the KV head) over a part of that run. Every reader sees an interval of slots, which covers
full, causal and windowed attention. Blocks of keys that the whole tile sees are processed by a loop without
masks, the rest by a second loop. `merge` merges the attention states of a row by log-sum-exp, as in flash
decoding. All exponentials are base 2.

EARLY: programs start while the kernel before them ends (programmatic dependent launch, from Hopper on), and
wait before they touch what it wrote or reads.
"""

import triton  # type: ignore[import-untyped]  # ships no type information
import triton.language as tl  # type: ignore[import-untyped]  # ships no type information
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]  # as above

LOG2_E = 1.4426950408889634
ITEM_FIELDS = 8
"""First entry, number of entries; first slot and end slot; first and end slot of the slots that all entries
see; first target; unused. Ends are exclusive."""
ENTRY_FIELDS = 4
"""Row of the batch, row of the shift table, first visible slot, end of the visible slots (exclusive)."""

_LOG2_E = tl.constexpr(LOG2_E)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)


@triton.jit
def rotation_table(shifts, inv_freq, table, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """``table`` fp32 [shifts, 2, HALF]: cosines and sines of ``shifts`` int32 times ``inv_freq`` fp64 [HALF].

    Angles are computed in fp64, because a shift can span a whole frame.
    """
    shift = tl.program_id(0)
    dim = tl.arange(0, BLOCK)
    here = dim < HALF
    angle = tl.load(shifts + shift).to(tl.float64) * tl.load(inv_freq + dim, mask=here, other=0.0)
    at = table + shift * 2 * HALF + dim
    tl.store(at, tl.cos(angle).to(tl.float32), mask=here)
    tl.store(at + HALF, tl.sin(angle).to(tl.float32), mask=here)


@triton.jit
def _load_block(base, slots, stride, stop, DIM: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """[slots, PADDED] of keys or values; zero from ``stop`` on, because that memory may contain NaN."""
    dims = tl.arange(0, PADDED)
    at = base + slots.to(tl.int64)[:, None] * stride + dims[None, :]
    if EDGE:
        if DIM == PADDED:
            block = tl.load(at, mask=(slots < stop)[:, None], other=0.0)
        else:
            block = tl.load(at, mask=(slots < stop)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == PADDED:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return block


@triton.jit
def _meet(
    acc,
    top,
    weight,
    query,
    keys,
    values,
    key_stride,
    value_stride,
    slots,
    low,
    high,
    stop,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Process one block of keys; returns the online softmax's next accumulator, maximum and weight."""
    key = _load_block(keys, slots, key_stride, stop, KEY_DIM, KEY_PADDED, EDGE)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:  # softcap * tanh(score / softcap); the factors are premultiplied
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * scale) + 1.0))
        unit = 1.0
    else:
        unit = scale
    if EDGE:
        seen = (slots[None, :] >= low[:, None]) & (slots[None, :] < high[:, None])
        score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1) * unit)
    # a row that has seen no key yet must not compute -inf - -inf
    base = tl.where(highest == float("-inf"), 0.0, highest) if EDGE else highest
    share = tl.exp2(score * unit - base[:, None])
    decay = tl.exp2(top - base)
    value = _load_block(values, slots, value_stride, stop, VALUE_DIM, VALUE_PADDED, EDGE)
    acc = tl.dot(share.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, highest, weight * decay + tl.sum(share, 1)


@triton.jit
def _rotated_query(
    query,
    head_stride,
    row_stride,
    heads,
    rows,
    shifts,
    real,
    table,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Query rows [TILE, KEY_PADDED] in the frame of their keys, in the query's type.

    Half-split rotary layout over the first ``2 * HALF`` dims.
    """
    dims = tl.arange(0, KEY_PADDED)
    start = query + heads.to(tl.int64) * head_stride + rows.to(tl.int64) * row_stride
    here = real[:, None] & (dims < KEY_DIM)[None, :]
    plain = tl.load(start[:, None] + dims[None, :], mask=here, other=0.0)
    if HALF == 0:
        rotated = plain
    else:
        partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
        other = tl.load(start[:, None] + partner[None, :], mask=here, other=0.0)
        rotated = real[:, None] & (dims < 2 * HALF)[None, :]
        angle = table + shifts[:, None] * 2 * HALF + (dims % HALF)[None, :]
        cos = tl.load(angle, mask=rotated, other=1.0)
        sin = tl.load(angle + HALF, mask=rotated, other=0.0)
        sin = tl.where((dims < HALF)[None, :], -sin, sin)
        rotated = (plain.to(tl.float32) * cos + other.to(tl.float32) * sin).to(plain.dtype)
    return rotated


@triton.jit
def attend(
    query,
    keys,
    values,
    items,
    entries,
    targets,
    table,
    part_out,
    part_lse,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_slot_stride,
    value_head_stride,
    value_slot_stride,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One item and KV head per program; the grid is [items * KV_HEADS], heads fastest.

    ``query`` [q_heads, rows, KEY_DIM]; ``keys``, ``values`` [kv_heads, slots, dim], last stride 1. ``items``
    int32 [., ITEM_FIELDS]; without entries the program ends at once. ``entries`` int32 [., ENTRY_FIELDS].
    ``targets`` int32: the part that each entry of each item writes. ``table``: see `rotation_table`.
    ``part_out`` fp32 [parts, q_heads, VALUE_DIM], ``part_lse`` fp32 [parts, q_heads] (base 2). ``scale``:
    times log2(e); with a soft-cap 2 log2(e) scale / softcap. ``softcap``: times log2(e).
    """
    if EARLY:
        gdc_launch_dependents()
    item = items + (tl.program_id(0) // KV_HEADS) * _ITEM_FIELDS
    head = tl.program_id(0) % KV_HEADS
    count = tl.load(item + 1)
    if count == 0:
        return
    first = tl.load(item)
    start = tl.load(item + 2)
    stop = tl.load(item + 3)
    common_start = tl.load(item + 4)
    common_stop = tl.load(item + 5)

    index = tl.arange(0, TILE)
    reader = index // GROUPS
    real = reader < count
    heads = head * GROUPS + index % GROUPS
    entry = entries + (first + reader) * _ENTRY_FIELDS
    rows = tl.load(entry, mask=real, other=0)
    shifts = tl.load(entry + 1, mask=real, other=0)
    low = tl.load(entry + 2, mask=real, other=0)
    high = tl.load(entry + 3, mask=real, other=0)
    if EARLY:  # all before is metadata, which no kernel of the pass writes
        gdc_wait()
    rotated = _rotated_query(
        query,
        query_head_stride,
        query_row_stride,
        heads,
        rows,
        shifts,
        real,
        table,
        KEY_DIM,
        KEY_PADDED,
        HALF,
    )

    # The blocks that every reader sees lie between the edges; all blocks are counted from `start`.
    inner = start + tl.cdiv(tl.minimum(tl.maximum(common_start, start), stop) - start, BLOCK) * BLOCK
    outer = inner + tl.maximum(tl.minimum(common_stop, stop) - inner, 0) // BLOCK * BLOCK
    before = (inner - start) // BLOCK
    edges = before + tl.cdiv(tl.maximum(stop - outer, 0), BLOCK)
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([TILE, VALUE_PADDED], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    for slot in tl.range(inner, outer, BLOCK):
        acc, top, weight = _meet(
            acc, top, weight, rotated, keys, values, key_slot_stride, value_slot_stride, slot + offsets,
            low, high, stop, scale, softcap,
            KEY_DIM, VALUE_DIM, KEY_PADDED, VALUE_PADDED, SOFTCAP, False,
        )  # fmt: skip
    for edge in tl.range(0, edges):
        slot = tl.where(edge < before, start + edge * BLOCK, outer + (edge - before) * BLOCK)
        acc, top, weight = _meet(
            acc, top, weight, rotated, keys, values, key_slot_stride, value_slot_stride, slot + offsets,
            low, high, stop, scale, softcap,
            KEY_DIM, VALUE_DIM, KEY_PADDED, VALUE_PADDED, SOFTCAP, True,
        )  # fmt: skip

    # A reader that saw no key keeps a maximum of -inf: its log-sum-exp is -inf, its zeros have no weight.
    divisor = tl.where(weight == 0.0, 1.0, weight)
    target = tl.load(targets + tl.load(item + 6) + reader, mask=real, other=0).to(tl.int64)
    at = target * (KV_HEADS * GROUPS) + heads
    dims = tl.arange(0, VALUE_PADDED)
    tl.store(
        part_out + at[:, None] * VALUE_DIM + dims[None, :],
        acc / divisor[:, None],
        mask=real[:, None] & (dims < VALUE_DIM)[None, :],
    )
    tl.store(part_lse + at, top + tl.log2(divisor), mask=real)


@triton.jit
def merge(
    part_out,
    part_lse,
    offsets,
    sinks,
    out,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of each row into ``out`` [rows, HEADS, VALUE_DIM]; the grid is [rows, stretches].

    A program merges COLUMNS numbers of one row: several heads, or a part of one. ``offsets`` int32 [rows +
    1]: row r has the parts from offsets[r] to offsets[r + 1] (exclusive); rows of padding have none and get
    zeros. ``sinks`` [HEADS]: a logit that takes weight and adds no value.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    if EARLY:
        gdc_wait()
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < HEADS * VALUE_DIM
    head = column // VALUE_DIM
    acc = tl.zeros([COLUMNS], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=here, other=0.0).to(tl.float32) * _LOG2_E
        weight = tl.full([COLUMNS], 1.0, tl.float32)
    else:
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        weight = tl.zeros([COLUMNS], tl.float32)
    for part in tl.range(first, last, PARTS):
        index = part + tl.arange(0, PARTS)
        real = (index < last)[:, None] & here[None, :]
        at = index.to(tl.int64)[:, None]
        lse = tl.load(part_lse + at * HEADS + head[None, :], mask=real, other=float("-inf"))
        parts = tl.load(part_out + at * (HEADS * VALUE_DIM) + column[None, :], mask=real, other=0.0)
        highest = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2(lse - base[None, :])
        decay = tl.exp2(top - base)
        acc = acc * decay + tl.sum(share * parts, 0)
        weight = weight * decay + tl.sum(share, 0)
        top = highest
    merged = acc / tl.where(weight == 0.0, 1.0, weight)
    at = row.to(tl.int64) * (HEADS * VALUE_DIM) + column
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=here)
