"""Parquet, Arrow and DBN: against numbers that are computed apart, and as columns against row by row."""

import contextlib
import gzip
import io
import os
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feeds.columns.record_columns import RecordColumns
from feeds.decimals import Fixed, fixed_of_float, to_units
from feeds.file_format import FORMATS, FormatError
from feeds.market_data import AnyRecord, Quote, Trade
from feeds.record_identity import token_of
from feeds.recorded_file import Says, look, read_items
from feeds.zstd import zstd
from tests.feeds import dbn_files
from tests.feeds.declared import BARS, TRADES, Read, declared, exact, read, read_file
from tests.kit.samples import SAMPLES

PARQUET = TRADES.replace('"csv"', '"parquet"')
ARROW = TRADES.replace('"csv"', '"arrow"')
TEN = 1_709_632_800_000_000_000
"""2024-03-05T10:00Z."""
SECOND = 10**9
TIMES = pa.timestamp("ns", "UTC")
UNDEFINED = 2**63 - 1


def table(**columns: Any) -> Any:
    return pa.table(columns)


def trades(prices: Any, sizes: Any = None, **more: Any) -> Any:
    """A table of a trade a second."""
    count = len(prices)
    times = pa.array([TEN + n * SECOND for n in range(count)], TIMES)
    return table(time=times, price=prices, size=[1] * count if sizes is None else sizes, **more)


FORM = PARQUET.replace(', id = "id"', "")
FLOATS = f"{FORM}float_decimals = {{ price = 2, size = 9 }}\n"


def packed(made: Any, container: str = "parquet", **options: Any) -> bytes:
    out = io.BytesIO()
    if container == "parquet":
        pq.write_table(made, out, **options)
    else:
        with pa.ipc.new_file(out, made.schema) as writer:
            writer.write_table(made, **options)
    return out.getvalue()


