"""The kernel's inner loops as numba intrinsics: each takes a tuple of addresses, sizes and steps in bytes.

Inputs may have any alignment that their elements have. Buffers of floats are tight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_kernel.vectors import F32, HALVES, I64, LANES, LOWEST, Vectors

TILE = 64
"""Keys of a tile."""
MOST_LINES = 6
"""Lines of a register tile."""
FLOAT = 4
"""Bytes."""
AHEAD = 2
"""Cache lines that `product` prefetches in a step."""
_ROW = FLOAT * TILE
_VECTOR = FLOAT * LANES


def widths(features: dict[str, bool]) -> tuple[int, ...]:
    """Vectors that a register tile may be wide on a CPU with ``features``, the widest first.

    6 by 4 vectors of 16 floats are 24 of AVX-512's 32 registers; 6 by 1 are 12 of AVX2's 16, or 24 of NEON's
    32.
    """
    return (4, 2, 1) if features.get("avx512f") else (1,)


WIDTHS = widths(dict(binding.get_host_cpu_features()))


_LLVM = {types.int64: I64, types.float32: F32}


def _action(*kinds: Any) -> Callable[[Callable[..., None]], Callable[[tuple[Any, ...]], None]]:
    """An intrinsic of one tuple of numbers from a function that emits code for them.

    It becomes an LLVM function, emitted once and never inlined: its constants and sums have all registers to
    themselves, while in a caller's loops LLVM would keep them on the stack.
    """

    def made(emit: Callable[..., None]) -> Callable[[tuple[Any, ...]], None]:
        def typed(typing_context: Any, arguments: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                function = _defined(builder.module, emit, [_LLVM[kind] for kind in kinds])
                builder.call(function, cgutils.unpack_tuple(builder, values[0]))
                return context.get_dummy_value()

            return types.void(types.Tuple(kinds)), generate

        return intrinsic(typed)  # type: ignore[no-any-return]  # numba is untyped

    return made


def _defined(module: Any, emit: Callable[..., None], kinds: list[Any]) -> Any:
    name = f"foretick_{emit.__name__}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(Vectors(builder), *function.args)
    builder.ret_void()
    return function


def _integers(count: int) -> Callable[[Callable[..., None]], Callable[[tuple[Any, ...]], None]]:
    return _action(*[types.int64] * count)


@_integers(10)
def product(
    v: Vectors,
    shape: Any,
    left: Any,
    left_step: Any,
    right: Any,
    right_step: Any,
    depth: Any,
    targets: Any,
    column: Any,
    add: Any,
    ahead: Any,
) -> None:
    """``target[i] = left[i] @ right``, or plus what is there if ``add``, for up to `MOST_LINES` lines.

    ``shape``: lines * 8 + vectors of a line (one of `WIDTHS`). ``left`` [lines, depth], ``right``
    [depth, vectors * LANES]. ``targets``: int64 addresses, to which ``column`` bytes are added. Meanwhile
    `AHEAD` cache lines for each step of ``depth`` are prefetched from ``ahead`` on: evenly, because few can
    be under way at a time.
    """
    given = left, left_step, right, right_step, depth, targets, column, add, ahead
    for lines in range(1, MOST_LINES + 1):
        for width in WIDTHS:
            with v.builder.if_then(v.builder.icmp_signed("==", shape, I64(8 * lines + width))):
                _product(v, lines, width, *given)


def _product(
    v: Vectors,
    lines: int,
    width: int,
    left: Any,
    left_step: Any,
    right: Any,
    right_step: Any,
    depth: Any,
    targets: Any,
    column: Any,
    add: Any,
    ahead: Any,
) -> None:
    b = v.builder
    places = [v.at(v.load(v.at(targets, 8 * i), I64), column) for i in range(lines)]
    # variables, which LLVM turns into registers
    sums = [[cgutils.alloca_once(b, v.constant(0).type) for _ in range(width)] for _ in range(lines)]
    with b.if_else(b.icmp_signed("!=", add, I64(0))) as (kept, fresh):
        with kept:
            for place, line in zip(places, sums, strict=True):
                for j, part in enumerate(line):
                    b.store(v.load(v.at(place, _VECTOR * j)), part)
        with fresh:
            for line in sums:
                for part in line:
                    b.store(v.constant(0), part)
    with cgutils.for_range(b, depth, intp=I64) as loop:
        row = v.at(right, v.times(loop.index, right_step))
        columns = [v.load(v.at(row, _VECTOR * j)) for j in range(width)]
        for i in range(AHEAD):
            v.prefetch(v.at(ahead, v.times(loop.index, AHEAD * _VECTOR), _VECTOR * i))
        for i, line in enumerate(sums):
            at = v.at(left, v.times(left_step, i), v.times(loop.index, FLOAT))
            factor = v.splat(v.load(at, F32))
            for part, values in zip(line, columns, strict=True):
                b.store(v.multiply_add(factor, values, b.load(part)), part)
    for place, line in zip(places, sums, strict=True):
        for j, part in enumerate(line):
            v.store(b.load(part), v.at(place, _VECTOR * j))


@_integers(12)
def dots(
    v: Vectors,
    lines: Any,
    queries: Any,
    step: Any,
    keys: Any,
    key_step: Any,
    last: Any,
    half: Any,
    width: Any,
    sums: Any,
    scores: Any,
    ahead: Any,
    far: Any,
) -> None:
    """Products of up to `MOST_LINES` lines with 16 keys, read once and in order, as columns of ``scores``.

    ``queries``, ``keys``: ``width`` vectors each, ``step`` and ``key_step`` apart; keys after ``last`` repeat
    it. ``half``: keys are bfloat16. ``sums``: memory for `LANES` vectors of each line. As much as is read is
    prefetched from ``ahead`` and ``far`` on.
    """
    b = v.builder
    for count in range(1, MOST_LINES + 1):
        for kind, size in ((v.constant(0).type, FLOAT), (HALVES, 2)):
            narrow = b.icmp_signed("!=" if size == 2 else "==", half, I64(0))
            with b.if_then(b.and_(narrow, b.icmp_signed("==", lines, I64(count)))):
                soon = ahead, far
                _lane_products(v, count, kind, size, queries, step, keys, key_step, last, width, sums, soon)
    with cgutils.for_range(b, lines, intp=I64) as line:
        own = v.at(sums, v.times(line.index, LANES * _VECTOR))
        total = v.lane_sums([v.load(v.at(own, _VECTOR * i)) for i in range(LANES)])
        v.store(total, v.at(scores, v.times(line.index, _ROW)))


def _lane_products(
    v: Vectors,
    count: int,
    kind: Any,
    size: int,
    queries: Any,
    step: Any,
    keys: Any,
    key_step: Any,
    last: Any,
    width: Any,
    sums: Any,
    soon: tuple[Any, Any],
) -> None:
    """Of each line and key, the products of vectors added lane by lane: ``sums`` [lines, LANES, LANES]."""
    b = v.builder
    with cgutils.for_range(b, I64(LANES), intp=I64) as key:
        index = b.select(b.icmp_signed("<", key.index, last), key.index, last)
        row = v.at(keys, v.times(index, key_step))
        parts = [cgutils.alloca_once(b, v.constant(0).type) for _ in range(count)]
        for part in parts:
            b.store(v.constant(0), part)
        with cgutils.for_range(b, width, intp=I64) as loop:
            for place in soon:
                v.prefetch(v.at(place, v.times(key.index, key_step), v.times(loop.index, size * LANES)))
            read = v.load(v.at(row, v.times(loop.index, size * LANES)), kind)
            values = v.widen(read) if kind is HALVES else read
            for i, part in enumerate(parts):
                query = v.load(v.at(queries, v.times(step, i), v.times(loop.index, _VECTOR)))
                b.store(v.multiply_add(query, values, b.load(part)), part)
        for i, part in enumerate(parts):
            v.store(b.load(part), v.at(sums, v.times(key.index, _VECTOR), LANES * _VECTOR * i))


@_action(*[types.int64] * 9, types.float32)
def soften(
    v: Vectors,
    count: Any,
    scores: Any,
    lines: Any,
    stride: Any,
    start: Any,
    keys: Any,
    whole: Any,
    tops: Any,
    width: Any,
    cap: Any,
) -> None:
    """The scores of ``count`` lines with a tile, base 2, become weights, which their states' sums add.

    ``lines``: int64, what `flash` knows of the lines: the first slot that each sees, ``stride`` bytes after
    it the stop, then the address of its output (``width`` vectors, then one of sums), and its number in
    ``tops``. The tile has ``keys`` keys from slot ``start`` on; all lines see 64 if ``whole``.

    A maximum rises only when a score exceeds it by 2^8, which rescales sums and output; so the usual tile
    neither rescales nor waits for a reduction. ``cap``: a soft-cap, base 2, of scores that come as
    2 log2(e) * score / cap; 0: none.
    """
    b = v.builder
    with cgutils.for_range(b, count, intp=I64) as loop:
        line = v.at(lines, v.times(loop.index, 8))
        row = v.at(scores, v.times(loop.index, _ROW))
        output = v.load(v.at(line, stride, stride), I64)
        own = v.load(v.at(line, stride, stride, stride), I64)
        top, sums = v.at(tops, v.times(own, FLOAT)), v.at(output, v.times(width, _VECTOR))
        kept = [cgutils.alloca_once(b, v.constant(0).type) for _ in range(TILE // LANES)]
        for j, score in enumerate(kept):
            b.store(v.load(v.at(row, _VECTOR * j)), score)
        with b.if_then(b.fcmp_ordered("!=", cap, F32(0.0)), likely=False):
            for score in kept:
                b.store(b.fmul(v.tanh_from(b.load(score)), v.splat(cap)), score)
        with b.if_then(b.icmp_signed("==", whole, I64(0)), likely=False):
            low, high = b.sub(v.load(line, I64), start), b.sub(v.load(v.at(line, stride), I64), start)
            low = b.select(b.icmp_signed("<", low, I64(TILE)), low, I64(TILE))
            high = b.select(b.icmp_signed("<", high, keys), high, keys)
            for j, score in enumerate(kept):
                seen = v.within(LANES * j, low, high)
                b.store(b.select(seen, b.load(score), v.constant(float("-inf"))), score)
        loaded = [b.load(score) for score in kept]
        highest = loaded[0]
        for score in loaded[1:]:
            highest = v.greater(score, highest)
        old = v.load(top, F32)
        over = b.fcmp_ordered(">", highest, v.splat(b.fadd(old, F32(8.0))))
        with b.if_then(v.any(over), likely=False):
            _raise(v, highest, top, sums, output, width)
        least, total = v.splat(v.load(top, F32)), v.load(sums)
        for j, score in enumerate(loaded):
            weight = v.exp2(b.fsub(score, least))
            v.store(weight, v.at(row, _VECTOR * j))
            total = b.fadd(total, weight)
        v.store(total, sums)


def _raise(v: Vectors, highest: Any, top: Any, sums: Any, output: Any, width: Any) -> None:
    """Raise the maximum at ``top`` to the greatest lane of ``highest``, and rescale what was added before."""
    b, old = v.builder, v.splat(v.load(top, F32))
    raised = v.greater(v.greatest(highest), old)
    factor = v.exp2(b.fsub(old, raised))
    v.store(b.extract_element(raised, I64(0)), top)
    v.store(b.fmul(v.load(sums), factor), sums)
    with cgutils.for_range(b, width, intp=I64) as loop:
        place = v.at(output, v.times(loop.index, _VECTOR))
        v.store(b.fmul(v.load(place), factor), place)


@_integers(5)
def turn(v: Vectors, source: Any, step: Any, last: Any, half: Any, target: Any) -> None:
    """16 rows of 16 numbers transposed to floats whose rows are a tile apart; rows after ``last`` repeat it.

    ``half``: they are bfloat16.
    """
    b = v.builder
    rows = [b.select(b.icmp_signed("<", I64(i), last), I64(i), last) for i in range(LANES)]
    with b.if_else(b.icmp_signed("!=", half, I64(0))) as (short, full):
        for taken, kind in ((short, HALVES), (full, v.constant(0).type)):
            with taken:
                read = [v.load(v.at(source, v.times(row, step)), kind) for row in rows]
                square = [v.widen(row) for row in read] if kind is HALVES else read
                for i, row in enumerate(v.transposed(square)):
                    v.store(row, v.at(target, _ROW * i))


@_integers(5)
def widened(v: Vectors, source: Any, step: Any, rows: Any, width: Any, target: Any) -> None:
    """``rows`` rows of ``width`` vectors of bfloat16, ``step`` apart, as floats."""
    b = v.builder
    with cgutils.for_range(b, rows, intp=I64) as row, cgutils.for_range(b, width, intp=I64) as loop:
        read = v.load(v.at(source, v.times(row.index, step), v.times(loop.index, 2 * LANES)), HALVES)
        index = b.add(v.times(row.index, width), loop.index)
        v.store(v.widen(read), v.at(target, v.times(index, _VECTOR)))


@_action(*[types.int64] * 4, types.float32)
def scaled(v: Vectors, source: Any, target: Any, width: Any, half: Any, factor: Any) -> None:
    """``width`` vectors as floats times ``factor``; ``half``: they are bfloat16."""
    b = v.builder
    with b.if_else(b.icmp_signed("!=", half, I64(0))) as (short, full):
        for taken, kind, size in ((short, HALVES, 2), (full, v.constant(0).type, FLOAT)):
            with taken, cgutils.for_range(b, width, intp=I64) as loop:
                read = v.load(v.at(source, v.times(loop.index, size * LANES)), kind)
                vector = v.widen(read) if kind is HALVES else read
                v.store(b.fmul(vector, v.splat(factor)), v.at(target, v.times(loop.index, _VECTOR)))


@_integers(3)
def rotated(v: Vectors, query: Any, angles: Any, half: Any) -> None:
    """Rotate the first ``half`` floats of ``query`` with as many more; ``angles``: cosines, then sines."""
    b, far = v.builder, v.times(half, FLOAT)
    vectors = b.udiv(half, I64(LANES))

    def turned(index: Any, size: int, kind: Any, add: Callable[[Any, Any, Any], Any]) -> None:
        step = v.times(index, size)
        places = v.at(query, step), v.at(query, far, step)
        first, second = (v.load(place, kind) for place in places)
        cos, sin = v.load(v.at(angles, step), kind), v.load(v.at(angles, far, step), kind)
        v.store(add(first, cos, b.fneg(b.fmul(second, sin))), places[0])
        v.store(add(second, cos, b.fmul(first, sin)), places[1])

    with cgutils.for_range(b, vectors, intp=I64) as loop:
        turned(loop.index, _VECTOR, v.constant(0).type, v.multiply_add)
    done = v.times(vectors, LANES)
    with cgutils.for_range(b, b.sub(half, done), intp=I64) as loop:
        turned(b.add(done, loop.index), FLOAT, F32, lambda x, y, z: b.fadd(b.fmul(x, y), z))


@_action(*[types.int64] * 4, types.float32)
def finished(v: Vectors, source: Any, target: Any, width: Any, half: Any, factor: Any) -> None:
    """``width`` vectors times ``factor`` as floats, or as bfloat16 if ``half``."""
    b = v.builder
    with cgutils.for_range(b, width, intp=I64) as loop:
        vector = b.fmul(v.load(v.at(source, v.times(loop.index, _VECTOR))), v.splat(factor))
        with b.if_else(b.icmp_signed("!=", half, I64(0))) as (short, full):
            with short:
                v.store(v.narrow(vector), v.at(target, v.times(loop.index, 2 * LANES)))
            with full:
                v.store(vector, v.at(target, v.times(loop.index, _VECTOR)))


@_action(*[types.int64] * 3, types.float32, types.float32)
def blended(v: Vectors, source: Any, target: Any, width: Any, factor: Any, own: Any) -> None:
    """``target * own + source * factor``, of ``width`` vectors."""
    b = v.builder
    with cgutils.for_range(b, width, intp=I64) as loop:
        place, step = v.at(target, v.times(loop.index, _VECTOR)), v.times(loop.index, _VECTOR)
        part = b.fmul(v.load(v.at(source, step)), v.splat(factor))
        v.store(v.multiply_add(v.load(place), v.splat(own), part), place)


@_integers(3)
def cleared(v: Vectors, output: Any, width: Any, top: Any) -> None:
    """The state of a line without keys: ``width`` vectors of 0, and the least ``top``."""
    with cgutils.for_range(v.builder, width, intp=I64) as loop:
        v.store(v.constant(0), v.at(output, v.times(loop.index, _VECTOR)))
    v.store(F32(LOWEST), top)


def _reader(kind: Any, result: Any) -> Callable[[Any, Any], Any]:
    def read(typing_context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            v = Vectors(builder)
            return v.load(v.at(values[0], v.times(values[1], 8 if kind is I64 else FLOAT)), kind)

        return result(types.int64, types.int64), generate

    return intrinsic(read)  # type: ignore[no-any-return]  # numba is untyped


def _writer(kind: Any, argument: Any) -> Callable[[Any, Any, Any], None]:
    def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            v = Vectors(builder)
            v.store(values[2], v.at(values[0], v.times(values[1], 8 if kind is I64 else FLOAT)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, argument), generate

    return intrinsic(write)  # type: ignore[no-any-return]  # numba is untyped


integer_at: Callable[[Any, Any], int] = _reader(I64, types.int64)
"""The int64 at an address plus ``index``."""
float_at: Callable[[Any, Any], Any] = _reader(F32, types.float32)
"""The float32 at an address plus ``index``."""
put_integer: Callable[[Any, Any, Any], None] = _writer(I64, types.int64)
put_float: Callable[[Any, Any, Any], None] = _writer(F32, types.float32)


def _taken(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, I64(1), "acq_rel")

    return types.int64(types.int64), generate


take: Callable[[Any], int] = intrinsic(_taken)
"""The int64 at an address, which becomes one more, for all threads."""
