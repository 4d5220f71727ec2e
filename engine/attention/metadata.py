"""The attention metadata of one forward pass: which packed rows attend to which extents, and their rotation.

It is made once per pass on the host and read by every layer. Rows of different readers that share an extent
(the frozen prefix of all sessions, the tape under k standing questions) form one part, so its keys are read
once for all of them.

A pass writes its new keys before attention, so a sequence can be cut: its earlier rows become one more extent
of the context of the later ones. Long sequences are cut this way, which bounds every causal square and mask,
and so is a last layer of which only some rows are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import torch

from engine.device import queued
from regions.extents import Extent, Placement, SlotRange

PIECE_ROWS = 1024
"""Longer sequences are cut into pieces of this many rows."""

WINDOWED_PIECE_ROWS = 512
"""Rows of a piece under a sliding window, at most the window; a mask has at most this squared entries."""


@dataclass(frozen=True)
class PackedRows:
    """Rows ``start`` to ``stop`` (exclusive) of the packed batch: the new tokens of one target."""

    start: int
    stop: int
    placement: Placement

    @property
    def rows(self) -> int:
        """Number of new tokens."""
        return self.stop - self.start

    @property
    def positions(self) -> range:
        """Their local positions."""
        first = self.placement.coord - self.placement.origin
        return range(first, first + self.rows)

    def sequences(self) -> list[PackedRows]:
        """Itself, or one for each window that its rows see: earlier rows are context of the later ones."""
        whole = self.placement
        firsts = [first for first, _ in whole.windows if first < self.rows]
        if len(firsts) < 2:
            return [self]
        return [
            PackedRows(
                self.start + first, self.start + stop, _part(replace(whole, context=context), first, stop)
            )
            for (first, context), stop in zip(whole.windows, [*firsts[1:], self.rows], strict=False)
        ]


@dataclass(frozen=True)
class ContextPart:
    """Rows that attend to slots ``start`` to ``stop`` (exclusive) of the pool; each sees at least one key.

    ``shifts``: positions by which each row's query is rotated to the extent's frame; None when all are 0.
    ``visible``: bool [rows, keys]; None when every row sees every key.
    """

    rows: slice | torch.Tensor
    start: int
    stop: int
    shifts: torch.Tensor | None
    visible: torch.Tensor | None


@dataclass(frozen=True)
class NewPart:
    """``count`` sequences with equally many rows; each row sees its own sequence up to itself.

    No product spans two sequences, so a sequence with NaN does not affect others.
    """

    rows: slice | torch.Tensor
    count: int


@dataclass
class AttentionMetadata:
    """The attention metadata of one packed batch."""

    sequences: Sequence[PackedRows]
    device: torch.device | str = "cpu"
    piece_rows: int = PIECE_ROWS
    windowed_piece_rows: int = WINDOWED_PIECE_ROWS
    _context: dict[int | None, list[ContextPart]] = field(default_factory=dict)
    _new: dict[int | None, list[NewPart]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Tokens of the batch."""
        return self.sequences[-1].stop

    def positions(self) -> torch.Tensor:
        """Local positions, int64 [rows]."""
        positions = [np.arange(s.positions.start, s.positions.stop) for s in self.sequences]
        return queued(torch.device(self.device), torch.from_numpy(np.concatenate(positions)))

    def only(self, rows: Sequence[int]) -> AttentionMetadata:
        """The metadata of a pass over only ``rows`` (ascending), whose keys are all in the pool."""
        kept: list[PackedRows] = []
        for sequence in self.sequences:
            mine = rows[bisect_left(rows, sequence.start) : bisect_left(rows, sequence.stop)]
            for _, numbered in groupby(enumerate(mine), key=lambda pair: pair[1] - pair[0]):
                run = [row for _, row in numbered]
                at = kept[-1].stop if kept else 0
                kept.append(PackedRows(at, at + len(run), after(sequence.placement, run[0] - sequence.start)))
        return AttentionMetadata(kept, self.device, self.piece_rows, self.windowed_piece_rows)

    def context(self, window: int | None) -> list[ContextPart]:
        """Parts over the pool for layers with this sliding window (None: full attention)."""
        if window not in self._context:
            self._context[window] = self._context_parts(window)
        return self._context[window]

    def new(self, window: int | None) -> list[NewPart]:
        """Parts within the batch's own rows."""
        if window not in self._new:
            by_rows = sorted(self._pieces(window), key=lambda piece: piece.rows)
            groups = (list(group) for _, group in groupby(by_rows, key=lambda piece: piece.rows))
            self._new[window] = [NewPart(rows_of(group, self.device), len(group)) for group in groups]
        return self._new[window]

    def _pieces(self, window: int | None) -> list[PackedRows]:
        """The sequences, cut so that all rows of a piece are within each other's window."""
        most = self.piece_rows if window is None else min(window, self.windowed_piece_rows)
        return [
            PackedRows(
                start, min(start + most, sequence.stop), after(sequence.placement, start - sequence.start)
            )
            for sequence in self.sequences
            for start in range(sequence.start, sequence.stop, most)
        ]

    def _context_parts(self, window: int | None) -> list[ContextPart]:
        shared: dict[tuple[int, int], list[tuple[PackedRows, int]]] = {}
        parts: list[ContextPart] = []
        for piece in self._pieces(window):
            for extent in piece.placement.context:
                shift = piece.placement.origin - extent.origin
                leaving, staying = split(extent, piece.placement.coord, piece.rows, window)
                if leaving.length and window is not None:
                    parts.append(self._masked(piece, leaving, shift, window))
                if staying.length:
                    shared.setdefault((staying.slot, staying.length), []).append((piece, shift))
        parts.extend(
            ContextPart(
                rows_of([s for s, _ in readers], self.device),
                slot,
                slot + length,
                self._shifts(readers),
                None,
            )
            for (slot, length), readers in shared.items()
        )
        return parts

    def _masked(self, piece: PackedRows, extent: Extent, shift: int, window: int) -> ContextPart:
        seeing = min(piece.rows, extent.coord + extent.length - 1 + window - piece.placement.coord)
        seers = replace(piece, stop=piece.start + seeing)
        queries = torch.arange(piece.placement.coord, piece.placement.coord + seeing)
        keys = torch.arange(extent.coord, extent.coord + extent.length)
        return ContextPart(
            slice(seers.start, seers.stop),
            extent.slot,
            extent.slot + extent.length,
            self._shifts([(seers, shift)]),
            (queries[:, None] - keys[None] < window).to(self.device),
        )

    def _shifts(self, readers: list[tuple[PackedRows, int]]) -> torch.Tensor | None:
        if not any(shift for _, shift in readers):
            return None
        return torch.cat([torch.full((s.rows,), shift) for s, shift in readers]).to(self.device)


