"""Products with packed weights, and norms, as numba intrinsics on vectors of 16 floats.

Numba's loops over arrays keep sums in memory; here a tile of `MOST` rows and some vectors of columns stays in
registers. Addresses are integers, steps are bytes from row to row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_kernel.products import WIDTHS
from engine.attention.cpu_kernel.vectors import F32, HALVES, I32, I64, LANES, Vectors

PANEL, MOST = 64, 6
"""Columns of a panel of weights, rows of a tile."""
_VECTORS = WIDTHS[0]
_SIZE = 4 * LANES
_LOG2_E = 1.4426950408889634


def _silu(v: Vectors, x: Any) -> Any:
    """x / (1 + e^-x)."""
    least = v.builder.fmul(x, v.constant(-_LOG2_E))
    most = v.constant(126.0)  # beyond, the quotient is subnormal
    power = v.exp2(v.builder.select(v.builder.fcmp_ordered(">", least, most), most, least))
    return v.builder.fdiv(x, v.builder.fadd(power, v.constant(1.0)))


def _tile(v: Vectors, rows: int, half: bool, values: Sequence[Any], column: int) -> list[list[Any]]:
    """Sums [rows][vectors] of the panel's columns from ``column`` on; ``values`` as in `product`."""
    x, x_step, depth, weights, start, start_step, _, _ = values
    slots = [
        [cgutils.alloca_once(v.builder, v.constant(0).type) for _ in range(_VECTORS)] for _ in range(rows)
    ]
    for r, own in enumerate(slots):
        for j, slot in enumerate(own):
            v.builder.store(v.load(v.at(start, v.times(start_step, r), 4 * column + _SIZE * j)), slot)
    size = 2 if half else 4
    with cgutils.for_range(v.builder, depth, intp=I64) as loop:
        line = v.at(weights, v.times(loop.index, PANEL * size), size * column)
        places = [v.at(line, size * LANES * j) for j in range(_VECTORS)]
        found = [v.widen(v.load(place, HALVES)) if half else v.load(place) for place in places]
        for r, own in enumerate(slots):
            factor = v.splat(v.load(v.at(x, v.times(x_step, r), v.times(loop.index, 4)), F32))
            for slot, column_of in zip(own, found, strict=True):
                v.builder.store(v.multiply_add(factor, column_of, v.builder.load(slot)), slot)
    return [[v.builder.load(slot) for slot in own] for own in slots]


def _emit(v: Vectors, rows: int, half: bool, gate: bool, values: Sequence[Any]) -> None:
    out, out_step = values[6:]
    tiles = [_tile(v, rows, half, values, column) for column in range(0, PANEL, LANES * _VECTORS)]
    for r in range(rows):
        found = [vector for tile in tiles for vector in tile[r]]
        if gate:
            gates, ups = found[: len(found) // 2], found[len(found) // 2 :]
            found = [v.builder.fmul(_silu(v, one), other) for one, other in zip(gates, ups, strict=True)]
        for j, vector in enumerate(found):
            v.store(vector, v.at(out, v.times(out_step, r), _SIZE * j))


def _product(half: bool, gate: bool) -> Callable[..., None]:
    def product(typing_context: Any, rows: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for count in range(1, MOST + 1):
                with builder.if_then(builder.icmp_signed("==", args[0], I64(count))):
                    _emit(Vectors(builder), count, half, gate, cgutils.unpack_tuple(builder, args[1]))
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, 8)), generate

    return intrinsic(product)  # type: ignore[no-any-return]  # numba is untyped


product = _product(half=False, gate=False)
"""``product(rows, (x, x_step, depth, weights, start, start_step, out, out_step))``, at most `MOST` rows:
out[r, :PANEL] = start[r, :PANEL] + x[r, :depth] @ weights[:depth, :PANEL]."""
product_half = _product(half=True, gate=False)
"""`product` with weights in bfloat16."""
gated = _product(half=False, gate=True)
"""As `product`; the panel's first half goes through SiLU and is multiplied by the second: 32 columns out."""
gated_half = _product(half=True, gate=True)
"""`gated` with weights in bfloat16."""


def _squares(typing_context: Any, address: Any, vectors: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Vectors(builder)
        total = cgutils.alloca_once(builder, v.constant(0).type)
        builder.store(v.constant(0), total)
        with cgutils.for_range(builder, args[1], intp=I64) as loop:
            x = v.load(v.at(args[0], v.times(loop.index, _SIZE)))
            builder.store(v.multiply_add(x, x, builder.load(total)), total)
        found = builder.load(total)
        for step in (8, 4, 2, 1):
            found = builder.fadd(found, v.shuffle(found, found, [i ^ step for i in range(LANES)]))
        return builder.extract_element(found, I64(0))

    return types.float32(types.int64, types.int64), generate


squares: Callable[[Any, Any], Any] = intrinsic(_squares)
"""The sum of the squares of the float vectors at an address."""


def _weighted(typing_context: Any, source: Any, weight: Any, target: Any, vectors: Any, factor: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Vectors(builder)
        with cgutils.for_range(builder, args[3], intp=I64) as loop:
            step = v.times(loop.index, _SIZE)
            x = builder.fmul(v.load(v.at(args[0], step)), v.splat(args[4]))
            v.store(builder.fmul(x, v.load(v.at(args[1], step))), v.at(args[2], step))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), generate


weighted: Callable[[Any, Any, Any, Any, Any], None] = intrinsic(_weighted)
"""``weighted(source, weight, target, vectors, factor)``: target = source * factor * weight."""


def _pointer(kind: Any) -> Callable[[Any], Any]:
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return intrinsic(pointer)  # type: ignore[no-any-return]  # numba is untyped


float_pointer, word_pointer, half_pointer, integer_pointer = (
    _pointer(kind) for kind in (types.float32, types.uint32, types.uint16, types.int64)
)
"""An address as a pointer, for `numba.carray`."""


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
