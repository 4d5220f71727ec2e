"""Messages that hold an array of records instead of one: some venues send a frame of trades at a time."""

import msgspec

from feeds.codec import MalformedRecord

_JSON = msgspec.json.Decoder(list[msgspec.Raw])
_MSGPACK = msgspec.msgpack.Decoder(list[msgspec.Raw])


def elements(payload: bytes, encoding: str, max_bytes: int) -> list[bytes]:
    """The encoded records in a message: those of its array, or the message itself.

    An oversized message is left to ``decode_record``, which refuses it.

    Raises:
        MalformedRecord: the array cannot be read.
    """
    is_json = encoding != "msgpack"
    if len(payload) > max_bytes or not (payload[:64].lstrip()[:1] == b"[" if is_json else _packed(payload)):
        return [payload]
    try:
        return [bytes(each) for each in (_JSON if is_json else _MSGPACK).decode(payload)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRecord("json" if is_json else "msgpack", f"an array of records: {error}") from None


def _packed(payload: bytes) -> bool:
    """Whether msgpack's first byte says array."""
    return payload[:1] in (b"\xdc", b"\xdd") or b"\x90" <= payload[:1] <= b"\x9f"
