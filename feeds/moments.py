"""The order of records that came together: what one message or body holds is one moment, whatever its order.

Venues and vendors send snapshots newest first, or by symbol. Read as they stand, all records behind the
newest one would be late.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from feeds.codec import YEAR_1990, YEAR_2100


class _When(msgspec.Struct, gc=False):
    ts_event: int = 0


_Decoder = msgspec.json.Decoder[_When] | msgspec.msgpack.Decoder[_When]
_DECODERS: dict[str, _Decoder] = {
    "json": msgspec.json.Decoder(_When),
    "msgpack": msgspec.msgpack.Decoder(_When),
}


def in_order(payloads: Sequence[bytes], encoding: str) -> list[bytes]:
    """Encoded records, as one message holds them, by event time; equal times keep their order.

    Where no record is older than the one after it they stand newest first, and equal times are turned round,
    too. A record without a readable time stays behind the one before it.
    """
    decoder = _DECODERS.get(encoding)
    if decoder is None or len(payloads) < 2:
        return list(payloads)
    times, newest = [], 0
    for payload in payloads:
        newest = _time(decoder, payload) or newest
        times.append(newest)
    return [payloads[at] for at in order_of(times)]


def order_of(times: Sequence[int]) -> list[int]:
    """The places of ``times`` in the order in which their records are read."""
    places = list(range(len(times)))
    if all(a <= b for a, b in pairwise(times)):
        return places
    if all(a >= b for a, b in pairwise(times)):
        return places[::-1]
    return sorted(places, key=times.__getitem__)


def _time(decoder: _Decoder, payload: bytes) -> int:
    """The event time of an encoded record; 0 where it cannot be read."""
    try:
        found = decoder.decode(payload).ts_event
    except (msgspec.DecodeError, ValueError, RecursionError):
        return 0
    return found if YEAR_1990 <= found < YEAR_2100 else 0
