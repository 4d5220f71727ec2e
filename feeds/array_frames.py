"""Messages that hold an array of records instead of one: some venues send a frame of trades at a time."""

import msgspec

from feeds.codec import MalformedRecord
from feeds.decoding import Undecodable, decoded
from feeds.envelopes import without_mark

_JSON = msgspec.json.Decoder(list[msgspec.Raw])
_MSGPACK = msgspec.msgpack.Decoder(list[msgspec.Raw])


def elements(payload: bytes, encoding: str, max_bytes: int) -> list[bytes]:
    """The encoded records in a message: those of its array, or the message itself.

    An oversized message is left to ``decode_record``, which refuses it.

    Raises:
        MalformedRecord: the array cannot be read.
    """
    if len(payload) > max_bytes:
        return [payload]
    is_json = encoding != "msgpack"
    text = without_mark(payload) if is_json else payload
    if not (text[:64].lstrip()[:1] == b"[" if is_json else _packed(payload)):
        return [payload]
    try:
        return [bytes(each) for each in decoded((_JSON if is_json else _MSGPACK).decode, text)]
    except Undecodable as error:
        raise MalformedRecord("json" if is_json else "msgpack", f"an array of records: {error}") from None


def _packed(payload: bytes) -> bool:
    """Whether msgpack's first byte says array."""
    return payload[:1] in (b"\xdc", b"\xdd") or b"\x90" <= payload[:1] <= b"\x9f"
