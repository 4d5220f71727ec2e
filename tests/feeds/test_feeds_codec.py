"""Checks on records: which pass, which are refused, and why."""

import json
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.codec import (
    MAX_BYTES,
    MalformedRecord,
    decode_message,
    decode_record,
    encode,
    header_encoding,
    make_headers,
)
from feeds.decimals import LIMIT, Fixed, from_units, parse_fixed
from feeds.market_data import (
    Action,
    Answer,
    AnyMessage,
    AnyRecord,
    Bar,
    Book,
    DataUpdated,
    DeadLetter,
    Event,
    InputRange,
    Latency,
    Quote,
    State,
    Status,
    Text,
    Trade,
)
from metrics.catalogue import REASONS
from tests.kit.records import BAR, QUOTE, START, TRADE


def refused(record: object, encoding: str = "json") -> MalformedRecord:
    payload = json.dumps(record).encode() if encoding == "json" else msgspec.msgpack.encode(record)
    with pytest.raises(MalformedRecord) as caught:
        decode_record(payload, encoding)
    return caught.value


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_trade_is_read_exactly(encoding: str) -> None:
    record = {**TRADE, "side": "sell", "id": "3735683259"}
    payload = json.dumps(record).encode() if encoding == "json" else msgspec.msgpack.encode(record)
    trade = decode_record(payload, encoding)
    assert trade == Trade(
        venue="V",
        symbol="AAA",
        ts_event=START,
        ts_recv=START + 5,
        price=from_units(61_837_630_000_000),
        size=from_units(3_000_000),
        side="sell",
        id="3735683259",
    )
    assert isinstance(trade, Trade)
    assert type(trade.price) is Fixed
    assert trade.key == "V:AAA"
    assert not trade.skewed


def test_integers_of_msgpack_are_nano_units() -> None:
    trade = decode_record(msgspec.msgpack.encode({**TRADE, "price": 61_837_630_000_000}), "msgpack")
    assert isinstance(trade, Trade)
    assert str(trade.price) == "61837.63"


@given(
    st.from_regex(r"(0|[1-9][0-9]{0,14})(\.[0-9]{1,18})?", fullmatch=True), st.sampled_from(["", "e", "E"])
)
@example("127", "")
@example("126.49", "")
@example("7.12", "e")
def test_numbers_of_json_are_what_they_say(number: str, exponent: str) -> None:
    text = f"{number}{exponent}-05" if exponent else number
    payload = json.dumps({**BAR, "volume": 7}).replace(": 7", f": {text}").encode()
    try:
        expected = parse_fixed(text)
    except ValueError:
        with pytest.raises(MalformedRecord, match="decimals"):
            decode_record(payload)
    else:
        bar = decode_record(payload)
        assert isinstance(bar, Bar)
        assert bar.volume == expected


def test_floats_of_msgpack_are_refused() -> None:
    error = refused({**TRADE, "price": 61837.5}, "msgpack")
    assert (error.reason, "got float" in error.message) == ("price", True)


def test_prices_travel_as_decimal_strings() -> None:
    trade = decode_record(json.dumps(TRADE).encode())
    for encoding, loads in (("json", json.loads), ("msgpack", msgspec.msgpack.decode)):
        wire = loads(encode(trade, encoding))
        assert (wire["type"], wire["price"], wire["size"]) == ("trade", "61837.63", "0.003")


names = st.text(st.characters(codec="ascii", categories=("Lu", "Ll", "Nd")), min_size=1, max_size=12)
prices = st.integers(1, LIMIT).map(Fixed)
sizes = st.integers(0, LIMIT).map(Fixed)
times = st.integers(631_152_000 * 10**9, 4_102_444_800 * 10**9 - 1)
common = {
    "venue": names,
    "symbol": names,
    "ts_event": times,
    "ts_recv": times,
    "seq": st.integers(0, 2**63 - 1),
}
trades = st.builds(
    Trade, **common, price=prices, size=sizes, side=st.sampled_from(["buy", "sell", "unknown"])
)
quotes = st.builds(Quote, **common, bid=prices, ask=prices, bid_size=sizes, ask_size=sizes)


