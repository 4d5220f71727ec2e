"""Missing records, by the numbers that venues give them, and by heartbeats in a quiet market.

A number at or below the newest one is late or repeated: it misses nothing and changes nothing. Only a run of
`CONFIRMED` such numbers, each above the one before and none with an event time before the newest one's, is a
numbering that began again: a venue's restart brings newer records, a reconnect repeats older ones. Until that
numbering has passed the old one, numbers may also follow the old one. A record that is missing when a later
one comes is counted then, once, whether it comes after all or not.
"""

from dataclasses import dataclass
from typing import Literal

from feeds.market_data import Received, VenueHeartbeat

Sequence = Literal["none", "symbol", "venue"]
"""What a venue's numbers count: nothing in particular, the records of each symbol, or all its records."""

CONFIRMED = 10
"""Lower numbers in a row, each above the one before, that are a numbering that began again."""


@dataclass(slots=True)
class Numbering:
    """The numbers of one symbol or venue so far. ``newest_event``: event time (ns) of its records."""

    newest: int
    newest_event: int
    before: int = 0
    """Newest number of the numbering before this one, while this one is below it; 0: none."""
    first_low: int = 0
    last_low: int = 0
    lows: int = 0
    """A run of lower numbers: its first and last one, and its length."""

    def take(self, record: Received) -> int:
        """Take a record; returns how many are missing right before it, or up to a heartbeat."""
        number, beats = record.seq, isinstance(record, VenueHeartbeat)
        if number <= self.newest:
            is_newer = not beats and record.ts_event >= self.newest_event
            return self._take_low(number) if is_newer else 0
        self.lows = 0
        follows = self.before if self.newest < self.before <= number else self.newest
        if number >= self.before:
            self.before = 0
        self.newest = number
        if not beats:
            self.newest_event = max(self.newest_event, record.ts_event)
        return max(0, number - follows - (not beats))

    def _take_low(self, number: int) -> int:
        if self.lows == 0 or number <= self.last_low:
            self.first_low, self.lows = number, 0
        self.last_low = number
        self.lows += 1
        if self.lows < CONFIRMED:
            return 0
        missing = number - self.first_low + 1 - self.lows
        self.before, self.newest, self.lows = max(self.before, self.newest), number, 0
        return missing


class Sequences:
    """The numberings of all symbols or venues that are read."""

    def __init__(self, counts: Sequence) -> None:
        self.counts = counts
        self._numberings: dict[str, Numbering] = {}

    def missing(self, record: Received) -> int:
        """Records missing right before this one. A heartbeat has the number of the record before it.

        Numbers that repeat or come late miss nothing. Call it in order, for symbols and venues that are read.
        """
        if self.counts == "none" or record.seq == 0:
            return 0
        key = record.key if self.counts == "symbol" else record.venue
        known = self._numberings.get(key)
        if known is None:
            self._numberings[key] = Numbering(record.seq, record.ts_event)
            return 0
        return known.take(record)
