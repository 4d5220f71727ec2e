"""What a pass cannot be quicker than on this machine: its arithmetic, or the reading of what it needs.

On a CPU in fp32 arithmetic is the larger of the two for a question of some 40 tokens; reading is for a
single row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from bench.figures import Figure, rate
from engine.model.loading import LoadedModel

_LOOKS = 5
_FLOAT = 4


class Shape(NamedTuple):
    """A dense decoder. ``linear_parameters``: those every row is multiplied by, the head left out."""

    parameters: int
    linear_parameters: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 4

    @classmethod
    def of(cls, loaded: LoadedModel) -> Shape:
        """Of a loaded dense decoder whose layers are alike."""
        head = loaded.model.get_output_embeddings()
        matrices = [m.weight for m in loaded.model.modules() if isinstance(m, nn.Linear) and m is not head]
        return cls(
            sum(parameter.numel() for parameter in loaded.model.parameters()),
            sum(weight.numel() for weight in matrices),
            len(loaded.layers),
            loaded.model.config.num_attention_heads,
            loaded.layers[0].kv_heads,
            loaded.layers[0].key_dim,
            loaded.dtype.itemsize,
        )


class Floor(NamedTuple):
    """Milliseconds of one pass."""

    arithmetic_ms: float
    reading_ms: float

    @property
    def ms(self) -> float:
        """Whichever is larger."""
        return max(self.arithmetic_ms, self.reading_ms)


@dataclass(frozen=True)
class Floors:
    """Of one model, at ``gemm`` operations and ``copy`` bytes (read and written) a second."""

    shape: Shape
    gemm: float
    copy: float

    def attention(self, rows: int, shared: float, own: float = 0.0, readers: int = 1) -> Floor:
        """``rows`` rows of ``readers`` over ``shared`` tokens, read once, and ``own`` of each reader."""
        shape = self.shape
        operations = 4.0 * shape.layers * shape.q_heads * shape.head_dim * rows * (shared + own)
        kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.value_bytes * (shared + readers * own)
        return self._floor(operations, kv)

    def linear(self, rows: int) -> Floor:
        """All but attention and the head: each row times every weight, the weights read once."""
        parameters = self.shape.linear_parameters
        return self._floor(2.0 * parameters * rows, parameters * self.shape.value_bytes)

    def of_pass(self, rows: int, shared: float, own: float = 0.0, readers: int = 1) -> float:
        """Attention and linear layers together, ms."""
        return self.attention(rows, shared, own, readers).ms + self.linear(rows).ms

    def _floor(self, operations: float, read: float) -> Floor:
        return Floor(operations / self.gemm * 1e3, read / self.copy * 1e3)


def causal(rows: int) -> float:
    """Tokens a row sees of its own pass, on average, itself included."""
    return (rows + 1) / 2


class LimitsProbe:
    """The machine's own rates, with torch's threads: one large product, and one large copy.

    ``side``: of the square matrices; ``copied``: bytes of one copy.
    """

    def __init__(self, side: int = 2048, copied: int = 1 << 28) -> None:
        self._a, self._b = (torch.rand(side, side) for _ in range(2))
        self._product = torch.empty(side, side)
        self._source = torch.ones(copied // _FLOAT)
        self._target = torch.empty_like(self._source)
        self._gemm_s: list[float] = []
        self._copy_s: list[float] = []
        self._multiply()
        self._copy()

    @torch.inference_mode()
    def look(self) -> None:
        """Measure again: before and after what they are floors of, so that a change of speed shows."""
        for _ in range(_LOOKS):
            self._gemm_s.append(_seconds(self._multiply))
            self._copy_s.append(_seconds(self._copy))

    def figures(self) -> Iterator[Figure]:
        """Both rates, over all looks."""
        side, moved = len(self._a), 2 * _FLOAT * len(self._source)
        yield rate("large matrix product", 2 * side**3 / 1e9, self._gemm_s, "GFLOP/s", LIMITS)
        yield rate("large copy, read and written", moved / 1e9, self._copy_s, "GB/s", LIMITS)

    def floors(self, loaded: LoadedModel) -> Floors:
        """At the medians of all looks."""
        gemm, copy = self.figures()
        return Floors(Shape.of(loaded), 1e9 * gemm.ours, 1e9 * copy.ours)

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._product)

    def _copy(self) -> None:
        self._target.copy_(self._source)


LIMITS = "The machine's own rates in this part"


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