positive = st.integers(1, 10**9 * 10**18).map(Fixed)
levels = st.lists(st.tuples(positive, positive), max_size=10, unique_by=lambda level: level[0]).map(sorted)
common = st.fixed_dictionaries(
    {
        "venue": st.just("V"),
        "symbol": st.sampled_from(["AAA", "*"]),
        "ts_event": st.integers(START, START + 10**15),
        "ts_recv": st.integers(START, START + 10**15),
    }
)
events = st.one_of(
    common.flatmap(lambda c: st.builds(Text, text=st.text(min_size=1).filter(str.strip), **just(c))),
    common.flatmap(lambda c: st.builds(Status, state=st.sampled_from(get_args(State)), **just(c))),
    common.flatmap(lambda c: st.builds(Action, action=st.just("split"), factor=positive, **just(c))),
    common.flatmap(
        lambda c: st.builds(Book, bids=levels.map(lambda b: b[::-1]), asks=levels, **just(c))
    ).filter(lambda book: bool(book.bids or book.asks)),
)


def just(members: dict[str, object]) -> dict[str, st.SearchStrategy[object]]:
    return {name: st.just(value) for name, value in members.items()}


@given(events, st.sampled_from(["json", "msgpack"]))
def test_events_come_back(event: Event, encoding: str) -> None:
    assert decode_record(encode(event, encoding), encoding) == event


@given(st.one_of(trades, quotes), st.sampled_from(["json", "msgpack"]))
def test_encode_and_decode_are_inverse(record: Trade | Quote, encoding: str) -> None:
    assert decode_record(encode(record, encoding), encoding) == record


def decoded(payload: bytes, encoding: str) -> AnyRecord | MalformedRecord:
    try:
        return decode_record(payload, encoding)
    except MalformedRecord as error:
        return error


@given(st.binary(max_size=200), st.sampled_from(["json", "msgpack"]))
def test_any_bytes_give_a_record_or_a_reason(payload: bytes, encoding: str) -> None:
    result = decoded(payload, encoding)
    if isinstance(result, MalformedRecord):
        assert result.reason in REASONS
        assert result.message
    else:
        assert decode_record(encode(result, encoding), encoding) == result


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        ({"price": None}, "price", "got NoneType"),
        ({"price": True}, "price", "got bool"),
        ({"price": "6.1e"}, "price", "not a decimal number"),
        ({"price": "NaN"}, "price", "not a decimal number"),
        ({"price": 1e-19}, "price", "more than 18 decimals"),
        ({"price": "0"}, "price", "above 0"),
        ({"price": "-1"}, "price", "above 0"),
        ({"price": 0}, "price", "above 0"),
        ({"price": "1000000000000001"}, "price", "beyond 1e15"),
        ({"price": 10**30}, "price", "beyond 1e15"),
        ({"price": 1e30}, "price", "beyond 1e15"),
        ({"size": "-0.1"}, "size", "negative"),
        ({"size": -0.5}, "size", "negative"),
        ({"size": "1e16"}, "size", "beyond"),
        ({"ts_event": START // 10**6}, "timestamp_unit", "ts_event 1723161255000 looks like milliseconds"),
        ({"ts_event": START // 10**3}, "timestamp_unit", "looks like microseconds"),
        ({"ts_recv": START // 10**9}, "timestamp_unit", "ts_recv 1723161255 looks like seconds"),
        ({"ts_event": 0}, "timestamp_unit", "not a nanosecond time"),
        ({"ts_event": -5}, "timestamp_unit", "not a nanosecond time"),
        ({"ts_event": START * 1000}, "timestamp_unit", "not a nanosecond time"),
        ({"ts_event": "now"}, "type", "int"),
        ({"ts_event": 1.5}, "type", "int"),
        ({"symbol": ""}, "symbol", "1 to 64"),
        ({"symbol": "B TC"}, "symbol", "blanks"),
        ({"symbol": "a\u0000"}, "symbol", "printable"),
        ({"venue": "A:B"}, "symbol", "colons"),
        ({"symbol": "X" * 65}, "symbol", "64"),
        ({"symbol": 5}, "type", "str"),
        ({"side": "short"}, "type", "short"),
        ({"type": "option"}, "type", "option"),
    ],
)
def test_refused_trades_say_why(change: dict[str, object], reason: str, says: str) -> None:
    error = refused({**TRADE, **change})
    assert error.reason == reason
    assert says in error.message


@pytest.mark.parametrize("field", ["price", "size", "symbol", "venue", "ts_event", "ts_recv"])
def test_missing_fields_are_named(field: str) -> None:
    error = refused({k: v for k, v in TRADE.items() if k != field})
    assert error.reason == "missing_field"
    assert field in error.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"high": "2.5"}, "bar_ohlc"),
        ({"low": "2.5"}, "bar_ohlc"),
        ({"open": "4.1"}, "bar_ohlc"),
        ({"low": "-1"}, "price"),
        ({"volume": "-1"}, "size"),
        ({"interval_ns": 0}, "type"),
    ],
)
def test_refused_bars_say_why(change: dict[str, object], reason: str) -> None:
    assert isinstance(decode_record(json.dumps(BAR).encode()), Bar)
    assert refused({**BAR, **change}).reason == reason