def numbers(found: Read) -> list[tuple[int, Decimal, Decimal]]:
    return [((each.ts_event - TEN) // SECOND, exact(each.price), exact(each.size)) for each in found.trades]


@dataclass
class Mixed(Read):
    """What is read where columns are allowed. ``rows``: as many records came in columns."""

    rows: int = 0
    columns: list[RecordColumns] = field(default_factory=list)


def as_columns(form: str, path: Path, **options: Any) -> Mixed:
    found = Mixed()
    says = Says(found.refuse, found.skip, found.notices.append)
    for item in read_items(path, declared(form), says, as_columns=True, **options):
        if isinstance(item, RecordColumns):
            found.rows += len(item)
            found.columns.append(item)
            found.records.extend(item.records())
        else:
            found.records.append(item)
    return found


def check_columns(found: Mixed) -> None:
    """The integers in columns are those of the records they stand for."""
    for columns in found.columns:
        for row, record in zip(columns.rows, columns.records(), strict=True):
            assert columns.keys.names[row["key"]] == record.key
            assert row.item()[:3] == (1, 1 if isinstance(record, Trade) else 2, 0)
            token = token_of(record, numbered=False)
            assert row.item()[4:8] == (record.ts_event, record.ts_recv, token, record.seq)
            assert row.item()[8:] == values_of(record)


def values_of(record: AnyRecord) -> tuple[int | None, ...]:
    if isinstance(record, Trade):
        sides = ("unknown", "buy", "sell")
        return (to_units(record.price), to_units(record.size), 0, 0, 0, sides.index(record.side))
    assert isinstance(record, Quote)
    return (*map(to_units, (record.bid, record.ask, record.bid_size, record.ask_size)), 0, 0)


def both(form: str, data: bytes) -> Mixed:
    """Read row by row and as columns, to the same records and refusals; what the columns gave."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_bytes(data)
        rows, columns = read_file(form, path), as_columns(form, path)
    assert columns.records == rows.records
    assert (columns.bad, columns.places, columns.skipped) == (rows.bad, rows.places, rows.skipped)
    check_columns(columns)
    return columns


@pytest.mark.parametrize("container", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("prices", "right"),
    [
        (pa.array([Decimal("101.25"), Decimal("0.01")], pa.decimal128(20, 2)), ["101.25", "0.01"]),
        (pa.array([Decimal("1e-9"), Decimal("5")], pa.decimal128(38, 9)), ["0.000000001", "5"]),
        (pa.array([101, 2**33], pa.int64()), ["101", "8589934592"]),
        (pa.array([7, 8], pa.uint64()), ["7", "8"]),
        (pa.array(["101.25", "7.12e-05"]), ["101.25", "0.0000712"]),
        (pa.array(["101.25", "9.5"]).dictionary_encode(), ["101.25", "9.5"]),
        (pa.array(["101.25", "9.5"], pa.large_string()), ["101.25", "9.5"]),
        (pa.array([Decimal("1e-18"), Decimal("9")], pa.decimal128(38, 18)), ["1e-18", "9"]),
        (pa.array([Decimal("3.5"), Decimal("9")], pa.decimal256(60, 3)), ["3.5", "9"]),
    ],
    ids=["decimal", "nano", "int64", "uint64", "text", "dictionary", "large", "atto", "decimal256"],
)
def test_numbers_are_exact(container: str, prices: Any, right: list[str]) -> None:
    form = FORM.replace("parquet", container)
    found = both(form, packed(trades(prices), container))
    assert numbers(found) == [(n, Decimal(text), 1) for n, text in enumerate(right)]


def test_floats_are_read_to_the_decimals_that_are_declared() -> None:
    made = trades(pa.array([101.25, 0.1 + 0.2, 1.115, 0.07]), pa.array([0.1, 1e5, 123456.789012345, 3.0]))
    found = both(FLOATS, packed(made))
    assert numbers(found) == [
        (0, Decimal("101.25"), Decimal("0.1")),
        (1, Decimal("0.3"), Decimal(10**5)),
        (3, Decimal("0.07"), Decimal(3)),
    ]
    assert found.bad == [(3, "price", "price: '1.115' has more than 2 decimals")]


def test_floats_without_declared_decimals_are_an_error() -> None:
    with pytest.raises(FormatError) as error:
        read(FORM, packed(trades(pa.array([1.5]))))
    assert str(error.value) == (
        "column 'price' (fields.price) is double, which is binary: declare float_decimals.price"
    )


@given(st.floats(), st.integers(0, 9))
@example(0.285, 2)
@example(1.115, 2)
@example(123456789012345.6, 1)
@example(float("nan"), 2)
def test_a_float_is_its_nearest_decimal_number_or_refused(value: float, decimals: int) -> None:
    try:
        found = fixed_of_float(repr(value), decimals)
    except ValueError:
        if np.isfinite(value) and abs(value) < 10**14 // 10**decimals:
            assert round(value, decimals) != value or abs(value) < 10.0**-decimals
        return
    with_digits = Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN)
    assert exact(found) == with_digits
    assert float(with_digits) == pytest.approx(value, abs=1.1e-3 * 10.0**-decimals, rel=1e-14)


_WIDE = Context(prec=60)
NAMES = ["AAA", "BBB", "", "a b", "x:y"]
STAMPS = st.integers(TEN, TEN + 1000 * SECOND) | st.sampled_from([0, 1, 4_102_444_800 * 10**9])


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, Any]:
    """A format of trades or quotes, and a table for it, with nulls and values that are refused."""
    count = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any], kind: Any, nulls: bool = True) -> Any:
        drawn = st.lists(values | st.none() if nulls else values, min_size=count, max_size=count)
        return pa.array(draw(drawn), kind)

    def number() -> tuple[Any, str]:
        match draw(st.integers(0, 4)):
            case 0:
                scale = draw(st.integers(0, 18))
                limit = 10 ** draw(st.integers(1, 30))
                units = st.integers(-limit, limit).map(lambda n: Decimal(n).scaleb(-scale, _WIDE))
                return column(units, pa.decimal128(38, scale)), ""
            case 1:
                return column(st.integers(-10, 2**63 - 1), pa.int64()), ""
            case 2:
                text = st.decimals(allow_nan=True, places=draw(st.integers(0, 10))).map(str)
                return column(text | st.sampled_from(["", "x", "1e3", "-1"]), pa.string()), ""
            case 3:
                decimals = draw(st.integers(0, 9))
                near = st.integers(-10, 10**12).map(lambda n: n / 10**decimals)
                return column(near | st.floats(), pa.float64()), str(decimals)
            case _:
                return column(st.integers(0, 2**64 - 1), pa.uint64()), ""

    match draw(st.integers(0, 3)):
        case 0:
            time, notation = column(STAMPS, TIMES), "iso"
        case 1:
            time, notation = column(STAMPS, pa.timestamp("ns")), "iso"
        case 2:
            time, notation = column(STAMPS.map(lambda n: n // 1000), pa.int64()), "epoch-us"
        case _:
            texts = st.sampled_from(["2024-03-05T10:00:00Z", "2024-03-05T10:00:00.000000007", "x"])
            time, notation = column(texts, pa.string()), "iso"
    members = draw(st.sampled_from([("price", "size"), ("bid", "ask", "bid_size", "ask_size")]))
    made = {name: number() for name in members}
    columns = {"time": time, "s": column(st.sampled_from(NAMES), pa.string())} | {
        n: c for n, (c, _) in made.items()
    }
    fields = {name: name for name in members} | {"symbol": "s"}
    more = ""
    if "price" in members:
        if draw(st.booleans()):
            columns["id"] = column(st.integers(-3, 2**40), pa.int64())
        else:
            columns["id"] = column(st.text(max_size=3), pa.string())
        columns["side"] = column(st.sampled_from(["B", "S", "?"]), pa.string())
        fields |= {"id": "id", "side": "side"}
        more += 'side_values = { B = "buy", S = "sell" }\n'
        if draw(st.booleans()):
            more += 'signed = "size"\n'
            fields.pop("side")
    decimals = {name: text for name, (_, text) in made.items() if text}
    if decimals:
        more += f"float_decimals = {{ {', '.join(f'{n} = {d}' for n, d in decimals.items())} }}\n"
    zone = draw(st.sampled_from(["UTC", "UTC-05:00", "America/New_York"])) if notation == "iso" else "UTC"
    form = f"""
container = "parquet"
null = {draw(st.sampled_from(["[]", '["", "?"]', '["1"]']))}
decimal = {draw(st.sampled_from(['"."', '","']))}
order = "{draw(st.sampled_from(["auto", "oldest_first", "newest_first"]))}"
[[records]]
kind = "{"trade" if "price" in members else "quote"}"
venue = "V"
implied_decimals = {draw(st.sampled_from([0, 0, 2]))}
multiplier = "{draw(st.sampled_from(["", "", "100", "0.001", "2.5", "1e15"]))}"
{more}
time = {{ field = "time", format = "{notation}", zone = "{zone}" }}
fields = {{ {", ".join(f'{n} = "{c}"' for n, c in fields.items())} }}
"""
    return form, pa.table(columns)


@settings(max_examples=300)
@given(tables())
def test_columns_are_what_rows_are(made: tuple[str, Any]) -> None:
    form, data = made
    both(form, packed(data))


def test_plain_tables_are_read_as_columns() -> None:
    """All of them: a table of which nothing is read as columns would pass every comparison."""
    prices = pa.array([Decimal(n).scaleb(-2) for n in range(1, 3001)], pa.decimal128(20, 2))
    found = both(PARQUET, packed(trades(prices, id=[str(n) for n in range(3000)])))
    assert (found.rows, found.bad) == (3000, [])
    assert both(FLOATS, packed(trades(pa.array(np.arange(1, 3001) / 100)))).rows == 3000


def test_a_row_that_is_refused_stands_between_columns() -> None:
    prices = pa.array([Decimal(n) for n in (1, 2, -3, 4, 5)], pa.decimal128(20, 2))
    found = both(FORM, packed(trades(prices)))
    assert (found.rows, found.refused) == (4, [(3, "price")])
    assert [each.seq for each in found.records] == [1, 2, 3, 4]


def test_a_table_newest_first_is_turned_round() -> None:
    prices = pa.array([Decimal(n) for n in range(1, 201)], pa.decimal128(20, 2))
    made = trades(prices)
    found = both(FORM, packed(made.take(list(range(199, -1, -1)))))
    assert [price for _, price, _ in numbers(found)] == list(range(1, 201))
    assert found.notices == ["newest first: read in time order"]


def test_bars_of_a_table() -> None:
    form = BARS.replace('"csv"', '"parquet"')
    prices = pa.array([Decimal("1.5"), Decimal("2.25")], pa.decimal128(9, 2))
    made = table(
        time=pa.array([TEN, TEN + 60 * SECOND], TIMES), volume=[5, 6],
        **dict.fromkeys(("open", "high", "low", "close"), prices),
    )  # fmt: skip
    assert [(exact(bar.close), exact(bar.volume)) for bar in both(form, packed(made)).bars] == [
        (Decimal("1.5"), 5),
        (Decimal("2.25"), 6),
    ]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            table(time=pa.array([TEN], TIMES), price=[1]),
            "the file has no column 'size', which the format declares; it has 'time', 'price'",
        ),
        (trades([[1]]), "column 'price' is list<"),
        (trades([b"1"]), "column 'price' is binary: expected numbers, text or times"),
        (
            table(time=[TEN], price=[1], size=[1]),
            "column 'time' is int64: declare a time.format such as epoch-ns",
        ),
        (table(time=[1.5], price=[1], size=[1]), "column 'time' (time.field) is double, which is binary"),
        (
            pa.table([pa.array([TEN], TIMES), [1], [1], [2]], names=["time", "price", "size", "price"]),
            "the file has two columns 'price'",
        ),
    ],
)  # fmt: skip
def test_columns_are_held_against_the_format(tmp_path: Path, made: Any, said: str) -> None:
    (tmp_path / "t.parquet").write_bytes(packed(made))
    with pytest.raises(FormatError) as error:
        look(tmp_path / "t.parquet", declared(FORM), print)
    assert str(error.value).startswith(f"t.parquet: {said}")


def test_timestamps_need_iso() -> None:
    with pytest.raises(FormatError, match=r"time.format = 'iso'"):
        read(FORM.replace('"iso"', '"epoch-ns"'), packed(trades([1])))


@pytest.mark.parametrize("container", ["parquet", "arrow", "dbn"])
@pytest.mark.parametrize("data", [b"", b"time,price\n", b"PAR1", b"ARROW1\0\0", b"DBN\x03\xff\0\0\0"])
def test_what_is_no_such_file(tmp_path: Path, container: str, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    form = "databento" if container == "dbn" else FORM.replace("parquet", container)
    with pytest.raises(FormatError, match=f"^t: the file('s metadata)? cannot be read as {container}: "):
        read_file(form, tmp_path / "t")


def test_a_table_that_is_declared_as_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(packed(trades([1])))
    ((_, _, said),) = read_file(TRADES, tmp_path / "t").bad
    assert said == "t is parquet: declare container = 'parquet'"


def test_a_table_without_rows_is_noticed() -> None:
    assert both(FORM, packed(trades(pa.array([], pa.int64())))).notices == ["the file holds no rows"]


@pytest.mark.parametrize(("byte", "rows"), [(200, 2000), (7000, 2600)])
def test_damage_in_a_table_loses_nothing_before_it(byte: int, rows: int) -> None:
    """Of the third group: in its first page, and in a later one; pages are of 200 rows."""
    made = trades(pa.array([Decimal(n + 1) for n in range(4000)], pa.decimal128(20, 2)))
    options = {"row_group_size": 1000, "write_page_checksum": True, "use_dictionary": False}
    data = bytearray(packed(made, **options, data_page_size=1000, write_batch_size=100, compression="none"))
    at = byte + pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(2).column(1).data_page_offset
    data[at] ^= 0xFF
    found = both(FORM, bytes(data))
    assert [n for n, _, _ in numbers(found)] == list(range(len(found.records)))
    assert len(found.records) == rows
    ((line, reason, said),) = found.bad
    assert (line, reason) == (len(found.records) + 1, "type")
    assert said.startswith(f"damaged from row {line} on: ")


def test_any_bit_of_a_small_table_may_be_wrong() -> None:
    """No error but `FormatError` comes out, however lengths and counts are changed."""
    data = packed(trades([1, 2, 3]), write_page_checksum=True, compression="none")
    for at in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with contextlib.suppress(FormatError):
            both(FORM, bytes(damaged))


@pytest.mark.parametrize("left", [0.3, 0.7, 0.99])
def test_a_truncated_arrow_file_is_read_as_far_as_it_goes(tmp_path: Path, left: float) -> None:
    made = trades(pa.array([Decimal(n + 1) for n in range(4000)], pa.decimal128(20, 2)))
    data = packed(made, "arrow", max_chunksize=500)
    data = data[: int(len(data) * left)]
    found = both(FORM.replace("parquet", "arrow"), data)
    whole = len(data) * 4000 // 500 // len(packed(made, "arrow", max_chunksize=500)) * 500
    assert len(found.records) >= whole - 500
    assert [n for n, _, _ in numbers(found)] == list(range(len(found.records)))
    assert found.bad[-1][2].startswith(f"damaged from row {len(found.records) + 1} on: ")
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(FormatError, match="the file ends early"):
        look(tmp_path / "t", declared(FORM.replace("parquet", "arrow")), print, to_end=True)


# --- DBN


def dbn(*records: bytes, names: dbn_files.Names = dbn_files.ACME, **options: Any) -> bytes:
    return dbn_files.metadata(names, **options) + b"".join(records)


def test_trades_of_dbn() -> None:
    made = [
        dbn_files.trade(TEN + n, 101_250_000_001 + n, n + 1, side="ABN"[n % 3], sequence=n) for n in range(50)
    ]
    found = both("databento", dbn(*made))
    assert found.rows == 50
    assert found.trades[1] == Trade(
        venue="GLBX.MDP3", symbol="ACME", ts_event=TEN + 1, ts_recv=TEN + 6, seq=2, unit="contracts",
        price=Fixed(101_250_000_002 * 10**9), size=Fixed(2 * 10**18), side="buy", id="1",
    )  # fmt: skip
    assert [each.side for each in found.trades[:3]] == ["sell", "buy", "unknown"]


def test_what_is_undefined_in_dbn_is_refused_and_what_is_no_trade_is_skipped() -> None:
    made = [
        dbn_files.trade(TEN, UNDEFINED, 1),
        dbn_files.trade(TEN + 1, 10**9, 2**32 - 1),
        dbn_files.trade(TEN + 2, 10**9, 1, action="C"),
        dbn_files.trade(TEN + 3, 10**9, 1, action="A"),
        dbn_files.trade(TEN + 4, 10**9, 1),
        dbn_files.trade(2**64 - 1, 10**9, 1, recv=TEN),
    ]
    found = both("databento", dbn(*made))
    assert found.refused == [(1, "missing_field"), (2, "missing_field"), (6, "missing_field")]
    assert found.skipped == {"book_updates": 2}
    assert [each.ts_event for each in found.records] == [TEN + 4]


def test_symbols_of_dbn_are_those_of_the_day() -> None:
    day = 86_400 * SECOND
    names = {
        "ES.c.0": [("2024-03-01", "2024-03-06", 7), ("2024-03-06", "2024-04-01", 8)],
        "B": [("2024-03-06", "2024-03-07", 7)],
    }
    made = [
        dbn_files.trade(TEN + n * day, 10**9, n + 1, number=number) for n in range(3) for number in (7, 8)
    ]
    found = both("databento", dbn(*made, names=names))
    assert [(each.symbol, exact(each.size)) for each in found.trades] == [
        ("ES.c.0", 1),
        ("B", 2),
        ("ES.c.0", 2),
        ("ES.c.0", 3),
    ]
    assert found.refused == [(2, "missing_field"), (5, "missing_field")]


def test_bars_of_dbn() -> None:
    made = [dbn_files.bar(TEN + n * 60 * SECOND, (5, 9, 1, 7), 2**40 + n) for n in range(3)]
    found = both("databento", dbn(*made, schema="ohlcv-1m"))
    bar = found.bars[2]
    assert (bar.open, bar.high, bar.low, bar.close) == tuple(each * 10**9 for each in (5, 9, 1, 7))
    assert (exact(bar.volume), bar.interval_ns, bar.key) == (2**40 + 2, 60 * SECOND, "GLBX.MDP3:ACME")


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
@pytest.mark.parametrize("lost", [1, 47, 48, 500])
def test_truncated_dbn(tmp_path: Path, pack: Any, lost: int) -> None:
    made = [dbn_files.trade(TEN + n, 10**9 + n, 1) for n in range(100)]
    data = dbn(*made)[:-lost]
    kept = 100 - -(-lost // 48)
    found = both("databento", data)
    assert len(found.records) == kept
    left = (48 - lost % 48) % 48
    assert found.refused == ([(kept + 1, "type")] if left else [])
    (tmp_path / "t").write_bytes(data)
    if left:
        with pytest.raises(
            FormatError, match=f"the file ends early: {left} bytes of its last record are left"
        ):
            look(tmp_path / "t", declared("databento"), print, to_end=True)
    squeezed = both("databento", pack(dbn(*made))[:-9])
    assert [each.seq for each in squeezed.records] == list(range(1, len(squeezed.records) + 1))
    assert squeezed.bad[-1][1] == "type"


def test_damage_in_dbn_loses_nothing_before_it() -> None:
    made = [dbn_files.trade(TEN + n, 10**9 + n, 1) for n in range(10)]
    made[6] = b"\0" + made[6][1:]
    found = both("databento", dbn(*made))
    assert (len(found.records), found.bad) == (6, [(7, "type", "damaged from record 7 on: no record there")])


def test_dbn_without_symbols() -> None:
    with pytest.raises(FormatError, match="no symbols"):
        read("databento", dbn(dbn_files.trade(TEN, 10**9, 1), names={}))
    text = (FORMATS / "databento.toml").read_text().replace('symbol = "symbol"', 'symbol = "instrument_id"')
    found = both(text.replace("description", "# description"), dbn(dbn_files.trade(TEN, 10**9, 1), names={}))
    assert [each.symbol for each in found.trades] == ["7"]


def test_a_column_that_dbn_lacks() -> None:
    form = FORM.replace("parquet", "dbn").replace("iso", "epoch-ns")
    with pytest.raises(FormatError, match="no column 'time'"):
        read(form, dbn(dbn_files.trade(TEN, 1, 1)))


@settings(max_examples=100)
@given(st.data())
def test_generated_dbn_against_its_own_integers(data: st.DataObject) -> None:
    price, size = st.integers(-5, 2**63 - 1), st.integers(0, 2**32 - 1)
    drawn = data.draw(
        st.lists(st.tuples(st.integers(TEN, TEN + 10**12), price, size, st.sampled_from("ABN")), min_size=1)
    )
    found = both("databento", dbn(*(dbn_files.trade(ts, p, s, side=side) for ts, p, s, side in drawn)))
    right = [(ts, p, s) for ts, p, s, _ in drawn if 0 < p < UNDEFINED and s < 2**32 - 1]
    assert [(each.ts_event, each.price, each.size) for each in found.trades] == [
        (ts, p * 10**9, s * 10**18) for ts, p, s in right
    ]
    assert len(found.bad) == len(drawn) - len(right)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("floats", [True, False], ids=["floats", "decimals"])
@pytest.mark.parametrize(("form", "decimals"), [("btc_perp_bars", 6), ("sp500_bars", 2)])
def test_real_bars_as_parquet(tmp_path: Path, form: str, decimals: int, floats: bool) -> None:
    """Written with pyarrow, and read as the lines of their csv file are."""
    folder = os.environ.get("FORETICK_DATA")
    if folder is None:
        pytest.skip("set FORETICK_DATA to the directory with the real data files")
    (sample,) = (each for each in SAMPLES if each.form == form)
    path = Path(folder) / sample.real
    lines = read_file(form, path)
    names = path.read_text().split("\n", 1)[0].split(",")
    made = pa.csv.read_csv(
        path, convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    )
    kind = pa.float64() if floats else pa.decimal128(20, 6)
    prices = [name for name in names if name.lower() in ("open", "high", "low", "close")]
    for name in prices:
        made = made.set_column(names.index(name), name, made[name].cast(kind))
    pq.write_table(made, tmp_path / "t.parquet")
    text = (FORMATS / f"{form}.toml").read_text().replace('"csv"', '"parquet"')
    if floats:
        keys = ", ".join(f"{name.lower()} = {decimals}" for name in prices)
        text = text.replace("time = ", f"float_decimals = {{ {keys} }}\ntime = ")
    found = read_file(text.replace("description", "# description"), tmp_path / "t.parquet")
    assert (found.records, found.bad) == (lines.records, lines.bad)
