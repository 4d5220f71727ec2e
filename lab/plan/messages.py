"""Synthetic trades as a source would give them."""

from feeds.codec import encode
from feeds.decimals import from_units
from feeds.market_data import Trade

TICK = 10_000_000
"""0.01, in 1e-9."""


def trade(symbol: str, at_ns: int, price_ticks: int) -> bytes:
    """A trade of one lot of VENUE:SYMBOL at this event time, as JSON."""
    venue, _, name = symbol.partition(":")
    return encode(
        Trade(
            venue=venue,
            symbol=name,
            ts_event=at_ns,
            ts_recv=at_ns,
            price=from_units(price_ticks * TICK),
            size=from_units(TICK),
            side="buy",
        )
    )