def test_refused_quotes_say_why() -> None:
    assert isinstance(decode_record(json.dumps(QUOTE).encode()), Quote)
    assert refused({**QUOTE, "bid": "0"}).reason == "price"
    assert refused({**QUOTE, "ask_size": "-1"}).reason == "size"


@pytest.mark.parametrize(
    ("payload", "encoding", "reason"),
    [
        (b"", "json", "json"),
        (b"{", "json", "json"),
        (b"\xff\xfe", "json", "json"),
        (b'{"type":"trade","venue":"\xff"}', "json", "json"),
        (b"[" * 100_000, "json", "type"),
        (b"[]", "json", "type"),
        (b"\xc1", "msgpack", "msgpack"),
        (b"", "msgpack", "msgpack"),
        (b"{}", "avro", "encoding"),
    ],
)
def test_payloads_that_are_no_record(payload: bytes, encoding: str, reason: str) -> None:
    with pytest.raises(MalformedRecord) as caught:
        decode_record(payload, encoding)
    assert caught.value.reason == reason


def test_ten_megabytes_are_refused_by_size_and_a_megabyte_is_not() -> None:
    with pytest.raises(MalformedRecord, match="limit of 1048576") as caught:
        decode_record(b"x" * 10_000_000)
    assert caught.value.reason == "oversize"
    payload = json.dumps(TRADE).encode()
    assert decode_record(payload + b" " * (MAX_BYTES - len(payload)))


def test_received_before_it_happened_is_kept_and_flagged() -> None:
    trade = decode_record(json.dumps({**TRADE, "ts_recv": START - 1_272_000_000}).encode())
    assert trade.skewed


def test_unknown_members_are_ignored() -> None:
    assert decode_record(json.dumps({**TRADE, "mood": 1.5}).encode()) == decode_record(
        json.dumps(TRADE).encode()
    )


ANSWER = Answer(
    session="btc",
    symbol="BINANCE:BTCUSDT",
    question="trend",
    question_hash="ab12",
    text="up",
    choice="up",
    logit_gap=1.25,
    probability=None,
    data_version=7,
    inputs=[InputRange("md.trades.v1", 0, 10, 19)],
    as_of=START,
    staleness_ns=1000,
    model="embedded",
    model_revision="r1",
    untrained=True,
    latency=Latency(forward_ns=5),
    reused_tokens=100,
    computed_tokens=12,
    flags=("untrained",),
    published_at=START + 1,
)
LETTER = DeadLetter(error="bad", reason="json", topic="t", partition=0, offset=3, payload=b"\x00\xff")


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "message", [ANSWER, LETTER, DataUpdated(session="s", data_version=2, as_of=START, bars=1)]
)
def test_messages_out_come_back_equal(message: AnyMessage, encoding: str) -> None:
    assert decode_message(encode(message, encoding), encoding) == message


def test_json_of_an_answer_names_its_type_and_a_dead_letter_is_base64() -> None:
    assert json.loads(encode(ANSWER))["type"] == "answer"
    assert json.loads(encode(LETTER))["payload"] == "AP8="


def test_headers_describe_the_message() -> None:
    headers = make_headers(ANSWER, "json", "foretick", 12)
    assert headers == {"schema": b"answer.v1", "encoding": b"json", "source": b"foretick", "seq": b"12"}
    assert header_encoding({**headers, "encoding": b"msgpack"}) == "msgpack"
    assert header_encoding({}) == header_encoding({"encoding": b""}) == "json"
    with pytest.raises(ValueError, match="avro"):
        encode(ANSWER, "avro")
