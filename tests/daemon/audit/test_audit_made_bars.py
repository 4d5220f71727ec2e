"""Bars that are made again of a recorded file: all of them, however many it holds."""

import asyncio
import csv
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from daemon.audit.made_bars import make_again
from daemon.cli.bars_file import lines_of
from daemon.config.load import load_config
from ingest.bar_kernel import Bars
from tests.daemon.audit.broker import FORM
from tests.kit import SECOND, START
from tests.kit.daemon import invoke
from tests.kit.records import bars_format

pytestmark = pytest.mark.timeout(600)
Row = tuple[str, ...]
NINE_THIRTY = datetime(2024, 8, 8, 9, 30, tzinfo=UTC)


def config_of(folder: Path, form: str, header: str, rows: list[str], bars: str) -> Path:
    """A file of these rows, as the only source."""
    (folder / "form.toml").write_text(form)
    (folder / "records.csv").write_text("\n".join([header, *rows]) + "\n")
    made = folder / "foretick.toml"
    made.write_text(
        f"""
standing = "none"
model = {{ path = "untrained", threads = 1 }}
bars = {{ {bars} }}
[[sessions]]
name = "aaa"
symbol = "V:AAA"
[source]
kind = "replay"
[source.replay]
file = "{folder / "records.csv"}"
format = "{folder / "form.toml"}"
speed = 600
"""
    )
    return made


def made_again(path: Path) -> list[Row]:
    config, found = load_config(path), list[Row]()
    (session,) = config.sessions

    def write(bars: Bars) -> None:
        found.extend(lines_of(session, bars))

    asyncio.run(make_again(config, "aaa", write))
    return found


def test_each_ready_made_bar_is_there(tmp_path: Path) -> None:
    """More than the data plane takes out of the ring at once, and more than its backlog holds."""
    draw, count = random.Random(7), 5000
    prices = [sorted(draw.randint(1000, 9999) for _ in range(4)) for _ in range(count)]
    times = [f"{NINE_THIRTY + timedelta(minutes=n):%Y-%m-%dT%H:%M:%S}" for n in range(count)]
    written = [(o, high, low, close) for low, o, close, high in prices]
    rows = [
        f"{at}Z,{','.join(f'{price / 100:.2f}' for price in four)},{n % 9 + 1}"
        for n, (at, four) in enumerate(zip(times, written, strict=True))
    ]
    config = config_of(tmp_path, bars_format("AAA"), "time,o,h,l,c,v", rows, 'interval = "1m"')
    expected = [
        (f"{at}.000000000Z", str(60 * SECOND), *(price / 100 for price in four), n % 9 + 1.0)
        for n, (at, four) in enumerate(zip(times, written, strict=True))
    ]
    assert [(row[2], row[3], *map(float, row[4:9])) for row in made_again(config)] == expected


def test_bars_of_trades_are_those_that_replay_writes(tmp_path: Path) -> None:
    """In their order, with the corrections that late trades make, and with the open bar at the end."""
    draw, seconds = random.Random(8), 1500
    trades = [
        (START + (n - 2 * (draw.random() < 0.02)) * SECOND + at, 10_000 + draw.randint(-99, 99))
        for n in range(seconds)
        for at in sorted(draw.sample(range(SECOND), 1 + n % 2))
    ]
    rows = [f"{at},AAA,{cents / 100:.2f},{1 + at % 5}" for at, cents in trades]
    bars = 'interval = "1s", late = "amend"'
    config = config_of(tmp_path, FORM, "time,symbol,price,size", rows, bars)
    played = invoke(
        "replay", str(tmp_path / "records.csv"), "--format", str(tmp_path / "form.toml"),
        "--config", str(config), "--to", "inproc", "--speed", "0", "--bars", str(tmp_path / "bars.csv"),
    )  # fmt: skip
    assert played.exit_code == 0, played.output
    with (tmp_path / "bars.csv").open(newline="") as file:
        _, *expected = map(tuple, csv.reader(file))
    found = made_again(config)
    assert found == expected
    amended = [row for row in found if "amended" in row[-1]]
    assert len(amended) > 10
    assert len({row[2] for row in found}) == len(found) - len(amended) > seconds - 100
