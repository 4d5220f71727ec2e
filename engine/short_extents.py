"""Short extents of many readers met in one product: what each has for itself behind a past they share.

The first tokens of 25 answers, or a few bars of each of 16 sessions, are some dozen keys that one reader
sees. A product and a merge for each of them cost more than the arithmetic, so extents of about the same
length, read by equally many rows, are copied side by side and padded. Readers stay apart in the batch
dimension: padding is a key of the reader's own, hidden by the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.batch import PastPart

SHORT_KEYS = 256
"""Longer extents are read in place."""


@dataclass(frozen=True)
class Gathered:
    """``count`` parts of equally many rows. ``slots``: int64 [count * keys], those of one part together.

    ``hidden``: float [count, 1, 1, keys], -inf where a part is padded; None when all are equally long.
    ``turns`` as in `PastPart`, for all ``rows``.
    """

    rows: slice | torch.Tensor
    count: int
    slots: torch.Tensor
    hidden: torch.Tensor | None
    turns: torch.Tensor | None


def gather(parts: Sequence[PastPart]) -> tuple[list[PastPart], list[Gathered]]:
    """``parts`` that stay as they are, and the short ones among them gathered; no row is twice in one."""
    alone: list[PastPart] = []
    alike: dict[tuple[int, int], list[tuple[slice, PastPart]]] = {}
    for part in parts:
        length = part.stop - part.start
        if part.visible is None and isinstance(part.rows, slice) and length <= SHORT_KEYS:
            rows = part.rows.stop - part.rows.start
            # lengths up to the same power of two
            alike.setdefault((rows, (length - 1).bit_length()), []).append((part.rows, part))
        else:
            alone.append(part)
    groups = [group for candidates in alike.values() for group in _disjoint(candidates)]
    alone += [part for group in groups if len(group) == 1 for _, part in group]
    return alone, [_gathered(group) for group in groups if len(group) > 1]


def _disjoint(candidates: list[tuple[slice, PastPart]]) -> list[list[tuple[slice, PastPart]]]:
    """As few groups as it takes for the rows of each to be apart, and in order."""
    groups: list[list[tuple[slice, PastPart]]] = []
    for rows, part in sorted(candidates, key=lambda candidate: int(candidate[0].start)):
        group = next((group for group in groups if group[-1][0].stop <= rows.start), None)
        if group is None:
            group = []
            groups.append(group)
        group.append((rows, part))
    return groups


def _gathered(group: list[tuple[slice, PastPart]]) -> Gathered:
    spans = [rows for rows, _ in group]
    parts = [part for _, part in group]
    first = torch.tensor([part.start for part in parts])[:, None]
    lengths = torch.tensor([part.stop - part.start for part in parts])[:, None]
    at = torch.arange(int(lengths.max())).expand(len(parts), -1)
    padding = at >= lengths
    side_by_side = all(a.stop == b.start for a, b in pairwise(spans))
    return Gathered(
        slice(spans[0].start, spans[-1].stop)
        if side_by_side
        else torch.cat([torch.arange(span.start, span.stop) for span in spans]),
        len(parts),
        (first + at.masked_fill(padding, 0)).flatten(),
        torch.zeros(at.shape).masked_fill_(padding, float("-inf"))[:, None, None] if padding.any() else None,
        _turns(spans, parts),
    )


def _turns(spans: list[slice], parts: list[PastPart]) -> torch.Tensor | None:
    if all(part.turns is None for part in parts):
        return None
    none = torch.zeros(spans[0].stop - spans[0].start, dtype=torch.int64)
    return torch.cat([none if part.turns is None else part.turns for part in parts])
