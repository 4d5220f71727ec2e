"""Records as they arrive: trades in their wire form, and where they come from."""

import time

import msgspec

from feeds.source import Incoming

TOPIC = "md.trades.v1"
SECOND = 1_000_000_000
START = 1_723_161_255 * SECOND
"""Event time of a test's first trade, ns."""
COMMON = {"venue": "V", "symbol": "AAA", "ts_event": START, "ts_recv": START + 5}
TRADE = {"type": "trade", **COMMON, "price": "61837.63", "size": "0.003"}
QUOTE = {"type": "quote", **COMMON, "bid": "1.5", "ask": "1.6", "bid_size": "3", "ask_size": 4}
BAR = {
    "type": "bar", **COMMON, "open": "2", "high": "4", "low": "1", "close": "3", "volume": "9.5",
    "interval_ns": 60 * SECOND,
}  # fmt: skip
"""A record of each kind, as its members are written."""


def bars_format(symbol: str) -> str:
    """A declared format of files with the bars of V:SYMBOL, one a minute: time,o,h,l,c,v."""
    return f"""description = "bars"
container = "csv"
[[records]]
kind = "bar"
venue = "V"
symbol = "{symbol}"
unit = "shares"
interval = "1m"
time = {{ field = "time", format = "iso" }}
fields = {{ open = "o", high = "h", low = "l", close = "c", volume = "v" }}
"""


def trade(symbol: str, ts_event: int, price: str = "100.00", size: str = "1", **more: object) -> bytes:
    """A trade in its wire form, JSON."""
    venue, _, name = symbol.partition(":")
    fields = {
        "type": "trade",
        "venue": venue,
        "symbol": name,
        "ts_event": ts_event,
        "ts_recv": ts_event,
        "price": price,
        "size": size,
    }
    return msgspec.json.encode(fields | more)


def event(kind: str, at_s: float, symbol: str = "AAA", **members: object) -> bytes:
    """A record that is in no bar, seconds after START."""
    moment = START + int(at_s * SECOND)
    common = {"type": kind, "venue": "V", "symbol": symbol, "ts_event": moment, "ts_recv": moment}
    return msgspec.json.encode(common | members)


def tick(at_s: float, price: str = "100.00", symbol: str = "V:AAA") -> bytes:
    """A trade, seconds after START."""
    return trade(symbol, START + int(at_s * SECOND), price)


def incoming(payload: bytes, offset: int, partition: int = 0, topic: str = TOPIC) -> Incoming:
    return Incoming(topic, partition, offset, None, payload, {}, time.time_ns())
