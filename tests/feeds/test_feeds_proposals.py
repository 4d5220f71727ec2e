"""Formats that are proposed for data: each reads what a format written by hand would read."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from feeds.file_format import FormatError, load_format
from feeds.market_data import Bar, Quote, Trade
from feeds.payloads.format_decoder import FormatDecoder
from feeds.proposals.form import Given, propose
from feeds.proposals.observed import Observed, observe
from feeds.proposals.sample import Sample, of_file, of_messages, of_text
from feeds.recorded_file import read_records
from feeds.source import Incoming

CASES = Path(__file__).parents[1] / "cases"
NOW = 1_767_225_600 * 10**9
HERE = Given("V", "S")
REFUSED = {
    "duplicate_column": "two columns 'close'",
    "signed_sizes": "no trade, quote or bar",  # of numbers in arrays nothing tells the meaning
}
"""Cases without a proposal that can be read."""
SAID = {
    "close_stamp_inclusive": {"stamp": "close"},
    "dst_repeated_hour": {"zone": "America/New_York"},
}
"""What a sample of these cases cannot tell."""


def records(form: Path, data: Path) -> list[Any]:
    return list(read_records(data, load_format(form)))


def refuse(made: Path, data: Path) -> None:
    """Propose a format, and read by it."""
    made.write_text(propose(of_file(data), HERE, "x").text)
    records(made, data)


@pytest.mark.parametrize("name", sorted(each.name for each in CASES.iterdir()))
def test_what_real_feeds_deliver_is_understood(name: str, tmp_path: Path) -> None:
    (data,) = (CASES / name).glob("input.*")
    made = tmp_path / "form.toml"
    declared = load_format(CASES / name / "format.toml") if name not in REFUSED else None
    if declared is None:
        with pytest.raises(FormatError, match=REFUSED[name]):
            refuse(made, data)
        return
    first = declared.records[0]
    said = SAID.get(name, {})
    given = Given(
        "" if "venue" in first.fields else first.venue,
        "" if "symbol" in first.fields else first.symbol,
        zone=said.get("zone", "" if first.time.zone == "UTC" else first.time.zone),
    )
    text = propose(of_file(data), given, "x").text
    if "stamp" in said:
        text = text.replace("[[records]]\n", '[[records]]\nstamp = "close"\n')
    made.write_text(text)
    expected = [
        msgspec.structs.replace(each, unit="base") for each in records(CASES / name / "format.toml", data)
    ]
    assert records(made, data) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "Datum;Zeit\n1;2\n3;4\n",
            None,
            id="no prices",
        ),
        pytest.param(
            "date;time;open;high;low;close;volume\n"
            "05.03.2024;10:00;1,5;2,5;1,25;2;7\n06.03.2024;10:01;1,5;2,5;1,25;2;7\n",
            ("bar", "2", 1709632800),
            id="decimal commas, days first",
        ),
        pytest.param(
            "Ticker\tTimestamp\tLast Price\tLast Size\tSide\n"
            "AAA\t1709632800\t10.5\t3\tB\nAAA\t1709632801\t10.6\t3\tS\n",
            ("trade", "10.5", 1709632800),
            id="tabs and other names",
        ),
        pytest.param(
            "1709632800000,10.1,10.2\n1709632801000,10.2,10.3\n",
            ("quote", "10.1", 1709632800),
            id="no header, bid and ask",
        ),
        pytest.param(
            '[{"t": 1709632800.25, "px": "1.5", "qty": 2}, {"t": 1709632801.25, "px": "1.6", "qty": 2}]',
            ("trade", "1.5", 1709632800),
            id="an array of JSON",
        ),
        pytest.param(
            '{"data": {"bid": 1.5, "ask": 1.75}, "ts": "2024-03-05T10:00:00Z"}\n'
            '{"data": {"bid": 1.5, "ask": 1.75}, "ts": "2024-03-05T10:00:01Z"}\n',
            ("quote", "1.5", 1709632800),
            id="members of members",
        ),
    ],
)
def test_dialects(tmp_path: Path, text: str, expected: tuple[str, str, int] | None) -> None:
    data = tmp_path / "data"
    data.write_text(text)
    if expected is None:
        with pytest.raises(FormatError, match="no trade, quote"):
            propose(of_text(text), HERE, "x")
        return
    proposal = propose(of_file(data), HERE, "x")
    (tmp_path / "form.toml").write_text(proposal.text)
    found = records(tmp_path / "form.toml", data)
    kind, price, seconds = expected
    first = found[0]
    assert len(found) == 2
    assert first.ts_event // 10**9 == seconds
    match first:
        case Bar():
            assert (kind, str(first.close)) == ("bar", price)
        case Quote():
            assert (kind, str(first.bid)) == ("quote", price)
        case Trade():
            assert (kind, str(first.price)) == ("trade", price)
            if "Side" in text:
                assert [each.side for each in found] == ["buy", "sell"]


def test_days_and_months_that_may_be_swapped_are_said(tmp_path: Path) -> None:
    rows = "".join(f"0{day}/02/2024 10:00:00,1.5,2\n" for day in (3, 4, 5))
    proposal = propose(of_text("time,price,size\n" + rows), HERE, "x")
    assert "'%d/%m/%Y %H:%M:%S'" in proposal.text.replace('"', "'")
    assert any("say --time-format" in note for note in proposal.notes)
    told = Given("V", "S", time_format="%m/%d/%Y %H:%M:%S")
    assert "%m/%d/%Y" in propose(of_text("time,price,size\n" + rows), told, "x").text


def messages(*bodies: Any, key: bytes | None = None) -> list[Incoming]:
    return [
        Incoming(
            "t", 0, n, key, each if isinstance(each, bytes) else json.dumps(each).encode(), ts_recv_ns=NOW
        )
        for n, each in enumerate(bodies)
    ]


def read(sample: Sample, sent: list[Incoming], tmp_path: Path, given: Given = HERE) -> Observed:
    path = tmp_path / "form.toml"
    path.write_text(propose(sample, given, "x").text)
    return observe(sent, FormatDecoder(load_format(path, of_messages=True), 1 << 20))


def test_kinds_of_messages_are_told_apart(tmp_path: Path) -> None:
    trade = {"e": "trade", "s": "BTCUSDT", "p": "61837.63", "q": "0.5", "m": True}
    sent = messages(
        {"result": None, "id": 1},
        *({**trade, "T": NOW // 10**6 + n, "t": n} for n in range(20)),
        *({"e": "depth", "U": n, "b": [["1", "2"]]} for n in range(5)),
    )
    found = read(of_messages(sent), sent, tmp_path, Given("BINANCE"))
    assert found.symbols == ["BINANCE:BTCUSDT"]
    assert len(found.records["BINANCE:BTCUSDT"]) == 20
    assert not found.refused
    assert {each.side for each in found.records["BINANCE:BTCUSDT"] if isinstance(each, Trade)} == {"sell"}


def test_arrays_in_messages_and_keys_as_symbols(tmp_path: Path) -> None:
    data = [{"ts": NOW // 10**6 + n, "px": f"1.{n}", "sz": "2"} for n in range(3)]
    sent = messages(*({"arg": "trades", "data": data} for _ in range(5)), key=b"AAA")
    found = read(of_messages(sent), sent, tmp_path, Given("V"))
    assert {symbol: len(each) for symbol, each in found.records.items()} == {"V:AAA": 15}


def test_binary_floats_have_the_decimals_of_the_sample(tmp_path: Path) -> None:
    bodies = [msgspec.msgpack.encode({"ts": NOW // 10**6, "price": p, "size": 2}) for p in (1.25, 1.5, 1.125)]
    sent = messages(*bodies)
    found = read(of_messages(sent), sent, tmp_path)
    (own,) = found.records.values()
    assert [str(each.price) for each in own if isinstance(each, Trade)] == ["1.25", "1.5", "1.125"]
    assert found.decimals("V:S") == 3


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (messages(b"\0\0\0\0\1abc"), "schema ids of a registry"),
        (messages(b""), "no message has a payload"),
        (messages({"a": 1}, msgspec.msgpack.encode({"a": 1})), "some messages are JSON and some msgpack"),
    ],
)
def test_messages_that_cannot_be_understood(sent: list[Incoming], why: str) -> None:
    with pytest.raises(FormatError, match=why):
        of_messages(sent)


def test_bars_of_what_was_seen(tmp_path: Path) -> None:
    sent = messages(*({"ts": NOW // 10**6 + 250 * n, "price": 10 + n % 3, "size": 1} for n in range(40)))
    found = read(of_messages(sent), sent, tmp_path)
    assert found.interval() == 5 * 10**9
    first, *_ = found.bars("V:S", 10**9, 2)
    shown = tuple(
        Decimal(str(each)) for each in (first.open, first.high, first.low, first.close, first.volume)
    )
    assert shown == (10, 12, 10, 10, 4)
