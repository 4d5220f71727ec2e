"""A synthetic tape for the demo: random walks with the phases of *Attention Once* section 4.2.

Deterministic for a seed: uptrends, corrections and consolidations of random length, trades at random times
within each second, sizes that swell with the move. Integers only: prices in ticks, sizes in lots.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from feeds.decimals import from_units
from feeds.market_data import Trade

_DRIFTS = (0.35, -0.30, 0.0)
"""Of an uptrend, a correction and a consolidation."""


@dataclass(frozen=True)
class Instrument:
    """A synthetic market: ``tick`` in units of 1e-9."""

    venue: str
    symbol: str
    price_ticks: int
    tick: int
    lot: int
    trades_per_second: int

    @property
    def key(self) -> str:
        """As of its records, `VENUE:SYMBOL`."""
        return f"{self.venue}:{self.symbol}"


INSTRUMENTS = (
    Instrument("DEMO", "ALPHA", 6_183_763, 10_000_000, 1_000_000, 12),
    Instrument("DEMO", "BRAVO", 214_050, 10_000_000, 100_000_000, 8),
    Instrument("DEMO", "CANDY", 112_150, 10_000, 1_000_000_000, 5),
)


class SyntheticTape:
    """Trades of one instrument, second by second."""

    def __init__(self, instrument: Instrument, seed: int) -> None:
        self._instrument = instrument
        self._random = random.Random(f"{seed}:{instrument.symbol}")
        self._price = instrument.price_ticks
        self._drift, self._left = 0.0, 0
        self._trade = 0

    def second(self, start_ns: int) -> Iterator[Trade]:
        """The trades of the second that begins at ``start_ns``, in order of event time."""
        rng, instrument = self._random, self._instrument
        if not self._left:
            self._drift = rng.choice(_DRIFTS)
            self._left = rng.randint(8, 30)
        self._left -= 1
        times = sorted(rng.randrange(1_000_000_000) for _ in range(instrument.trades_per_second))
        for at in times:
            move = round(rng.gauss(self._drift, 1.5))
            self._price = max(1, self._price + move)
            self._trade += 1
            ts_event = start_ns + at
            yield Trade(
                venue=instrument.venue,
                symbol=instrument.symbol,
                ts_event=ts_event,
                ts_recv=ts_event,
                seq=self._trade,
                price=from_units(self._price * instrument.tick),
                size=from_units(rng.randint(1, 4 + 3 * abs(move)) * instrument.lot),
                side="buy" if move > 0 else "sell" if move < 0 else "unknown",
                id=str(self._trade),
            )
