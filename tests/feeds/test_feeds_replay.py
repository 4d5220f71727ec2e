"""Files to records: small files of each shape always, real ones if FORETICK_DATA names their directory."""

import gzip
import io
import os
import tempfile
import zipfile
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.containers import CorruptFile, texts
from feeds.decimals import parse_fixed
from feeds.file_format import FormatError
from feeds.market_data import Bar, Quote, Trade
from feeds.zstd import zstd
from tests.feeds.declared import MINUTE, read, read_file

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
1723161254250000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":"1e","q":"1","T":1723161255343,"m":false}}
1723161254260000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":"5","q":"1","T":1723161255,"m":false}}
1723161254270000000 {"stream":"x@trade","data":{"s":"BTCUSDT","t":9,"p":61837.649999999,"q":"1","T":1723161255343,"m":false}}
"""  # noqa: E501 - lines of a capture are as long as they are


def zipped(text: bytes, *names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for name in names or ("folder/capture.txt",):
            archive.writestr(name, text)
    return packed.getvalue()


PACK = {"plain": bytes, "gzip": gzip.compress, "zip": zipped, "zstd": zstd.compress}


@pytest.fixture(params=PACK)
def capture(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "capture"
    path.write_bytes(PACK[request.param](CAPTURE.encode()))
    return path


def test_a_capture_gives_trades_and_quotes_in_file_order(capture: Path) -> None:
    found = read_file("binance_capture", capture)
    quote, first, second, last = found.records
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
    assert [each.seq for each in found.records] == [1, 2, 3, 4]
    assert isinstance(last, Trade)
    assert str(last.price) == "61837.649999999"  # a JSON number, never converted to a float
    assert found.refused == [
        *((6, "timestamp_unit"), (7, "json"), (8, "missing_field")),
        *((9, "price"), (10, "price"), (11, "timestamp_unit")),
    ]
    assert found.bad[-1][2] == (
        "time: 1723161255 as epoch-ms is not in the years 1990 to 2099; it looks like epoch-s: "
        "declare that as time.format"
    )


def test_times_select_without_renumbering(capture: Path) -> None:
    first = 1_723_161_255_342_000_000
    late = read_file("binance_capture", capture, from_ns=first, until_ns=first + 10**6)
    assert [each.seq for each in late.records] == [2, 3]


@pytest.mark.parametrize("form", ["gzip", "zip", "zstd"])
def test_a_broken_archive_is_reported_and_what_came_before_is_kept(tmp_path: Path, form: str) -> None:
    path = tmp_path / "capture"
    text = CAPTURE.encode() * 50
    for cut in (9, 60):
        path.write_bytes(PACK[form](text)[:-cut])
        found = read_file("binance_capture", path)
        assert found.refused[-1] == (0, "type"), cut
        assert len(found.records) <= 4 * 50


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    packed = bytearray(zipped(CAPTURE.encode()))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # say encrypted
        at = -1
        while (at := packed.find(signature, at + 1)) >= 0:
            packed[at + flags] |= 1
    path = tmp_path / "capture.zip"
    path.write_bytes(packed)
    with pytest.raises(CorruptFile, match="encrypted"):
        list(texts(path))


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=4), st.integers(1, 64))
def test_frames_of_zstd_read_as_one_text(parts: list[bytes], size: int) -> None:
    packed = b"".join(zstd.compress(part) for part in parts)
    with tempfile.NamedTemporaryFile() as file:
        file.write(packed)
        file.flush()
        ((_, text),) = ((name, read_by(text, size)) for name, text in texts(Path(file.name)))
    assert text == b"".join(parts)


def read_by(text: IO[bytes], size: int) -> bytes:
    return b"".join(iter(lambda: text.read(size), b""))


def test_the_files_of_an_archive_come_one_after_the_other_each_on_its_day(tmp_path: Path) -> None:
    form = """
        container = "csv"
        header = false
        [[records]]
        kind = "bar"
        venue = "US"
        symbol = "SPY"
        unit = "shares"
        interval = "1m"
        implied_decimals = 4
        time = { field = 0, format = "day-ms", zone = "America/New_York", date = "%Y%m%d" }
        fields = { open = 1, high = 2, low = 3, close = 4, volume = 5 }
        """
    path = tmp_path / "spy.zip"
    names = ("20131007_spy_minute_trade.csv", "20131108_spy_minute_trade.csv")
    path.write_bytes(zipped(b"34200000,1684410,1684410,1683600,1683800,3300\n86400000,1,1,1,1,1\n", *names))
    found = read_file(form, path)
    october, november = found.bars
    assert (str(october.open), str(october.close), str(october.volume)) == ("168.441", "168.38", "3300")
    assert october.ts_event == 1_381_152_600_000_000_000  # 13:30 UTC in summer
    assert november.ts_event == 1_383_921_000_000_000_000  # 14:30 UTC in winter
    assert found.refused == [(2, "timestamp_unit")] * 2
    given_day = read_file(form, path, day=date(2020, 1, 2)).records[0]
    assert given_day.ts_event == 1_577_975_400_000_000_000
    path.write_bytes(zipped(b"34200000,1,1,1,1,1\n", "spy.csv"))
    with pytest.raises(FormatError, match=r"no date like %Y%m%d"):
        read_file(form, path)


def test_times_of_the_day_need_a_day(tmp_path: Path) -> None:
    form = """
        container = "csv"
        header = false
        [[records]]
        kind = "quote"
        venue = "FX"
        symbol = "EURUSD"
        time = { field = 0, format = "day-ms" }
        fields = { bid = 1, ask = 2 }
        """
    path = tmp_path / "20140501_quote.csv"
    path.write_text("14400032,1.38669,1.38691\n")
    with pytest.raises(FormatError, match=r"time\.date"):
        read_file(form, path)
    (quote,) = read_file(form, path, day=date(2014, 5, 1)).records
    assert quote.ts_event == 1_398_916_800_032_000_000


def test_bars_without_volume_have_none() -> None:
    form = """
        container = "csv"
        [[records]]
        kind = "bar"
        venue = "FX"
        symbol = "EURUSD"
        interval = "1m"
        time = { field = "t", format = "epoch-s" }
        fields = { open = "o", high = "h", low = "l", close = "c" }
        """
    found = read(form, "t,o,h,l,c\n1577916000,1,3,1,2\n")
    assert ([bar.volume for bar in found.bars], found.bad) == ([0], [])


ARRAYS = """\
1618677817.0208: {"channel":"trades","market":"BTC-PERP","data":[{"id":1,"price":60000.5,"size":0.1,"side":"buy","time":"2021-04-17T16:43:36.98+00:00"},{"id":2,"price":60001.0,"size":2,"side":"sell","time":"2021-04-17T16:43:36.99+00:00"}]}
1618677817.1: {"channel":"orderbook","market":"BTC-PERP","data":{"bids":[]}}
1618677817.2: {"channel":"trades","market":"BTC-PERP","data":[{"id":3,"price":-1,"size":2,"side":"sell","time":"2021-04-17T16:43:37.1+00:00"},7,{"id":4,"price":60002,"size":2,"side":"sell","time":"2021-04-17T16:43:37.1+00:00"}]}
1618677817.3: {"channel":"trades","market":"BTC-PERP","data":"none"}
1618677817.4: {"channel":"trades","market":"BTC-PERP","data":[]}
1618677817.5: {"channel":"markets"}
16186778x7.5: {"channel":"trades"}
"""  # noqa: E501 - as a venue sends them


def test_arrays_of_trades_after_a_time_in_decimal_seconds() -> None:
    form = """
        container = "jsonl-capture"
        receive = { format = "epoch-s", separator = ":" }
        passed_over = { book_deltas = { field = "channel", prefix = "orderbook" } }
        [[records]]
        kind = "trade"
        venue = "FTX"
        each = "data"
        match = { field = "channel", prefix = "trades" }
        time = { field = "time", format = "iso" }
        fields = { symbol = "$.market", price = "price", size = "size", id = "id", side = "side" }
        side_values = { buy = "buy", sell = "sell" }
        """
    found = read(form, ARRAYS)
    assert [(r.seq, r.symbol, r.ts_recv, r.id, str(r.price)) for r in found.trades] == [
        (1, "BTC-PERP", 1_618_677_817_020_800_000, "1", "60000.5"),
        (2, "BTC-PERP", 1_618_677_817_020_800_000, "2", "60001"),
        (3, "BTC-PERP", 1_618_677_817_200_000_000, "4", "60002"),
    ]
    assert found.refused == [(3, "price"), (3, "missing_field"), (4, "type"), (7, "timestamp_unit")]
    assert found.skipped == {"book_deltas": 1, "other": 1}


def test_arrays_of_arrays_are_read_by_index() -> None:
    form = """
        container = "jsonl"
        [[records]]
        kind = "trade"
        venue = "K"
        symbol = "XBTUSD"
        each = "$.1"
        time = { field = "2", format = "epoch-s" }
        fields = { price = "0", size = "1", side = "3" }
        side_values = { s = "sell", b = "buy" }
        """
    line = '[0,[["5541.2","0.15","1534614057.321597","s"],["6060","0.02","1534614057.324998","b"]]]\n'
    found = read(form, line)
    assert [(str(r.price), r.ts_event, r.side) for r in found.trades] == [
        ("5541.2", 1_534_614_057_321_597_000, "sell"),
        ("6060", 1_534_614_057_324_998_000, "buy"),
    ]
    assert found.bad == []


def test_headerless_quotes_in_fixed_est() -> None:
    found = read(
        "histdata_quotes",
        b"20200101 170000065,1.121200,1.121720,0\n20200701 170000065,1.1,1.2,0\n"
        b"\nx,1,2,0\n20200101 17\xff,1,2\n",
    )
    winter, summer = found.records
    assert isinstance(winter, Quote)
    assert winter.ts_event == winter.ts_recv == 1_577_916_000_065_000_000  # 2020-01-01T22:00:00.065Z
    assert summer.ts_event == 1_593_640_800_065_000_000  # 22:00 UTC in July as well: no daylight saving
    assert (str(winter.bid), str(winter.ask), winter.bid_size) == ("1.1212", "1.12172", 0)
    assert found.refused == [(4, "timestamp_unit"), (5, "encoding")]


def test_bars_with_quote_volume() -> None:
    found = read(
        "btc_perp_bars",
        "timestamp,open,high,low,close,volume\n"
        "2021-12-31 23:01:00.000000,46319.0,46385.0,46319.0,46377.0,2300413.7295\n"
        "2022-01-01 03:03:00.000000,46821.75,46821.75,46800.0,46800.0,218102.59507500002\n"
        "2022-01-01 03:04:00.000000,46821.75,46800.0,46800.0,46800.0,1\n"
        "2022-01-01 03:05:00.000000,46821.75\n",
    )
    first, noisy = found.bars
    assert (first.ts_event, first.interval_ns, first.unit) == (1_640_991_660_000_000_000, MINUTE, "quote")
    assert prices(first) == "46319 46385 46319 46377"
    assert str(noisy.volume) == "218102.595075"
    assert found.refused == [(4, "bar_ohlc"), (5, "type")]


def prices(bar: Bar) -> str:
    """Open, high, low and close."""
    return f"{bar.open} {bar.high} {bar.low} {bar.close}"


def test_bars_whose_columns_come_in_another_order() -> None:
    row = "Date,Open,Close,High,Low,Volume\n11/5/2019 9:30,3080.8,3080.49,3081.47,3080.3,0\n"
    (bar,) = read("sp500_bars", row).bars
    assert bar.ts_event == 1_572_964_200_000_000_000  # 14:30 UTC: New York was on winter time since the 3rd
    assert prices(bar) == "3080.8 3081.47 3080.3 3080.49"


def test_a_new_format_needs_no_code() -> None:
    """Semicolons, close-stamped five-minute bars, several symbols."""
    form = """
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
    rows = "EQTY;SAP;01.07.2024 09:05;10;2;1;3;1.5\nBOND;X;01.07.2024 09:05;1;1;1;1;1\n"
    found = read(form, f"class;sym;t;v;c;l;h;o\n{rows}")
    (bar,) = found.bars
    assert (bar.symbol, prices(bar)) == ("SAP", "1.5 3 1 2")
    assert bar.ts_event == 1_719_817_200_000_000_000  # opened 07:00 UTC
    assert (bar.interval_ns, found.bad) == (5 * MINUTE, [])


