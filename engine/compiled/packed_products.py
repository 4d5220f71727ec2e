"""Products with packed weights, and norms, as numba intrinsics on vectors of 16 floats.

Numba's loops over arrays keep sums in memory; here a tile of `MAX_LINES` rows and some vectors of columns
stays in registers. Addresses are integers, steps are bytes from row to row.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.cpu.emit import action, instruction
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


def _tile(v: Vectors, rows: int, kind: int, column: int, *read: Any) -> list[list[Any]]:
    """Sums [rows][vectors] of the panel's columns from ``column`` on; ``read`` as of `panel_product`."""
    x, x_step, depth, weights, start, start_step = read
    begun = [
        [v.load(v.at(start, v.times(start_step, r), 4 * column + VECTOR_BYTES * j)) for j in range(_VECTORS)]
        for r in range(rows)
    ]
    slots = [[cgutils.alloca_once_value(v.builder, value) for value in own] for own in begun]
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


@action(10)
def panel_product(v: Vectors, rows: Any, half: Any, *given: Any) -> None:
    """out[r, :PANEL] = start[r, :PANEL] + x[r, :depth] @ weights[:depth, :PANEL], at most `MAX_LINES` r.

    ``half``: the weights are `HALF`, else `FLOATS`. ``given``: x, x_step, depth, weights, start, start_step,
    out, out_step.
    """
    for stored in v.either(half):
        _panel(v, rows, HALF if stored is HALVES else FLOATS, *given)


@action(9, needs=PAIRED)
def pair_product(v: Vectors, rows: Any, *given: Any) -> None:
    """`panel_product` of inputs in bfloat16 with `PAIRS`, ``depth`` of them."""
    _panel(v, rows, PAIRS, *given)


@action(5)
def gated(v: Vectors, rows: Any, sums: Any, out: Any, out_step: Any, half: Any) -> None:
    """out[r, :PANEL / 2] = silu(sums[r, :PANEL / 2]) * sums[r, PANEL / 2:], in bfloat16 if ``half``."""
    b, behind = v.builder, PANEL // 2 * 4
    with cgutils.for_range(b, rows, intp=I64) as loop:
        row, target = v.at(sums, v.times(loop.index, 2 * behind)), v.at(out, v.times(loop.index, out_step))
        found = [
            b.fmul(_silu(v, v.load(v.at(row, at))), v.load(v.at(row, behind + at)))
            for at in range(0, behind, VECTOR_BYTES)
        ]
        for kind in v.either(half):
            for j, vector in enumerate(found):
                v.write(vector, v.at(target, v.size(kind) * j), kind)


@instruction(types.float32, types.int64, types.int64)
def squares(v: Vectors, address: Any, vectors: Any) -> Any:
    """The sum of the squares of the float vectors at an address."""
    b = v.builder
    total = cgutils.alloca_once_value(b, v.constant(0))
    with cgutils.for_range(b, vectors, intp=I64) as loop:
        x = v.load(v.at(address, v.times(loop.index, VECTOR_BYTES)))
        b.store(v.multiply_add(x, x, b.load(total)), total)
    found = b.load(total)
    for step in (8, 4, 2, 1):
        found = b.fadd(found, v.shuffle(found, found, [i ^ step for i in range(LANES)]))
    return b.extract_element(found, I64(0))


@action(5, 1)
def weighted(v: Vectors, source: Any, weight: Any, target: Any, vectors: Any, half: Any, factor: Any) -> None:
    """target = source * factor * weight, of ``vectors`` vectors, in bfloat16 if ``half``."""
    b = v.builder
    for kind in v.either(half):
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            step = v.times(loop.index, VECTOR_BYTES)
            x = b.fmul(v.load(v.at(source, step)), v.splat(factor))
            x = b.fmul(x, v.load(v.at(weight, step)))
            v.write(x, v.at(target, v.times(loop.index, v.size(kind))), kind)


def pointer_to(kind: Any) -> Callable[[Any], Any]:
    """Makes an address a pointer to numba's ``kind``, for `numba.carray`."""

    @instruction(types.CPointer(kind), types.int64)
    def pointer(v: Vectors, address: Any) -> Any:
        return address

    return pointer


float_pointer, word_pointer, half_pointer, integer_pointer = (
    pointer_to(kind) for kind in (types.float32, types.uint32, types.uint16, types.int64)
)


def _called(v: Vectors, function: Any, kind: Any, *arguments: Any) -> Any:
    """What the C function at an address returns; addresses are its arguments."""
    pointer = ir.IntType(8).as_pointer()
    called = ir.FunctionType(kind, [pointer] * len(arguments)).as_pointer()
    given = [v.builder.inttoptr(each, pointer) for each in arguments]
    return v.builder.call(v.builder.inttoptr(function, called), given)


@instruction(types.void, types.int64)
def invoke(v: Vectors, function: Any) -> None:
    """Call the C function without arguments at an address."""
    _called(v, function, ir.VoidType())


@instruction(types.int64, types.int64)
def number_from(v: Vectors, function: Any) -> Any:
    """The int that the C function without arguments at an address returns."""
    return v.builder.sext(_called(v, function, I32), I64)


@instruction(types.void, types.int64, types.int64)
def invoke_with(v: Vectors, function: Any, argument: Any) -> None:
    """Call the C function at an address with another address."""
    _called(v, function, ir.VoidType(), argument)
