"""The two products of attention: register-tiled, of many lines, and by dot products, of few."""

from typing import Any

from numba.core import cgutils

from engine.cpu.emit import action
from engine.cpu.vectors import (
    F32,
    FLOAT,
    I64,
    LANES,
    MAX_LINES,
    TILE_BYTES,
    VECTOR,
    VECTOR_BYTES,
    WIDTHS,
    Vectors,
)

AHEAD = 2
"""Cache lines that `product` prefetches in a step."""


@action(10)
def product(v: Vectors, shape: Any, *given: Any) -> None:
    """``target[i] = left[i] @ right``, or plus what is there if ``add``, for up to `MAX_LINES` lines.

    ``shape``: lines * 8 + vectors of a line (one of `WIDTHS`). ``given``: as `_product` unpacks them.
    ``left`` [lines, depth], ``right`` [depth, vectors * LANES].
    ``targets``: int64 addresses, to which ``column`` bytes are added. Meanwhile `AHEAD` cache lines for each
    step of ``depth`` are prefetched from ``ahead`` on: evenly, because few can be under way at a time.
    """
    for lines in range(1, MAX_LINES + 1):
        for width in WIDTHS:
            with v.builder.if_then(v.builder.icmp_signed("==", shape, I64(8 * lines + width))):
                _product(v, lines, width, *given)


def _product(v: Vectors, lines: int, width: int, *given: Any) -> None:
    left, left_step, right, right_step, depth, targets, column, add, ahead = given
    b = v.builder
    places = [v.at(v.load(v.at(targets, 8 * i), I64), column) for i in range(lines)]
    # variables, which LLVM turns into registers
    sums = [[cgutils.alloca_once(b, VECTOR) for _ in range(width)] for _ in range(lines)]
    with b.if_else(b.icmp_signed("!=", add, I64(0))) as (kept, fresh):
        with kept:
            for place, line in zip(places, sums, strict=True):
                for j, part in enumerate(line):
                    b.store(v.load(v.at(place, VECTOR_BYTES * j)), part)
        with fresh:
            for line in sums:
                for part in line:
                    b.store(v.constant(0), part)
    with cgutils.for_range(b, depth, intp=I64) as loop:
        row = v.at(right, v.times(loop.index, right_step))
        columns = [v.load(v.at(row, VECTOR_BYTES * j)) for j in range(width)]
        for i in range(AHEAD):
            v.prefetch(v.at(ahead, v.times(loop.index, AHEAD * VECTOR_BYTES), VECTOR_BYTES * i))
        for i, line in enumerate(sums):
            at = v.at(left, v.times(left_step, i), v.times(loop.index, FLOAT))
            factor = v.splat(v.load(at, F32))
            for part, values in zip(line, columns, strict=True):
                b.store(v.multiply_add(factor, values, b.load(part)), part)
    for place, line in zip(places, sums, strict=True):
        for j, part in enumerate(line):
            v.store(b.load(part), v.at(place, VECTOR_BYTES * j))


@action(11)
def dots(v: Vectors, lines: Any, number: Any, *given: Any) -> None:
    """The products of up to `MAX_LINES` lines with some of 16 keys, added lane by lane.

    ``queries``, ``keys``: ``width`` vectors each, ``step`` and ``key_step`` apart. ``number``: of what keys
    are stored as (`KINDS`). ``sums``: the first key's, [lines, LANES keys, LANES]. As much as is read is
    prefetched from ``ahead`` and ``far`` on. ``given``: as they are unpacked.
    """
    for kind in v.each(number):
        for some in range(1, MAX_LINES + 1):
            with v.builder.if_then(v.builder.icmp_signed("==", lines, I64(some))):
                _lane_products(v, some, kind, *given)


def _lane_products(v: Vectors, lines: int, kind: Any, *given: Any) -> None:
    queries, step, keys, key_step, count, width, sums, *soon = given
    b = v.builder
    with cgutils.for_range(b, count, intp=I64) as key:
        row = v.at(keys, v.times(key.index, key_step))
        parts = [cgutils.alloca_once_value(b, v.constant(0)) for _ in range(lines)]
        with cgutils.for_range(b, width, intp=I64) as loop:
            for place in soon:
                v.prefetch(v.at(place, v.times(key.index, key_step), v.times(loop.index, v.size(kind))))
            values = v.read(v.at(row, v.times(loop.index, v.size(kind))), kind)
            for i, part in enumerate(parts):
                query = v.load(v.at(queries, v.times(step, i), v.times(loop.index, VECTOR_BYTES)))
                b.store(v.multiply_add(query, values, b.load(part)), part)
        totals = v.scaled([b.load(part) for part in parts], kind, v.at(row, v.times(width, v.size(kind))))
        for i, total in enumerate(totals):
            v.store(total, v.at(sums, v.times(key.index, VECTOR_BYTES), LANES * VECTOR_BYTES * i))


@action(3)
def summed(v: Vectors, lines: Any, sums: Any, scores: Any) -> None:
    """What `dots` left in ``sums`` added up: 16 columns of ``scores``."""
    b = v.builder
    with cgutils.for_range(b, lines, intp=I64) as line:
        own = v.at(sums, v.times(line.index, LANES * VECTOR_BYTES))
        total = v.lane_sums([v.load(v.at(own, VECTOR_BYTES * i)) for i in range(LANES)])
        v.store(total, v.at(scores, v.times(line.index, TILE_BYTES)))
