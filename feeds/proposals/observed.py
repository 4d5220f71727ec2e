"""What a format makes of a sample: symbols, bars, and what it refuses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from feeds.codec import MalformedRecord
from feeds.decimals import Fixed, decimals_of
from feeds.market_data import AnyRecord, Bar, Quote, Received, Trade
from feeds.payloads.payload_decoder import PayloadDecoder
from feeds.source import Incoming

SECOND = 10**9
INTERVALS = tuple(n * SECOND for n in (1, 5, 15, 60, 300, 900, 3600))
_RECORDS_A_BAR = 5
"""Records that half of the bars should have."""


@dataclass
class FirstBar:
    """A bar as it is made of the first records."""

    opens: int
    open: Fixed
    high: Fixed
    low: Fixed
    close: Fixed
    volume: Fixed

    def add(self, high: Fixed, low: Fixed, close: Fixed, volume: Fixed) -> None:
        """One more record."""
        self.high, self.low, self.close = max(self.high, high), min(self.low, low), close
        self.volume = Fixed(self.volume + volume)


@dataclass
class Refusals:
    """``refused``, ``examples``: unusable records by reason, and what is said of the first of each."""

    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, error: MalformedRecord) -> None:
        """A record is unusable."""
        self.refused[error.reason] += 1
        self.examples.setdefault(error.reason, error.message)


@dataclass
class Observed(Refusals):
    """``records``: by symbol."""

    records: dict[str, list[AnyRecord]] = field(default_factory=dict)

    def add(self, found: Iterable[Received | MalformedRecord]) -> None:
        """Look at these."""
        for each in found:
            if isinstance(each, MalformedRecord):
                self.refuse(each)
            elif isinstance(each, AnyRecord):
                self.records.setdefault(each.key, []).append(each)

    @property
    def symbols(self) -> list[str]:
        """Those with the most records first."""
        return sorted(self.records, key=lambda key: (-len(self.records[key]), key))

    def decimals(self, symbol: str) -> int:
        """The most decimals that a price of the symbol has."""
        return max(decimals_of(price) for each in self.records[symbol] for price in prices(each))

    def interval(self) -> int:
        """Of bars, ns: that of ready-made ones; else the shortest in which a few records come."""
        busiest = self.records[self.symbols[0]]
        if isinstance(first := busiest[0], Bar):
            return first.interval_ns
        for interval in INTERVALS:
            counts = Counter(each.ts_event // interval for each in busiest)
            if median(counts.values()) >= _RECORDS_A_BAR:
                return interval
        return 60 * SECOND

    def bars(self, symbol: str, interval: int, most: int) -> list[FirstBar]:
        """The first bars of a symbol."""
        found: dict[int, FirstBar] = {}
        for each in sorted(self.records[symbol], key=lambda each: each.ts_event):
            opens = each.ts_event - each.ts_event % interval
            if opens not in found:
                if len(found) == most:
                    break
                price = prices(each)[0]
                found[opens] = FirstBar(opens, price, price, price, price, Fixed(0))
            low, high = min(prices(each)), max(prices(each))
            found[opens].add(high, low, prices(each)[-1], _size(each))
        return list(found.values())


def observe(messages: Sequence[Incoming], payloads: PayloadDecoder) -> Observed:
    """What a decoder makes of messages."""
    found = Observed()
    for each in messages:
        if each.fault is None and each.payload:
            found.add(part.record for part in payloads.parts(each).parts)
    return found


def prices(record: AnyRecord) -> Sequence[Fixed]:
    """The prices of a record, the first and the last ones where bars have theirs; the middle of a quote."""
    match record:
        case Bar():
            return record.open, record.high, record.low, record.close
        case Quote():
            return (Fixed((record.bid + record.ask) // 2),)
        case Trade():
            return (record.price,)


def _size(record: AnyRecord) -> Fixed:
    match record:
        case Bar():
            return record.volume
        case Trade():
            return record.size
    return Fixed(0)
