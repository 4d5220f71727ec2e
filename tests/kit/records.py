"""Records as they arrive: trades in their wire form, and where they come from."""

from __future__ import annotations

import time

import msgspec

from feeds.source import Incoming

TOPIC = "md.trades.v1"
SECOND = 1_000_000_000
START = 1_723_161_255 * SECOND
"""Event time of a test's first trade, ns."""


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


def incoming(payload: bytes, offset: int, partition: int = 0, topic: str = TOPIC) -> Incoming:
    return Incoming(topic, partition, offset, None, payload, {}, time.time_ns())
