"""The same trades in every kind of file, to the bars that plain decimal arithmetic makes of them."""

import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feeds.zstd import zstd
from tests.feeds import dbn_files
from tests.kit.daemon import invoke

SECOND = 10**9
START = 1_709_632_800 * SECOND
"""2024-03-05T10:00Z."""
COUNT = 400
SYMBOLS = ("AAA", "BBB")
Trades = list[tuple[int, str, Decimal, int]]
"""Time in ns, symbol, price, size."""

FIELDS = 'fields = { symbol = "s", price = "price", size = "size" }'
FORM = """
description = "made up"
container = "%s"
%s
[[records]]
kind = "trade"
venue = "V"
%s
time = { field = "time", format = "%s" }
"""


def trades() -> Trades:
    random = np.random.default_rng(11)
    times = START + np.cumsum(random.integers(0, SECOND, COUNT))
    cents = 10_000 + np.cumsum(random.integers(-30, 31, COUNT))
    prices = [Decimal(each).scaleb(-2) for each in cents.tolist()]
    symbols = [SYMBOLS[each] for each in random.integers(0, 2, COUNT)]
    return list(zip(times.tolist(), symbols, prices, random.integers(1, 9, COUNT).tolist(), strict=True))


def right(found: Trades) -> dict[tuple[str, int], tuple[Decimal, ...]]:
    """Bars of a minute by symbol and opening: open, high, low, close, volume."""
    minutes: dict[tuple[str, int], Trades] = {}
    for trade in found:
        minutes.setdefault((trade[1].lower(), trade[0] // (60 * SECOND)), []).append(trade)
    bars = {}
    for key, inside in minutes.items():
        prices = [price for _, _, price, _ in inside]
        volume = Decimal(sum(size for *_, size in inside))
        bars[key] = (prices[0], max(prices), min(prices), prices[-1], volume)
    return bars


def _text(folder: Path, found: Trades, name: str, content: str, *options: str) -> tuple[Path, str]:
    path = folder / f"input.{name}"
    path.write_text(content, newline="")
    return path, FORM % options + FIELDS


def as_csv(folder: Path, found: Trades) -> tuple[Path, str]:
    """With a byte-order mark, semicolons, decimal commas, and line ends of Windows."""
    rows = [f"{at};{symbol};{str(price).replace('.', ',')};{size}" for at, symbol, price, size in found]
    text = "\r\n".join(["\ufefftime;s;price;size", *rows, ""])
    return _text(folder, found, "csv", text, "csv", 'delimiter = ";"\ndecimal = ","', "", "epoch-ns")


def as_csv_without_header(folder: Path, found: Trades) -> tuple[Path, str]:
    rows = [f"{at},{symbol},{price},{size}" for at, symbol, price, size in found]
    path, form = _text(folder, found, "csv", "\n".join(rows), "csv", "header = false", "", "epoch-ns")
    for at, name in enumerate(("time", "s", "price", "size")):
        form = form.replace(f'"{name}"', str(at))
    return path, form


def as_json(folder: Path, found: Trades) -> tuple[Path, str]:
    rows = [
        {"time": at, "s": symbol, "price": float(price), "size": size} for at, symbol, price, size in found
    ]
    return _text(folder, found, "json", json.dumps(rows, indent=1), "json", "", "", "epoch-ns")


def table(found: Trades, prices: pa.Array) -> pa.Table:
    times = pa.array([at for at, *_ in found], pa.timestamp("ns", "UTC"))
    symbols = pa.array([symbol for _, symbol, *_ in found])
    return pa.table({"time": times, "s": symbols, "price": prices, "size": [size for *_, size in found]})


def decimals(found: Trades) -> pa.Array:
    return pa.array([price for _, _, price, _ in found], pa.decimal128(18, 4))


def as_parquet(folder: Path, found: Trades) -> tuple[Path, str]:
    pq.write_table(table(found, decimals(found)), folder / "t.parquet", row_group_size=150)
    return folder / "t.parquet", FORM % ("parquet", "", "", "iso") + FIELDS


def as_parquet_of_floats(folder: Path, found: Trades) -> tuple[Path, str]:
    made = table(found, pa.array([float(price) for _, _, price, _ in found]))
    pq.write_table(made, folder / "t.parquet")
    form = FORM % ("parquet", "", "float_decimals = { price = 2 }", "iso")
    return folder / "t.parquet", form + FIELDS


def as_feather(folder: Path, found: Trades) -> tuple[Path, str]:
    made = table(found, decimals(found))
    with pa.ipc.new_file(folder / "t.feather", made.schema) as writer:
        writer.write_table(made, max_chunksize=90)
    return folder / "t.feather", FORM % ("arrow", "", "", "iso") + FIELDS


def as_parquet_of_each_symbol(folder: Path, found: Trades) -> tuple[Path, str]:
    """A folder of a file for each, with something else in it."""
    for symbol in SYMBOLS:
        own = [trade for trade in found if trade[1] == symbol]
        pq.write_table(table(own, decimals(own)), folder / f"{symbol}.parquet")
    (folder / "notes.txt").write_text("no data")
    return folder, FORM % ("parquet", 'members = "*.parquet"', "", "iso") + FIELDS


def as_dbn(folder: Path, found: Trades) -> tuple[Path, str]:
    names = {symbol: [("2024-03-05", "2024-03-06", n + 1)] for n, symbol in enumerate(SYMBOLS)}
    out = io.BytesIO(dbn_files.metadata(names))
    out.seek(0, io.SEEK_END)
    for at, symbol, price, size in found:
        out.write(dbn_files.trade(at, int(price * SECOND), size, number=SYMBOLS.index(symbol) + 1))
    (folder / "t.dbn.zst").write_bytes(zstd.compress(out.getvalue()))
    return folder / "t.dbn.zst", ""


KINDS = [
    as_csv, as_csv_without_header, as_json, as_parquet, as_parquet_of_floats, as_feather,
    as_parquet_of_each_symbol, as_dbn,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", KINDS, ids=lambda kind: kind.__name__)
def test_bars_of_every_kind_of_file(
    tmp_path: Path, write: Callable[[Path, Trades], tuple[Path, str]]
) -> None:
    found = trades()
    (tmp_path / "data").mkdir()
    path, text = write(tmp_path / "data", found)
    form, made = tmp_path / "form.toml", tmp_path / "bars.csv"
    form.write_text(text)
    done = invoke(
        *("replay", str(path), "--format", str(form) if text else "databento", "--to", "inproc"),
        *("--speed", "0", "--set", "bars.interval=1m", "--bars", str(made)),
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    assert ", 0 malformed lines" in done.stdout
    with made.open(newline="") as file:
        bars = {
            (row["session"], _minute(row["opens"])): tuple(
                Decimal(row[name]) for name in ("open", "high", "low", "close", "volume")
            )
            for row in csv.DictReader(file)
        }
    assert bars == right(found)


def _minute(text: str) -> int:
    return int(np.datetime64(text[:16], "m").astype(np.int64))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name, said in (("none.parquet", "No such file"), ("*.parquet", "no files: ")):
        done = invoke("replay", str(tmp_path / name), "--format", "databento", "--to", "inproc")
        assert done.exit_code == 2
        assert said in done.stderr
        assert name in done.stderr
