"""Local hours that occur twice: instants to wall times and back, in the order of a file."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds import repeated_hour
from tests.feeds.declared import TRADES, ns, pushed, read, with_symbols

CHANGES = {
    "America/New_York": datetime(2024, 11, 3, 6, tzinfo=UTC),
    "Europe/Berlin": datetime(2024, 10, 27, 1, tzinfo=UTC),
    "Australia/Lord_Howe": datetime(2024, 4, 6, 15, tzinfo=UTC),  # by half an hour
    "America/Havana": datetime(2024, 11, 3, 5, tzinfo=UTC),  # over midnight
}


def form(zone: str, more: str = "") -> str:
    return TRADES.replace('"iso"', f'"iso", zone = "{zone}"').replace(
        'container = "csv"', f'container = "csv"\n{more}'
    )


def wall(instant: datetime, zone: str) -> str:
    return instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None).isoformat()


def text(instants: list[datetime], zone: str) -> str:
    rows = [f"{wall(each, zone)},1,1,{number}" for number, each in enumerate(instants)]
    return "\n".join(["time,price,size,id", *rows, ""])


def fold(zone: str) -> timedelta:
    before, after = (
        (CHANGES[zone] + timedelta(hours=hours)).astimezone(ZoneInfo(zone)).utcoffset() for hours in (-1, 1)
    )
    assert before is not None
    assert after is not None
    return before - after


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[datetime]]:
    """Instants around a change in order; on the wall it goes back there by a minute or more."""
    zone = draw(st.sampled_from(sorted(CHANGES)))
    change, span = CHANGES[zone], fold(zone)
    seconds = st.integers(-2 * 3600, 3 * 3600)
    around = [change + timedelta(seconds=each) for each in draw(st.lists(seconds, max_size=20))]
    first = draw(st.integers(60, int(span.total_seconds()) - 1))
    second = draw(st.integers(0, first - 60))
    last = change - span + timedelta(seconds=first)  # the newest of the first hour
    again = change + timedelta(seconds=second)  # the oldest of the second
    kept = [each for each in around if not last < each < again]
    return zone, sorted([*kept, last, again])


@given(histories())
def test_order_says_which_hour_is_meant(history: tuple[str, list[datetime]]) -> None:
    zone, instants = history
    found = read(form(zone, 'order = "oldest_first"'), text(instants, zone))
    assert found.bad == []
    assert [each.ts_event for each in found.records] == [ns(each) for each in instants]
    assert [each.ts_recv for each in found.records] == [ns(each) for each in instants]


@given(histories())
def test_newest_first_it_is_the_order_from_the_end(history: tuple[str, list[datetime]]) -> None:
    zone, instants = history
    found = read(form(zone, 'order = "newest_first"'), text(instants[::-1], zone))
    assert found.bad == []
    assert [each.ts_event for each in found.records] == [ns(each) for each in instants]


@given(st.sampled_from(sorted(CHANGES)), st.lists(st.integers(-3 * 3600, 3 * 3600), max_size=30))
def test_no_record_in_order_gets_the_wrong_hour(zone: str, offsets: list[int]) -> None:
    """Where order cannot say, records are refused, and all others are right."""
    instants = sorted(CHANGES[zone] + timedelta(seconds=each) for each in offsets)
    found = read(form(zone, 'order = "oldest_first"'), text(instants, zone))
    lines = {line for line, _, _ in found.bad}
    expected = [ns(each) for number, each in enumerate(instants) if number + 2 not in lines]
    assert [each.ts_event for each in found.records] == expected
    twice = [
        n + 2
        for n, each in enumerate(instants)
        if abs(each - CHANGES[zone] + fold(zone) / 10**9) <= fold(zone)
    ]
    assert lines <= set(twice)
    assert all(reason == "timestamp_unit" for _, reason, _ in found.bad)


def test_an_hour_that_the_file_has_once_is_refused_with_its_lines() -> None:
    rows = ["time,price,size,id"]
    rows += [f"2024-11-03T{hour:02}:{minute:02}:00,1,1,1" for hour in range(4) for minute in (10, 50)]
    found = read(form("America/New_York"), "\n".join(rows))
    assert found.refused == [(4, "timestamp_unit"), (5, "timestamp_unit")]
    assert "2024-11-03T05:10:00.000000000Z and 2024-11-03T06:10:00.000000000Z" in found.bad[0][2]
    assert "the order of the file does not say which is meant" in found.bad[0][2]
    assert len(found.records) == 6


def test_a_body_is_a_file() -> None:
    zone = "America/New_York"
    both = [CHANGES[zone] + timedelta(minutes=each) for each in (-50, -10, 10, 50)]
    assert pushed(form(zone), text(both, zone)).usable == 4
    assert [line for line, _ in pushed(form(zone), text(both[:2], zone)).errors] == [2, 3]


def test_a_third_pass_is_refused() -> None:
    found = read(form("America/New_York"), "time,price,size,id\n" + "".join(
        f"2024-11-03T01:{minute}:00,1,1,1\n" for minute in (10, 50, 10, 50, 10)
    ))  # fmt: skip
    assert found.refused == [(6, "timestamp_unit")]
    assert "more than twice" in found.bad[0][2]


def test_symbols_are_settled_each_by_its_own_order() -> None:
    """The second symbol has the hour only once."""
    declaration = with_symbols(form("America/New_York"))
    lines = ("00:30 A", "01:10 A", "01:20 B", "01:05 A", "01:30 B", "02:10 B")
    rows = (f"2024-11-03T{line[:5]}:00,1,1,1,{line[-1]}" for line in lines)
    found = read(declaration, "\n".join(["time,price,size,id,s", *rows]))
    assert found.refused == [(4, "timestamp_unit"), (6, "timestamp_unit")]
    assert [each.ts_event for each in found.records] == [
        ns(datetime(2024, 11, 3, hour, minute, tzinfo=UTC))
        for hour, minute in ((4, 30), (5, 10), (6, 5), (7, 10))
    ]


@pytest.mark.parametrize("declared_ready", ["", 'ready = "last"'])
def test_bars_of_an_hour_open_twice_at_the_same_wall_time(declared_ready: str) -> None:
    """With updates of one candle nothing can say which hour it is."""
    declaration = f"""
    container = "csv"
    header = false
    [[records]]
    kind = "bar"
    venue = "T"
    symbol = "S"
    interval = "1h"
    {declared_ready}
    time = {{ field = 0, format = "%Y-%m-%d %H:%M", zone = "America/New_York" }}
    fields = {{ open = 1, high = 1, low = 1, close = 1 }}
    """
    found = read(declaration, "".join(f"2024-11-03 {hour:02}:00,1\n" for hour in (0, 1, 1, 2)))
    first = datetime(2024, 11, 3, 4, tzinfo=UTC)
    if declared_ready:
        assert found.refused == [(2, "timestamp_unit"), (3, "timestamp_unit")]
        return
    assert [each.ts_event for each in found.records] == [
        ns(first + timedelta(hours=each)) for each in range(4)
    ]


def test_ticks_out_of_order_by_seconds_do_not_change_the_hour() -> None:
    zone = "Europe/Berlin"
    seconds = [-3000, -2990, -2991, -1000, -1001, 100, 99, 1800, 4000]
    instants = [CHANGES[zone] + timedelta(seconds=each) for each in seconds]
    found = read(form(zone), text(instants, zone))
    assert [each.ts_event for each in found.records] == [ns(each) for each in instants]


def test_records_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are refused then; what comes later is still settled."""
    monkeypatch.setattr(repeated_hour, "MAX_HELD", 20)
    zone = "Europe/Berlin"
    instants = [CHANGES[zone] + timedelta(minutes=minute) for minute in range(-50, 60)]
    found = read(form(zone), text(instants, zone))
    assert [line for line, _, _ in found.bad] == list(range(2, 44))
    assert [each.ts_event for each in found.records] == [ns(each) for each in instants[42:]]


def test_many_symbols_pass_through_the_hour() -> None:
    declaration = with_symbols(form("Europe/Berlin"))
    instants = [CHANGES["Europe/Berlin"] + timedelta(minutes=minute) for minute in range(-90, 150, 5)]
    rows = [f"{wall(each, 'Europe/Berlin')},1,1,1,S{n}" for each in instants for n in range(100)]
    found = read(declaration, "\n".join(["time,price,size,id,s", *rows]))
    assert found.bad == []
    assert [each.ts_event for each in found.records] == [ns(each) for each in instants for _ in range(100)]
