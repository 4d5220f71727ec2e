"""The sliding region as data: a tape's retention, its records, and the state to resume it from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from regions.extents import Segment


@dataclass(frozen=True)
class Retention:
    """How much of the tape stays; 0 is no limit for ``records`` and ``span_ns``.

    ``span_ns``: most event time between a record and the newest one.
    """

    tokens: int
    records: int = 0
    span_ns: int = 0


class LiveRecord(NamedTuple):
    """A record of the window: its tokens and its event time, ns."""

    tokens: Sequence[int]
    ts_event: int


class KVState(NamedTuple):
    """What the KV of a tape depends on.

    ``number``: windows that were prefilled again and adopted so far. ``records``: those of the newest such
    window, and all since. ``left``: records left that window before it was adopted, so it depends on them,
    too.
    """

    number: int = 0
    records: int = 0
    left: bool = False


class TapeState(msgspec.Struct, frozen=True):
    """All of a tape but its KV and frozen prefix; ``origin``: of the frame the next token is written in."""

    version: int
    evicted_tokens: int
    evicted_records: int
    origin: int
    records: tuple[LiveRecord, ...]
    stretches: tuple[Segment, ...]
    kv: KVState

    @property
    def tokens(self) -> int:
        """Tokens of the window."""
        return sum(len(record.tokens) for record in self.records)

    def check(self, frame_limit: int) -> None:
        """Raise ValueError unless records and stretches agree, with all positions below ``frame_limit``."""
        coord = self.evicted_tokens
        for stretch in self.stretches:
            if stretch.coord != coord or stretch.length < 1:
                raise ValueError(f"the stored window has a hole at token {coord}")
            highest = stretch.max_position
            if highest >= frame_limit:
                raise ValueError(f"stored positions reach {highest}, the frame limit is {frame_limit}")
            coord += stretch.length
        if coord != self.evicted_tokens + self.tokens:
            raise ValueError("the stored window and its records have different lengths")
