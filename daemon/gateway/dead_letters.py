"""DLQ records: what was received or could not be sent, as it was, and why. And their log lines, a few."""

import logging
import time
from collections.abc import Callable
from typing import Any

from daemon import protocol
from daemon.gateway.checkpoint.delivery import RefusedMessage
from daemon.ring_numbers import numbers_of
from feeds.codec import MalformedRecord, encode
from feeds.market_data import AnyRecord, Bar, DeadLetter, InputRange, Quote, Side, Stage, Trade
from feeds.source import Incoming
from ingest.record import BAR, QUOTE, SIDE_BUY, SIDE_SELL
from metrics.feed_faults import RULED

LETTER_BYTES = 1 << 18
"""Bytes of a payload that a DLQ record keeps: its base64 still fits a broker's message limit."""
HEADER_BYTES = 1 << 14
"""The same of key and headers together; what is beyond is left out."""
_EVERY_NS = 1_000_000_000
_SIDES: dict[int, Side] = {SIDE_BUY: "buy", SIDE_SELL: "sell"}
_WHY = {
    "late": "its bar has closed (bars.late)",
    "price_jump": "its price is too far from the one before it (bars.price_jump)",
    "interval": "it is a bar of another length than the session's (bars.interval, bars.ready)",
    **{kind.name: f"{kind.rule} (quality.{kind.name})" for kind in RULED},
}


def unreadable(message: Incoming, error: MalformedRecord) -> DeadLetter:
    """The record of a message, or a record of one, that could not be decoded."""
    return _received(message, "read", error.reason, str(error), message.ts_recv_ns)


def refused(
    event: protocol.RecordRefused, symbol: str, place: InputRange, original: Incoming | None
) -> DeadLetter:
    """The record of a record that a session refused.

    ``symbol``: the record's VENUE:SYMBOL; ``place``: where it was. Without its ``original`` the payload is
    the record in JSON, with the members that the ring keeps.
    """
    why = f"{event.session} refuses a record of {symbol}: {_WHY[event.reason]}"
    if original is not None:
        return _received(original, "process", event.reason, why, time.time_ns(), place.source)
    payload = encode(_record(event, symbol))
    return DeadLetter(
        stage="process",
        error=why,
        reason=event.reason,
        topic=place.topic,
        partition=place.partition,
        offset=place.first_offset,
        source=place.source,
        payload=payload,
        size=len(payload),
        rebuilt=True,
        failed_at=time.time_ns(),
    )


def unpublished(message: RefusedMessage) -> DeadLetter:
    """The record of an answer that a sink refused for good."""
    return DeadLetter(
        stage="produce",
        error=message.error,
        reason=message.reason,
        topic=message.topic,
        partition=-1,
        offset=-1,
        **_kept(message.payload, message.key, message.headers),
        failed_at=time.time_ns(),
    )


def _received(
    message: Incoming, stage: Stage, reason: str, why: str, at_ns: int, source: str = ""
) -> DeadLetter:
    return DeadLetter(
        stage=stage,
        error=why,
        reason=reason,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        source=source,
        **_kept(message.payload, message.key, message.headers),
        failed_at=at_ns,
    )


def _kept(payload: bytes, key: bytes | None, headers: Any) -> dict[str, Any]:
    kept: dict[str, bytes] = {}
    room = HEADER_BYTES - len(key or b"")
    for name, value in headers.items():
        room -= len(name.encode()) + len(value)
        if room < 0:
            break
        kept[name] = value
    short = key is None or len(key) <= HEADER_BYTES
    return {
        "payload": payload[:LETTER_BYTES],
        "size": len(payload),
        "key": key if short else None,
        "headers": kept,
    }


def _record(event: protocol.RecordRefused, key: str) -> AnyRecord:
    venue, _, symbol = key.partition(":")
    common: dict[str, Any] = {
        "venue": venue,
        "symbol": symbol,
        "ts_event": event.ts_event,
        "ts_recv": event.ts_recv,
        "seq": event.seq,
    }
    values = event.values
    common |= numbers_of(values)
    if values.kind == QUOTE:
        return Quote(**common)
    if values.kind == BAR:
        return Bar(**common, interval_ns=values.x)
    return Trade(**common, side=_SIDES.get(values.x, "unknown"))


class DeadLetterLog:
    """Logs one DLQ record a second of each reason, and how many more there were since the one before."""

    def __init__(self, log: logging.Logger, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._log, self._clock_ns = log, clock_ns
        self._said: dict[tuple[str, str], int] = {}
        self._silent: dict[tuple[str, str], int] = {}

    def note(self, dead_letter: DeadLetter) -> None:
        """Log ``dead_letter``, or count it with those that are not."""
        key, now = (dead_letter.stage, dead_letter.reason), self._clock_ns()
        if key in self._said and now - self._said[key] < _EVERY_NS:
            self._silent[key] = self._silent.get(key, 0) + 1
            return
        self._said[key], more = now, self._silent.pop(key, 0)
        where = (
            dead_letter.topic
            if dead_letter.partition < 0
            else f"{dead_letter.topic}/{dead_letter.partition}@{dead_letter.offset}"
        )
        others = f" ({more} more of this reason since the last such line)" if more else ""
        self._log.warning("DLQ record, %s: %s: %s%s", dead_letter.stage, where, dead_letter.error, others)
