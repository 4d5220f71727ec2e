"""Vectors of 16 floats over llvmlite's builder: one register with AVX-512, two with AVX2, four with NEON.

Numba's arrays hide from LLVM that the last stride is one element, and keep a tile of sums in memory instead
of registers. So the kernels' inner loops are written as LLVM's fixed-width vectors.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

LANES = 16
"""Floats of a vector."""
TILE = 64
"""Keys of a tile."""
FLOAT = 4
"""Bytes."""
VECTOR_BYTES, TILE_BYTES = LANES * FLOAT, TILE * FLOAT
LOWEST = -3.4028234663852886e38
"""The lowest finite float: a row's maximum before its first key."""

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR, INTS, HALVES, CODES = (ir.VectorType(element, LANES) for element in (F32, I32, I16, I8))
KINDS = VECTOR, HALVES, CODES
"""What keys and values are stored as, by number; behind a row of `CODES` stands its scale, a bfloat16."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite is untyped
    """LLVM's bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRED = "avx512bf16"
"""The LLVM feature of a CPU that multiplies pairs of bfloat16."""
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)

_EXP2 = (1.0, 0.6931469776, 0.2402224215, 0.0555073378, 0.0096715088, 0.0013264699)
"""2^x on [-1/2, 1/2] from x^0 on, exact at 0: a minimax fit, relative error 9e-8."""
_ROUND = 1.5 * 2.0**23
"""Adding it rounds a float to a whole number, which is then in its lowest bits."""
_LEAST = -127.0
"""The exponent whose bits are those of 0."""
_ONE = 0x3F800000
"""The bits of 1.0."""
_NAN_BFLOAT16 = 0x7FC0


MAX_LINES = 6
"""Lines of a register tile."""


def widths(features: dict[str, bool]) -> tuple[int, ...]:
    """Vectors that a register tile may be wide on a CPU with ``features``, the widest first.

    6 by 4 vectors of 16 floats are 24 of AVX-512's 32 registers; 6 by 1 are 12 of AVX2's 16, or 24 of NEON's
    32.
    """
    return (4, 2, 1) if features.get("avx512f") else (1,)


WIDTHS = widths(dict(binding.get_host_cpu_features()))


