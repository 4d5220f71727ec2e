"""Folders and patterns: several files are played as one, by time."""

import asyncio
import heapq
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeds import merged_files
from feeds.codec import decode_record
from feeds.columns.record_columns import ColumnBatch, RecordColumns
from feeds.connectors.replay import ReplayConnector
from feeds.market_data import AnyRecord
from feeds.merged_files import files_of, merged
from feeds.replay_source import ReplaySource
from feeds.source import Incoming
from tests.feeds.declared import TRADES, declared, read_file, with_symbols
from tests.feeds.test_feeds_tables import TEN, TIMES, as_columns, check_columns

SECOND = 10**9
PARQUET = with_symbols(TRADES.replace('"csv"', '"parquet"'))
CSV = with_symbols(TRADES).replace("iso", "epoch-ns")
Trades = list[tuple[int, str]]
"""Seconds since ten o'clock and the symbol of each trade; its id is its place."""


def write_parquet(path: Path, trades: Trades) -> None:
    count = len(trades)
    pq.write_table(
        pa.table(
            {
                "time": pa.array([TEN + at * SECOND for at, _ in trades], TIMES),
                "s": pa.array([symbol for _, symbol in trades], pa.string()),
                "price": pa.array([Decimal(n + 1) for n in range(count)], pa.decimal128(20, 2)),
                "size": pa.array([1] * count, pa.int64()),
                "id": pa.array([f"{path.stem}{n}" for n in range(count)], pa.string()),
            }
        ),
        path,
    )


def write_csv(path: Path, trades: Trades) -> None:
    rows = [f"{TEN + at * SECOND},{symbol},{n + 1},1,{path.stem}{n}" for n, (at, symbol) in enumerate(trades)]
    path.write_text("\n".join(["time,s,price,size,id", *rows, ""]))


def right(files: list[Trades]) -> list[str]:
    """Ids in the order of play: by the newest time so far in the trade's file, then by file."""
    streams = []
    for number, trades in enumerate(files):
        newest, stream = 0, []
        for place, (at, _) in enumerate(trades):
            newest = max(newest, at)
            stream.append((newest, number, place, f"{chr(97 + number)}{place}"))
        streams.append(stream)
    return [found for *_, found in heapq.merge(*streams)]


