"""Which blocks one holder alone refers to, kept current change by change: asking costs nothing.

A cache promises its blocks to the pool as long as nobody else reads them. Whether that is so changes whenever
anybody shares or releases a block, so the allocator reports both; a report costs what the change itself does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32]


class Claims:
    """One holder's own references to each block, beside everybody's ``references``, int32 [blocks].

    Made by `BlockAllocator.claim`. The holder counts in `hold` after it has shared blocks, and in `let_go`
    before it releases them; in between nobody must ask.
    """

    def __init__(self, references: Counts) -> None:
        self.own: Counts = np.zeros_like(references)
        """The holder's references to each block."""
        self.sole = 0
        """Blocks that nobody else refers to."""
        self._references = references

    def hold(self, runs: Iterable[tuple[int, int]]) -> None:
        """The holder has one more reference to each block from start to stop of ``runs``."""
        for start, stop in runs:
            self.own[start:stop] += 1
            self.sole += int(np.count_nonzero(self.own[start:stop] == self._references[start:stop]))

    def let_go(self, runs: Iterable[tuple[int, int]]) -> None:
        """The holder is about to give one reference to each block of ``runs`` back."""
        for start, stop in runs:
            self.sole -= int(np.count_nonzero(self.own[start:stop] == self._references[start:stop]))
            self.own[start:stop] -= 1

    def shared(self, start: int, stop: int) -> None:
        """The allocator is about to count one more reference to each block from ``start`` to ``stop``."""
        self.sole -= self._sole_of(start, stop)

    def released(self, start: int, stop: int) -> None:
        """The allocator counts one reference less to each block from ``start`` to ``stop``."""
        self.sole += self._sole_of(start, stop)

    def idle(self) -> npt.NDArray[np.bool_]:
        """Per block, bool [blocks]: nobody but the holder refers to it, or nobody at all."""
        idle: npt.NDArray[np.bool_] = self.own == self._references
        return idle

    def check_integrity(self) -> None:
        """Raise AssertionError unless the count of sole blocks is right."""
        sole = np.count_nonzero(self.own[self.idle()])
        assert sole == self.sole, f"{self.sole} blocks are counted as referred to by one holder, not {sole}"

    def _sole_of(self, start: int, stop: int) -> int:
        own = self.own[start:stop]
        return int(np.count_nonzero((own == self._references[start:stop]) & (own > 0)))
