"""Recorded market data, played whole or for days: its bars are those of plain decimal arithmetic."""

import csv
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tests.kit.daemon import invoke

MINUTE_NS = 60 * 10**9
Bar = tuple[Decimal, ...]
"""Open, high, low, close, volume."""
UTC = ZoneInfo("UTC")
pytestmark = pytest.mark.skipif("FORETICK_DATA" not in os.environ, reason="FORETICK_DATA names no folder")


def minute_of(at: datetime) -> int:
    return int(at.timestamp()) // 60


def ready(path: Path, read: Callable[[dict[str, str]], datetime]) -> dict[int, Bar]:
    """Bars as they stand in a file."""
    with path.open(newline="") as file:
        found = {}
        for row in csv.DictReader(file):
            numbers = {name.lower(): Decimal(text) for name, text in row.items() if name not in TIMES}
            volume = round(numbers["volume"], 9)
            found[minute_of(read(row))] = (*(numbers[n] for n in ("open", "high", "low", "close")), volume)
        return found


TIMES = ("timestamp", "Date")


def of_perpetual(path: Path) -> dict[int, Bar]:
    return ready(path, lambda row: datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC))


def of_index(path: Path) -> dict[int, Bar]:
    eastern = ZoneInfo("America/New_York")
    return ready(path, lambda row: datetime.strptime(row["Date"], "%m/%d/%Y %H:%M").replace(tzinfo=eastern))


def of_mids(quotes: Iterable[tuple[int, Decimal, Decimal]]) -> dict[int, Bar]:
    """Bars of the middles of quotes (time in ns, bid, ask), which have no volume."""
    minutes: dict[int, list[Decimal]] = {}
    for at, bid, ask in quotes:
        minutes.setdefault(at // MINUTE_NS, []).append((bid + ask) / 2)
    return {at: (mids[0], max(mids), min(mids), mids[-1], Decimal()) for at, mids in minutes.items()}


def of_ticks(path: Path) -> dict[int, Bar]:
    def quotes() -> Iterator[tuple[int, Decimal, Decimal]]:
        with path.open(newline="") as file:
            for time, bid, ask, _ in csv.reader(file):
                local = datetime.strptime(time[:15], "%Y%m%d %H%M%S").replace(tzinfo=UTC)
                at = int((local + timedelta(hours=5)).timestamp()) * 10**9 + int(time[15:]) * 10**6
                yield at, Decimal(bid), Decimal(ask)

    return of_mids(quotes())


def of_capture(path: Path) -> dict[int, Bar]:
    """Of the best quotes, which come first in the capture, at the time of their receipt."""

    def quotes() -> Iterator[tuple[int, Decimal, Decimal]]:
        with gzip.open(path, "rt") as file:
            for line in file:
                received, _, text = line.partition(" ")
                frame = json.loads(text)
                if frame.get("stream", "").endswith("@bookTicker"):
                    yield int(received), Decimal(frame["data"]["b"]), Decimal(frame["data"]["a"])

    return of_mids(quotes())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "form", "computed", "until"),
    [
        ("btc_perp_1m_202201.csv", "btc_perp_bars", of_perpetual, "2022-01-03T00:00:00Z"),
        ("sp500_index_1m_20191105.csv", "sp500_bars", of_index, ""),
        ("histdata_eurusd_ticks_20200101.csv", "histdata_quotes", of_ticks, ""),
        ("binance_spot_btcusdt_20240808_raw.gz", "binance_capture", of_capture, ""),
    ],
)
def test_bars_of_a_recording(
    name: str, form: str, computed: Callable[[Path], dict[int, Bar]], until: str, tmp_path: Path
) -> None:
    data, made = Path(os.environ["FORETICK_DATA"]) / name, tmp_path / "bars.csv"
    done = invoke(
        *("replay", str(data), "--format", form, "--to", "inproc", "--speed", "0", "--bars", str(made)),
        *("--set", "bars.interval=1m", "--set", "model.path=untrained", "--set", "standing=none"),
        *(("--until", until) if until else ()),
    )
    assert done.exit_code == 0, done.stderr
    with made.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {
        minute_of(datetime.fromisoformat(row["opens"][:19] + "+00:00")): tuple(
            Decimal(row[n]) for n in ("open", "high", "low", "close", "volume")
        )
        for row in rows
    }
    expected = computed(data)
    if until:
        end = minute_of(datetime.fromisoformat(until))
        expected = {at: bar for at, bar in expected.items() if at < end}
    assert len(found) == len(rows)
    assert found == expected
