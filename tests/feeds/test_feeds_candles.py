"""Ready-made bars of a file: updates of an unfinished one, and stamps at the close."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.file_format import FormatError
from tests.feeds.declared import BARS, MINUTE, TRADES, declared, pushed, read

START = int(datetime(2024, 3, 5, 10, tzinfo=UTC).timestamp()) * 10**9
UPDATES = """
container = "csv"
header = false
[[records]]
kind = "bar"
venue = "T"
interval = "1m"
{ready}
time = {{ field = 0, format = "epoch-ns" }}
fields = {{ symbol = 1, open = 2, high = 2, low = 2, close = 2 }}
"""
LAST = UPDATES.format(ready='ready = "last"')

Updates = list[tuple[int, str, int]]
"""Minute, symbol and price of each line."""


def lines(updates: Updates) -> str:
    return "".join(f"{START + minute * MINUTE},{symbol},{price}\n" for minute, symbol, price in updates)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("AB"), st.integers(1, 9)), max_size=40))
def test_the_last_update_of_a_candle_counts(updates: Updates) -> None:
    updates.sort(key=lambda update: update[0])
    expected = {(symbol, minute): price for minute, symbol, price in updates}
    found = read(f'order = "oldest_first"\n{LAST}', lines(updates))
    got = [(bar.symbol, (bar.ts_event - START) // MINUTE, bar.close // 10**18) for bar in found.bars]
    assert sorted(got) == sorted((*key, price) for key, price in expected.items())
    for symbol in "AB":
        opened = [minute for each, minute, _ in got if each == symbol]
        assert opened == sorted(opened)
    assert found.skipped["unfinished_candles"] == len(updates) - len(expected)
    assert [bar.seq for bar in found.bars] == list(range(1, len(got) + 1))


def test_an_update_of_an_older_candle_is_passed_on_and_will_be_late() -> None:
    found = read(
        f'order = "oldest_first"\n{LAST}', lines([(0, "A", 1), (1, "A", 2), (0, "A", 3), (1, "A", 4)])
    )
    assert [((bar.ts_event - START) // MINUTE, bar.close // 10**18) for bar in found.bars] == [
        (0, 1),
        (0, 3),
        (1, 4),
    ]


def test_repeated_openings_without_a_declaration_are_not_silent() -> None:
    found = read(
        UPDATES.format(ready=""), lines([(0, "A", 1), (0, "A", 1), (0, "A", 2), (1, "A", 3), (1, "A", 4)])
    )
    assert len(found.bars) == 5
    (notice,) = found.notices
    assert notice.startswith("2 bars repeat the opening before them with other values, first in line 3")
    assert 'ready = "last"' in notice


def test_updates_of_a_body_are_resolved_within_it() -> None:
    body = pushed(LAST, lines([(0, "A", 1), (0, "A", 2), (1, "A", 3)]))
    assert (body.usable, body.passed_over, body.errors) == (2, 1, [])


def test_only_bars_have_updates() -> None:
    with pytest.raises(FormatError, match="ready: only bars"):
        declared(TRADES.replace('kind = "trade"', 'kind = "trade"\nready = "last"'))


INTERVALS = {"1s": 1, "5s": 5, "1m": 60, "5m": 300, "1h": 3600, "4h": 14_400, "1d": 86_400}


def closing(interval: str, unit: str = "epoch-ns") -> str:
    return BARS.replace('interval = "1m"', f'interval = "{interval}"\nstamp = "close"').replace("iso", unit)


def openings(form: str, stamps: list[str]) -> list[int]:
    rows = "".join(f"{stamp},1,2,1,2,1\n" for stamp in stamps)
    return [
        bar.ts_event
        for bar in read(f'order = "oldest_first"\n{form}', f"time,open,high,low,close,volume\n{rows}").bars
    ]


@given(
    st.sampled_from(sorted(INTERVALS)),
    st.integers(0, 10**5),
    st.integers(0, 1439),
    st.sampled_from([0, 1, 100, 10**3, 10**6]),
)
def test_an_inclusive_stamp_at_the_close_belongs_to_its_interval(
    interval: str, bars: int, shift: int, before: int
) -> None:
    """Also of sessions that do not begin at midnight: whole minutes later."""
    span = INTERVALS[interval] * 10**9
    opening = START + (bars * span) % (10**9 * 86_400 * 365 * 20) + (shift * MINUTE if span >= MINUTE else 0)
    assert openings(closing(interval), [str(opening + span - before)]) == [opening]


@pytest.mark.parametrize(
    ("interval", "stamp", "expected"),
    [
        ("1m", "2024-03-05T10:00:59.999Z", "10:00"),
        ("1m", "2024-03-05T10:00:59.999999Z", "10:00"),
        ("1m", "2024-03-05T10:00:59.999999999Z", "10:00"),
        ("1m", "2024-03-05T10:00:59Z", "10:00"),
        ("1m", "2024-03-05T10:01:00Z", "10:00"),
        ("1d", "2024-03-05T23:59:59Z", "00:00"),
        ("1h", "2024-03-05T10:29:59.999Z", "09:30"),
        ("1m", "2024-03-05T10:01:17Z", "10:00:17"),
    ],
)
def test_known_stamps(interval: str, stamp: str, expected: str) -> None:
    hour, minute, second = (int(part) for part in f"{expected}:00".split(":")[:3])
    opening = datetime(2024, 3, 5, hour, minute, second, tzinfo=UTC)
    assert openings(closing(interval, "iso"), [stamp]) == [int(opening.timestamp()) * 10**9]


def test_openings_beside_the_grid_are_kept_and_named() -> None:
    """Sessions and weeks open at any minute, so only what is beside whole minutes is odd."""
    stamps = [datetime(2024, 3, 5, 9, 30, 17 * (n == 2), tzinfo=UTC) + timedelta(hours=n) for n in range(4)]
    rows = "".join(f"{stamp:%Y-%m-%dT%H:%M:%SZ},1,2,1,2,1\n" for stamp in stamps)
    found = read(BARS.replace("1m", "1h"), f"time,open,high,low,close,volume\n{rows}")
    assert len(found.bars) == 4
    assert found.notices == ["1 bars do not open on a multiple of 1m, first in line 4"]
