"""Products with packed weights, and norms, as numba intrinsics on vectors of 16 floats.

Numba's loops over arrays keep sums in memory; here a tile of `MAX_LINES` rows and some vectors of columns
stays in registers. Addresses are integers, steps are bytes from row to row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.emit import action, integers
from engine.cpu.vectors import (
    F32,
    HALVES,
    I32,
    I64,
    INTS,
    LANES,
    MAX_LINES,
    PAIRED,
    VECTOR,
    VECTOR_BYTES,
    WIDTHS,
    Vectors,
)

PANEL = 64
"""Columns of a panel of weights."""
FLOATS, HALF, PAIRS = range(3)
"""Kinds of weights: float32; bfloat16, which become floats as they are read; and pairs of bfloat16, those of
two successive inputs, which are in bfloat16 as well. With pairs, a step of depth is two inputs."""
_VECTORS = WIDTHS[0]
_LOG2_E = 1.4426950408889634


def _silu(v: Vectors, x: Any) -> Any:
    """x / (1 + e^-x)."""
    least = v.builder.fmul(x, v.constant(-_LOG2_E))
    most = v.constant(126.0)  # beyond, the quotient is subnormal
    power = v.exp2(v.builder.select(v.builder.fcmp_ordered(">", least, most), most, least))
    return v.builder.fdiv(x, v.builder.fadd(power, v.constant(1.0)))


def _tile(
    v: Vectors,
    rows: int,
    kind: int,
    column: int,
    x: Any,
    x_step: Any,
    depth: Any,
    weights: Any,
    start: Any,
    start_step: Any,
) -> list[list[Any]]:
    """Sums [rows][vectors] of the panel's columns from ``column`` on; arguments as in `panel_product`."""
    slots = [
        [cgutils.alloca_once(v.builder, v.constant(0).type) for _ in range(_VECTORS)] for _ in range(rows)
    ]
    for r, own in enumerate(slots):
        for j, slot in enumerate(own):
            v.builder.store(v.load(v.at(start, v.times(start_step, r), 4 * column + VECTOR_BYTES * j)), slot)
    size = 2 if kind == HALF else 4
    stored, taken = {FLOATS: (VECTOR, F32), HALF: (HALVES, F32), PAIRS: (INTS, I32)}[kind]
    multiply_add = v.add_pairs if kind == PAIRS else v.multiply_add
    with cgutils.for_range(v.builder, depth, intp=I64) as loop:
        line = v.at(weights, v.times(loop.index, PANEL * size), size * column)
        found = [v.load(v.at(line, size * LANES * j), stored) for j in range(_VECTORS)]
        if kind == HALF:
            found = [v.widen(each) for each in found]
        for r, own in enumerate(slots):
            factor = v.splat(v.load(v.at(x, v.times(x_step, r), v.times(loop.index, 4)), taken))
            for slot, column_of in zip(own, found, strict=True):
                v.builder.store(multiply_add(factor, column_of, v.builder.load(slot)), slot)
    return [[v.builder.load(slot) for slot in own] for own in slots]


def _panel(v: Vectors, rows: Any, kind: int, *given: Any) -> None:
    b, (*read, out, out_step) = v.builder, given
    for count in range(1, MAX_LINES + 1):
        with b.if_then(b.icmp_signed("==", rows, I64(count))):
            for column in range(0, PANEL, LANES * _VECTORS):
                for r, own in enumerate(_tile(v, count, kind, column, *read)):
                    for j, vector in enumerate(own):
                        v.store(vector, v.at(out, v.times(out_step, r), 4 * column + VECTOR_BYTES * j))


@integers(10)
def panel_product(v: Vectors, rows: Any, half: Any, *given: Any) -> None:
    """out[r, :PANEL] = start[r, :PANEL] + x[r, :depth] @ weights[:depth, :PANEL], at most `MAX_LINES` r.

    ``half``: the weights are `HALF`, else `FLOATS`. ``given``: x, x_step, depth, weights, start, start_step,
    out, out_step.
    """
    with v.builder.if_else(v.builder.icmp_signed("!=", half, I64(0))) as (short, full):
        for taken, kind in ((short, HALF), (full, FLOATS)):
            with taken:
                _panel(v, rows, kind, *given)


