"""Random batches over shared extents, as sessions with questions make them."""

from __future__ import annotations

import random
from typing import Any

from engine.attention.metadata import AttentionMetadata, PackedRows
from regions.extents import Extent, Placement, SlotRange


class Slots:
    """Allocates runs of slots that are never adjacent, except where `behind` continues one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next = 1

    def run(self, length: int) -> int:
        slot = self.next + self.rng.randrange(1, 4)
        self.next = slot + length
        return slot

    def ranges(self, rows: int) -> tuple[SlotRange, ...]:
        """One or two runs for ``rows`` new rows."""
        cut = self.rng.randrange(1, rows) if rows > 1 and self.rng.random() < 0.4 else rows
        return tuple((self.run(n), n) for n in (cut, rows - cut) if n)


def mixed_batch(rng: random.Random, device: str = "cpu") -> tuple[AttentionMetadata, int]:
    """Readers of a frozen prefix and a tape in several frames, an append to it, a stateless prompt.

    Also the slots a pool for it needs.
    """
    slots = Slots(rng)
    begin = rng.randrange(3000, 90000)
    prefix = rng.randrange(1, 40)
    context = [Extent(slots.run(prefix), prefix, begin - prefix, begin - prefix)]
    coord = begin
    for _ in range(rng.randrange(1, 3)):
        length = rng.randrange(1, 180)
        context.append(Extent(slots.run(length), length, coord, coord - rng.randrange(0, 3000)))
        coord += length
    placements = []
    for _ in range(rng.randrange(1, 4)):  # questions, some with tokens of their own in KV
        own = list(context)
        at, rows = coord, rng.choice([1, 1, 1, 2, 5, 19])
        if rng.random() < 0.5:
            length = rng.randrange(1, 30)
            own.append(Extent(slots.run(length), length, at, context[-1].origin))
            at += length
        placements.append(Placement(tuple(own), slots.ranges(rows), at, own[-1].origin))
    if rng.random() < 0.5:  # the tape's next record right behind its last slot, as allocators place it
        tail = context[-1]
        slot = slots.run(300)
        context[-1] = tail._replace(slot=slot)
        placements = [
            Placement(tuple(context[-1] if e == tail else e for e in s.context), *_rest(s))
            for s in placements
        ]
        placements.append(Placement(tuple(context), ((slot + tail.length, 9),), coord, tail.origin))
    rows = rng.randrange(1, 20)
    placements.append(Placement((), slots.ranges(rows), 0, 0))
    rng.shuffle(placements)
    packed: list[PackedRows] = []
    for placement in placements:
        start = packed[-1].stop if packed else 0
        packed.append(PackedRows(start, start + sum(n for _, n in placement.slots), placement))
    return AttentionMetadata(packed, device), slots.next + 2


def _rest(placement: Placement) -> tuple[Any, ...]:
    return placement.slots, placement.coord, placement.origin
