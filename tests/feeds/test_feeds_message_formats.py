"""Messages in declared formats: each encoding against plain Python, and what cannot be read."""

import asyncio
import io
import json
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from feeds.codec import MalformedRecord
from feeds.file_format import FormatError, load_format
from feeds.market_data import Bar, Quote, Trade
from feeds.payloads import schema_registry as registries
from feeds.payloads.format_decoder import ByRule, FormatDecoder, Rule
from feeds.payloads.payload_decoder import Decoded, WireDecoder
from feeds.payloads.schema_registry import Schema, SchemaRegistry
from feeds.source import Incoming

NOW = 1_767_225_600 * 10**9  # 2026-01-01T00:00:00Z
SYMBOLS = ["X:AAA", "X:BBB"]
MOST = 1 << 16
TRADE = """
description = "trades"
container = "{container}"
{more}
[[records]]
kind = "trade"
venue = "X"
time = {{ field = "t", format = "epoch-ms" }}
fields = {{ symbol = "s", price = "p", size = "q", id = "i", side = "m" }}
side_values = {{ true = "sell", false = "buy" }}
{record}
"""
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Trade",
    "fields": [
        {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "s", "type": "string"},
        {"name": "p", "type": "double"},
        {"name": "q", "type": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 4}},
        {"name": "i", "type": ["null", "long"]},
        {"name": "m", "type": "boolean"},
    ],
}


def message(payload: bytes, offset: int = 0, **more: Any) -> Incoming:
    return Incoming("ticks", 3, offset, payload=payload, **{"key": None, "ts_recv_ns": NOW, **more})


def decoder(folder: Path, text: str, registry: SchemaRegistry | None = None) -> FormatDecoder:
    path = folder / "form.toml"
    path.write_text(text)
    made = FormatDecoder(load_format(path, of_messages=True), MOST, registry)
    made.read_symbols(SYMBOLS)
    return made


def trades(container: str = "json", more: str = "", record: str = "") -> str:
    return TRADE.format(container=container, more=more, record=record)


def records(found: Decoded) -> list[Any]:
    return [part.record for part in found.parts]


def refusal(found: Decoded) -> MalformedRecord:
    (only,) = records(found)
    assert isinstance(only, MalformedRecord)
    return only


def expect_columns(made: FormatDecoder, messages: list[Incoming]) -> int:
    """Rows that are taken hold what the message's one record holds. Returns how many are."""
    rows = made.columns(messages)
    for row, each in zip(rows, messages, strict=True):
        if not row["taken"]:
            continue
        (record,) = records(made.parts(each))
        assert isinstance(record, Trade)
        known = record.key in SYMBOLS
        assert row["key"] == (SYMBOLS.index(record.key) if known else -1)
        assert (row["ts_event"], row["ts_recv"]) == (record.ts_event, record.ts_recv)
        assert (int(row["a"]) * 10**9, int(row["b"]) * 10**9) == (record.price, record.size)
        assert row["x"] == ["unknown", "buy", "sell"].index(record.side)
    return int(rows["taken"].sum())


NUMBERS = st.decimals(min_value=0, max_value=10**6, places=6)
DOCUMENTS = st.fixed_dictionaries(
    {
        "t": st.integers(NOW // 10**6 - 10**6, NOW // 10**6),
        "s": st.sampled_from(["AAA", "BBB", "CCC"]),
        "p": NUMBERS,
        "q": NUMBERS,
        "i": st.none() | st.integers(0, 2**40),
        "m": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@given(st.lists(DOCUMENTS, min_size=1, max_size=8), st.data())
def test_trades_of_json_are_read_exactly(
    folder: Path, documents: list[dict[str, Any]], data: st.DataObject
) -> None:
    made = decoder(folder, trades())
    messages = []
    for at, each in enumerate(documents):
        as_text = data.draw(st.booleans())
        numbers = {name: f"{each[name]:f}" for name in ("p", "q")}
        body = json.dumps({**each, "p": 0, "q": 0} | (numbers if as_text else {}))
        if not as_text:  # numbers with all their digits
            body = body.replace('"p": 0', f'"p": {numbers["p"]}').replace('"q": 0', f'"q": {numbers["q"]}')
        messages.append(message(body.encode(), at))
    for each, sent in zip(documents, messages, strict=True):
        (found,) = records(made.parts(sent))
        assert found == Trade(
            venue="X",
            symbol=each["s"],
            ts_event=each["t"] * 10**6,
            ts_recv=NOW,
            price=found.price,
            size=found.size,
            side="sell" if each["m"] else "buy",
            id="" if each["i"] is None else str(each["i"]),
        )
        assert (Decimal(found.price), Decimal(found.size)) == (each["p"] * 10**18, each["q"] * 10**18)
    # whether a price of zero is one, its sessions say
    assert expect_columns(made, messages) == sum(bool(each["p"]) for each in documents)


def protobuf_kind(path: Path) -> Any:
    """A message like `SCHEMA`, declared in a file of descriptors."""
    file = descriptor_pb2.FileDescriptorProto(name="md.proto", package="md", syntax="proto3")
    kind = file.message_type.add(name="Trade")
    types = {"t": 3, "s": 9, "p": 1, "q": 9, "i": 3, "m": 8}
    for number, (name, code) in enumerate(types.items(), 1):
        kind.field.add(name=name, number=number, label=1, type=code, proto3_optional=name == "i")
        if name == "i":
            kind.oneof_decl.add(name="_i")
            kind.field[-1].oneof_index = 0
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("md.Trade"))


def avro(document: dict[str, Any], schema: Any = SCHEMA) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), document)
    return stream.getvalue()


