"""Files to records: small files of each shape always, real ones if FORETICK_DATA names their directory."""

import gzip
import os
from itertools import pairwise
from pathlib import Path

import pytest

from feeds.codec import MalformedRecord
from feeds.decimal9 import parse_fixed9
from feeds.file_format import load_format
from feeds.messages import AnyRecord, Bar, Quote, Trade
from feeds.replay import read_records

MINUTE = 60 * 10**9

CAPTURE = """\
1723161253937085768 {"stream":"x@depth@100ms","data":{"e":"depthUpdate","b":[["61737.63000000","0.00000000"]]}}
1723161254087891268 {"stream":"x@bookTicker","data":{"u":1,"s":"BTCUSDT","b":"61837.63","B":"3.78","a":"61837.64","A":"1"}}
1723161254087896568 {"stream":"x@trade","data":{"s":"BTCUSDT","t":7,"p":"61837.63000000","q":"0.02","T":1723161255342,"m":true}}
1723161254206652067 {"lastUpdateId":50093239218,"bids":[]}
1723161254210000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":8,"p":"61837.64","q":"0.5","T":1723161255342,"m":false}}
not-a-time {"stream":"x@trade"}
1723161254220000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":"61837.64"
1723161254230000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"q":"1","T":1723161255343,"m":false}}
1723161254240000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":"-5","q":"1","T":1723161255343,"m":false}}
1723161254250000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":1e5,"q":"1","T":1723161255343,"m":false}}
1723161254260000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":"5","q":"1","T":1723161255,"m":false}}
1723161254270000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":61837.649999999,"q":"1","T":1723161255343,"m":false}}
"""  # noqa: E501 - lines of a capture are as long as they are


def read(path: Path, form: str | Path, **options: object) -> tuple[list[AnyRecord], list[tuple[int, str]]]:
    bad: list[tuple[int, str]] = []

    def note(line: int, error: MalformedRecord) -> None:
        bad.append((line, error.reason))

    records = list(read_records(path, load_format(form), on_malformed=note, **options))  # type: ignore[arg-type]  # passed on
    return records, bad


