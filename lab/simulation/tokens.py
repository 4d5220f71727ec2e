"""Prompts of any length in little memory: tokens as runs of consecutive numbers.

A document is one `range`, so a prompt of a few documents is a few ranges, however long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAX_ID = 2**31 - 1
"""The memory model keeps token ids as int32."""


class Segments(Sequence[int]):
    """An immutable sequence of token ids: the concatenation of ``ranges`` (of step 1).

    The runs are maximal, so equal sequences have equal runs. Raises ValueError for another step.
    """

    __slots__ = ("_ends", "ranges")

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        self.ranges: tuple[range, ...] = tuple(_maximal(ranges))
        self._ends: list[int] = list(accumulate(map(len, self.ranges)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Segments: ...
    def __getitem__(self, index: int | slice) -> int | Segments:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("segments are cut in steps of 1 only")
            return self._cut(start, stop)
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        run = bisect_right(self._ends, at)
        return self.ranges[run][at - self._ends[run]]

    def __add__(self, other: Segments) -> Segments:
        return Segments((*self.ranges, *other.ranges))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Segments):
            return self.ranges == other.ranges
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(int.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> NDArray[np.int32]:
        """The token ids, int32 [tokens], for the memory model."""
        runs = [np.arange(run.start, run.stop, dtype=np.int32) for run in self.ranges]
        return np.concatenate(runs) if runs else np.empty(0, np.int32)

    def _cut(self, start: int, stop: int) -> Segments:
        if start >= stop:
            return EMPTY
        if start == 0 and stop == len(self):
            return self
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        runs = list(self.ranges[first : last + 1])
        # Cut the tail first: with a single run, both cuts are on that run.
        runs[-1] = runs[-1][: len(runs[-1]) - (self._ends[last] - stop)]
        runs[0] = runs[0][start - (self._ends[first - 1] if first else 0) :]
        piece = Segments.__new__(Segments)  # parts of maximal runs are maximal: no check needed
        piece.ranges, piece._ends = tuple(runs), list(accumulate(map(len, runs)))
        return piece


def _maximal(ranges: Iterable[range]) -> Iterator[range]:
    """Join runs that continue one another; drop empty ones."""
    run = range(0)
    for piece in ranges:
        if piece.step != 1:
            raise ValueError(f"a run of tokens must have step 1, not {piece.step}")
        if not piece:
            continue
        if run and run.stop == piece.start:
            run = range(run.start, piece.stop)
            continue
        if run:
            yield run
        run = piece
    if run:
        yield run


EMPTY = Segments()
