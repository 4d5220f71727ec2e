"""Decoding as columns against `decode_record`: the same values where a row is taken, and none it refuses."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feeds.codec import MalformedRecord, decode_record, encode
from feeds.columns import ENCODINGS, OTHER, ColumnDecoder
from feeds.decimals import to_units
from feeds.market_data import AnyRecord, Bar, Quote, Trade
from feeds.record_identity import token_of
from tests.kit.records import BAR, QUOTE, START, TRADE

KEYS = ["V:AAA", "V:B", "VENUE:LONG-SYMBOL", "V:é"]
DECODER = ColumnDecoder(KEYS)
SIDES = ("unknown", "buy", "sell")


def columns_of(record: AnyRecord) -> tuple[Any, ...]:
    """What a row should hold; prices and sizes in 1e-9, None for one that is finer."""
    key = KEYS.index(record.key) if record.key in KEYS else -1
    received = record.clock == "receive"
    match record:
        case Trade():
            kind, numbers, x = 1, (record.price, record.size, 0, 0, 0), SIDES.index(record.side)
        case Quote():
            kind, numbers, x = 2, (record.bid, record.ask, record.bid_size, record.ask_size, 0), 0
        case Bar():
            kind, x = 3, record.interval_ns
            numbers = (record.open, record.high, record.low, record.close, record.volume)
    values = (*map(to_units, numbers), x)
    token = token_of(record, numbered=False)
    return (1, kind, received, key, record.ts_event, record.ts_recv, token, record.seq, *values)


def check(payload: bytes, encoding: str = "json") -> bool:
    """Compare, with whole records before and behind it; whether the row is taken."""
    whole = encode(decode_record(json.dumps(TRADE).encode()), encoding)
    kinds = np.full(3, ENCODINGS[encoding], np.uint8)
    before, row, after = DECODER.decode([whole, payload, whole], kinds)
    assert before["taken"] == after["taken"] == 1, "its neighbours"
    try:
        record = decode_record(payload, encoding)
    except MalformedRecord:
        assert not row["taken"]
        return False
    if row["taken"]:
        assert row.item() == columns_of(record)
    return bool(row["taken"])


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("plain", [TRADE, QUOTE, BAR], ids=["trade", "quote", "bar"])
def test_what_our_own_codec_writes_is_taken(plain: dict[str, Any], encoding: str) -> None:
    record = decode_record(json.dumps(plain).encode())
    assert check(encode(record, encoding), encoding)
    for more in ({"clock": "receive", "seq": 7}, {"unit": "contracts"}, {"symbol": "ZZZ"}):
        changed = decode_record(json.dumps(plain | more).encode())
        assert check(encode(changed, encoding), encoding)


def test_members_in_any_order_and_white_space_are_taken() -> None:
    assert check(json.dumps(dict(reversed(BAR.items())), indent=2).encode() + b" \n")
    assert check(json.dumps(TRADE | {"side": "sell", "id": "12-a", "unit": "lots"}).encode())


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "more",
    [{"extra": [1, {"price": 2}]}, {"id": "é"}, {"symbol": "é"}, {"price": "+1"}, {"id": 'a"\\'}],
    ids=["member", "text", "symbol", "sign", "escape"],
)
def test_what_is_unusual_but_right_is_read_to_the_same_values_or_left(
    more: dict[str, Any], encoding: str
) -> None:
    packer = json.dumps if encoding == "json" else msgspec.msgpack.encode
    packed = packer(TRADE | more)
    payload = packed.encode() if isinstance(packed, str) else packed
    decode_record(payload, encoding)
    check(payload, encoding)


def test_another_encoding_is_left() -> None:
    payload = json.dumps(TRADE).encode()
    rows = DECODER.decode([payload, payload], np.array([OTHER, 0], np.uint8))
    assert rows["taken"].tolist() == [0, 1]


def test_no_records_and_no_keys() -> None:
    assert len(DECODER.decode([])) == 0
    (row,) = ColumnDecoder([]).decode([json.dumps(TRADE).encode()])
    assert (row["taken"], row["key"]) == (1, -1)


NAMES = ["V", "AAA", "B", "VENUE", "LONG-SYMBOL", "", "a b", "a:b", "é", "x" * 64, "x" * 65]
ODD = ['q"', "\\", "\x7f", "٣"]
WORDS = "trade quote bar buy sell unknown base contracts contractz exchange receive"
DECIMALS = (
    "1 0 1.5 01.50 1. .5 -1 +1 1e3 1.0000000001 1.0000000000 9200000000 9200000000.000000001 0.000000001 "
    "999999999.999999999 1000000000 99999999999"
)
texts = st.sampled_from([*NAMES, *ODD, *WORDS.split(), *DECIMALS.split(), "1.5\n"])
numbers = st.sampled_from(
    [0, 1, -1, 5, 127, 128, 255, 256, 10**9, 2**31, 2**32, START, START // 1000, START // 10**6, 10**18,
     10**18 - 1, 9_200_000_000 * 10**9, 9_200_000_000 * 10**9 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
)  # fmt: skip
values = st.one_of(
    texts,
    numbers,
    st.none(),
    st.booleans(),
    st.sampled_from([1.5, 0.1, 7.12e-05, 1e22]),
    st.just([1]),
    st.just({}),
)
members = st.sampled_from(
    [*sorted({*TRADE, *QUOTE, *BAR}), "seq", "clock", "unit", "side", "id", "extra", "interval_nt", "prices"]
)


@settings(max_examples=400)
@given(
    plain=st.sampled_from([TRADE, QUOTE, BAR]),
    changes=st.dictionaries(members, values, max_size=3),
    dropped=st.sets(members, max_size=1),
    order=st.randoms(use_true_random=False),
)
def test_any_members_are_read_as_by_the_codec(
    plain: dict[str, Any], changes: dict[str, Any], dropped: set[str], order: Any
) -> None:
    made = [(name, value) for name, value in (plain | changes).items() if name not in dropped]
    order.shuffle(made)
    check(json.dumps(dict(made)).encode())
    check(json.dumps(dict(made), ensure_ascii=False).encode())
    check(msgspec.msgpack.encode(dict(made)), "msgpack")


@settings(max_examples=400)
@given(
    plain=st.sampled_from([TRADE, QUOTE, BAR]),
    encoding=st.sampled_from(["json", "msgpack"]),
    edits=st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from([*b'0159"\\{}[]:,. -+etn\n\x00\x7f\x80\xff\xcf']),
            st.sampled_from(["set", "insert", "delete", "cut"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_damaged_payloads_are_read_as_by_the_codec(
    plain: dict[str, Any], encoding: str, edits: list[tuple[int, int, str]]
) -> None:
    payload = bytearray(encode(decode_record(json.dumps(plain).encode()), encoding))
    for at, byte, how in edits:
        place = at % (len(payload) + 1)
        if how == "set":
            payload[place : place + 1] = bytes([byte])
        elif how == "insert":
            payload.insert(place, byte)
        elif how == "delete":
            del payload[place : place + 1]
        else:
            del payload[place:]
    check(bytes(payload), encoding)


@given(st.binary(max_size=60), st.sampled_from(["json", "msgpack"]))
@example(b"", "json")
@example(b'{"type":"trade","type":"quote"}', "json")
def test_any_bytes_are_read_as_by_the_codec(payload: bytes, encoding: str) -> None:
    check(payload, encoding)


@settings(max_examples=300)
@given(st.from_regex(r"[0-9]{0,12}\.?[0-9]{0,11}", fullmatch=True))
def test_decimal_text_is_exact(text: str) -> None:
    check(json.dumps(TRADE | {"price": text, "size": text}).encode())


def with_numbers(price: str, size: str) -> bytes:
    """A trade with these JSON numbers, as they are written."""
    return (
        json.dumps(TRADE | {"price": 7, "size": 8})
        .replace(": 7,", f": {price},")
        .replace(": 8", f": {size}")
        .encode()
    )


@pytest.mark.parametrize(
    ("price", "size"), [("127", "100"), ("126.49", "0"), ("0.000000001", "9200000000"), ("9200000000", "0.5")]
)
def test_plain_json_numbers_are_taken(price: str, size: str) -> None:
    assert check(with_numbers(price, size))


json_numbers = st.from_regex(r"-?[0-9]{0,12}(\.[0-9]{0,11})?([eE][+-]?[0-9]{0,3})?", fullmatch=True)


@settings(max_examples=400)
@given(json_numbers, json_numbers)
@example("7.12e-05", "1E3")
@example("-0", "-0.0")
@example("01", "00.5")
@example("1.", ".5")
def test_json_numbers_are_read_as_by_the_codec(price: str, size: str) -> None:
    check(with_numbers(price, size))


@settings(max_examples=200)
@given(st.from_regex(r"0?[0-9]{1,20}", fullmatch=True))
def test_integers_of_units_are_exact(text: str) -> None:
    check(json.dumps(TRADE | {"size": 7}).replace(": 7", f": {text}").encode())
