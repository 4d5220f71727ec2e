"""What stands around a record is named, with what to do about it; marks and capitals do no harm."""

import gzip
import json
import struct
import uuid

import cramjam
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.array_frames import elements
from feeds.codec import MalformedRecord, decode_record, header_encoding
from feeds.envelopes import wrapping_of
from tests.kit.records import TRADE

PLAIN = json.dumps(TRADE).encode()
ROW = {"id": 1, "px": 100}
DEBEZIUM = {"before": None, "after": TRADE, "op": "c", "ts_ms": 1}


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        ({"schema": {"type": "struct"}, "payload": TRADE}, ("Kafka Connect", "schemas.enable=false")),
        ({"schema": None, "payload": ROW}, ("Kafka Connect",)),
        ({"payload": TRADE, "schema": {}}, ("Kafka Connect",)),
        (DEBEZIUM, ("Debezium", "ExtractNewRecordState")),
        ({"before": ROW, "after": None, "op": "d"}, ("Debezium",)),
        ({"after": ROW, "op": "r"}, ("Debezium",)),
        ({"schema": {}, "payload": DEBEZIUM}, ("Kafka Connect", "Debezium", "ExtractNewRecordState")),
        (
            {"specversion": "1.0", "id": "1", "source": "/x", "type": "trade.v1", "data": TRADE},
            ("CloudEvents",),
        ),
        ({"database": "d", "table": "t", "type": "insert", "data": ROW}, ("Maxwell",)),
        ({"database": "d", "table": "t", "type": "INSERT", "data": [ROW]}, ("Canal",)),
        ({"value": TRADE}, ("member 'value'",)),
        ({"meta": 1, "events": [TRADE, TRADE]}, ("member 'events'",)),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_an_envelope_is_named(envelope, words, encoding):
    pack = msgspec.msgpack.encode if encoding == "msgpack" else msgspec.json.encode
    with pytest.raises(MalformedRecord) as raised:
        decode_record(pack(envelope), encoding)
    assert raised.value.reason == "envelope"
    assert [word for word in words if word not in str(raised.value)] == []


def test_an_envelope_within_itself_is_named_once():
    deep = b'{"schema":1,"payload":' * 500 + b"{}" + b"}" * 500
    found = wrapping_of(deep, "json")
    assert found is not None
    assert found.message.count("Kafka Connect") == 2


GLUE = uuid.UUID("b7b4a7f0-9c96-4e4a-a687-fb5de9ef0c63")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\0" + struct.pack(">I", 7) + PLAIN, ("schema registry", "schema id 7")),
        (b"\0" + struct.pack(">I", 2**32 - 1) + b"\x02\x06abc", ("schema id 4294967295",)),
        (b"\x03\x00" + GLUE.bytes + PLAIN, ("Glue", str(GLUE))),
        (b"\x03\x05" + GLUE.bytes + b"x\x9c", ("Glue",)),
        (b"\xc3\x01" + bytes(8) + b"abc", ("Avro",)),
        (b"Obj\x01" + bytes(40), ("Avro",)),
        (json.dumps(TRADE).encode("utf-16"), ("UTF-16", "UTF-8")),
        (b"\xfe\xff" + json.dumps(TRADE).encode("utf-16-be"), ("UTF-16",)),
        (gzip.compress(PLAIN), ("packed by gzip",)),
        (bytes(cramjam.zstd.compress(PLAIN)), ("packed by zstd",)),
        (bytes(cramjam.lz4.compress(PLAIN)), ("packed by lz4",)),
        (bytes(cramjam.snappy.compress(PLAIN)), ("packed by snappy",)),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_framing_is_named(payload, words, encoding):
    with pytest.raises(MalformedRecord) as raised:
        decode_record(payload, encoding)
    assert raised.value.reason == "framing"
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{", "json"),
        (b"\0", "json"),
        (b"{}", "missing_field"),
        (json.dumps({**TRADE, "price": "x", "before": 1, "after": 2}).encode(), "price"),
        (json.dumps({**TRADE, "schema": 1, "payload": TRADE, "size": "-1"}).encode(), "size"),
        (b"[1, 2]", "type"),
    ],
)
def test_a_record_with_a_fault_of_its_own_is_no_envelope(payload, reason):
    with pytest.raises(MalformedRecord) as raised:
        decode_record(payload)
    assert raised.value.reason == reason


def test_other_members_of_a_record_are_ignored():
    payload = json.dumps({**TRADE, "schema": 1, "payload": 2, "before": 3, "after": 4}).encode()
    assert decode_record(payload) == decode_record(PLAIN)


@given(st.binary(max_size=200), st.sampled_from(["json", "msgpack"]))
def test_any_bytes_are_named_or_not_but_raise_nothing(payload, encoding):
    found = wrapping_of(payload, encoding)
    assert found is None or found.reason in ("envelope", "framing")


def test_a_byte_order_mark_is_read_away():
    assert decode_record(b"\xef\xbb\xbf" + PLAIN) == decode_record(PLAIN)
    array = b"\xef\xbb\xbf [" + PLAIN + b"," + PLAIN + b"]"
    assert elements(array, "json", 1 << 20) == [PLAIN, PLAIN]
    with pytest.raises(MalformedRecord, match="json"):
        decode_record(b"\xef\xbb\xbf" * 2 + PLAIN)


def test_a_mark_is_a_part_of_msgpack():
    with pytest.raises(MalformedRecord) as raised:
        decode_record(b"\xef\xbb\xbf" + msgspec.msgpack.encode(TRADE), "msgpack")
    assert raised.value.reason in ("msgpack", "type")


@pytest.mark.parametrize(
    ("named", "encoding"),
    [
        (b"JSON", "json"),
        (b" Json ", "json"),
        (b"MsgPack", "msgpack"),
        (b"application/json", "json"),
        (b"Application/JSON; charset=UTF-8", "json"),
        (b"application/vnd.acme.trade+json", "json"),
        (b"application/msgpack", "msgpack"),
        (b"application/x-msgpack", "msgpack"),
        (b"application/vnd.msgpack", "msgpack"),
        (b"avro", "avro"),
        (b"\xff", "\ufffd"),
    ],
)
def test_names_of_encodings_are_read_in_any_case(named, encoding):
    assert header_encoding({"encoding": named}) == encoding


def test_an_encoding_of_any_length_is_refused_in_few_words():
    with pytest.raises(MalformedRecord) as raised:
        decode_record(PLAIN, header_encoding({"encoding": b"x" * 1_000_000}))
    assert raised.value.reason == "encoding"
    assert len(str(raised.value)) < 200