class Vectors:
    """Emits operations on vectors. Addresses are 64-bit integers, and steps between them are bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        declare = cgutils.get_or_insert_function
        fused, fetch = ir.FunctionType(VECTOR, [VECTOR] * 3), [I8.as_pointer(), I32, I32, I32]
        self._multiply_add = declare(builder.module, fused, "llvm.fmuladd.v16f32")
        self._fetch = declare(builder.module, ir.FunctionType(ir.VoidType(), fetch), "llvm.prefetch.p0")

    def at(self, address: Any, *steps: Any) -> Any:
        """``address`` and ``steps`` bytes, each a constant or a value."""
        for step in steps:
            address = self.builder.add(address, I64(step) if isinstance(step, int) else step)
        return address

    def times(self, count: Any, size: Any) -> Any:
        """The product of two whole numbers."""
        return self.builder.mul(count, I64(size) if isinstance(size, int) else size)

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        """What lies at ``address``, aligned to an element."""
        align = 8 if kind is I64 else 2 if kind in (HALVES, I16) else 1 if kind is CODES else 4
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any) -> None:
        """Write ``value``."""
        align = 2 if value.type in (HALVES, I16) else 4
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def either(self, half: Any) -> Iterator[Any]:
        """Run a loop's body for `HALVES`, whose code runs if ``half`` is not 0, and for `VECTOR`."""
        with self.builder.if_else(self.builder.icmp_signed("!=", half, I64(0))) as (short, full):
            for taken, kind in ((short, HALVES), (full, VECTOR)):
                with taken:
                    yield kind

    def each(self, number: Any) -> Iterator[Any]:
        """Run a loop's body for each of `KINDS`; the code of that of ``number`` runs."""
        for i, kind in enumerate(KINDS):
            with self.builder.if_then(self.builder.icmp_signed("==", number, I64(i))):
                yield kind

    def size(self, kind: Any) -> int:
        """Bytes of a vector of this kind."""
        return VECTOR_BYTES >> KINDS.index(kind)

    def read(self, address: Any, kind: Any) -> Any:
        """The vector of ``kind`` at ``address``, as floats; of codes, without their scale."""
        found = self.load(address, kind)
        if kind is CODES:
            return self.builder.sitofp(self.builder.sext(found, INTS), VECTOR)
        return self.widen(found) if kind is HALVES else found

    def scaled(self, vectors: Sequence[Any], kind: Any, scale: Any) -> list[Any]:
        """``vectors`` read of a row of ``kind``, times the row's scale at the address ``scale``."""
        if kind is not CODES:
            return list(vectors)
        bits = self.builder.shl(self.builder.zext(self.load(scale, I16), I32), I32(16))
        factor = self.splat(self.builder.bitcast(bits, F32))
        return [self.builder.fmul(vector, factor) for vector in vectors]

    def write(self, vector: Any, address: Any, kind: Any) -> None:
        """Write floats as a vector of ``kind``."""
        self.store(self.narrow(vector) if kind is HALVES else vector, address)

    def prefetch(self, address: Any) -> None:
        """Ask for a cache line in the second cache; the first holds the tile at hand."""
        self.builder.call(
            self._fetch, [self.builder.inttoptr(address, I8.as_pointer()), I32(0), I32(2), I32(1)]
        )

    def constant(self, value: float) -> Any:
        """A vector of equal floats."""
        return ir.Constant(VECTOR, [float(value)] * LANES)

    def splat(self, scalar: Any) -> Any:
        """A vector of the number ``scalar``."""
        none = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        one = self.builder.insert_element(none, scalar, I32(0))
        return self.shuffle(one, one, [0] * LANES)

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        """Lanes of ``a`` (from 0 on) and ``b`` (from `LANES` on) in ``order``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(INTS, list(order)))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``, in one step where the CPU can."""
        return self.builder.call(self._multiply_add, [a, b, c])

    def add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """``c`` plus, in each lane, the products of ``a``'s and ``b``'s two bfloat16, which are 32-bit words.

        Only for a CPU with `PAIRED`. Subnormal numbers count as 0.
        """
        kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
        dots = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return self.builder.call(dots, [c, *(self.builder.bitcast(each, _PAIRS) for each in (a, b))])

    def greater(self, a: Any, b: Any) -> Any:
        """The greater of each two; ``b`` where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def greatest(self, vector: Any) -> Any:
        """The greatest lane, in all lanes."""
        for step in (8, 4, 2, 1):
            vector = self.greater(vector, self.shuffle(vector, vector, [i ^ step for i in range(LANES)]))
        return vector

    def any(self, flags: Any) -> Any:
        """Whether any of the comparisons in ``flags`` holds."""
        return self.builder.icmp_unsigned("!=", self.builder.bitcast(flags, I16), I16(0))

    def within(self, first: int, low: Any, high: Any) -> Any:
        """Whether ``first`` and the numbers after it are at least ``low`` and below ``high``, both small."""
        numbers = ir.Constant(INTS, [first + i for i in range(LANES)])
        low, high = (self.splat(self.builder.trunc(bound, I32)) for bound in (low, high))
        return self.builder.and_(
            self.builder.icmp_signed(">=", numbers, low), self.builder.icmp_signed("<", numbers, high)
        )

    def exp2(self, x: Any) -> Any:
        """2^x for x below 127, relative error 2e-7; exactly 1 at 0, 0 below -127, NaN of NaN."""
        b, magic = self.builder, self.constant(_ROUND)
        bounded = self.greater(self.constant(_LEAST), x)
        rounded = b.fadd(bounded, magic)
        rest = b.fsub(bounded, b.fsub(rounded, magic))
        power = self.constant(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            power = self.multiply_add(power, rest, self.constant(coefficient))
        exponent = b.shl(b.bitcast(rounded, INTS), ir.Constant(INTS, [23] * LANES))
        scale = b.add(exponent, ir.Constant(INTS, [_ONE] * LANES))
        return b.fmul(power, b.bitcast(scale, VECTOR))

    def tanh_from(self, doubled: Any) -> Any:
        """tanh(y) from ``doubled`` = 2 y log2(e): 1 - 2 / (2^doubled + 1), to an absolute 1e-7."""
        b, one = self.builder, self.constant(1.0)
        too_large = b.fcmp_ordered(">", doubled, self.constant(64.0))
        power = self.exp2(b.select(too_large, self.constant(64.0), doubled))
        return b.fsub(one, b.fdiv(self.constant(2.0), b.fadd(power, one)))

    def widen(self, halves: Any) -> Any:
        """bfloat16 as float."""
        sixteen = ir.Constant(INTS, [16] * LANES)
        return self.builder.bitcast(self.builder.shl(self.builder.zext(halves, INTS), sixteen), VECTOR)

    def narrow(self, vector: Any) -> Any:
        """Float as bfloat16, rounded to nearest even."""
        b, sixteen = self.builder, ir.Constant(INTS, [16] * LANES)
        bits = b.bitcast(vector, INTS)
        odd = b.and_(b.lshr(bits, sixteen), ir.Constant(INTS, [1] * LANES))
        rounded = b.lshr(b.add(b.add(bits, odd), ir.Constant(INTS, [0x7FFF] * LANES)), sixteen)
        nan = b.fcmp_unordered("uno", vector, vector)
        return b.trunc(b.select(nan, ir.Constant(INTS, [_NAN_BFLOAT16] * LANES), rounded), HALVES)

    def widen_ieee(self, halves: Any) -> Any:
        """Float16, as 16-bit words, as float: exact for all finite ones, on any CPU."""
        b, bits = self.builder, self.builder.zext(halves, INTS)

        def moved(mask: int, by: int) -> Any:
            kept = b.and_(bits, ir.Constant(INTS, [mask] * LANES))
            return b.shl(kept, ir.Constant(INTS, [by] * LANES))

        size = b.fmul(b.bitcast(moved(0x7FFF, 13), VECTOR), self.constant(2.0**112))
        return b.bitcast(b.or_(b.bitcast(size, INTS), moved(0x8000, 16)), VECTOR)

    def numbers(self, codes: Any) -> Any:
        """Unsigned bytes as floats."""
        return self.builder.sitofp(self.builder.zext(codes, INTS), VECTOR)

    def paired(self, first: Any, second: Any) -> Any:
        """Two vectors, of 32 floats in all, as 16 words: pairs of neighbours, rounded to bfloat16.

        Only for a CPU with `PAIRED`. Subnormal numbers become 0.
        """
        kind, name = ir.FunctionType(_PAIRS, [VECTOR] * 2), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        round_both = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.bitcast(self.builder.call(round_both, [second, first]), INTS)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """A square of `LANES` vectors transposed: blocks of 8, 4, 2 and 1 swap places."""
        square = list(rows)
        for step in (8, 4, 2, 1):
            low = [c if not c & step else LANES + (c ^ step) for c in range(LANES)]
            high = [c | step if not c & step else LANES + c for c in range(LANES)]
            for i in (i for i in range(LANES) if not i & step):
                pair = square[i], square[i + step]
                square[i], square[i + step] = (self.shuffle(*pair, order) for order in (low, high))
        return square

    def lane_sums(self, vectors: Sequence[Any]) -> Any:
        """The sum of each of `LANES` vectors, as one vector."""
        sums, step = list(vectors), 1
        while len(sums) > 1:
            # two vectors become one: pairs of neighbours `step` lanes apart are added
            even = [c if not c & step else LANES + (c ^ step) for c in range(LANES)]
            odd = [c | step if not c & step else LANES + c for c in range(LANES)]
            sums = [
                self.builder.fadd(self.shuffle(a, b, even), self.shuffle(a, b, odd))
                for a, b in list(pairwise(sums))[::2]
            ]
            step *= 2
        return sums[0]
