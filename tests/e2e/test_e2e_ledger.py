"""Every record is in a bar or counted, and answers say what their bars lack: through the whole daemon."""

import csv
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from daemon.config.schema import SourceConfig
from daemon.ledger import ledger
from feeds.market_data import Answer
from tests.kit import SECOND, START, inproc_config, trade, until
from tests.kit.daemon import invoke
from tests.kit.inproc import running

TRADES = """
description = "trades"
container = "csv"
[[records]]
kind = "trade"
time = { field = "at", format = "epoch-s" }
fields = { venue = "venue", symbol = "symbol", price = "price", size = "size", id = "id" }
"""
OPENS = 1_723_161_240


def row(second: int, price: str, number: int, symbol: str = "AAA", size: str = "2") -> str:
    return f"{OPENS + second},V,{symbol},{price},{size},{number}"


FILE = [
    row(1, "100.1", 1),
    row(2, "100.2", 2),
    row(1, "100.1", 1),  # again
    row(3, "-5", 3),
    row(59, "100.4", 4, size="0.000000000001"),
    row(61, "100.5", 5),
    row(5, "99.9", 6),  # late
    row(62, "100.6", 7, symbol="BBB"),
    row(121, "100.7", 8),
]


def play(folder: Path, lines: list[str], *options: str) -> tuple[Result, list[dict[str, str]]]:
    """The result of a replay, and the rows of its bars."""
    (folder / "trades.toml").write_text(TRADES)
    (folder / "trades.csv").write_text("\n".join(["at,venue,symbol,price,size,id", *lines]))
    done = invoke(
        *("replay", str(folder / "trades.csv"), "--format", str(folder / "trades.toml")),
        *("--to", "inproc", "--speed", "0", "--set", "bars.interval=1m", "--symbols", "1"),
        *("--bars", str(folder / "bars.csv"), *options),
    )
    with (folder / "bars.csv").open(newline="") as file:
        return done, list(csv.DictReader(file))


def bars_of(lines: list[str]) -> list[tuple[Decimal, ...]]:
    """Open, high, low, close and volume of each minute, of the usable records of AAA in time."""
    minutes: dict[int, list[tuple[Decimal, Decimal]]] = {}
    seen, newest = set[str](), 0
    for line in lines:
        at, _, symbol, price, size, _ = line.split(",")
        minute = int(at) // 60
        if symbol == "AAA" and Decimal(price) > 0 and line not in seen and minute >= newest:
            seen.add(line)
            newest = minute
            minutes.setdefault(minute, []).append((Decimal(price), Decimal(size)))
    made = []
    for ticks in minutes.values():
        prices, volume = [price for price, _ in ticks], sum((size for _, size in ticks), Decimal(0))
        made.append((prices[0], max(prices), min(prices), prices[-1], volume))
    return made


def test_a_replay_says_what_became_of_every_record_and_writes_its_bars(tmp_path: Path) -> None:
    done, rows = play(tmp_path, FILE, "--max-late", "20")
    assert done.exit_code == 0, done.stderr
    found = done.stdout.splitlines()
    assert "9 records read: 7 for sessions, 1 of other symbols, 1 malformed (price 1)" in found
    at = found.index("session  records  in bars  late  repeated  dropped  refused  other kinds")
    assert found[at + 1].split() == ["aaa", "7", "5", "1", "1", "0", "0", "0"]
    numbers = [
        tuple(Decimal(each[name]) for name in ("open", "high", "low", "close", "volume")) for each in rows
    ]
    assert numbers == bars_of(FILE)
    opened = [datetime.fromtimestamp(OPENS + 60 * n, UTC).strftime("%Y-%m-%dT%H:%M:%S") for n in range(3)]
    assert [each["opens"] for each in rows] == [f"{moment}.000000000Z" for moment in opened]
    assert [(each["symbol"], each["interval"], each["records"]) for each in rows] == [
        ("V:AAA", str(60 * SECOND), records) for records in ("3", "1", "1")
    ]
    assert [each["flags"].split() for each in rows] == [["replay", "incomplete"], ["replay"], ["replay"]]