@pytest.fixture(params=["plain", "gzip"])
def capture(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "capture"
    path.write_bytes(gzip.compress(CAPTURE.encode()) if request.param == "gzip" else CAPTURE.encode())
    return path


def test_a_capture_gives_trades_and_quotes_in_file_order(capture: Path) -> None:
    records, bad = read(capture, "binance_capture")
    quote, first, second, last = records
    assert isinstance(quote, Quote)
    assert (quote.ts_event, quote.clock) == (quote.ts_recv, "receive")
    assert (str(quote.bid), str(quote.bid_size), str(quote.ask), str(quote.ask_size)) == (
        *("61837.63", "3.78"),
        *("61837.64", "1"),
    )
    assert isinstance(first, Trade)
    assert isinstance(second, Trade)
    assert (first.id, first.side, first.clock, str(first.price)) == ("7", "sell", "exchange", "61837.63")
    assert (second.id, second.side) == ("8", "buy")
    assert first.ts_event == second.ts_event == 1_723_161_255_342_000_000
    assert first.skewed
    assert [each.seq for each in records] == [1, 2, 3, 4]
    assert isinstance(last, Trade)
    assert str(last.price) == "61837.649999999"  # a JSON number, never converted to a float
    assert bad == [
        *((6, "timestamp_unit"), (7, "json"), (8, "missing_field")),
        *((9, "price"), (10, "price"), (11, "timestamp_unit")),
    ]


def test_times_select_without_renumbering(capture: Path) -> None:
    late, _ = read(
        capture, "binance_capture", from_ns=1_723_161_255_342_000_000, until_ns=1_723_161_255_343_000_000
    )
    assert [each.seq for each in late] == [2, 3]


def test_a_broken_gzip_stream_is_reported_and_what_came_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "capture.gz"
    path.write_bytes(gzip.compress(CAPTURE.encode())[:-9])
    records, bad = read(path, "binance_capture")
    assert bad[-1] == (0, "type")
    assert len(records) <= 4


def test_headerless_quotes_in_fixed_est(tmp_path: Path) -> None:
    path = tmp_path / "ticks.csv"
    path.write_bytes(
        b"20200101 170000065,1.121200,1.121720,0\n20200701 170000065,1.1,1.2,0\n"
        b"\nx,1,2,0\n20200101 17\xff,1,2\n"
    )
    records, bad = read(path, "histdata_quotes")
    winter, summer = records
    assert isinstance(winter, Quote)
    assert winter.ts_event == winter.ts_recv == 1_577_916_000_065_000_000  # 2020-01-01T22:00:00.065Z
    assert summer.ts_event == 1_593_640_800_065_000_000  # 22:00 UTC in July as well: no daylight saving
    assert (str(winter.bid), str(winter.ask), winter.bid_size) == ("1.1212", "1.12172", 0)
    assert bad == [(4, "timestamp_unit"), (5, "timestamp_unit")]


def test_bars_with_quote_volume(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    path.write_text(
        "timestamp,open,high,low,close,volume\n"
        "2021-12-31 23:01:00.000000,46319.0,46385.0,46319.0,46377.0,2300413.7295\n"
        "2022-01-01 03:03:00.000000,46821.75,46821.75,46800.0,46800.0,218102.59507500002\n"
        "2022-01-01 03:04:00.000000,46821.75,46800.0,46800.0,46800.0,1\n"
        "2022-01-01 03:05:00.000000,46821.75\n"
    )
    records, bad = read(path, "btc_perp_bars")
    first, noisy = records
    assert isinstance(first, Bar)
    assert isinstance(noisy, Bar)
    assert (first.ts_event, first.interval_ns, first.unit) == (1_640_991_660_000_000_000, MINUTE, "quote")
    assert (str(first.open), str(first.high), str(first.low), str(first.close)) == (
        "46319",
        "46385",
        "46319",
        "46377",
    )
    assert str(noisy.volume) == "218102.595075"
    assert bad == [(4, "bar_ohlc"), (5, "missing_field")]


def test_bars_whose_columns_come_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "index.csv"
    path.write_text("Date,Open,Close,High,Low,Volume\n11/5/2019 9:30,3080.8,3080.49,3081.47,3080.3,0\n")
    (bar,), bad = read(path, "sp500_bars")
    assert isinstance(bar, Bar)
    assert bar.ts_event == 1_572_964_200_000_000_000  # 14:30 UTC: New York was on winter time since the 3rd
    assert (str(bar.open), str(bar.close), str(bar.high), str(bar.low)) == (
        "3080.8",
        "3080.49",
        "3081.47",
        "3080.3",
    )
    assert bad == []


def test_a_new_format_needs_no_code(tmp_path: Path) -> None:
    form = tmp_path / "fifth.toml"
    form.write_text(
        """
        description = "semicolons, close-stamped five-minute bars, several symbols"
        container = "csv"
        delimiter = ";"
        [[records]]
        kind = "bar"
        venue = "XETR"
        unit = "shares"
        interval = "5m"
        stamp = "close"
        match = { field = "class", prefix = "EQ" }
        time = { field = "t", format = "%d.%m.%Y %H:%M", zone = "Europe/Berlin" }
        fields = { symbol = "sym", open = "o", high = "h", low = "l", close = "c", volume = "v" }
        """
    )
    path = tmp_path / "fifth.csv"
    path.write_text(
        "class;sym;t;v;c;l;h;o\nEQTY;SAP;01.07.2024 09:05;10;2;1;3;1.5\nBOND;X;01.07.2024 09:05;1;1;1;1;1\n"
    )
    (bar,), bad = read(path, form)
    assert isinstance(bar, Bar)
    assert (bar.symbol, str(bar.open), str(bar.high), str(bar.low), str(bar.close)) == (
        "SAP",
        "1.5",
        "3",
        "1",
        "2",
    )
    assert bar.ts_event == 1_719_817_200_000_000_000  # opened 07:00 UTC
    assert (bar.interval_ns, bad) == (5 * MINUTE, [])


def test_plain_json_lines_need_no_receive_time(tmp_path: Path) -> None:
    form = tmp_path / "lines.toml"
    form.write_text(
        """
        description = "json lines"
        container = "jsonl"
        [[records]]
        kind = "trade"
        venue = "V"
        time = { field = "at", format = "epoch-s" }
        fields = { symbol = "s", price = "px.last", size = "n" }
        """
    )
    path = tmp_path / "lines.jsonl"
    path.write_text('{"at": 1577916000.065, "s": "A", "px": {"last": 0.1}, "n": 3}\n\n[1]\n')
    (trade,), bad = read(path, form)
    assert isinstance(trade, Trade)
    assert (trade.price, trade.size, trade.ts_event) == (10**8, 3 * 10**9, 1_577_916_000_065_000_000)
    assert trade.side == "unknown"
    assert bad == [(3, "missing_field")]


def real(name: str) -> Path:
    folder = os.environ.get("FORETICK_DATA")
    if folder is None:
        pytest.skip("set FORETICK_DATA to the directory with the real data files")
    return Path(folder) / name


def test_real_capture() -> None:
    records, bad = read(real("binance_spot_btcusdt_20240808_raw.gz"), "binance_capture")
    trades = [each for each in records if isinstance(each, Trade)]
    quotes = [each for each in records if isinstance(each, Quote)]
    assert (len(trades), len(quotes), bad) == (9_757, 28_040, [])
    assert (str(trades[0].price), str(trades[-1].price)) == ("61837.63", "61685.99")
    assert min(t.price for t in trades) == parse_fixed9("61583.22")
    assert max(t.price for t in trades) == parse_fixed9("61860.80")
    assert all(int(b.id) == int(a.id) + 1 for a, b in pairwise(trades))
    assert sum(a.ts_event == b.ts_event for a, b in pairwise(trades)) == 6_534
    assert all(trade.skewed for trade in trades)
    assert trades[0].ts_event == 1_723_161_255_342_000_000
    assert all(quote.clock == "receive" and not quote.skewed for quote in quotes)


def test_real_quotes() -> None:
    records, bad = read(real("histdata_eurusd_ticks_20200101.csv"), "histdata_quotes")
    quotes = [each for each in records if isinstance(each, Quote)]
    assert (len(quotes), bad) == (9_500, [])
    assert quotes[0].ts_event == 1_577_916_000_065_000_000
    assert quotes[-1].ts_event == quotes[0].ts_event + (6 * 3600 + 52) * 10**9 + 60_000_000
    assert min(q.bid for q in quotes) == parse_fixed9("1.12106")
    assert max(q.bid for q in quotes) == parse_fixed9("1.12245")
    spreads = [q.ask - q.bid for q in quotes]
    assert (min(spreads), max(spreads)) == (parse_fixed9("0.00001"), parse_fixed9("0.00072"))
    assert all(a.ts_event < b.ts_event for a, b in pairwise(quotes))
    assert max(b.ts_event - a.ts_event for a, b in pairwise(quotes)) == 85_693_000_000


def test_real_perpetual_bars() -> None:
    records, bad = read(real("btc_perp_1m_202201.csv"), "btc_perp_bars")
    bars = [each for each in records if isinstance(each, Bar)]
    assert (len(bars), bad) == (45_031, [])
    assert bars[0].ts_event == 1_640_991_660_000_000_000  # 2021-12-31T23:01Z
    assert bars[-1].ts_event == 1_643_693_460_000_000_000  # 2022-02-01T05:31Z
    assert all(b.ts_event - a.ts_event == MINUTE for a, b in pairwise(bars))
    assert min(b.low for b in bars) == parse_fixed9("32837")


def test_real_index_bars() -> None:
    records, bad = read(real("sp500_index_1m_20191105.csv"), "sp500_bars")
    bars = [each for each in records if isinstance(each, Bar)]
    assert (len(bars), bad) == (1_563, [])
    assert (str(bars[0].open), str(bars[-1].close)) == ("3080.8", "3092.91")
    gaps = [b.ts_event - a.ts_event for a, b in pairwise(bars)]
    assert sorted(set(gaps)) == [MINUTE, (17 * 60 + 30) * MINUTE]
    assert gaps.count((17 * 60 + 30) * MINUTE) == 3
    assert all(b.volume == 0 for b in bars)
