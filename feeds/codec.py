"""Bytes to checked records and messages to bytes, in JSON and msgpack.

All market data passes ``decode_record``: it returns records with plausible prices and times, and refuses
others with a ``Reason`` and a message for people.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, get_args

import msgspec

from feeds.decimals import Fixed, check_fixed, from_units, parse_fixed, whole
from feeds.decoding import Undecodable, decoded
from feeds.envelopes import without_mark, wrapping_of
from feeds.market_data import (
    ABOUT,
    Action,
    AnyMessage,
    Bar,
    Book,
    Event,
    Quote,
    Received,
    Status,
    Text,
    Trade,
)  # fmt: skip
from feeds.source import YEAR_1990 as YEAR_1990
from feeds.source import YEAR_2100 as YEAR_2100
from metrics.catalogue import Reason

Encoding = Literal["json", "msgpack"]
MAX_BYTES = 1 << 20
MAX_NAME = 64
MAX_TEXT = 4096
"""Characters of a text; its line has fewer."""
MAX_LEVELS = 10
"""Of one side of a book."""
_MAX_FACTOR = Fixed(10**9 * 10**18)

_PRICES = frozenset(("price", "bid", "ask", "open", "high", "low", "close", "factor", "amount"))
SIZES = frozenset(("size", "bid_size", "ask_size", "volume"))
_PATH = re.compile(r"`\$\.(\w+)")


class MalformedRecord(ValueError):
    """A payload that is not a usable record; ``message`` says what is wrong.

    ``key``, ``ts_event``: VENUE:SYMBOL and time of a line, as far as they are known; "" and 0: not.
    """

    def __init__(self, reason: Reason, message: str, *, key: str = "", ts_event: int = 0) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.key, self.ts_event = key, ts_event


_SCHEMA = re.compile(r"(\w+)\.v(\d+)")
_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyMessage))


class _Decoder(Protocol):
    def decode(self, payload: bytes, /) -> Any: ...


def _of_json(kind: type, value: Any) -> Any:
    """Msgspec's hook for ``Fixed`` members of JSON: decimal text, or a number, which arrives as its text."""
    if kind is not Fixed:
        raise NotImplementedError(f"no wire form for {kind}")
    if type(value) is str:
        return parse_fixed(value)
    if type(value) is int:
        return whole(value)
    raise ValueError(f"expected a number or decimal text, got {type(value).__name__}")


def _of_msgpack(kind: type, value: Any) -> Any:
    """The same of msgpack: decimal text or an integer of units of 1e-9; its floats are binary."""
    if kind is not Fixed:
        raise NotImplementedError(f"no wire form for {kind}")
    if type(value) is str:
        return parse_fixed(value)
    if type(value) is int:
        return check_fixed(from_units(value))
    raise ValueError(f"expected decimal text or an integer of 1e-9 units, got {type(value).__name__}")


def _from_fixed(value: Any) -> Any:
    if type(value) is Fixed:
        return str(value)
    raise NotImplementedError(f"no wire form for {type(value)}")


_RECORDS: dict[str, _Decoder] = {
    "json": msgspec.json.Decoder(Received, dec_hook=_of_json, float_hook=str),
    "msgpack": msgspec.msgpack.Decoder(Received, dec_hook=_of_msgpack),
}
_MESSAGES: dict[str, _Decoder] = {
    "json": msgspec.json.Decoder(AnyMessage, dec_hook=_of_json, float_hook=str),
    "msgpack": msgspec.msgpack.Decoder(AnyMessage, dec_hook=_of_msgpack),
}
_ENCODERS: dict[str, msgspec.json.Encoder | msgspec.msgpack.Encoder] = {
    "json": msgspec.json.Encoder(enc_hook=_from_fixed),
    "msgpack": msgspec.msgpack.Encoder(enc_hook=_from_fixed),
}


def decode_record(
    payload: bytes, encoding: str = "json", max_bytes: int = MAX_BYTES, *, any_price: bool = False
) -> Received:
    """Decode and check one record. ``any_price``: also of zero and below.

    A payload above ``max_bytes`` is refused without decoding. A receive time before the event time is
    accepted: the clocks of two machines differ.

    Raises:
        MalformedRecord: the payload is not a usable record.
    """
    if len(payload) > max_bytes:
        raise MalformedRecord("oversize", f"{len(payload)} bytes are more than the limit of {max_bytes}")
    record = cast(Received, _decode(_RECORDS, payload, encoding))
    check_record(record, any_price=any_price)
    return record