def test_plain_json_lines_need_no_receive_time() -> None:
    form = """
        container = "jsonl"
        [[records]]
        kind = "trade"
        venue = "V"
        time = { field = "at", format = "epoch-s" }
        fields = { symbol = "s", price = "px.last", size = "n" }
        """
    found = read(form, '{"at": 1577916000.065, "s": "A", "px": {"last": 0.1}, "n": 3}\n\n[1]\n')
    (trade,) = found.trades
    assert (str(trade.price), str(trade.size), trade.ts_event) == ("0.1", "3", 1_577_916_000_065_000_000)
    assert trade.side == "unknown"
    assert found.refused == [(3, "missing_field")]


def real(name: str) -> Path:
    folder = os.environ.get("FORETICK_DATA")
    if folder is None:
        pytest.skip("set FORETICK_DATA to the directory with the real data files")
    return Path(folder) / name


def test_real_capture() -> None:
    found = read_file("binance_capture", real("binance_spot_btcusdt_20240808_raw.gz"))
    assert found.skipped == {"book_deltas": 3_451, "book_snapshots": 1}
    trades, quotes = found.trades, found.quotes
    assert (len(trades), len(quotes), found.bad) == (9_757, 28_040, [])
    assert (str(trades[0].price), str(trades[-1].price)) == ("61837.63", "61685.99")
    assert min(t.price for t in trades) == parse_fixed("61583.22")
    assert max(t.price for t in trades) == parse_fixed("61860.80")
    assert all(int(b.id) == int(a.id) + 1 for a, b in pairwise(trades))
    assert sum(a.ts_event == b.ts_event for a, b in pairwise(trades)) == 6_534
    assert all(trade.skewed for trade in trades)
    assert trades[0].ts_event == 1_723_161_255_342_000_000
    assert all(quote.clock == "receive" and not quote.skewed for quote in quotes)