FLOATS = "float_decimals = { p = 2 }".replace("p =", "price =")


@given(documents=st.lists(DOCUMENTS, min_size=1, max_size=8))
def test_every_encoding_reads_the_same(folder: Path, documents: list[dict[str, Any]]) -> None:
    (folder / "trade.avsc").write_text(json.dumps(SCHEMA))
    kind = protobuf_kind(folder / "trade.desc")
    rounded = [{**each, "p": round(each["p"], 2), "q": round(each["q"], 4)} for each in documents]
    payloads: dict[str, list[bytes]] = {"json": [], "msgpack": [], "avro": [], "protobuf": []}
    for each in rounded:
        texts = {**each, "p": f"{each['p']:f}", "q": f"{each['q']:f}"}
        payloads["json"].append(json.dumps(texts).encode())
        payloads["msgpack"].append(msgspec.msgpack.encode({**texts, "p": float(each["p"])}))
        payloads["avro"].append(avro({**each, "p": float(each["p"])}))
        payloads["protobuf"].append(kind(**{**texts, "p": float(each["p"])}).SerializeToString())
    more = {
        "json": ("", ""),
        "msgpack": ("", FLOATS),
        "avro": ('schema = "trade.avsc"', FLOATS),
        "protobuf": ('schema = "trade.desc"\nmessage = "md.Trade"', FLOATS),
    }
    found = {}
    for container, own in payloads.items():
        made = decoder(folder, trades(container, *more[container]))
        messages = [message(payload, at) for at, payload in enumerate(own)]
        expect_columns(made, messages)
        found[container] = [
            (each.reason if isinstance(each, MalformedRecord) else each)
            for sent in messages
            for each in records(made.parts(sent))
        ]
    assert found["msgpack"] == found["avro"] == found["protobuf"] == found["json"]


