"""The machine's own rates, looked at several times during a run: one large product, and one large copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.engine_floor import Limits
from bench.figures import rates

_LOOKS = 5
_FLOAT = 4


class LimitsProbe:
    """Measures with torch's threads. ``side``: of the square matrices; ``copied``: bytes of one copy."""

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
    def look(self) -> Limits:
        """Measure again; everything seen so far. Between the parts, so that a change of speed shows."""
        for _ in range(_LOOKS):
            self._gemm_s.append(_seconds(self._multiply))
            self._copy_s.append(_seconds(self._copy))
        side, moved = len(self._a), 2 * _FLOAT * len(self._source)
        return Limits(rates(2 * side**3, self._gemm_s), rates(moved, self._copy_s))

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._product)

    def _copy(self) -> None:
        self._target.copy_(self._source)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