def test_real_quotes() -> None:
    found = read_file("histdata_quotes", real("histdata_eurusd_ticks_20200101.csv"))
    quotes = found.quotes
    assert (len(quotes), found.bad) == (9_500, [])
    assert quotes[0].ts_event == 1_577_916_000_065_000_000
    assert quotes[-1].ts_event == quotes[0].ts_event + (6 * 3600 + 52) * 10**9 + 60_000_000
    assert min(q.bid for q in quotes) == parse_fixed("1.12106")
    assert max(q.bid for q in quotes) == parse_fixed("1.12245")
    spreads = [q.ask - q.bid for q in quotes]
    assert (min(spreads), max(spreads)) == (parse_fixed("0.00001"), parse_fixed("0.00072"))
    assert all(a.ts_event < b.ts_event for a, b in pairwise(quotes))
    assert max(b.ts_event - a.ts_event for a, b in pairwise(quotes)) == 85_693_000_000


def test_real_perpetual_bars() -> None:
    found = read_file("btc_perp_bars", real("btc_perp_1m_202201.csv"))
    bars = found.bars
    assert (len(bars), found.bad) == (45_031, [])
    assert bars[0].ts_event == 1_640_991_660_000_000_000  # 2021-12-31T23:01Z
    assert bars[-1].ts_event == 1_643_693_460_000_000_000  # 2022-02-01T05:31Z
    assert all(b.ts_event - a.ts_event == MINUTE for a, b in pairwise(bars))
    assert min(b.low for b in bars) == parse_fixed("32837")


def test_real_index_bars() -> None:
    found = read_file("sp500_bars", real("sp500_index_1m_20191105.csv"))
    bars = found.bars
    assert (len(bars), found.bad) == (1_563, [])
    assert (str(bars[0].open), str(bars[-1].close)) == ("3080.8", "3092.91")
    gaps = [b.ts_event - a.ts_event for a, b in pairwise(bars)]
    assert sorted(set(gaps)) == [MINUTE, (17 * 60 + 30) * MINUTE]
    assert gaps.count((17 * 60 + 30) * MINUTE) == 3
    assert all(b.volume == 0 for b in bars)