@integers(9, needs=PAIRED)
def pair_product(v: Vectors, rows: Any, *given: Any) -> None:
    """`panel_product` of inputs in bfloat16 with `PAIRS`, ``depth`` of them."""
    _panel(v, rows, PAIRS, *given)


@integers(5)
def gated(v: Vectors, rows: Any, sums: Any, out: Any, out_step: Any, half: Any) -> None:
    """out[r, :PANEL / 2] = silu(sums[r, :PANEL / 2]) * sums[r, PANEL / 2:], in bfloat16 if ``half``."""
    b, behind = v.builder, PANEL // 2 * 4
    with cgutils.for_range(b, rows, intp=I64) as loop:
        row, target = v.at(sums, v.times(loop.index, 2 * behind)), v.at(out, v.times(loop.index, out_step))
        found = [
            b.fmul(_silu(v, v.load(v.at(row, at))), v.load(v.at(row, behind + at)))
            for at in range(0, behind, VECTOR_BYTES)
        ]
        with b.if_else(b.icmp_signed("!=", half, I64(0))) as (short, full):
            with short:
                for j, vector in enumerate(found):
                    v.store(v.narrow(vector), v.at(target, VECTOR_BYTES // 2 * j))
            with full:
                for j, vector in enumerate(found):
                    v.store(vector, v.at(target, VECTOR_BYTES * j))


def _squares(typing_context: Any, address: Any, vectors: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Vectors(builder)
        total = cgutils.alloca_once(builder, v.constant(0).type)
        builder.store(v.constant(0), total)
        with cgutils.for_range(builder, args[1], intp=I64) as loop:
            x = v.load(v.at(args[0], v.times(loop.index, VECTOR_BYTES)))
            builder.store(v.multiply_add(x, x, builder.load(total)), total)
        found = builder.load(total)
        for step in (8, 4, 2, 1):
            found = builder.fadd(found, v.shuffle(found, found, [i ^ step for i in range(LANES)]))
        return builder.extract_element(found, I64(0))

    return types.float32(types.int64, types.int64), generate


squares: Callable[[Any, Any], Any] = intrinsic(_squares)
"""The sum of the squares of the float vectors at an address."""


@action(*[types.int64] * 5, types.float32)
def weighted(v: Vectors, source: Any, weight: Any, target: Any, vectors: Any, half: Any, factor: Any) -> None:
    """target = source * factor * weight, of ``vectors`` vectors, in bfloat16 if ``half``."""
    b = v.builder
    with b.if_else(b.icmp_signed("!=", half, I64(0))) as (short, full):
        for taken, size in ((short, VECTOR_BYTES // 2), (full, VECTOR_BYTES)):
            with taken, cgutils.for_range(b, vectors, intp=I64) as loop:
                step = v.times(loop.index, VECTOR_BYTES)
                x = b.fmul(v.load(v.at(source, step)), v.splat(factor))
                x = b.fmul(x, v.load(v.at(weight, step)))
                v.store(v.narrow(x) if size < VECTOR_BYTES else x, v.at(target, v.times(loop.index, size)))


def pointer_to(kind: Any) -> Callable[[Any], Any]:
    """Makes an address a pointer to numba's ``kind``, for `numba.carray`."""

    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return intrinsic(pointer)  # type: ignore[no-any-return]  # numba is untyped


float_pointer, word_pointer, half_pointer, integer_pointer = (
    pointer_to(kind) for kind in (types.float32, types.uint32, types.uint16, types.int64)
)


def _caller(result: Any, kind: Any) -> Callable[[Any], Any]:
    def call(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = builder.inttoptr(args[0], ir.FunctionType(kind, []).as_pointer())
            found = builder.call(function, [])
            return context.get_dummy_value() if result is types.void else builder.sext(found, I64)

        return result(types.int64), generate

    return intrinsic(call)  # type: ignore[no-any-return]  # numba is untyped


invoke: Callable[[Any], None] = _caller(types.void, ir.VoidType())
"""Call the C function without arguments at an address."""
number_from: Callable[[Any], int] = _caller(types.int64, I32)
"""The int that the C function without arguments at an address returns."""


def _invoked(typing_context: Any, address: Any, argument: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


invoke_with: Callable[[Any, Any], None] = intrinsic(_invoked)
"""Call the C function at an address with another address."""