def decode_message(payload: bytes, encoding: str = "json") -> AnyMessage:
    """Decode any message of ``feeds.market_data`` (answers too), without the plausibility checks of records.

    Raises:
        MalformedRecord: the payload is not such a message.
    """
    return cast(AnyMessage, _decode(_MESSAGES, payload, encoding))


def encode(message: AnyMessage, encoding: str = "json") -> bytes:
    """Write a message; prices and sizes become decimal strings. Raises ValueError for an unknown encoding."""
    encoder = _ENCODERS.get(encoding)
    if encoder is None:
        raise ValueError(f"encoding {encoding!r} is not one of json, msgpack")
    return encoder.encode(message)


def make_headers(message: AnyMessage, encoding: str, source: str, seq: int) -> dict[str, bytes]:
    """Transport headers: schema (``trade.v1``), encoding, source and the sender's sequence number."""
    tag = str(message.__struct_config__.tag)
    return {
        "schema": f"{tag}.v1".encode(),
        "encoding": encoding.encode(),
        "source": source.encode(),
        "seq": str(seq).encode(),
    }


REPLAY = "replay"
"""Header of a replayed record: its event time is in the past, and its age counts from its sending."""


def header_encoding(headers: Mapping[str, bytes], default: str = "json") -> str:
    """The encoding named in a message's headers, or ``default``, as where the header is empty.

    Capitals are no difference, and a media type such as ``application/json; charset=utf-8`` is its encoding.
    """
    raw = headers.get("encoding")
    return _encoding_named(raw[:MAX_NAME]) if raw else default


def check_version(headers: Mapping[str, bytes]) -> None:
    """Raise MalformedRecord for a message of ours in another version, as a later release may send it.

    Headers named ``schema`` that are somebody else's say nothing here.
    """
    if foreign := _foreign_version(headers.get("schema", b"")[:MAX_NAME]):
        raise MalformedRecord("schema", f"the message is {foreign}; this program reads version 1")


def is_foreign(headers: Mapping[str, bytes]) -> bool:
    """Whether `check_version` refuses a message with these headers."""
    return bool(_foreign_version(headers.get("schema", b"")[:MAX_NAME]))


@lru_cache(maxsize=64)
def _foreign_version(schema: bytes) -> str:
    """The schema, if it is one of ours (``trade.v2``) in another version; empty of all others."""
    found = _SCHEMA.fullmatch(schema.decode("ascii", "replace"))
    return found[0] if found and found[1] in _TAGS and found[2] != "1" else ""


@lru_cache(maxsize=64)
def _encoding_named(raw: bytes) -> str:
    name = raw.decode("ascii", "replace").partition(";")[0].strip().lower()
    if name.startswith("application/"):
        name = name.removeprefix("application/").rpartition("+")[2].removeprefix("x-").removeprefix("vnd.")
    return name


def _decode(decoders: Mapping[str, _Decoder], payload: bytes, encoding: str) -> object:
    decoder = decoders.get(encoding)
    if decoder is None:
        raise MalformedRecord("encoding", f"encoding {encoding!r} is not one of json, msgpack")
    try:
        return decoded(decoder.decode, payload if encoding == "msgpack" else without_mark(payload))
    except Undecodable as error:
        if (found := wrapping_of(payload, encoding)) is not None:
            raise MalformedRecord(found.reason, found.message) from None
        unreadable: Reason = "msgpack" if encoding == "msgpack" else "json"
        reason = _reason(str(error)) if error.readable else unreadable
        raise MalformedRecord(reason, str(error)) from None


def _reason(text: str) -> Reason:
    if "missing required field" in text:
        return "missing_field"
    path = _PATH.search(text)
    field = path.group(1) if path else ""
    if field in _PRICES:
        return "price"
    return "size" if field in SIZES else "type"


def check_record(record: Received, *, any_price: bool = False) -> None:
    """The plausibility checks of ``decode_record``, for records from elsewhere. Raises MalformedRecord."""
    if not (YEAR_1990 <= record.ts_event < YEAR_2100 and YEAR_1990 <= record.ts_recv < YEAR_2100):
        _refuse_times(record)
    if not (is_name(record.symbol) and is_name(record.venue)):
        raise MalformedRecord(
            "symbol",
            f"venue and symbol must be 1 to {MAX_NAME} printable characters without blanks or colons",
        )
    if not any_price:
        check_prices(record)
    match record:
        case Trade():
            _check_size("size", record.size)
        case Quote():
            _check_size("bid_size", record.bid_size)
            _check_size("ask_size", record.ask_size)
        case Bar():
            _check_bar(record)
        case Text() | Status() | Action() | Book():
            _check_event(record)


