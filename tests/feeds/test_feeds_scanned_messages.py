"""Messages that compiled code reads: their values and records are those of the readers of one message."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feeds.codec import MalformedRecord
from feeds.columns.places import Places, Scanned, is_text, is_utf8
from feeds.decimals import BinaryFloat
from feeds.documents import at_names, text_of
from feeds.file_format import load_format
from feeds.market_data import Quote, Trade
from feeds.payloads.format_decoder import Documents, FormatDecoder, JsonDocuments, MsgpackDocuments
from feeds.payloads.protobuf import ProtobufDocuments, compiled
from feeds.payloads.scanned_columns import ScannedColumns
from feeds.payloads.schema_registry import Schema
from feeds.source import Incoming

NOW = 1_767_225_600 * 10**9  # 2026-01-01T00:00:00Z
SYMBOLS = ["X:AAA", "X:BBB", "X:7"]
REFS = ("t", "s", "p", "q", "i", "m", "n", "e", "$.p", "k", "k.p", "k.s", "d.0.p", "d.1", "k.d.0", "at", "")

PROTO = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
message T {
  enum Side { BUY = 0; SELL = 1; SHORT = 7; BELOW = -2; }
  message K { string p = 1; string s = 2; optional double d = 3; repeated sint64 more = 4 [packed = true]; }
  message Level { fixed32 a = 1; repeated Level levels = 2; }
  int64 t = 1;
  string s = 2;
  double p = 3;
  string q = 4;
  optional int64 i = 5;
  bool m = 6;
  uint64 n = 7;
  Side e = 8;
  K k = 9;
  google.protobuf.Timestamp at = 10;
  float f = 11;
  int32 i32 = 12;
  uint32 u32 = 13;
  sint32 s32 = 14;
  sint64 s64 = 15;
  fixed32 f32 = 16;
  fixed64 f64 = 17;
  sfixed32 sf32 = 18;
  sfixed64 sf64 = 19;
  bytes raw = 20;
  oneof which { string left = 21; int64 right = 22; K both = 23; }
  map<string, Level> levels = 24;
  repeated Level more = 25;
  repeated Side sides = 26;
  repeated string texts = 27;
  google.protobuf.Timestamp other = 28;
}
"""
OF_PROTO = ["t", "s", "p", "q", "i", "m", "n", "e", "k", "at", "f", "i32", "u32", "s32", "s64", "f32", "f64"]
OF_PROTO += ["sf32", "sf64", "raw", "left", "right", "k.p", "k.s", "k.d", "at.seconds", "none"]
MORE_OF_PROTO = ["t", "at", "both.d", "right", "k"]


class Raw(str):
    """The text of a number of JSON."""


NUMBERS = st.sampled_from(
    [
        "0",
        "-0",
        "-0.0",
        "1.50",
        "1e2",
        "1E-3",
        "12.",
        ".5",
        "007",
        "+1",
        "-",
        "1e",
        "-17",
        "0.1e+5",
        "9" * 30,
        "123456789012345678",
        "1234567890123456789",
        "8999999999999999999",
        "9000000000000000000",
        "9223372036854775808",
        "1.0000000001",
        "NaN",
        "1.5x",
    ]
).map(Raw)
ODD = st.one_of(
    st.sampled_from(
        [None, True, False, "", "-", "x", "é", "a\\b", 'a"b', "\x01", "\x7f", [], {}, -1, 2**63, 7]
    ),
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=4),
)