def rows_of(spans: Sequence[PackedRows], device: torch.device | str) -> slice | torch.Tensor:
    """The rows of ``spans``, in order; a slice when they are adjacent."""
    if all(a.stop == b.start for a, b in pairwise(spans)):
        return slice(spans[0].start, spans[-1].stop)
    return torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)


def after(placement: Placement, tokens: int) -> Placement:
    """The rest of ``placement`` after its first ``tokens`` tokens, which become context."""
    context = list(placement.context)
    left: list[SlotRange] = []
    coord = placement.coord
    for slot, count in placement.slots:
        written = min(count, placement.coord + tokens - coord)
        if written:
            context.append(Extent(slot, written, coord, placement.origin))
            coord += written
        if written < count:
            left.append((slot + written, count - written))
    coord = placement.coord + tokens
    return Placement(tuple(context), tuple(left), coord, placement.origin, own=placement.own)


def _part(placement: Placement, first: int, stop: int) -> Placement:
    """Tokens ``first`` to ``stop`` (exclusive) of ``placement``; those before them become context."""
    found = after(placement, first)
    own: list[SlotRange] = []
    left = stop - first
    for slot, count in found.slots:
        if left:
            own.append((slot, min(count, left)))
            left -= own[-1][1]
    return replace(found, slots=tuple(own))


def split(extent: Extent, coord: int, rows: int, window: int | None) -> tuple[Extent, Extent]:
    """Split ``extent`` into the keys that some but not all of the rows see, and those that all rows see.

    ``coord``: stream coordinate of the first row. Either may have length 0.
    """
    if window is None:
        return extent._replace(length=0), extent
    first_sees, last_sees = (
        min(max(row - window + 1 - extent.coord, 0), extent.length) for row in (coord, coord + rows - 1)
    )
    return _cut(extent, first_sees, last_sees), _cut(extent, last_sees, extent.length)


def _cut(extent: Extent, start: int, stop: int) -> Extent:
    return extent._replace(slot=extent.slot + start, length=stop - start, coord=extent.coord + start)
