"""Batches short extents of many readers, such as their own tokens after a shared context.

The first tokens of 25 answers, or a few bars of each of 16 sessions, are a few dozen keys with one reader
each. A product and a merge for each would cost more than the arithmetic. So extents of similar length, read
by equally many rows, are copied into one padded batch; several extents of one reader (a prompt that came in
pieces) are joined first. The padding repeats a key of the reader and is hidden by the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.metadata import ContextPart, rows_of

SHORT_KEYS = 256
"""Longer extents are read in place."""
JOINED_KEYS = 1024
"""Most keys of one reader to join: the copy should stay in the core's cache."""
BATCHED_KEYS = 1 << 14
"""Most keys of one product, with padding: they are copied for each layer."""


@dataclass(frozen=True)
class ContextBatch:
    """``count`` readers with equally many rows. ``slots``: int64 [count * keys], grouped by reader.

    ``hidden``: float [count, 1, 1, keys], -inf at padding; None when all have equally many keys. ``shifts``:
    as in `ContextPart`, for all ``rows``.
    """

    rows: slice | torch.Tensor
    count: int
    slots: torch.Tensor
    hidden: torch.Tensor | None
    shifts: torch.Tensor | None


@dataclass(frozen=True)
class _Read:
    """Extents that the same rows read with the same shifts: one row of keys."""

    rows: slice
    parts: list[ContextPart]

    @property
    def keys(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def slots(self, keys: int) -> torch.Tensor:
        """The slots of its keys, padded to ``keys`` with its first slot."""
        ranges = [torch.arange(part.start, part.stop) for part in self.parts]
        return torch.cat([*ranges, torch.full((keys - self.keys,), self.parts[0].start)])


def batch_short(
    parts: Sequence[ContextPart], joined_keys: int = JOINED_KEYS, batched_keys: int = BATCHED_KEYS
) -> tuple[list[ContextPart], list[ContextBatch]]:
    """``parts`` to read in place, and batches of short ones; no row occurs twice in a batch."""
    alone: list[ContextPart] = []
    alike: dict[tuple[int, int], list[_Read]] = {}
    for read in _reads(parts, alone, joined_keys):
        rows = read.rows.stop - read.rows.start
        # equal lengths after rounding up to a power of two
        alike.setdefault((rows, (read.keys - 1).bit_length()), []).append(read)
    groups = [group for (_, bits), reads in alike.items() for group in _groups(reads, batched_keys >> bits)]
    batched: list[ContextBatch] = []
    for group in groups:
        if len(group) == len(group[0].parts) == 1:
            alone += group[0].parts
        else:
            batched.append(_batched(group))
    return alone, batched


def _reads(parts: Sequence[ContextPart], alone: list[ContextPart], joined_keys: int) -> list[_Read]:
    """Join the short ones of ``parts`` up to ``joined_keys``; append the others to ``alone``."""
    reads: dict[tuple[int, int, tuple[int, ...] | None], list[_Read]] = {}
    for part in parts:
        length = part.stop - part.start
        if part.visible is not None or not isinstance(part.rows, slice) or length > SHORT_KEYS:
            alone.append(part)
            continue
        shifts = None if part.shifts is None else tuple(part.shifts.tolist())
        same = reads.setdefault((part.rows.start, part.rows.stop, shifts), [])
        if same and same[-1].keys + length <= joined_keys:
            same[-1].parts.append(part)
        else:
            same.append(_Read(part.rows, [part]))
    return [read for same in reads.values() for read in same]


def _groups(candidates: list[_Read], most: int) -> list[list[_Read]]:
    """As few groups of at most ``most`` as possible; the rows of a group are disjoint and in order."""
    groups: list[list[_Read]] = []
    for read in sorted(candidates, key=lambda read: int(read.rows.start)):
        open_ = (group for group in groups if len(group) < most and group[-1].rows.stop <= read.rows.start)
        group = next(open_, None)
        if group is None:
            groups.append(group := [])
        group.append(read)
    return groups


def _batched(group: list[_Read]) -> ContextBatch:
    lengths = torch.tensor([read.keys for read in group])[:, None]
    keys = int(lengths.max())
    padding = torch.arange(keys).expand(len(group), -1) >= lengths
    return ContextBatch(
        rows_of([read.rows for read in group], "cpu"),
        len(group),
        torch.cat([read.slots(keys) for read in group]),
        torch.zeros(padding.shape).masked_fill_(padding, float("-inf"))[:, None, None]
        if padding.any()
        else None,
        _shifts(group),
    )


def _shifts(group: list[_Read]) -> torch.Tensor | None:
    shifts = [read.parts[0].shifts for read in group]
    if all(own is None for own in shifts):
        return None
    none = torch.zeros(group[0].rows.stop - group[0].rows.start, dtype=torch.int64)
    return torch.cat([none if own is None else own for own in shifts])
