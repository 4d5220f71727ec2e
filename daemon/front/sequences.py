"""Missing records, told by the numbers that venues give them, and by heartbeats in a quiet market."""

from __future__ import annotations

from typing import Literal

from feeds.messages import Heartbeat, Received

Sequence = Literal["none", "symbol", "venue"]
"""What a venue's numbers count: nothing in particular, the records of each symbol, or all its records."""

REORDERED = 1000
"""A number this far below the newest one is that of a numbering that began again."""


class Sequences:
    """The newest number of each symbol or venue."""

    def __init__(self, counts: Sequence) -> None:
        self.counts = counts
        self._newest: dict[str, int] = {}

    def missing(self, record: Received) -> int:
        """Records missing right before this one. A heartbeat has the number of the record before it.

        Numbers that repeat or come late miss nothing. Call it in order, for symbols and venues that are read.
        """
        if self.counts == "none" or record.seq == 0:
            return 0
        key = record.key if self.counts == "symbol" else record.venue
        newest = self._newest.get(key)
        if newest is None or record.seq > newest or record.seq < newest - REORDERED:
            self._newest[key] = record.seq
        if newest is None:
            return 0
        following = newest if isinstance(record, Heartbeat) else newest + 1
        return max(0, record.seq - following)
