"""What stands around a record that could not be decoded: an envelope, a registry's bytes, a compression.

None of these is read. A DLQ record names what was found and what the sender may change.
"""

import uuid
from typing import Any, NamedTuple, get_args

import msgspec

from feeds.market_data import Received
from metrics.catalogue import Reason

MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some writers of text put in front."""


class Wrapping(NamedTuple):
    """What is around a record; ``message`` is for people."""

    reason: Reason
    message: str


_TYPES = frozenset(str(each.__struct_config__.tag) for each in get_args(Received))
_ENVELOPES: tuple[tuple[frozenset[str], str, str], ...] = (
    (
        frozenset(("schema", "payload")),
        "Kafka Connect",
        "set value.converter.schemas.enable=false in the connector",
    ),
    (frozenset(("before", "after")), "Debezium", "let its transform ExtractNewRecordState unwrap it"),
    (frozenset(("after", "op")), "Debezium", "let its transform ExtractNewRecordState unwrap it"),
    (frozenset(("before", "op")), "Debezium", "let its transform ExtractNewRecordState unwrap it"),
    (frozenset(("specversion", "id", "source")), "CloudEvents", "send it in binary content mode"),
    (frozenset(("database", "table", "data")), "Maxwell or Canal", "send the row itself, as a record"),
)
_PACKED: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\xff\x06\x00\x00sNaPpY", "snappy"),
)
_PLAIN = "send JSON or msgpack without it (docs/protocol.md)"


def without_mark(payload: bytes) -> bytes:
    """The payload without a byte order mark in front."""
    return payload.removeprefix(MARK)


def wrapping_of(payload: bytes, encoding: str) -> Wrapping | None:
    """What is around the record in ``payload``, which could not be decoded; None where nothing is known."""
    framing = _framing_of(payload)
    if framing:
        return Wrapping("framing", framing)
    try:
        if encoding == "msgpack":
            value: Any = msgspec.msgpack.decode(payload)
        else:
            value = msgspec.json.decode(without_mark(payload))
    except Exception:  # it is no document at all, as the decoder has said already
        return None
    envelope = _envelope_of(value) if isinstance(value, dict) else ""
    return Wrapping("envelope", envelope) if envelope else None


def _framing_of(payload: bytes) -> str:
    if payload[:1] == b"\0" and len(payload) > 5:
        number = int.from_bytes(payload[1:5], "big")
        return f"a schema registry's five bytes are in front (magic byte 0, schema id {number}): {_PLAIN}"
    if payload[:2] in (b"\x03\x00", b"\x03\x05") and len(payload) > 18:
        return (
            f"a Glue schema registry's 18 bytes are in front (id {uuid.UUID(bytes=payload[2:18])}): {_PLAIN}"
        )
    if payload[:2] == b"\xc3\x01" and len(payload) > 10:
        return f"it is one object of Avro (bytes c3 01 in front): {_PLAIN}"
    if payload[:4] == b"Obj\x01":
        return f"it is a file of Avro objects: {_PLAIN}"
    if payload[:2] in (b"\xff\xfe", b"\xfe\xff") and len(payload) > 3:
        return "it is text in UTF-16, by its byte order mark: send UTF-8"
    for magic, name in _PACKED:
        if payload.startswith(magic):
            return f"the payload itself is packed by {name}: let the transport compress instead"
    return ""


def _envelope_of(value: dict[Any, Any]) -> str:
    if _is_record(value):
        return ""
    if (found := _named(value)) is not None:
        name, advice = found
        inner = value.get("payload")
        if name == "Kafka Connect" and isinstance(inner, dict) and (within := _named(inner)) is not None:
            name, advice = f"{name}'s around {within[0]}", f"{advice}, and {within[1]}"
        return f"{name}'s envelope is around the record: {advice}"
    for name, inner in value.items():
        first = inner[0] if isinstance(inner, list) and inner else inner
        if isinstance(first, dict) and _is_record(first):
            return f"the record is in the member {str(name)[:64]!r} of another object: send it by itself"
    return ""


def _named(value: dict[Any, Any]) -> tuple[str, str] | None:
    """An envelope's name, and what to do about it."""
    return next(((name, advice) for members, name, advice in _ENVELOPES if members <= value.keys()), None)


def _is_record(value: dict[Any, Any]) -> bool:
    return value.get("type") in _TYPES if isinstance(value.get("type"), str) else False
