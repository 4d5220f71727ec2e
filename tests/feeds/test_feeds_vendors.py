"""Notations of vendors, venues and spreadsheets, each file as it is delivered."""

import gzip
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.market_data import Trade
from feeds.timestamps import time_parser
from tests.feeds.declared import BARS, TRADES, exact, ns, read, read_file

TEN = 1_709_632_800_000_000_000
"""2024-03-05T10:00Z."""
JSON = TRADES.replace('"csv"', '"json"').replace("iso", "epoch-ms")


def test_trades_of_tardis(tmp_path: Path) -> None:
    text = (
        "exchange,symbol,timestamp,local_timestamp,id,side,price,amount\n"
        "binance-futures,BTCUSDT,1709632800012000,1709632800017313,4645109281,sell,66402.1,0.052\n"
        "binance-futures,BTCUSDT,1709632800044000,1709632800049555,4645109282,buy,66402.2,1.1E-5\n"
        "deribit,BTC-PERPETUAL,1709632800045123,1709632800050000,297311,unknown,66390.5,10\n"
    )
    path = tmp_path / "binance-futures_trades_2024-03-05_BTCUSDT.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    found = read_file("tardis_trades", path)
    assert found.bad == []
    assert [(each.key, each.ts_event - TEN, each.side) for each in found.trades] == [
        ("binance-futures:BTCUSDT", 12_000_000, "sell"),
        ("binance-futures:BTCUSDT", 44_000_000, "buy"),
        ("deribit:BTC-PERPETUAL", 45_123_000, "unknown"),
    ]
    assert [exact(each.size) for each in found.trades] == [Decimal(t) for t in ("0.052", "0.000011", "10")]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", [True, False])
def test_commas_separators_marks_and_line_ends(mark: str, end: str, header: bool) -> None:
    """What a European spreadsheet writes."""
    form = BARS.replace("iso", "excel")
    rows = ["45356,4166666667;1.101,25;1.102,5;1.101;1.102;12.345.678,5", "45356,4173611111;1;2;1;2;0"]
    if header:
        rows.insert(0, "time;open;high;low;close;volume")
    else:
        names = ("time", "open", "high", "low", "close", "volume")
        for at, name in enumerate(names):
            form = form.replace(f'"{name}"', str(at))
    keys = f'delimiter = ";"\ndecimal = ","\nthousands = "."\nheader = {str(header).lower()}\n'
    found = read(f"{keys}{form}", f"{mark}{end.join(rows)}{end}")
    assert found.bad == []
    first, second = found.bars
    assert [(bar.ts_event - TEN) // 10**9 for bar in found.bars] == [0, 60]
    assert [exact(each) for each in (first.open, first.high, first.low, first.close, first.volume)] == [
        Decimal(text) for text in ("1101.25", "1102.5", "1101", "1102", "12345678.5")
    ]
    assert exact(second.close) == 2


@given(st.datetimes(datetime(1990, 1, 1), datetime(2099, 12, 31)), st.integers(9, 12))
def test_spreadsheet_dates_are_exact_to_the_millisecond(moment: datetime, decimals: int) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    since = moment - datetime(1899, 12, 30)
    days = Decimal(since // timedelta(milliseconds=1)) / 86_400_000
    parse = time_parser("excel")
    text = f"{days:.{decimals}f}"
    assert parse(text).ns == ns(moment.replace(tzinfo=UTC))
    whole, part = text.split(".")
    assert parse(f"{whole} 0.{part}") == parse(text)


@pytest.mark.parametrize("text", ["45356.41667", "45356.1", "-1", "", "x", "45356 ", "1/2", "4_5", "nan"])
def test_spreadsheet_dates_that_were_rounded_are_refused(text: str) -> None:
    if text == "45356.1":  # a tenth of a day is 2:24
        assert time_parser("excel")(text).ns == ns(datetime(2024, 3, 5, 2, 24, tzinfo=UTC))
        return
    with pytest.raises(ValueError, match=r"rounded|not a time"):
        time_parser("excel")(text)


DOCUMENTS = [
    '{"time":1709632801000,"price":7.12e-05,"size":100.0,"id":"1"}',
    '{"time":1709632802000,"price":0.0000713,\n  "size":1e3,"id":"2"}',
    '{"time":1709632861000,"price":-1,"size":1,"id":"3"}',
]


@pytest.mark.parametrize(
    "text",
    [
        f"[{','.join(DOCUMENTS)}]",
        f"\ufeff[\r\n{', '.join(DOCUMENTS)}\r\n]\r\n",
        f"[[{'],['.join(DOCUMENTS)}]]",
        "\n".join(DOCUMENTS),
        f"[{DOCUMENTS[0]}][{DOCUMENTS[1]},{DOCUMENTS[2]}]",
    ],
)
def test_json_arrays(text: str) -> None:
    form = JSON.replace('symbol = "S"', 'symbol = "S"\neach = "$"') if text.startswith("[[") else JSON
    found = read(form, text)
    assert [(exact(each.price), exact(each.size), each.id) for each in found.trades] == [
        (Decimal("0.0000712"), Decimal(100), "1"),
        (Decimal("0.0000713"), Decimal(1000), "2"),
    ]
    (refused,) = found.refused
    assert refused == (1 + text[: text.index(DOCUMENTS[2])].count("\n"), "price")


def test_what_stands_in_an_array_before_a_damage_is_read() -> None:
    found = read(JSON, f'[{DOCUMENTS[0]},\n{{"time":17,')
    assert isinstance(found.records[0], Trade)
    assert found.refused == [(2, "json")]
    assert read(JSON, f"[{DOCUMENTS[0]}").bad == [(1, "json", "truncated: the array is not closed")]
    assert read(JSON, "[" * 100_000).refused == [(1, "json")]
