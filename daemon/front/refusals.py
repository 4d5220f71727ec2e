"""The dead letter of a record that a session refused: the record again, and where it came from."""

from __future__ import annotations

from typing import Any

from daemon import protocol
from feeds.codec import encode
from feeds.decimal9 import Fixed9
from feeds.messages import AnyRecord, Bar, DeadLetter, Quote, Side, Trade
from ingest.record import BAR, QUOTE, SIDE_BUY, SIDE_SELL

_SIDES: dict[int, Side] = {SIDE_BUY: "buy", SIDE_SELL: "sell"}
_WHY = {
    "late": "its bar has closed (bars.late)",
    "price_jump": "its price is too far from the one before it (bars.price_jump)",
}


def letter_of(event: protocol.RecordRefused, symbol: str, position: tuple[str, int, int]) -> DeadLetter:
    """``symbol``: the record's VENUE:SYMBOL; ``position``: its topic, partition and offset.

    The payload is the record in JSON, with the members that the ring keeps.
    """
    topic, partition, offset = position
    return DeadLetter(
        error=f"{event.session} refuses a record of {symbol}: {_WHY[event.reason]}",
        reason=event.reason,
        topic=topic,
        partition=partition,
        offset=offset,
        payload=encode(_record(event, symbol)),
    )


def _record(event: protocol.RecordRefused, key: str) -> AnyRecord:
    venue, _, symbol = key.partition(":")
    common: dict[str, Any] = {
        "venue": venue,
        "symbol": symbol,
        "ts_event": event.ts_event,
        "ts_recv": event.ts_recv,
        "seq": event.seq,
    }
    a, b, c, d, e = (Fixed9(value) for value in (event.a, event.b, event.c, event.d, event.e))
    if event.kind == QUOTE:
        return Quote(**common, bid=a, ask=b, bid_size=c, ask_size=d)
    if event.kind == BAR:
        return Bar(**common, open=a, high=b, low=c, close=d, volume=e, interval_ns=event.x)
    return Trade(**common, price=a, size=b, side=_SIDES.get(event.x, "unknown"))