def mostly(usual: st.SearchStrategy[Any], *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One in twenty of the others."""
    return st.sampled_from([usual] * 19 + [st.one_of(*others)]).flatmap(lambda each: each)


EPOCH_MS = st.integers(NOW // 10**6 - 10**6, NOW // 10**6)
TIMES = st.sampled_from([NOW // 10**9, NOW, 0, "2025-12-31T23:59:59.5Z", "1767225600.25", 1767225599.136])
TIMES = mostly(EPOCH_MS, TIMES)
PRICES = st.decimals(min_value=-1, max_value=10**6, places=3).map(lambda each: f"{each:f}")
FLOATS = st.decimals(min_value=-1, max_value=10**6, places=2).map(float)


def members(
    numbers: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Documents, most of whose values are plausible, and a few of which are odd."""

    def rarely(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return mostly(usual, odd)

    names = st.sampled_from(["AAA", "BBB", "CCC"])
    within = st.fixed_dictionaries({"p": rarely(numbers)}, optional={"s": rarely(names), "d": st.lists(odd)})
    return st.fixed_dictionaries(
        {"t": rarely(TIMES), "s": rarely(names), "p": rarely(numbers), "q": rarely(numbers)},
        optional={
            "i": rarely(st.none() | st.integers(0, 2**40) | st.text("ab1", max_size=3)),
            "m": rarely(st.booleans()),
            "n": rarely(st.integers(0, 2**40)),
            "e": rarely(st.sampled_from(["trade", "other", 1])),
            "k": rarely(within),
            "d": rarely(st.lists(within, max_size=3)),
            "other": rarely(st.text("ab.", max_size=3)),
            "deep": st.recursive(
                odd, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.just("p"), each)
            ),
        },
    )


def written(value: Any, blank: str = "") -> str:
    """JSON with numbers as they are given, and blanks."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        inside = (f"{json.dumps(name)}{blank}:{blank}{written(each, blank)}" for name, each in value.items())
        return f"{{{blank}{f'{blank},{blank}'.join(inside)}{blank}}}"
    if isinstance(value, list):
        return f"[{','.join(written(each, blank) for each in value)}{blank}]"
    return json.dumps(value, ensure_ascii=False)


def packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return b"\x80"


@st.composite
def damaged(draw: st.DrawFn, payloads: st.SearchStrategy[bytes]) -> bytes:
    """A payload, or one with something wrong."""
    payload = draw(payloads)
    how = draw(st.sampled_from(["no"] * 20 + ["cut", "byte", "twice", "more", "front"]))
    at = draw(st.integers(0, max(0, len(payload) - 1)))
    match how:
        case "cut":
            return payload[:at]
        case "byte":
            return payload[:at] + bytes([draw(st.integers(0, 255))]) + payload[at + 1 :]
        case "twice":
            return payload[:at] + payload[max(0, at - draw(st.integers(1, 12))) :]
        case "more":
            return payload + draw(st.binary(max_size=4))
        case "front":
            return draw(st.sampled_from([b"\xef\xbb\xbf", b"\0\0\0\0\x05", b"\0\0\0\0\x05\0"])) + payload
    return payload


JSON = damaged(
    st.tuples(
        members(PRICES | PRICES.map(Raw) | NUMBERS, ODD | NUMBERS), st.sampled_from(["", " ", "\n\t "])
    ).map(lambda each: written(*each).encode())
)
MSGPACK = damaged(members(PRICES | FLOATS | st.integers(0, 10**6), ODD | st.binary(max_size=4)).map(packed))


KIND: Any = compiled(Schema("PROTOBUF", PROTO)).kind("T")


def encoded(*documents: dict[str, Any]) -> bytes:
    """Messages of Protobuf one after the other, which are one message."""
    return b"".join(KIND(**each).SerializeToString() for each in documents)


SIGNED, UNSIGNED = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)
LONG, LONG_UNSIGNED = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)
INT = {
    "t": EPOCH_MS, "i": LONG, "n": st.integers(0, 2**40), "e": st.sampled_from([0, 1, 7, -2, 0, 1, 7, -2, 5]),
    "i32": SIGNED, "u32": UNSIGNED, "s32": SIGNED, "s64": LONG, "f32": UNSIGNED, "f64": LONG_UNSIGNED,
    "sf32": SIGNED, "sf64": LONG,
}  # fmt: skip
WITHIN = st.fixed_dictionaries(
    {"p": PRICES, "s": mostly(st.just("AAA"), st.just("é"))},
    optional={"d": mostly(FLOATS, st.floats()), "more": st.lists(st.integers(-9, 300), max_size=3)},
)
MOMENT = st.fixed_dictionaries(
    {},
    optional={
        "seconds": mostly(st.just(NOW // 10**9), st.just(-1)),
        "nanos": mostly(st.just(5), st.just(-1)),
    },
)
LEVEL = st.fixed_dictionaries(
    {}, optional={"a": INT["u32"], "levels": st.lists(st.just({"a": 1}), max_size=2)}
)
OF_MESSAGE = st.fixed_dictionaries(
    {"t": INT["t"], "s": st.sampled_from(["AAA", "BBB"]), "p": FLOATS, "q": PRICES, "m": st.booleans()},
    optional={
        **{name: INT[name] for name in INT if name != "t"},
        "k": WITHIN, "at": MOMENT, "other": MOMENT, "f": st.floats(width=32),
        "raw": mostly(st.just(b"ab"), st.binary(max_size=4)),
        "left": mostly(st.text("ab", max_size=3), st.text(max_size=3)), "right": INT["s64"], "both": WITHIN,
        "more": st.lists(LEVEL, max_size=2),
        "levels": st.dictionaries(st.sampled_from("ab"), LEVEL, max_size=2),
        "texts": st.lists(st.text("ab", max_size=2)),
        "sides": st.lists(st.sampled_from([0, 1, 7]), max_size=3),
    },
)  # fmt: skip
FIELDS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 2, 3, 5]), st.binary(max_size=12)), max_size=3
)


def wire(fields: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Members as they might be written, right or wrong."""
    made = b""
    for number, how, data in fields:
        tag = number << 3 | how
        head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
        made += head + (bytes([len(data)]) + data if how == 2 else data)
    return made


PROTOBUF = damaged(
    st.tuples(OF_MESSAGE, mostly(st.just({}), OF_MESSAGE), mostly(st.just([]), FIELDS)).map(
        lambda each: encoded(*each[:2]) + wire(each[2])
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scanned")
    (made / "t.desc").write_bytes(compiled(Schema("PROTOBUF", PROTO)).serialized)
    return made


def expect_values(documents: Documents, payloads: Sequence[bytes], refs: Sequence[str]) -> int:
    """What is read stands in the document, and a document with it there is. Returns how many are read."""
    places = Places.compile(refs)
    assert places is not None
    scanned = documents.scan(b"".join(payloads), np.cumsum(list(map(len, payloads))), places)
    assert isinstance(scanned, Scanned)
    read = np.flatnonzero(scanned.read)
    found = [documents.document(payloads[at]) for at in read.tolist()]
    columns = ScannedColumns(scanned, read, places.numbers)
    for ref in refs:
        names = ref.split(".")
        values = [at_names(each, names[names[0] == "$" :]) for each in found]
        expected = [text_of(ref, each) for each in values]
        column = columns.column(ref)
        if column is None:  # a number and a text are the same
            assert any(isinstance(each, float) for each in values)
            continue
        texts = [column.text(at) for at in range(len(read))]
        assert texts == expected, (ref, payloads)
        assert [type(each) is BinaryFloat for each in texts] == [
            type(each) is BinaryFloat for each in expected
        ]
        if column.absent is not None:
            assert column.absent.tolist() == [
                text is None and value is not None for text, value in zip(expected, values, strict=True)
            ]
        else:
            assert all(
                text is not None or value is None for text, value in zip(expected, values, strict=True)
            )
    return len(read)


@given(st.lists(JSON, min_size=1, max_size=6))
@example([b'{"p":1,"p":2}', b'{"k":{},"k":{"p":1}}', b'{"p":[1,]}', b'{"p":1}x', b"[]", b'{"p":1e5}', b"{}"])
@example(
    [
        b'{"k":{"p":1},"k":{}}',
        b'{"d":[{"p":1}],"d":[]}',
        b'{"k":{"p":1},"k":null}',
        b'{"k":5}',
        b'{"k":[{"p":1}]}',
    ]
)
@example([b'{"d":[{"p":"1"},5,[[]]],"k":{"d":["x"]}}', b'{"p":-0}', b'{"p":"\\u0041"}', b'{"x":"\\n","p":1}'])
def test_values_of_json(payloads: list[bytes]) -> None:
    expect_values(JsonDocuments(), payloads, REFS)


@given(st.lists(MSGPACK, min_size=1, max_size=6))
@example(
    [msgspec.msgpack.encode({"p": each}) for each in (2**63, 2**63 - 1, -(2**63), -(2**31), -1, b"\xff")]
)
@example(
    [b"\x81\xa1p\xca\x7f\xa0\x00\x00", b"\x81\xa1p\xcb\x7f\xf4\x00\x00\x00\x00\x00\x00", b"\x81\xa1p\x00"]
)
@example([b"\x82\xa1k\x81\xa1p\x01\xa1k\x80", b"\x81\xa1k\x91\x81\xa1p\x01", b"\x81\xa1k\x81\xa1p\x01"])
@example(
    [b"\x81\xa1p\xca\x3f\x80\x00\x00", b"\x82\xa1p\x01\xa1p\x02", b"\x81\xa1p\xc1", b"\x81\x01\x02", b"\x01"]
)
def test_values_of_msgpack(payloads: list[bytes]) -> None:
    expect_values(MsgpackDocuments(), payloads, REFS)


@given(st.lists(PROTOBUF, min_size=1, max_size=6), st.sampled_from([OF_PROTO, MORE_OF_PROTO]))
@example([encoded({"k": {"p": "1"}}, {"k": {"s": "2"}})], OF_PROTO)
@example([encoded({"at": {"seconds": 5, "nanos": -1}})], OF_PROTO)
@example([encoded({"at": {"seconds": 5, "nanos": 10**9}})], OF_PROTO)
@example([encoded({"left": "x"}, {"right": 1}), encoded({"right": 1}, {"left": "x"})], OF_PROTO)
@example(
    [encoded({"at": {"seconds": 5}}, {"at": {"nanos": 5}}), encoded({"both": {"d": 1.5}}, {"right": 1})],
    MORE_OF_PROTO,
)
@settings(max_examples=300)
def test_values_of_protobuf(folder: Path, payloads: list[bytes], refs: list[str]) -> None:
    form = load_format(made_format(folder, "protobuf", ""), of_messages=True)
    payloads = [each for each in payloads if each[:1] > b"\0"] or [KIND(m=True).SerializeToString()]
    expect_values(ProtobufDocuments(form, None), payloads, refs)


@pytest.mark.parametrize("number", [1, 5, 6, 7, 8, 12, 13, 14, 15, 30])
def test_numbers_of_any_length_are_read_as_protobuf_does_or_not_at_all(folder: Path, number: int) -> None:
    form = load_format(made_format(folder, "protobuf", ""), of_messages=True)
    ends = [b"\x00", b"\x01", b"\x02", b"\x7f", b"\x80"]
    for length in range(11):
        payloads = [wire([(number, 0, fill * length + end)]) for fill in (b"\x80", b"\xff") for end in ends]
        expect_values(ProtobufDocuments(form, None), payloads, OF_PROTO)


@pytest.mark.parametrize(
    ("documents", "payloads"),
    [
        (
            JsonDocuments(),
            [written({"t": 1, "s": "A", "p": Raw("1.5"), "deep": [{"x": None}], "m": True}).encode()],
        ),
        (JsonDocuments(), [written({"t": NOW, "i": -NOW}).encode()]),
        (MsgpackDocuments(), [packed({"t": 1, "s": "A", "p": 1.5, "deep": [{"x": None}], "m": True})]),
    ],
)
def test_plain_payloads_are_read(documents: Documents, payloads: list[bytes]) -> None:
    assert expect_values(documents, payloads, REFS) == 1


def test_plain_messages_of_protobuf_are_read(folder: Path) -> None:
    form = load_format(made_format(folder, "protobuf", ""), of_messages=True)
    every = {
        "t": 5, "s": "A", "p": 1.5, "q": "2", "i": -3, "m": True, "n": 2**40, "e": 7, "f": 0.5, "i32": -4,
        "u32": 4, "s32": -5, "s64": -6, "f32": 7, "f64": 8, "sf32": -9, "sf64": -10, "raw": b"x", "right": 4,
        "k": {"p": "1", "d": 2.5, "more": [1, -300]}, "at": {"seconds": 5, "nanos": 6},
        "levels": {"a": {"a": 4, "levels": [{}]}}, "more": [{"a": 1}], "sides": [0, 7], "texts": ["a", ""],
    }  # fmt: skip
    payloads = [
        KIND().SerializeToString(),
        KIND(**every).SerializeToString(),
        KIND(e=-2, left="x").SerializeToString(),
    ]
    assert expect_values(ProtobufDocuments(form, None), payloads, OF_PROTO) == 3


def test_what_compiled_code_cannot_look_for_has_no_plan(folder: Path) -> None:
    assert Places.compile(["d.1", "d.01"]) is None
    assert Places.compile([f"m{n}" for n in range(100)]) is None
    form = load_format(made_format(folder, "protobuf", ""), of_messages=True)
    documents, payload = ProtobufDocuments(form, None), KIND(m=True).SerializeToString()
    places = Places.compile(["texts.0"])
    assert places is not None
    assert documents.scan(payload, np.array([len(payload)]), places) is None


# Records.


def made_format(folder: Path, container: str, records: str, more: str = "") -> Path:
    path = folder / "form.toml"
    if container == "protobuf":
        more += '\nschema = "t.desc"\nmessage = "T"'
    plain = 'kind = "trade"\nvenue = "X"\ntime = { field = "t", format = "epoch-ms" }\n'
    plain += 'fields = { symbol = "s", price = "p", size = "q" }'
    path.write_text(
        f'description = "d"\ncontainer = "{container}"\n{more}\n[[records]]\n{records or plain}\n'
    )
    return path


@st.composite
def formats(draw: st.DrawFn, container: str) -> tuple[str, str]:
    """A table of records, and what stands before it."""

    def one(*options: str) -> str:
        return draw(st.sampled_from(options))

    trade = draw(st.booleans())
    refs = {"p": ["p", "p", "$.p", "k.p"], "q": ["q", "q", "p", "d.0.p"]}
    if container == "protobuf":
        refs = {"p": ["p", "k.d", "f", "q", "p"], "q": ["q", "q", "k.p", "n", "i32", "u32"]}
    prices, sizes = ("price",) if trade else ("bid", "ask"), ("size",) if trade else ("bid_size",)
    fields = {"symbol": one("s", "s", "k.s", "$key", "n")} | {name: one(*refs["p"]) for name in prices}
    fields |= {name: one(*refs["q"]) for name in sizes if trade or draw(st.booleans())}
    lines = [f'kind = "{"trade" if trade else "quote"}"', 'venue = "X"']
    if trade and draw(st.booleans()):
        fields["id"] = one("i", "n", "t", "s", "p")
    if trade and draw(st.booleans()):
        fields["side"] = one("m", "e", "i")
        lines.append(
            'side_values = { true = "sell", false = "buy", SELL = "sell", BUY = "buy", 7 = "unknown" }'
        )
    elif trade and draw(st.booleans()):
        lines.append('signed = "size"')
    if draw(st.integers(0, 3)) == 3:
        fields["seq"] = one("n", "i")
    named = ", ".join(f'{name} = "{ref}"' for name, ref in fields.items())
    lines.append(f"fields = {{ {named} }}")
    time = one(*["t"] * 8, "at", "n")
    unit = (
        one("epoch-s", "iso") if time == "at" else one(*["epoch-ms"] * 16, "epoch-s", "epoch-us", "epoch-ns")
    )
    lines.append(f'time = {{ field = "{time}", format = "{unit}" }}')
    if container != "json" and draw(st.integers(0, 4)):
        decimals = {name: draw(st.integers(2, 5)) for name in prices} | {"time": 3}
        lines.append(f"float_decimals = {{ {', '.join(f'{name} = {n}' for name, n in decimals.items())} }}")
    if draw(st.booleans()):
        lines.append(f'rounded = ["{prices[0]}"]')
    if draw(st.integers(0, 3)) == 3:
        lines.append("implied_decimals = 2")
    if draw(st.integers(0, 3)) == 3:
        lines.append(f'multiplier = "{one("100", "0.01", "1e-9")}"')
    if draw(st.integers(0, 4)) == 4:
        lines.append(f'match = {{ field = "{one("e", "m", "n")}", values = ["trade", "1", "true", "BUY"] }}')
    nulls = one("", "", 'null = ["", "-"]', 'null = ["x", "AAA"]')
    return "\n".join(lines), nulls


def expect_records(made: FormatDecoder, messages: Sequence[Incoming]) -> int:
    """Rows that are taken hold what the message's one record holds. Returns how many are."""
    rows = made.columns(messages)
    for row, each in zip(rows, messages, strict=True):
        if not row["taken"]:
            continue
        decoded = made.parts(each)
        (record,) = [part.record for part in decoded.parts]
        assert not decoded.passed_over
        assert isinstance(record, Trade | Quote), (record, each.payload)
        assert row["key"] == (SYMBOLS.index(record.key) if record.key in SYMBOLS else -1)
        assert (row["ts_event"], row["ts_recv"], row["seq"]) == (record.ts_event, record.ts_recv, record.seq)
        numbers = [record.price, record.size, 0, 0] if isinstance(record, Trade) else [
            record.bid, record.ask, record.bid_size, record.ask_size
        ]  # fmt: skip
        assert [int(row[name]) * 10**9 for name in "abcd"] == numbers
        if isinstance(record, Trade):
            assert row["x"] == ["unknown", "buy", "sell"].index(record.side)
            assert row["token"] == (crc32(record.id.encode()) or 1 if record.id else 0)
    return int(rows["taken"].sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("container", "payloads"), [("json", JSON), ("msgpack", MSGPACK), ("protobuf", PROTOBUF)]
)
def test_records_are_those_that_each_message_has(
    folder: Path, container: str, payloads: st.SearchStrategy[bytes]
) -> None:
    @given(
        form=formats(container),
        given=st.lists(payloads, min_size=1, max_size=8),
        keys=st.lists(st.booleans()),
    )
    @settings(max_examples=300)
    def run(form: tuple[str, str], given: list[bytes], keys: list[bool]) -> None:
        made = FormatDecoder(load_format(made_format(folder, container, *form), of_messages=True), 1 << 16)
        made.read_symbols(SYMBOLS)
        messages = [
            Incoming("ticks", 3, at, b"AAA" if at < len(keys) else None, payload, ts_recv_ns=NOW)
            for at, payload in enumerate(given)
        ]
        expect_records(made, messages)

    run()


def decoder(folder: Path, container: str, records: str, more: str = "") -> FormatDecoder:
    made = FormatDecoder(
        load_format(made_format(folder, container, records, more), of_messages=True), 1 << 16
    )
    made.read_symbols(SYMBOLS)
    return made


TRADE = """
kind = "trade"
venue = "X"
time = { field = "t", format = "epoch-ms" }
fields = { symbol = "s", price = "p", size = "q", id = "i", side = "m" }
side_values = { true = "sell", false = "buy", 1 = "buy" }
"""


@pytest.mark.parametrize(
    "change", [{}, {"i": None}, {"x": "é"}, {"m": 1}, {"x": "a\\b"}, {"i": 2**64}, {"i": "é"}]
)
def test_trades_of_json_are_taken(folder: Path, change: dict[str, Any]) -> None:
    """Also where the readers of documents take them, and where one number of several is an integer."""
    made = decoder(folder, "json", TRADE)
    body = {"t": NOW // 10**6, "s": "AAA", "p": Raw("1.5"), "q": Raw("2"), "i": 7, "m": True}
    bodies = [body, body | {"p": Raw("1")} | change, body | {"p": "3"}]
    messages = [
        Incoming("ticks", 0, at, None, written(each).encode(), ts_recv_ns=NOW)
        for at, each in enumerate(bodies)
    ]
    assert expect_records(made, messages) == 3


def test_whole_numbers_among_floats_are_taken(folder: Path) -> None:
    made = decoder(folder, "msgpack", TRADE + "float_decimals = { price = 2 }")
    body = {"t": NOW // 10**6, "s": "AAA", "p": 1.5, "q": "2", "i": 7, "m": True}
    payloads = [packed(body), packed(body | {"p": 2}), packed(body | {"p": 0.25})]
    messages = [Incoming("ticks", 0, at, None, each, ts_recv_ns=NOW) for at, each in enumerate(payloads)]
    assert expect_records(made, messages) == 3


def test_a_side_that_is_missing_is_not_one_that_is_null(folder: Path) -> None:
    body = {"t": NOW // 10**6, "s": "AAA", "p": "1", "q": "2", "m": None}
    for container, encode in (("json", msgspec.json.encode), ("msgpack", msgspec.msgpack.encode)):
        made = decoder(folder, container, TRADE, 'null = ["-"]')
        bodies = [body, body | {"m": "-"}, {name: body[name] for name in "tspq"}, body | {"m": []}]
        messages = [Incoming("ticks", 0, 0, None, encode(each), ts_recv_ns=NOW) for each in bodies]
        assert made.columns(messages)["taken"].tolist() == [1, 1, 0, 0]
        assert expect_records(made, messages) == 2
        reasons = [part.record for each in messages[2:] for part in made.parts(each).parts]
        assert [isinstance(each, MalformedRecord) and each.reason for each in reasons] == [
            "missing_field"
        ] * 2


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


TEXTS = st.text(max_size=6).map(lambda text: text.encode("utf-8", "surrogatepass"))
EDGES = bytes.fromhex("00417f808f909fa0bfc0c1c2dfe0e1edeff0f1f4f5ff")
"""First and last bytes of each kind in UTF-8."""
BYTES = st.lists(st.sampled_from(list(EDGES)), max_size=7).map(bytes)


@given(st.lists(TEXTS | BYTES, max_size=4).map(b"".join))
def test_text_is_what_python_decodes(data: bytes) -> None:
    """Without overlong forms, surrogates, what is beyond U+10FFFF, and cut sequences."""
    around = np.frombuffer(b"\xe2" + data + b"\x82\xac", np.uint8)
    assert is_utf8(around, 1, 1 + len(data)) == is_text(around, 1, 1 + len(data)) == decodes(data)


@pytest.mark.parametrize("text", ["é", "日本", "𝄞", "a\x80"])
def test_texts_beyond_ascii_are_read_in_compiled_code(folder: Path, text: str) -> None:
    places = Places.compile(["s", "p"])
    assert places is not None
    document = {"s": text, "p": "1.5", text: 7}
    good = json.dumps(document, ensure_ascii=False).encode(), msgspec.msgpack.encode(document)
    for readers, payload in zip((JsonDocuments(), MsgpackDocuments()), good, strict=True):
        cut = payload.replace(text.encode(), text.encode()[:-1] + b"!")  # of the same length, and no text
        scanned = readers.scan(payload + cut, np.cumsum([len(payload), len(cut)]), places)
        assert scanned.read.tolist() == [True, False]
        column = ScannedColumns(scanned, np.array([0]), places.numbers).column("s")
        assert column is not None
        assert [column.words[place] for place in column.values] == [text]
    message = encoded({"s": text, "p": 1.5})
    with_reader = ProtobufDocuments(load_format(made_format(folder, "protobuf", ""), of_messages=True), None)
    by_place = with_reader.scan(message, np.array([len(message)]), places)
    assert by_place is not None
    assert by_place.read.tolist() == [True]
