"""What a message that cannot be used speaks of: its symbol and time, as far as they can be read.

A refused record leaves a hole in a bar. Whoever reads that bar is to know, so the hole needs a place.
"""

import re
from typing import Any, NamedTuple

import msgspec

from feeds.source import YEAR_1990, YEAR_2100

_LOOKED_AT = 1 << 16
"""Bytes of a payload in which names are looked for, where it cannot be decoded."""


class Subject(NamedTuple):
    """A symbol, VENUE:SYMBOL, and an event time; 0: not known."""

    key: str
    ts_event: int


class _Members(msgspec.Struct, gc=False):
    venue: Any = None
    symbol: Any = None
    ts_event: Any = None


_DECODERS: dict[str, msgspec.json.Decoder[_Members] | msgspec.msgpack.Decoder[_Members]] = {
    "json": msgspec.json.Decoder(_Members),
    "msgpack": msgspec.msgpack.Decoder(_Members),
}
_TEXT = rb'"%s"\s*:\s*"([^"\\]{1,64})"'
_VENUE, _SYMBOL = re.compile(_TEXT % b"venue"), re.compile(_TEXT % b"symbol")
_TIME = re.compile(rb'"ts_event"\s*:\s*([0-9]{18,19})[^0-9]')


def subjects_of(payload: bytes, encoding: str, key: bytes | None) -> list[Subject]:
    """What a message speaks of: by its members, by the text of broken JSON, or by its ``key``."""
    found = _by_members(payload, encoding) or (_by_text(payload) if encoding == "json" else [])
    return found or ([Subject(key.decode("utf-8", "replace"), 0)] if key else [])


def _by_members(payload: bytes, encoding: str) -> list[Subject]:
    decoder = _DECODERS.get(encoding)
    if decoder is None:
        return []
    try:
        found = decoder.decode(payload)
    except Exception:  # whatever is wrong with it, its names are not known so
        return []
    if type(found.venue) is not str or type(found.symbol) is not str:
        return []
    return [Subject(f"{found.venue}:{found.symbol}", plausible(found.ts_event))]


def _by_text(payload: bytes) -> list[Subject]:
    """The symbols of JSON that is broken, such as one that was cut off; its time where it names only one."""
    text = payload[:_LOOKED_AT]
    venues = _VENUE.findall(text)
    symbols = _SYMBOL.findall(text)
    if len(set(venues)) == 1:
        venues = venues[:1] * len(symbols)
    keys = dict.fromkeys(b"%s:%s" % each for each in zip(venues, symbols, strict=False))
    times = [plausible(int(each)) for each in _TIME.findall(text)]
    moment = times[0] if len(times) == len(symbols) == 1 else 0
    return [Subject(key.decode("utf-8", "replace"), moment) for key in keys]


def plausible(moment: object) -> int:
    """A time in ns if it is one of the years 1990 to 2099, else 0."""
    return moment if isinstance(moment, int) and YEAR_1990 <= moment < YEAR_2100 else 0
