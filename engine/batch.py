"""The attention plan of one forward pass: which packed rows meet which extents, turned by how much.

Made once on the host per pass and read by every layer. Rows of different readers that share an extent
(the frozen prefix of all sessions, the tape under k standing questions) meet it in one part, so its keys
are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from regions.extents import Extent, Step

PACK_ROWS = 512
"""New tokens of several sequences share one masked product up to this many rows."""


@dataclass(frozen=True)
class Packed:
    """Rows ``start`` to ``stop`` of the packed batch: the new tokens of one target."""

    start: int
    stop: int
    step: Step

    @property
    def rows(self) -> int:
        """New tokens of this sequence."""
        return self.stop - self.start


@dataclass(frozen=True)
class PastPart:
    """Rows that attend to slots ``start`` to ``stop`` of the pool.

    ``turns``: positions by which each row's query is turned towards the extent's frame, None when all
    are zero. ``visible``: bool [rows, keys], None when every row sees every key.
    """

    rows: slice | torch.Tensor
    start: int
    stop: int
    turns: torch.Tensor | None
    visible: torch.Tensor | None


@dataclass(frozen=True)
class NewPart:
    """Rows ``start`` to ``stop`` attend to each other's keys. ``visible`` None: one sequence, causal."""

    start: int
    stop: int
    visible: torch.Tensor | None


@dataclass
class BatchPlan:
    """Everything attention needs to know about one packed batch."""

    sequences: Sequence[Packed]
    device: torch.device | str = "cpu"
    _past: dict[int | None, list[PastPart]] = field(default_factory=dict)
    _new: dict[int | None, list[NewPart]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Tokens of the batch."""
        return self.sequences[-1].stop

    def positions(self) -> torch.Tensor:
        """Local positions, int64 [rows]."""
        return torch.cat(
            [
                torch.arange(s.step.coord - s.step.origin, s.step.coord - s.step.origin + s.rows)
                for s in self.sequences
            ]
        ).to(self.device)

    def past(self, window: int | None) -> list[PastPart]:
        """Parts over the pool for layers with this sliding window (None: full attention)."""
        if window not in self._past:
            self._past[window] = self._past_parts(window)
        return self._past[window]

    def new(self, window: int | None) -> list[NewPart]:
        """Parts among the batch's own rows."""
        if window not in self._new:
            self._new[window] = self._new_parts(window)
        return self._new[window]

    def _past_parts(self, window: int | None) -> list[PastPart]:
        shared: dict[tuple[int, int], list[tuple[Packed, int]]] = {}
        parts: list[PastPart] = []
        for sequence in self.sequences:
            for extent in sequence.step.past:
                turn = sequence.step.origin - extent.origin
                seen = clip(extent, sequence.step.coord, sequence.rows, window)
                if seen is None:
                    continue
                if window is None or sequence.step.coord + sequence.rows - 1 - seen.coord < window:
                    shared.setdefault((seen.slot, seen.length), []).append((sequence, turn))
                else:
                    parts.append(self._windowed(sequence, seen, turn, window))
        parts.extend(
            PastPart(_rows([s for s, _ in readers]), slot, slot + length, self._turns(readers), None)
            for (slot, length), readers in shared.items()
        )
        return parts

    def _windowed(self, sequence: Packed, extent: Extent, turn: int, window: int) -> PastPart:
        queries = torch.arange(sequence.step.coord, sequence.step.coord + sequence.rows)
        keys = torch.arange(extent.coord, extent.coord + extent.length)
        visible = queries[:, None] - keys[None] < window
        return PastPart(
            slice(sequence.start, sequence.stop),
            extent.slot,
            extent.slot + extent.length,
            self._turns([(sequence, turn)]),
            visible.to(self.device),
        )

    def _turns(self, readers: list[tuple[Packed, int]]) -> torch.Tensor | None:
        if not any(turn for _, turn in readers):
            return None
        return torch.cat([torch.full((s.rows,), turn) for s, turn in readers]).to(self.device)

    def _new_parts(self, window: int | None) -> list[NewPart]:
        parts: list[NewPart] = []
        pack: list[Packed] = []
        for sequence in self.sequences:
            if pack and sequence.stop - pack[0].start > PACK_ROWS:
                parts.append(self._pack(pack, window))
                pack = []
            pack.append(sequence)
        parts.append(self._pack(pack, window))
        return parts

    def _pack(self, pack: list[Packed], window: int | None) -> NewPart:
        start, stop = pack[0].start, pack[-1].stop
        if len(pack) == 1 and (window is None or pack[0].rows <= window):
            return NewPart(start, stop, None)
        visible = torch.zeros(stop - start, stop - start, dtype=torch.bool)
        for s in pack:
            square = torch.ones(s.rows, s.rows, dtype=torch.bool).tril()
            if window is not None:
                square &= ~torch.ones_like(square).tril(-window)
            visible[s.start - start : s.stop - start, s.start - start : s.stop - start] = square
        return NewPart(start, stop, visible.to(self.device))


def clip(extent: Extent, coord: int, rows: int, window: int | None) -> Extent | None:
    """The part of ``extent`` that the oldest of the rows (at stream coordinate ``coord``) still sees."""
    if window is None:
        return extent
    hidden = coord - window + 1 - extent.coord
    if hidden >= extent.length:
        return None
    if hidden <= 0:
        return extent
    return extent._replace(
        slot=extent.slot + hidden, length=extent.length - hidden, coord=extent.coord + hidden
    )


def _rows(sequences: list[Packed]) -> slice | torch.Tensor:
    """The rows of ``sequences`` in batch order: a slice when they lie side by side."""
    if all(a.stop == b.start for a, b in pairwise(sequences)):
        return slice(sequences[0].start, sequences[-1].stop)
    return torch.cat([torch.arange(s.start, s.stop) for s in sequences])
