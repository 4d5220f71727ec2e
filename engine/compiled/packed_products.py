"""Products with packed weights, and norms, as numba intrinsics on vectors of 16 floats.

Numba's loops over arrays keep sums in memory; here a tile of `MAX_LINES` rows and some vectors of columns
stays in registers. Addresses are integers, steps are bytes from row to row.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.cpu.emit import action, instruction
from engine.cpu.vectors import (
    CODES,
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
FLOATS, HALF, PAIRS, BYTES, NIBBLES, BYTE_PAIRS, NIBBLE_PAIRS = range(7)
"""Kinds of weights: float32; bfloat16, which become floats as they are read; and pairs of bfloat16, those of
two successive inputs, which are in bfloat16 as well. With pairs, a step of depth is two inputs.

The others are codes of 8 and of 4 bits, which become floats as they are read, or pairs of bfloat16. A panel
is in blocks of `GROUP` inputs: float16 scales [PANEL] and offsets [PANEL], then codes [steps, PANEL], of
pairs [steps, PANEL, 2]. Of a step's codes of 4 bits, the second half is in the upper bits of the bytes of the
first. A weight is scale * code + offset, rounded once to float32."""
GROUP = 32
"""Inputs of a block of codes."""
_HEAD = 4 * PANEL
"""Bytes of a block's scales and offsets."""
BLOCK_BYTES = {bits: _HEAD + GROUP * PANEL * bits // 8 for bits in (8, 4)}
IN_PAIRS = (PAIRS, BYTE_PAIRS, NIBBLE_PAIRS)
CODED = {BYTES: 8, BYTE_PAIRS: 8, NIBBLES: 4, NIBBLE_PAIRS: 4}
"""Kinds of codes, and their bits."""
_VECTORS = WIDTHS[0]
_LOG2_E = 1.4426950408889634


def _silu(v: Vectors, x: Any) -> Any:
    """x / (1 + e^-x)."""
    least = v.builder.fmul(x, v.constant(-_LOG2_E))
    most = v.constant(126.0)  # beyond, the quotient is subnormal
    power = v.exp2(v.builder.select(v.builder.fcmp_ordered(">", least, most), most, least))
    return v.builder.fdiv(x, v.builder.fadd(power, v.constant(1.0)))


class _Block:
    """The columns of a panel from ``column`` on, in the block of codes at an address."""

    def __init__(self, v: Vectors, kind: int, address: Any, column: int) -> None:
        self._v, self._column, self._pairs, self._narrow = v, column, kind in IN_PAIRS, CODED[kind] == 4
        steps = GROUP // 2 if self._pairs else GROUP
        self._codes, self._step = (
            v.at(address, _HEAD),
            GROUP * PANEL // steps // (2 if self._narrow else 1),
        )
        self._scales, self._offsets = ([*self._spread(v.at(address, begin))] for begin in (0, 2 * PANEL))

    def _spread(self, begin: Any) -> Iterator[Any]:
        """Floats for each vector of codes."""
        v = self._v
        for j in range(_VECTORS):
            found = v.widen_ieee(v.load(v.at(begin, 2 * (self._column + LANES * j)), HALVES))
            if self._pairs:  # a column has two codes
                yield from (
                    v.shuffle(found, found, [i // 2 for i in range(k, k + LANES)]) for k in (0, LANES)
                )
            else:
                yield found

    def at(self, step: Any) -> list[Any]:
        """The weights of a step, as `FLOATS` or `PAIRS`, in `_VECTORS` vectors."""
        v, each = self._v, 2 if self._pairs else 1
        line = v.at(self._codes, v.times(step, self._step))
        found = []
        for j, (scale, offset) in enumerate(zip(self._scales, self._offsets, strict=True)):
            place = self._column * each + LANES * j
            upper = self._narrow and place >= self._step
            codes = v.load(v.at(line, place - self._step if upper else place), CODES)
            if self._narrow:
                bits = ir.Constant(CODES, [4 if upper else 15] * LANES)
                codes = v.builder.lshr(codes, bits) if upper else v.builder.and_(codes, bits)
            found.append(v.multiply_add(v.numbers(codes), scale, offset))
        return [v.paired(*found[i : i + 2]) for i in range(0, len(found), 2)] if self._pairs else found


def _lines(
    v: Vectors, kind: int, weights: Any, depth: Any, column: int, use: Callable[[Any, list[Any]], None]
) -> None:
    """Call ``use`` with each step of ``depth`` and its weights: `_VECTORS` vectors of `FLOATS` or `PAIRS`."""
    if kind in (FLOATS, HALF, PAIRS):
        size, stored = {FLOATS: (4, VECTOR), HALF: (2, HALVES), PAIRS: (4, INTS)}[kind]
        with cgutils.for_range(v.builder, depth, intp=I64) as loop:
            line = v.at(weights, v.times(loop.index, PANEL * size), size * column)
            found = [v.load(v.at(line, size * LANES * j), stored) for j in range(_VECTORS)]
            use(loop.index, [v.widen(each) for each in found] if kind == HALF else found)
        return
    b, size = v.builder, BLOCK_BYTES[CODED[kind]]
    steps = I64(GROUP // 2 if kind in IN_PAIRS else GROUP)
    blocks = b.udiv(b.add(depth, b.sub(steps, I64(1))), steps)
    with cgutils.for_range(b, blocks, intp=I64) as outer:
        block, begun = (
            _Block(v, kind, v.at(weights, v.times(outer.index, size)), column),
            b.mul(outer.index, steps),
        )
        left = b.sub(depth, begun)
        count = b.select(b.icmp_signed("<", left, steps), left, steps)
        with cgutils.for_range(b, count, intp=I64) as inner:
            use(b.add(begun, inner.index), block.at(inner.index))


def _tile(v: Vectors, rows: int, kind: int, column: int, *read: Any) -> list[list[Any]]:
    """Sums [rows][vectors] of the panel's columns from ``column`` on; ``read`` as of `panel_product`."""
    x, x_step, depth, weights, start, start_step = read
    begun = [
        [v.load(v.at(start, v.times(start_step, r), 4 * column + VECTOR_BYTES * j)) for j in range(_VECTORS)]
        for r in range(rows)
    ]
    slots = [[cgutils.alloca_once_value(v.builder, value) for value in own] for own in begun]
    multiply_add, taken = (v.add_pairs, I32) if kind in IN_PAIRS else (v.multiply_add, F32)

    def add(step: Any, found: list[Any]) -> None:
        for r, own in enumerate(slots):
            factor = v.splat(v.load(v.at(x, v.times(x_step, r), v.times(step, 4)), taken))
            for slot, column_of in zip(own, found, strict=True):
                v.builder.store(multiply_add(factor, column_of, v.builder.load(slot)), slot)

    _lines(v, kind, weights, depth, column, add)
    return [[v.builder.load(slot) for slot in own] for own in slots]


def _panel(v: Vectors, rows: Any, kind: int, *given: Any) -> None:
    b, (*read, out, out_step) = v.builder, given
    for count in range(1, MAX_LINES + 1):
        with b.if_then(b.icmp_signed("==", rows, I64(count))):
            for column in range(0, PANEL, LANES * _VECTORS):
                for r, own in enumerate(_tile(v, count, kind, column, *read)):
                    for j, vector in enumerate(own):
                        v.store(vector, v.at(out, v.times(out_step, r), 4 * column + VECTOR_BYTES * j))


def _expand(v: Vectors, kind: int, weights: Any, depth: Any, out: Any) -> None:
    for column in range(0, PANEL, LANES * _VECTORS):

        def put(step: Any, found: list[Any], column: int = column) -> None:
            line = v.at(out, v.times(step, 4 * PANEL), 4 * column)
            for j, vector in enumerate(found):
                v.store(vector, v.at(line, VECTOR_BYTES * j))

        _lines(v, kind, weights, depth, column, put)


def _either(v: Vectors, kind: Any, kinds: Sequence[int]) -> Iterator[int]:
    """Run a loop's body for each of ``kinds``, whose code runs if ``kind`` is that one."""
    for each in kinds:
        with v.builder.if_then(v.builder.icmp_signed("==", kind, I64(each))):
            yield each


@action(10)
def panel_product(v: Vectors, rows: Any, kind: Any, *given: Any) -> None:
    """out[r, :PANEL] = start[r, :PANEL] + x[r, :depth] @ weights[:depth, :PANEL], at most `MAX_LINES` r.

    ``kind``: of the weights, of those without pairs. ``given``: x, x_step, depth, weights, start, start_step,
    out, out_step.
    """
    for each in _either(v, kind, (FLOATS, HALF, BYTES, NIBBLES)):
        _panel(v, rows, each, *given)


@action(10, needs=PAIRED)
def pair_product(v: Vectors, rows: Any, kind: Any, *given: Any) -> None:
    """`panel_product` of inputs in bfloat16 with pairs, ``depth`` of them."""
    for each in _either(v, kind, IN_PAIRS):
        _panel(v, rows, each, *given)


@action(4)
def expand(v: Vectors, kind: Any, weights: Any, depth: Any, out: Any) -> None:
    """out[:depth, :PANEL] = the weights of a panel, as `FLOATS`, from `BYTES` or `NIBBLES`."""
    for each in _either(v, kind, (BYTES, NIBBLES)):
        _expand(v, each, weights, depth, out)


@action(4, needs=PAIRED)
def expand_pairs(v: Vectors, kind: Any, weights: Any, depth: Any, out: Any) -> None:
    """`expand` to `PAIRS`, from `BYTE_PAIRS` or `NIBBLE_PAIRS`."""
    for each in _either(v, kind, (BYTE_PAIRS, NIBBLE_PAIRS)):
        _expand(v, each, weights, depth, out)


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


float_pointer, word_pointer, half_pointer, integer_pointer, code_pointer = (
    pointer_to(kind) for kind in (types.float32, types.uint32, types.uint16, types.int64, types.int8)
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