def _check_event(event: Event) -> None:
    match event:
        case Text():
            _check_words("text", event.text)
            if not event.text.strip():
                raise MalformedRecord("missing_field", "text is empty")
        case Status():
            _check_words("reason", event.reason)
        case Action():
            _check_action(event)
        case Book():
            _check_book(event)


def _check_words(name: str, words: str) -> None:
    if len(words) > MAX_TEXT:
        raise MalformedRecord("oversize", f"{name} has {len(words)} characters, more than {MAX_TEXT}")


def _check_action(event: Action) -> None:
    name = ABOUT[event.action]
    value = getattr(event, name)
    if not value:
        raise MalformedRecord("missing_field", f"a {event.action} needs {name}")
    if name == "new_symbol":
        if not is_name(event.new_symbol):
            raise MalformedRecord("symbol", f"new_symbol {event.new_symbol[:MAX_NAME]!r} is no symbol")
    elif not 0 < value <= _MAX_FACTOR:
        raise MalformedRecord("price", f"{name} must be above 0 and at most 1e9, got {value}")
    if event.effective and not YEAR_1990 <= event.effective < YEAR_2100:
        raise MalformedRecord("timestamp_unit", f"effective {event.effective} is not a time in ns")


def _check_book(book: Book) -> None:
    if not (book.bids or book.asks):
        raise MalformedRecord("missing_field", "a book needs bids or asks")
    for name, levels in (("bids", book.bids), ("asks", book.asks)):
        if len(levels) > MAX_LEVELS:
            raise MalformedRecord("oversize", f"{len(levels)} {name} are more than {MAX_LEVELS}")
        for _, size in levels:
            _check_size(name, size)
        prices = [price if name == "asks" else -price for price, _ in levels]
        if any(a >= b for a, b in pairwise(prices)):
            raise MalformedRecord("price", f"{name} must begin with the best price, and no two be equal")


def check_prices(record: Received) -> None:
    """Prices are above zero. Raises MalformedRecord."""
    match record:
        case Trade():
            _check_price("price", record.price)
        case Quote():
            _check_price("bid", record.bid)
            _check_price("ask", record.ask)
        case Bar():
            _check_price("low", record.low)
            _check_price("high", record.high)
        case Book():
            for price, _ in (*record.bids, *record.asks):
                _check_price("bids and asks", price)


def _check_bar(bar: Bar) -> None:
    _check_size("volume", bar.volume)
    if bar.interval_ns <= 0:
        raise MalformedRecord("type", f"interval_ns must be positive, got {bar.interval_ns}")
    if not (bar.low <= bar.open <= bar.high and bar.low <= bar.close <= bar.high):
        raise MalformedRecord(
            "bar_ohlc",
            f"open {bar.open} and close {bar.close} must lie between low {bar.low} and high {bar.high}",
        )


def _check_price(name: str, value: Fixed) -> None:
    if value <= 0:
        raise MalformedRecord("price", f"{name} must be above 0, got {value}")


def _check_size(name: str, value: Fixed) -> None:
    if value < 0:
        raise MalformedRecord("size", f"{name} must not be negative, got {value}")


@lru_cache(maxsize=8192)  # cached: every record carries one of a few names
def is_name(name: str) -> bool:
    """Whether a text may name a symbol or a venue. No colon: keys are VENUE:SYMBOL."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and " " not in name and ":" not in name


def _refuse_times(record: Received) -> None:
    for name, value in (("ts_event", record.ts_event), ("ts_recv", record.ts_recv)):
        if YEAR_1990 <= value < YEAR_2100:
            continue
        for unit, factor in (("seconds", 10**9), ("milliseconds", 10**6), ("microseconds", 10**3)):
            if YEAR_1990 <= value * factor < YEAR_2100:
                raise MalformedRecord(
                    "timestamp_unit", f"{name} {value} looks like {unit}; nanoseconds are expected"
                )
        raise MalformedRecord(
            "timestamp_unit", f"{name} {value} is not a nanosecond time in the years 1990 to 2099"
        )
