"""Records a second from a recorded file of Parquet or DBN to bars, beside its library's own decoding."""

import asyncio
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import uvloop
from msgspec.structs import replace

import ingest
from bench.figures import Figure, Goal, Setting, rate
from bench.run import MeasurementFailed, SuiteRun
from bench.stream import processes
from bench.stream.kafka import make_ingest
from bench.stream.processes import child, new_ring
from daemon.config.schema import SourceConfig
from feeds import columns
from feeds.file_format import FileFormat, load_format
from feeds.replay_source import ReplaySource

GOAL = Goal(1_000_000.0, "at least", "ours")
_DEADLINE_S = 120.0
_START_NS = 1_709_632_800 * 10**9
_RING = SourceConfig().ring_capacity
_FORM = """
description = "measured"
container = "parquet"
[[records]]
kind = "trade"
venue = "BENCH"
float_decimals = { price = 2 }
time = { field = "time", format = "iso" }
fields = { symbol = "symbol", price = "price", size = "size", id = "id" }
"""


@dataclass(frozen=True)
class _File:
    """A file, the symbols in it, and how its library decodes it."""

    path: Path
    form: FileFormat
    symbols: list[str]
    decode: Callable[[Path], int]


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Trades of 16 symbols in one file, once as Parquet (zstd, prices as floats) and once as DBN. A replay
    without pace reads it in this process into the ring, and a second process makes bars of a second and their
    tokens. The reference is the library's own decoding on the same cores: pyarrow's into a table, and
    databento-dbn's into its records.
    """
    trades, markets, repeats = run.sized((2_000_000, 16, 3), (4000, 2, 1))
    ingest.warm_up()
    columns.warm_up()
    with TemporaryDirectory() as folder:
        for container, write in (("Parquet", _parquet), ("DBN", _dbn)):
            try:
                file = write(Path(folder), trades, markets)
            except ModuleNotFoundError as error:
                raise MeasurementFailed(
                    f"{error.name} is missing: pip install 'foretick[parquet,dbn]'"
                ) from None
            ours, bare = [], []
            for _ in range(repeats):
                ours.append(uvloop.run(_whole(file, trades)))
                bare.append(_timed(file, trades))
            setting: Setting = {"file": container, "trades": trades, "symbols": markets}
            found = rate("records a second", trades, ours, "")
            reference = rate("records a second", trades, bare, "").ours
            against = "library's own decoding"
            yield replace(found, setting=setting, goal=GOAL, against=against, reference=reference)


def _timed(file: _File, trades: int) -> float:
    began = time.perf_counter()
    decoded = file.decode(file.path)
    took = time.perf_counter() - began
    if decoded != trades:
        raise MeasurementFailed(f"{file.path.name}: the library decodes {decoded} records of {trades}")
    return took


async def _whole(file: _File, total: int) -> float:
    """Seconds from the start of the replay until all of its bars are made."""
    source = ReplaySource("replay", file.path, file.form, 0.0)
    with new_ring(_RING) as ring, child(processes.bars, ring.name, file.symbols, total) as pipe:
        began = time.monotonic_ns()
        await source.start()
        taking = asyncio.create_task(make_ingest(source, ring, file.symbols).run())
        finished = asyncio.create_task(asyncio.to_thread(pipe.recv))
        async with asyncio.timeout(_DEADLINE_S):
            await taking
            ended, _, _ = await finished
        await source.stop()
    if source.malformed_lines:
        raise MeasurementFailed(f"{file.path.name}: {source.first_malformed}")
    return float(ended - began) / 1e9


def _trades(count: int, markets: int) -> dict[str, Any]:
    """Columns of trades: times, ns; prices in cents; sizes; the symbol's number."""
    random = np.random.default_rng(7)
    return {
        "time": _START_NS + np.cumsum(random.integers(0, 10**9 // (100 * markets), count)),
        "price": 1_000_000 + np.cumsum(random.integers(-1, 2, count)),
        "size": random.integers(1, 1000, count),
        "symbol": random.integers(0, markets, count),
    }


def _parquet(folder: Path, count: int, markets: int) -> _File:
    import pyarrow as pa
    from pyarrow import parquet

    made = _trades(count, markets)
    names = [f"S{n:02d}" for n in range(markets)]
    table = pa.table(
        {
            "time": pa.array(made["time"], pa.timestamp("ns", "UTC")),
            "symbol": pa.DictionaryArray.from_arrays(pa.array(made["symbol"]), names),
            "price": made["price"] / 100,
            "size": made["size"],
            "id": np.arange(count),
        }
    )
    path, form = folder / "trades.parquet", folder / "form.toml"
    parquet.write_table(table, path, compression="zstd")
    form.write_text(_FORM)
    symbols = [f"BENCH:{name}" for name in names]
    return _File(path, load_format(form), symbols, lambda path: int(parquet.read_table(path).num_rows))


class _Interval(msgspec.Struct):
    start_date: datetime.date
    end_date: datetime.date
    symbol: str


class _Mapping(msgspec.Struct):
    raw_symbol: str
    intervals: list[_Interval]


def _dbn(folder: Path, count: int, markets: int) -> _File:
    import databento_dbn as dbn

    names = [f"S{n:02d}" for n in range(markets)]
    span = datetime.date(2024, 3, 5), datetime.date(2024, 4, 1)
    mappings: Sequence[Any] = [_Mapping(name, [_Interval(*span, str(n))]) for n, name in enumerate(names)]
    header: dict[str, Any] = {"stype_in": dbn.SType.RAW_SYMBOL, "stype_out": dbn.SType.INSTRUMENT_ID}
    header |= {"dataset": "BENCH", "start": _START_NS, "schema": dbn.Schema.TRADES, "symbols": names}
    metadata = dbn.Metadata(**header, mappings=mappings)
    made = _trades(count, markets)
    records = np.zeros(count, np.dtype(dbn.TradeMsg._dtypes))
    records["length"], records["action"], records["side"] = records.itemsize // 4, b"T", b"B"
    records["instrument_id"], records["size"] = made["symbol"], made["size"]
    records["price"] = made["price"] * 10**7
    records["ts_event"] = records["ts_recv"] = made["time"]
    records["sequence"] = np.arange(count)
    path = folder / "trades.dbn"
    path.write_bytes(bytes(metadata.encode()) + records.tobytes())
    return _File(path, load_format("databento"), [f"BENCH:{name}" for name in names], _decode_dbn)


def _decode_dbn(path: Path) -> int:
    import databento_dbn as dbn

    decoder = dbn.DBNDecoder()
    decoder.write(path.read_bytes())
    return len(decoder.decode()) - 1  # the metadata comes first
