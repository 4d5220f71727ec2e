"""The online softmax of lines: scores to weights, and the state that they leave."""

from typing import Any

from numba.core import cgutils

from engine.cpu.emit import action
from engine.cpu.vectors import (
    F32,
    FLOAT,
    I64,
    LANES,
    LOWEST,
    TILE,
    TILE_BYTES,
    VECTOR_BYTES,
    Vectors,
)


@action(9, 1)
def soften(v: Vectors, *given: Any) -> None:
    """The scores of ``count`` lines with a tile, base 2, become weights, which their states' sums add.

    ``lines``: int64, what `flash` knows of the lines: the first key that each sees, ``stride`` bytes after
    it the stop, then the address of its output (``width`` vectors, then one of sums), and its number in
    ``tops``. The tile has ``keys`` keys from ``start`` on; all lines see 64 if ``whole``.

    A maximum rises only when a score exceeds it by 2^8, which rescales sums and output; so the usual tile
    neither rescales nor waits for a reduction. ``cap``: a soft-cap, base 2, of scores that come as
    2 log2(e) * score / cap; 0: none. ``given``: as they are unpacked.
    """
    count, scores, lines, stride, start, keys, whole, tops, width, cap = given
    b = v.builder
    with cgutils.for_range(b, count, intp=I64) as loop:
        line = v.at(lines, v.times(loop.index, 8))
        row = v.at(scores, v.times(loop.index, TILE_BYTES))
        output = v.load(v.at(line, stride, stride), I64)
        own = v.load(v.at(line, stride, stride, stride), I64)
        top, sums = v.at(tops, v.times(own, FLOAT)), v.at(output, v.times(width, VECTOR_BYTES))
        tile = [v.load(v.at(row, VECTOR_BYTES * j)) for j in range(TILE // LANES)]
        kept = [cgutils.alloca_once_value(b, score) for score in tile]
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
            v.store(weight, v.at(row, VECTOR_BYTES * j))
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
        place = v.at(output, v.times(loop.index, VECTOR_BYTES))
        v.store(b.fmul(v.load(place), factor), place)


@action(4, 1)
def finished(v: Vectors, source: Any, target: Any, width: Any, half: Any, factor: Any) -> None:
    """``width`` vectors times ``factor`` as floats, or as bfloat16 if ``half``."""
    b = v.builder
    with cgutils.for_range(b, width, intp=I64) as loop:
        vector = b.fmul(v.load(v.at(source, v.times(loop.index, VECTOR_BYTES))), v.splat(factor))
        for kind in v.either(half):
            v.write(vector, v.at(target, v.times(loop.index, v.size(kind))), kind)


@action(3, 2)
def blended(v: Vectors, source: Any, target: Any, width: Any, factor: Any, own: Any) -> None:
    """``target * own + source * factor``, of ``width`` vectors."""
    b = v.builder
    with cgutils.for_range(b, width, intp=I64) as loop:
        place, step = v.at(target, v.times(loop.index, VECTOR_BYTES)), v.times(loop.index, VECTOR_BYTES)
        part = b.fmul(v.load(v.at(source, step)), v.splat(factor))
        v.store(v.multiply_add(v.load(place), v.splat(own), part), place)


@action(3)
def cleared(v: Vectors, output: Any, width: Any, top: Any) -> None:
    """The state of a line without keys: ``width`` vectors of 0, and the least ``top``."""
    with cgutils.for_range(v.builder, width, intp=I64) as loop:
        v.store(v.constant(0), v.at(output, v.times(loop.index, VECTOR_BYTES)))
    v.store(F32(LOWEST), top)