def test_a_binary_float_is_read_only_to_the_digits_that_are_declared(tmp_path: Path) -> None:
    body = {"t": NOW // 10**6, "s": "AAA", "p": 0.1 + 0.2, "q": "1", "m": True}
    undeclared = decoder(tmp_path, trades("msgpack"))
    sent = message(msgspec.msgpack.encode(body))
    assert "declare float_decimals.price" in refusal(undeclared.parts(sent)).message
    assert expect_columns(undeclared, [sent]) == 0
    (found,) = records(decoder(tmp_path, trades("msgpack", "", FLOATS)).parts(sent))
    assert str(found.price) == "0.3"
    too_fine = message(msgspec.msgpack.encode({**body, "p": 1.005}))
    assert refusal(decoder(tmp_path, trades("msgpack", "", FLOATS)).parts(too_fine)).reason == "price"


def test_a_float_is_a_time_where_its_decimals_are_declared(tmp_path: Path) -> None:
    text = trades("msgpack").replace("epoch-ms", "epoch-s") + "float_decimals = { time = 3 }\n"
    sent = message(msgspec.msgpack.encode({"t": 1767225599.136, "s": "AAA", "p": "1", "q": "1", "m": True}))
    (found,) = records(decoder(tmp_path, text).parts(sent))
    assert found.ts_event == 1_767_225_599_136 * 10**6


ENVELOPE = """
description = "a table's changes"
container = "json"
[[records]]
kind = "quote"
time = { field = "payload.after.at", format = "epoch-us" }
fields = { venue = "$headers.venue", symbol = "$key", bid = "payload.after.bid", ask = "payload.after.ask" }
match = { field = "payload.op", values = ["c", "u", "r"] }
[passed_over]
deleted = { field = "payload.op", values = ["d"] }
"""


def test_an_envelope_is_read_by_path_and_key_and_headers_are_fields(tmp_path: Path) -> None:
    made = decoder(tmp_path, ENVELOPE)
    row = {"at": NOW // 1000, "bid": "10.25", "ask": "10.5"}
    body = {"schema": {}, "payload": {"op": "u", "before": None, "after": row}}
    sent = message(json.dumps(body).encode(), key=b"AAA", headers={"venue": b"X"}, ts_source_ns=NOW - 5)
    (found,) = records(made.parts(sent))
    assert isinstance(found, Quote)
    assert (found.key, str(found.bid), str(found.ask)) == ("X:AAA", "10.25", "10.5")
    assert found.ts_recv == NOW - 5  # the broker's time, which stays when it is read again
    assert made.columns([sent])["taken"].all()
    gone = message(json.dumps({"payload": {"op": "d", "before": row, "after": None}}).encode())
    assert made.parts(gone) == Decoded([], 1)
    assert not made.columns([gone])["taken"].any()


def test_an_array_is_a_record_each_by_time(tmp_path: Path) -> None:
    body = [{"t": NOW // 10**6 - back, "s": "AAA", "p": "1", "q": str(back), "m": True} for back in (1, 0, 2)]
    made = decoder(tmp_path, trades())
    found = records(made.parts(message(json.dumps(body).encode())))
    assert [str(each.size) for each in found] == ["2", "1", "0"]
    nested = decoder(tmp_path, trades(record='each = "data"'))
    found = records(nested.parts(message(json.dumps({"data": body}).encode())))
    assert [str(each.size) for each in found] == ["2", "1", "0"]


def test_unusable_records_of_an_array_are_one_refusal_beside_the_usable_ones(tmp_path: Path) -> None:
    good = {"t": NOW // 10**6, "s": "AAA", "p": "1", "q": "1", "m": True}
    made = decoder(tmp_path, trades())
    body = [good, {**good, "p": "-"}, {**good, "s": "BBB", "q": None}]
    found = made.parts(message(json.dumps(body).encode()))
    assert isinstance(found.parts[0].record, Trade)
    assert isinstance(found.parts[1].record, MalformedRecord)
    assert found.parts[1].record.message.startswith("2 records are unusable: price")
    assert [each.key for each in found.parts[1].subjects] == ["X:AAA", "X:BBB"]


def test_lines_and_cells_are_records(tmp_path: Path) -> None:
    text = trades("csv", "header = false", "")
    text = text.replace('"t"', "0").replace('"s"', "1").replace('"p"', "2").replace('"q"', "3")
    text = text.replace(', id = "i", side = "m"', "")
    body = f"{NOW // 10**6},AAA,1.5,2\n{NOW // 10**6 + 1},BBB,2.5,3\n"
    found = records(decoder(tmp_path, text).parts(message(body.encode())))
    assert [(each.symbol, str(each.price)) for each in found] == [("AAA", "1.5"), ("BBB", "2.5")]
    lines = "\n".join(json.dumps({"t": NOW // 10**6, "s": s, "p": 1, "q": 2, "m": True}) for s in "ab")
    assert [
        each.symbol for each in records(decoder(tmp_path, trades("jsonl")).parts(message(lines.encode())))
    ] == [
        "a",
        "b",
    ]
    headed = trades("csv")
    wrong = decoder(tmp_path, headed).parts(message(b"a,b\n1,2\n"))
    assert refusal(wrong).reason == "type"


def test_times_of_receipt_and_numbers_of_the_venue(tmp_path: Path) -> None:
    text = trades().replace('{ field = "t", format = "epoch-ms" }', '{ format = "receive" }')
    text = text.replace('id = "i"', 'id = "i", seq = "n"')
    made = decoder(tmp_path, text)
    sent = message(
        json.dumps({"s": "AAA", "p": 1, "q": 2, "m": False, "n": 17}).encode(), ts_source_ns=NOW - 9
    )
    (found,) = records(made.parts(sent))
    assert (found.ts_event, found.clock, found.seq) == (NOW - 9, "receive", 17)
    bad = message(json.dumps({"s": "AAA", "p": 1, "q": 2, "m": False, "n": -1}).encode())
    assert refusal(made.parts(bad)).reason == "type"


@pytest.mark.parametrize(("hour", "expected"), [(0, "22:30"), (1, "23:30")])
def test_a_local_time_that_occurs_twice_is_the_one_nearer_to_its_receipt(
    tmp_path: Path, hour: int, expected: str
) -> None:
    text = trades().replace('format = "epoch-ms"', 'format = "iso", zone = "America/Havana"')
    made = decoder(tmp_path, text)
    first = 1_762_061_400 * 10**9  # 2025-11-02T05:30Z is 00:30 there, or 01:30 in the first of two hours
    body = {"t": "2025-11-02T00:30:00", "s": "AAA", "p": 1, "q": 2, "m": True}
    sent = message(json.dumps(body).encode(), ts_recv_ns=first + hour * 3600 * 10**9 - 3600 * 10**9)
    (found,) = records(made.parts(sent))
    assert found.ts_event == first - 3600 * 10**9 + hour * 3600 * 10**9, expected


# What is in front of payloads.


class Registry:
    """The client of a registry, which fails as often as it is told."""

    def __init__(self, schemas: dict[int, Any], fails: int = 0) -> None:
        self.schemas, self.fails, self.asked = schemas, fails, list[int]()

    def get_schema(self, number: int) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryError

        self.asked.append(number)
        if self.fails:
            self.fails -= 1
            raise OSError("refused")
        if number not in self.schemas:
            raise SchemaRegistryError(404, 40403, "not found")
        return self.schemas[number]


def stored(kind: str, text: str) -> Any:
    from confluent_kafka.schema_registry import Schema as Stored

    return Stored(text, kind)


async def no_sleep(_seconds: float) -> None:
    await asyncio.sleep(0)


def framed(number: int, payload: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + payload


async def test_avro_is_read_by_the_schema_that_it_was_written_in(tmp_path: Path) -> None:
    """Members come and go; each payload names its schema, and a registry is asked once for each."""
    newer = {**SCHEMA, "fields": [{"name": "more", "type": "string"}, *SCHEMA["fields"]]}
    client = Registry({7: stored("AVRO", json.dumps(SCHEMA)), 8: stored("AVRO", json.dumps(newer))}, fails=2)
    schemas = SchemaRegistry(client, no_sleep)
    made = decoder(tmp_path, trades("avro", "", FLOATS), schemas)
    body = {"t": NOW // 10**6, "s": "AAA", "p": 1.5, "q": Decimal("2.25"), "i": 9, "m": True}
    sent = [
        message(framed(7, avro(body))),
        message(framed(8, avro({**body, "more": "x", "s": "BBB"}, newer))),
        message(framed(9, avro(body))),
        message(avro(body)),
        message(framed(7, avro({**body, "more": "x"}, newer))),
    ]
    await made.prepare(sent)
    await made.prepare(sent)
    assert sorted(client.asked) == sorted([*client.asked[:2], 7, 8, 9])
    assert (schemas.failed, made.failed) == (2, 2)
    found = [records(made.parts(each))[0] for each in sent]
    assert [each.symbol for each in found[:2]] == ["AAA", "BBB"]
    assert [each.reason for each in found[2:4]] == ["schema", "framing"]
    assert isinstance(found[4], MalformedRecord), "it is of another schema than it says"
    assert expect_columns(made, sent) == 2


async def test_a_schema_that_was_not_known_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Registry({})
    made = decoder(tmp_path, trades("avro", "", FLOATS), SchemaRegistry(client, no_sleep))
    body = {"t": NOW // 10**6, "s": "AAA", "p": 1.5, "q": Decimal("2.25"), "i": 9, "m": True}
    sent = message(framed(7, avro(body)))
    await made.prepare([sent])
    assert refusal(made.parts(sent)).reason == "schema"
    client.schemas[7] = stored("AVRO", json.dumps(SCHEMA))
    later = time.monotonic() + registries.UNKNOWN_S
    monkeypatch.setattr(registries.time, "monotonic", lambda: later)
    await made.prepare([sent])
    assert isinstance(records(made.parts(sent))[0], Trade)


async def test_protobuf_is_read_by_a_registrys_schema(tmp_path: Path) -> None:
    text = """
    syntax = "proto3";
    package md;
    import "google/protobuf/timestamp.proto";
    message Other { string name = 1; }
    message Outer {
      enum Side { BUY = 0; SELL = 1; }
      message Trade {
        string s = 1; double p = 2; string q = 3; google.protobuf.Timestamp at = 4; Side m = 5;
      }
    }
    """
    form = trades("protobuf", "", FLOATS).replace(
        '{ field = "t", format = "epoch-ms" }', '{ field = "at", format = "epoch-s" }'
    )
    form = form.replace('true = "sell", false = "buy"', 'SELL = "sell", BUY = "buy"')
    client = Registry({5: stored("PROTOBUF", text), 6: stored("AVRO", json.dumps(SCHEMA))})
    made = decoder(tmp_path, form, SchemaRegistry(client, no_sleep))
    from feeds.payloads.protobuf import compiled

    kind = compiled(Schema("PROTOBUF", text)).kind("md.Outer.Trade")
    trade = kind(s="AAA", p=1.5, q="2", m=1)
    trade.at.seconds, trade.at.nanos = NOW // 10**9 - 1, 123_456_789
    path = bytes([4, 2, 0])  # two numbers: the second message, and the first one in it
    sent = [
        message(framed(5, path + trade.SerializeToString())),
        message(framed(6, path + trade.SerializeToString())),
        message(framed(5, bytes([4, 2, 8]) + trade.SerializeToString())),
        message(framed(5, b"\xff")),
        message(framed(5, path + b"\xff\xff")),
        message(framed(5, b"\x07\x0a\x05Trade" + trade.SerializeToString())),
    ]
    await made.prepare(sent)
    found = [records(made.parts(each))[0] for each in sent]
    assert (found[0].ts_event, found[0].side) == (NOW - 10**9 + 123_456_789, "sell")
    assert [each.reason for each in found[1:]] == ["schema", "schema", "framing", "protobuf", "framing"]


async def test_protobuf_names_the_message_as_apicurio_writes_it(tmp_path: Path) -> None:
    """A message of Protobuf with the name and its size, in place of Confluent's numbers."""
    text = (
        'syntax = "proto3"; message Other { string s = 1; } '
        "message Trade { int64 t = 1; string s = 2; string p = 3; string q = 4; bool m = 5; }"
    )
    client = Registry({5: stored("PROTOBUF", text)})
    made = decoder(tmp_path, trades("protobuf"), SchemaRegistry(client, no_sleep))
    from feeds.payloads.protobuf import compiled

    trade = compiled(Schema("PROTOBUF", text)).kind("Trade")(t=NOW // 10**6, s="AAA", p="1.5", q="2")
    named = b"\x07\x0a\x05Trade"
    sent = [message(framed(5, named + trade.SerializeToString())) for _ in range(2)]
    sent.append(message(framed(5, b"\x07\x0a\x05Quote" + trade.SerializeToString())))
    await made.prepare(sent)
    assert made.columns(sent)["taken"].tolist() == [1, 1, 0]
    assert [type(records(made.parts(each))[0]) for each in sent] == [Trade, Trade, MalformedRecord]
    (tmp_path / "own.desc").write_bytes(compiled(Schema("PROTOBUF", text)).serialized)
    own = decoder(tmp_path, trades("protobuf", 'schema = "own.desc"\nmessage = "Trade"'))
    assert [type(records(own.parts(each))[0]) for each in sent[:2]] == [Trade, Trade]
    assert refusal(own.parts(sent[2])).reason == "schema"


# Which format a message has.


def test_the_first_rule_that_covers_a_message_counts(tmp_path: Path) -> None:
    wire = WireDecoder(MOST)
    by_topic, by_header = (decoder(tmp_path, trades()) for _ in range(2))
    made = ByRule([Rule(by_topic, topics=["md.*"]), Rule(by_header, header=("type", "tr*"))], other=wire)
    made.read_symbols(SYMBOLS)
    own = b'{"type":"trade","venue":"X","symbol":"BBB","ts_event":%d,"ts_recv":%d,"price":"1","size":"2"}' % (
        NOW,
        NOW,
    )
    theirs = json.dumps({"t": NOW // 10**6, "s": "AAA", "p": 1, "q": 2, "m": True}).encode()
    sent = [
        message(own),
        msgspec.structs.replace(message(theirs), topic="md.trades"),
        message(theirs, headers={"type": b"trade"}),
        message(theirs),
    ]
    assert made.columns(sent)["taken"].tolist() == [1, 1, 1, 0]
    assert made.columns(sent)["key"][:3].tolist() == [1, 0, 0]
    found = [records(made.parts(each))[0] for each in sent]
    assert [isinstance(each, Trade) for each in found] == [True, True, True, False]
    assert made.failed == 0


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_a_rule_may_ask_for_a_field_of_a_message(tmp_path: Path, encode: Callable[[Any], bytes]) -> None:
    container = "json" if encode is msgspec.json.encode else "msgpack"
    own = decoder(tmp_path, trades(container, "", FLOATS if container == "msgpack" else ""))
    made = ByRule([Rule(own, field=("kind.0", "tr*"))], other=WireDecoder(MOST))
    made.read_symbols(SYMBOLS)
    trade = {"t": NOW // 10**6, "s": "AAA", "p": 1, "q": 2, "m": True}
    kinds = [{"kind": ["trade"]}, {"kind": ["quote"]}, {"kind": "trade"}, {"kind": [["trade"]]}, {}]
    sent = [message(encode(trade | each)) for each in kinds] + [message(b""), message(b"\xff")]
    assert made.columns(sent)["taken"].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert [isinstance(records(made.parts(each))[0], Trade) for each in sent] == [True] + [False] * 6


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trades("parquet"), "container: of messages it is one of"),
        (trades("jsonl-capture"), "container: of messages"),
        (trades("avro"), "declare schema, or configure a registry"),
        (trades("protobuf"), "declare schema and message"),
        (trades("avro", 'schema = "none.avsc"'), "No such file"),
        (trades("protobuf", 'schema = "none.desc"'), "Protobuf needs both"),
        (trades("json", 'schema = "x"'), "schema, message: json has none"),
        (trades("json", 'members = "*.csv"'), "messages have none"),
        (trades().replace("epoch-ms", "day-ms"), "nothing says of which day"),
        (trades("json", "", "float_decimals = { price = 2 }"), "holds no binary floats"),
    ],
)
def test_a_format_that_messages_cannot_have_says_so(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        decoder(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trades("msgpack"), "msgpack is one of messages"),
        (trades().replace('"s"', '"$key"'), "is of messages"),
        (trades().replace('{ field = "t", format = "epoch-ms" }', '{ format = "receive" }'), "jsonl-capture"),
        (trades().replace('id = "i"', 'seq = "i"'), "numbered as they stand"),
    ],
)
def test_a_format_that_files_cannot_have_says_so(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "form.toml").write_text(text)
    with pytest.raises(FormatError, match=why):
        load_format(tmp_path / "form.toml")


def test_bars_are_read_one_by_one(tmp_path: Path) -> None:
    text = """
    description = "candles"
    container = "json"
    [[records]]
    kind = "bar"
    venue = "X"
    interval = "1m"
    time = { field = "k.t", format = "epoch-ms" }
    fields = { symbol = "s", open = "k.o", high = "k.h", low = "k.l", close = "k.c", volume = "k.v" }
    match = { field = "k.x", values = ["true"] }
    """
    made = decoder(tmp_path, text)
    bar = {"t": NOW // 10**6, "o": "1", "h": "3", "l": "1", "c": "2", "v": "9", "x": True}
    (found,) = records(made.parts(message(json.dumps({"s": "AAA", "k": bar}).encode())))
    assert isinstance(found, Bar)
    assert (found.ts_event, str(found.close)) == (NOW, "2")
    unfinished = message(json.dumps({"s": "AAA", "k": {**bar, "x": False}}).encode())
    assert made.parts(unfinished) == Decoded([], 1)


@given(payload=st.binary(max_size=300))
@pytest.mark.parametrize("container", ["json", "jsonl", "csv", "msgpack", "avro", "protobuf"])
def test_any_bytes_are_refused_or_read(folder: Path, container: str, payload: bytes) -> None:
    (folder / "trade.avsc").write_text(json.dumps(SCHEMA))
    protobuf_kind(folder / "trade.desc")
    more = {
        "avro": ('schema = "trade.avsc"', FLOATS),
        "protobuf": ('schema = "trade.desc"\nmessage = "md.Trade"', FLOATS),
        "csv": ("", ""),
    }.get(container, ("", ""))
    made = decoder(folder, trades(container, *more))
    sent = message(payload)
    for each in records(made.parts(sent)):
        assert isinstance(each, Trade) or each.reason != "internal", each
    expect_columns(made, [sent])
