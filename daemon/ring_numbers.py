"""Prices and sizes of records as the ring's integers, exactly or not at all."""

from __future__ import annotations

from typing import NamedTuple

from feeds.codec import MalformedRecord
from feeds.decimals import NANO, to_units
from feeds.messages import AnyRecord, Quote, Trade
from ingest.record import BAR, QUOTE, SIDE_BUY, SIDE_SELL, SIDE_UNKNOWN, TRADE

_MAX = 2**63 - 1
_SIDES = {"unknown": SIDE_UNKNOWN, "buy": SIDE_BUY, "sell": SIDE_SELL}


class RingValues(NamedTuple):
    """``kind``, `a` to `e` and `x` of `ingest.record`."""

    kind: int
    values: tuple[int, int, int, int, int]
    x: int


def ring_values(record: AnyRecord) -> RingValues:
    """The integers of a record. Raises MalformedRecord for a number that has none."""
    if isinstance(record, Trade):
        values = (_price("price", record.price), _size("size", record.size), 0, 0, 0)
        return RingValues(TRADE, values, _SIDES[record.side])
    if isinstance(record, Quote):
        bid, ask = _price("bid", record.bid), _price("ask", record.ask)
        sizes = _size("bid_size", record.bid_size), _size("ask_size", record.ask_size)
        return RingValues(QUOTE, (bid, ask, *sizes, 0), 0)
    names = ("open", "high", "low", "close")
    opened, high, low, close = (_price(name, getattr(record, name)) for name in names)
    return RingValues(BAR, (opened, high, low, close, _size("volume", record.volume)), record.interval_ns)


def _price(name: str, value: int) -> int:
    units = to_units(value, NANO)
    if units is None or units > _MAX:
        raise MalformedRecord("price", f"{name} {value} is no multiple of 1e-{NANO} below 9.2e9")
    return units


def _size(name: str, value: int) -> int:
    units = to_units(value, NANO)
    if units is None or units > _MAX:
        raise MalformedRecord("size", f"{name} {value} is no multiple of 1e-{NANO} below 9.2e9")
    return units
