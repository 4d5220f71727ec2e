"""Loads keys, values and queries into the kernel's memory: transposed, widened, scaled, rotated."""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from engine.cpu.emit import action
from engine.cpu.vectors import (
    F32,
    FLOAT,
    I64,
    LANES,
    TILE_BYTES,
    VECTOR,
    VECTOR_BYTES,
    Vectors,
)


@action(6)
def turn(v: Vectors, source: Any, step: Any, last: Any, number: Any, scale: Any, target: Any) -> None:
    """16 rows of 16 numbers transposed to floats whose rows are a tile apart; rows after ``last`` repeat it.

    ``number``: of what they are stored as (`KINDS`). ``scale``: bytes from ``source`` to its row's scale.
    """
    b = v.builder
    rows = [b.select(b.icmp_signed("<", I64(i), last), I64(i), last) for i in range(LANES)]
    for kind in v.each(number):
        read = []
        for row in rows:
            at = v.at(source, v.times(row, step))
            read += v.scaled([v.read(at, kind)], kind, v.at(at, scale))
        for i, row in enumerate(v.transposed(read)):
            v.store(row, v.at(target, TILE_BYTES * i))


@action(6)
def copied(v: Vectors, source: Any, step: Any, rows: Any, width: Any, number: Any, target: Any) -> None:
    """``rows`` rows of ``width`` vectors, ``step`` apart, as floats; ``number``: of `KINDS`."""
    b = v.builder
    for kind in v.each(number):
        with cgutils.for_range(b, rows, intp=I64) as row, cgutils.for_range(b, width, intp=I64) as loop:
            own = v.at(source, v.times(row.index, step))
            read = v.read(v.at(own, v.times(loop.index, v.size(kind))), kind)
            (read,) = v.scaled([read], kind, v.at(own, v.times(width, v.size(kind))))
            v.store(read, v.at(target, v.times(b.add(v.times(row.index, width), loop.index), VECTOR_BYTES)))


@action(4, 1)
def scaled(v: Vectors, source: Any, target: Any, width: Any, half: Any, factor: Any) -> None:
    """``width`` vectors as floats times ``factor``; ``half``: they are bfloat16."""
    b = v.builder
    for kind in v.either(half):
        with cgutils.for_range(b, width, intp=I64) as loop:
            vector = v.read(v.at(source, v.times(loop.index, v.size(kind))), kind)
            v.store(b.fmul(vector, v.splat(factor)), v.at(target, v.times(loop.index, VECTOR_BYTES)))


@action(3)
def rotated(v: Vectors, query: Any, angles: Any, half: Any) -> None:
    """Rotate ``half`` floats of ``query`` with the next as many; ``angles``: their cosines, then sines."""
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
        turned(loop.index, VECTOR_BYTES, VECTOR, v.multiply_add)
    done = v.times(vectors, LANES)
    with cgutils.for_range(b, b.sub(half, done), intp=I64) as loop:
        turned(b.add(done, loop.index), FLOAT, F32, lambda x, y, z: b.fadd(b.fmul(x, y), z))