TRADE = st.tuples(st.integers(0, 30), st.sampled_from("XYZ"))
FILES = st.lists(st.lists(TRADE, max_size=25), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(FILES, st.booleans(), st.integers(1, 7))
def test_records_of_all_files_are_played_by_time(
    tmp_path_factory: pytest.TempPathFactory, files: list[Trades], tables: bool, records: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    write, form, end = (write_parquet, PARQUET, "parquet") if tables else (write_csv, CSV, "csv")
    form = f'order = "oldest_first"{form}'
    for number, trades in enumerate(files):
        write(folder / f"{chr(97 + number)}.{end}", trades)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged_files, "_RECORDS", records)
        found = read_file(form, folder)
        columns = as_columns(form, folder)
    assert [each.id for each in found.trades] == right(files)
    assert [each.seq for each in found.records] == list(range(1, len(found.records) + 1))
    assert columns.records == found.records
    check_columns(columns)
    assert not tables or columns.rows == len(found.records)


def test_a_pattern_and_what_a_folder_is_held_against(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", ".hidden.csv", "notes.txt"):
        write_csv(tmp_path / name, [(1, "X")])
    assert [each.name for each in files_of(tmp_path, "*.csv")] == ["a.csv", "b.csv"]
    assert [each.name for each in files_of(tmp_path / "[ab].csv")] == ["a.csv", "b.csv"]
    assert files_of(tmp_path / "none.csv") == [tmp_path / "none.csv"]
    with pytest.raises(FileNotFoundError, match="no files: "):
        files_of(tmp_path / "*.parquet")
    assert [each.id for each in read_file(CSV, tmp_path / "[ab].csv").trades] == ["a0", "b0"]


def test_refusals_name_their_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [(1, "X")])
    (tmp_path / "b.csv").write_text(f"time,s,price,size,id\n{TEN},X,-1,1,\n{TEN},X,1,1,\n")
    found = read_file(CSV, tmp_path)
    assert found.bad == [(2, "price", "b.csv: price must be above 0, got -1")]
    assert len(found.records) == 2


def test_files_are_opened_when_their_time_comes() -> None:
    opened: list[int] = []

    def file(number: int) -> tuple[int, object]:
        def open_() -> object:
            opened.append(number)
            for at in range(2):
                yield record(number * 10 + at)

        return number * 10, open_

    items = merged([file(n) for n in (3, 1, 2)])  # type: ignore[misc]
    assert next(items).ts_event == 10
    assert opened == [1]
    assert [each.ts_event for each in items] == [11, 20, 21, 30, 31]


def record(at: int) -> AnyRecord:
    payload = b'{"type":"trade","venue":"V","symbol":"S","ts_event":%d,"ts_recv":%d,"price":"1","size":"1"}'
    made = decode_record(payload % (TEN + at, TEN + at))
    return msgspec.structs.replace(made, ts_event=at)  # type: ignore[return-value]


@pytest.mark.parametrize("speed", [0.0, 10.0, 1e9])
def test_columns_are_paced_as_records_are(tmp_path: Path, speed: float) -> None:
    """Seconds 0, 0, 1, 5 and 3 at ten times the speed: what is behind a newer one comes right behind it."""
    write_parquet(tmp_path / "a.parquet", [(at, "X") for at in (0, 0, 1, 5, 3)])
    now = [100.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    source = ReplaySource(
        "r", tmp_path / "a.parquet", declared(PARQUET), speed, monotonic_s=lambda: now[0], sleep=sleep
    )
    batches: list[tuple[float, list[Incoming]]] = []

    async def play() -> None:
        await source.start()
        async for batch in source.batches():
            assert isinstance(batch, ColumnBatch)
            batches.append((now[0] - 100, list(batch)))

    asyncio.run(play())
    messages = [message for _, batch in batches for message in batch]
    assert [message.offset for message in messages] == list(range(5))
    assert [decode_record(m.payload).seq for m in messages] == [1, 2, 3, 4, 5]
    assert messages[0].key == b"T:X"
    assert messages[0].headers["replay"] == b"1"
    if speed == 10:
        assert [(round(at, 1), len(batch)) for at, batch in batches] == [(0, 2), (0.1, 1), (0.5, 2)]
    else:
        assert sum(len(batch) for _, batch in batches) == 5


def test_a_time_span_of_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [(at, "X") for at in (0, 1, 5, 2, 7)])
    span = {"from_ns": TEN + SECOND, "until_ns": TEN + 5 * SECOND}
    found = as_columns(PARQUET, tmp_path / "a.parquet", **span)
    assert [each.seq for each in found.records] == [2, 4]
    assert found.records == read_file(PARQUET, tmp_path / "a.parquet", **span).records
    check_columns(found)
    assert all(isinstance(each, RecordColumns) for each in found.columns)


def test_a_folder_is_checked_file_by_file(tmp_path: Path) -> None:
    form = tmp_path / "form.toml"
    form.write_text(f'description = "made"\nmembers = "*.parquet"{PARQUET}')
    write_parquet(tmp_path / "a.parquet", [(0, "X")])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    wrong = [each for each in ReplayConnector(file=str(tmp_path), format=str(form)).check() if not each.ok]
    assert [each.key for each in wrong] == ["file"]
    assert wrong[0].message.startswith("b.parquet: the file cannot be read as parquet: ")
    (tmp_path / "b.parquet").unlink()
    assert all(each.ok for each in ReplayConnector(file=str(tmp_path), format=str(form)).check())
