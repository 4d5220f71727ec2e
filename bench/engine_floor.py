"""What a pass cannot be quicker than on this machine: its arithmetic, or the reading of what it needs.

The rates come from the same run (`engine_limits`). On a CPU in fp32 arithmetic is the larger of the two for
a question of some 40 tokens; reading is for a single row.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from bench.figures import Rates


class Shape(msgspec.Struct, frozen=True):
    """A dense decoder. ``linear_parameters``: those every row is multiplied by, the head left out."""

    model: str
    parameters: int
    linear_parameters: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 4


class Limits(msgspec.Struct, frozen=True):
    """``gemm``: floating-point operations a second in one large product; ``copy``: bytes read and written."""

    gemm: Rates
    copy: Rates


class Floor(NamedTuple):
    """Milliseconds of one pass."""

    arithmetic_ms: float
    reading_ms: float

    @property
    def ms(self) -> float:
        """Whichever is larger."""
        return max(self.arithmetic_ms, self.reading_ms)


def attention_floor(
    shape: Shape, limits: Limits, rows: int, shared: int, own: float = 0.0, readers: int = 1
) -> Floor:
    """``rows`` rows of ``readers`` over ``shared`` tokens, read once, and ``own`` tokens of each reader."""
    operations = 4.0 * shape.layers * shape.q_heads * shape.head_dim * rows * (shared + own)
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.value_bytes * (shared + readers * own)
    return _floor(limits, operations, kv)


def linear_floor(shape: Shape, limits: Limits, rows: int) -> Floor:
    """Everything but attention and the head: each row times every weight, the weights read once."""
    parameters = shape.linear_parameters
    return _floor(limits, 2.0 * parameters * rows, parameters * shape.value_bytes)


def pass_floor(shape: Shape, limits: Limits, rows: int, shared: int, own: float = 0.0) -> float:
    """Both together, ms."""
    attention = attention_floor(shape, limits, rows, shared, own)
    return attention.ms + linear_floor(shape, limits, rows).ms


def causal(rows: int) -> float:
    """Tokens a row sees of its own pass, on average, itself included."""
    return (rows + 1) / 2


def _floor(limits: Limits, operations: float, read: float) -> Floor:
    return Floor(operations / limits.gemm.median * 1e3, read / limits.copy.median * 1e3)