PATTERN = """
standing = "paper_six"
[bars]
interval = "1m"
[[sessions]]
name = "aaa"
symbol = "V:AAA"
price_decimals = 1
[[sessions]]
match = "V:B*"
price_decimals = 1
"""


def test_a_replay_writes_and_prints_the_bars_of_sessions_that_a_pattern_opens(tmp_path: Path) -> None:
    (tmp_path / "foretick.toml").write_text(PATTERN)
    lines = [row(at, "100.5", at, symbol=symbol) for at in (1, 61, 121, 181) for symbol in ("AAA", "BBB")]
    done, rows = play(tmp_path, lines, "--config", str(tmp_path / "foretick.toml"))
    assert done.exit_code == 0, done.stderr
    made = Counter(each["symbol"] for each in rows)
    assert made["V:AAA"] >= 3
    assert made["V:BBB"] >= 3
    told = [line for line in done.stdout.splitlines() if line.startswith("V:BBB 2024-")]
    assert told
    assert all("Z 100.5 v" in line for line in told)


def test_too_many_late_records_are_an_error_with_a_clear_line(tmp_path: Path) -> None:
    done, _ = play(tmp_path, FILE)
    assert done.exit_code == 1
    assert "aaa: 1 of 7 records (14.3%) came after their bar had closed" in done.stderr
    assert "--max-late allows 1 %" in done.stderr


def test_answers_of_a_replay_carry_what_their_windows_lack(tmp_path: Path) -> None:
    done, _ = play(tmp_path, FILE, "--max-late", "20", "--json")
    found = [msgspec.json.decode(line, type=Answer) for line in done.stdout.splitlines()]
    last = {answer.question: answer for answer in found}
    assert last
    assert all({"late", "incomplete"} <= set(answer.flags) for answer in last.values())


@pytest.mark.parametrize("counts", ["none", "symbol"])
async def test_what_a_reconnect_sends_again_is_counted_once(counts: str) -> None:
    config = inproc_config(source=SourceConfig(sequence=counts))  # type: ignore[call-arg]  # a field of its table

    def tick(number: int, at_s: float, size: str = "1") -> bytes:
        return trade(
            "V:AAA", START + int(at_s * SECOND), f"{100 + number}.0", size, seq=number, id=f"t{number}"
        )

    first, again = tick(1, 0.1, "2"), tick(2, 0.2, "3")
    sent = [first, again, first, again, tick(3, 0.3), tick(4, 1.1), again, tick(5, 2.1)]
    async with running(config) as daemon:
        daemon.put(*sent)
        await until(lambda: daemon.state().live_records == 2)
        assert daemon.count("records_duplicate", session="aaa") == 3
        assert daemon.count("records_late", session="aaa") == 0
        assert daemon.count("records_lost_upstream", source="test") == 0
        assert daemon.count("records_in_bars", session="aaa") == 5
        assert ledger(daemon.gateway.store).unaccounted == {}


async def test_a_refused_record_flags_answers_and_asks_while_its_bar_is_in_the_window() -> None:
    async with running(inproc_config()) as daemon:
        broken = trade("V:AAA", START + SECOND // 2, "-1")
        daemon.put(trade("V:AAA", START), broken)
        daemon.put(*(trade("V:AAA", START + n * SECOND) for n in (1, 2, 3)))
        await until(lambda: daemon.state().live_records == 3 and len(daemon.answers()) >= 6)
        assert all("incomplete" in a.flags and "late" not in a.flags for a in daemon.answers())
        question = next(each for each in daemon.state().questions if each.choices)
        reply = await daemon.call("ask", "aaa", "Which way?", choices=question.choices)
        assert "incomplete" in reply.flags
