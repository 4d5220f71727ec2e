"""The simulated market: trades that go through the daemon's ring."""

import random

from ingest.record import TRADE, RecordWriter
from ingest.ring import Ring
from lab.plan.sources import Sources

EPOCH_NS = 1_750_000_000 * 10**9
"""Event time and wall clock at virtual time 0."""
_PRICE = 20_000
"""Of the synthetic trades, in units of the last decimal."""


class Market:
    """Prices that walk randomly, one for each symbol of ``sources``; trades are written to ``ring``."""

    def __init__(self, sources: Sources, ring: Ring, seed: int) -> None:
        self._ring, self._rng, self._writer = ring, random.Random(seed), RecordWriter(1)
        self.trades = 0
        """Trades so far."""
        symbols = sources.symbols
        self._prices = [_PRICE] * len(symbols)
        self._units, self._finer = [0] * len(symbols), [0] * len(symbols)
        for session in sources.config.sessions:
            for each in session.symbols:
                self._finer[symbols[each]] = session.scale - 9
                self._units[symbols[each]] = 10 ** (session.scale - session.price_decimals)

    def trade(self, symbol: int, event_ns: int, now: int) -> None:
        """Write a trade of one lot; both times are virtual, ns."""
        price = self._prices[symbol] + self._rng.choice((-1, 0, 1))
        self._prices[symbol] = price = min(max(price, _PRICE - 50), _PRICE + 50)
        self.trades += 1
        self._writer.clear()
        self._writer.add(
            TRADE,
            symbol,
            EPOCH_NS + event_ns,
            EPOCH_NS + now,
            (price * self._units[symbol], 10**9, 0, 0, 0),
            offset=self.trades,
            ts_source=EPOCH_NS + now,
            price_finer=self._finer[symbol],
        )
        self._ring.push(self._writer.records)
