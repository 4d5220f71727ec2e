# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# Kernels are written in Triton's own language, which type checkers do not know.
"""Triton kernels between the matrix products of a decoder layer. Each rounds once, from fp32.

EARLY: as in `engine.attention.triton_kernels`.
"""

import triton  # type: ignore[import-untyped]  # ships no type information
import triton.language as tl  # type: ignore[import-untyped]  # ships no type information
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]  # as above


@triton.jit
def add_norm(
    states,
    added,
    weight,
    normed,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``normed`` = RMS norm of ``states`` [rows, WIDTH]; the grid is [rows].

    ADDS: ``added`` is added to ``states`` before, in place.
    """
    if EARLY:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, PADDED)
    here = at < WIDTH
    factor = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    state = tl.load(states + start + at, mask=here, other=0.0)
    if ADDS:
        more = tl.load(added + start + at, mask=here, other=0.0)
        state = (state.to(tl.float32) + more.to(tl.float32)).to(state.dtype)
        tl.store(states + start + at, state, mask=here)
    wide = state.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    tl.store(normed + start + at, (wide * scale * factor).to(state.dtype), mask=here)


@triton.jit
def rotate_and_write(
    joint,
    cos,
    sin,
    query_norm,
    key_norm,
    slots,
    keys,
    values,
    epsilon,
    key_head_stride,
    key_slot_stride,
    value_head_stride,
    value_slot_stride,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate queries and keys in place, write keys and values into the pool; the grid is [rows, KV_HEADS].

    ``joint`` [rows, (GROUPS + 2) * KV_HEADS * 2 * HALF]: heads of queries, keys and values. ``cos``, ``sin``:
    fp32 [rows, HALF]. ``keys``, ``values`` [KV_HEADS, slots, 2 * HALF]. NORMS: of queries' and keys' heads.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    dims = tl.arange(0, HALF_PADDED)
    index = tl.arange(0, HEADS_PADDED)  # the queries of the group, then their key
    column = tl.where(index < GROUPS, head * GROUPS + index, KV_HEADS * GROUPS + head) * (2 * HALF)
    row_start = joint + row * ((GROUPS + 2) * KV_HEADS * 2 * HALF)
    at = row_start + column[:, None] + dims[None, :]
    whole = dims < HALF
    here = (index <= GROUPS)[:, None] & whole[None, :]
    first = tl.load(at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    if NORMS:
        factors = tl.where((index == GROUPS)[:, None], key_norm + dims[None, :], query_norm + dims[None, :])
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + epsilon)
        first *= scale[:, None] * tl.load(factors, mask=here, other=0.0).to(tl.float32)
        second *= scale[:, None] * tl.load(factors + HALF, mask=here, other=0.0).to(tl.float32)
    turn_cos = tl.load(cos + row * HALF + dims, mask=whole, other=1.0)[None, :]
    turn_sin = tl.load(sin + row * HALF + dims, mask=whole, other=0.0)[None, :]
    turned = (first * turn_cos - second * turn_sin).to(joint.dtype.element_ty)
    other = (second * turn_cos + first * turn_sin).to(joint.dtype.element_ty)
    tl.store(at, turned, mask=here)
    tl.store(at + HALF, other, mask=here)
    pooled = keys + head.to(tl.int64) * key_head_stride + slot * key_slot_stride + (column * 0)[:, None]
    here = (index == GROUPS)[:, None] & whole[None, :]
    tl.store(pooled + dims[None, :], turned, mask=here)
    tl.store(pooled + HALF + dims[None, :], other, mask=here)
    value = row_start + (KV_HEADS * (GROUPS + 1) + head) * (2 * HALF) + dims
    pooled = values + head.to(tl.int64) * value_head_stride + slot * value_slot_stride + dims
    tl.store(pooled, tl.load(value, mask=whole), mask=whole)
    tl.store(pooled + HALF, tl.load(value + HALF, mask=whole), mask=whole)


@triton.jit
def swiglu(joint, mixed, INNER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """``mixed`` [rows, INNER] = silu of the first half of ``joint`` [rows, 2 * INNER] times the second.

    The grid is [rows, blocks].
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < INNER
    gate = tl.load(joint + row * 2 * INNER + at, mask=here, other=0.0)
    up = tl.load(joint + row * 2 * INNER + INNER + at, mask=here, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(mixed + row * INNER + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=here)
