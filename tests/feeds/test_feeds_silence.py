"""Silence: learnt gaps beside a plain reference, limits, hours of the day, and calendars of venues."""

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeds.quality.calendar import Calendar
from feeds.quality.gap_file import EVERY_NS, GapFile
from feeds.quality.silence import BUCKETS, HOURS, LEAST, SilenceMonitor
from ingest.record import BAR, FLAG_REPLAY, HEARTBEAT, RECORD, REFUSAL, TRADE

SECOND = 10**9
HOUR = 3600 * SECOND
NEW_YORK = ZoneInfo("America/New_York")


def records(times: Sequence[int], symbol: int = 0, kind: int = TRADE, flags: int = 0) -> np.ndarray:
    rows = np.zeros(len(times), RECORD)
    rows["ts_event"], rows["symbol"], rows["kind"], rows["flags"] = times, symbol, kind, flags
    return rows


def monitor(calendar: Calendar | None = None) -> SilenceMonitor:
    made = SilenceMonitor(3.0, SECOND, {"V": calendar} if calendar else {}, without=FLAG_REPLAY)
    made.read({"V:A": 0, "W:B": 1})
    return made


def taught(
    gap_ns: int, n: int = LEAST + 1, calendar: Calendar | None = None, start: int = 0
) -> SilenceMonitor:
    """Of symbol V:A, with a record every ``gap_ns``; the last one at ``start`` by both clocks."""
    made = monitor(calendar)
    times = start - gap_ns * np.arange(n)[::-1]
    made.learn(records(times.tolist()), start)
    return made


def always(_symbol: str) -> bool:
    return True


def wall(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=NEW_YORK).timestamp()) * SECOND


NYSE = ("America/New_York", ["mon-fri 09:30-16:00"], ["2026-12-25"], ["2026-11-27 13:00"])


@given(
    gaps=st.lists(st.integers(1, 10**13), min_size=LEAST, max_size=LEAST + 300),
    cuts=st.lists(st.integers(0, LEAST), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_the_p99_is_that_of_all_gaps_and_at_most_a_fifth_more(gaps: list[int], cuts: list[int]) -> None:
    """Nearest rank, over the gaps of its hour if these are enough, else over all."""
    times = np.cumsum([HOUR, *gaps]).tolist()
    made, borders = monitor(), [0, *sorted(cuts), len(times)]
    for a, b in pairwise(borders):
        made.learn(records(times[a:b]), 1)
    for hour in (0, 7):
        own = [gap for gap, at in zip(gaps, times[1:], strict=True) if at // HOUR % 24 == hour]
        ranked = sorted(own if len(own) >= LEAST else gaps)
        exact = ranked[int(np.ceil(0.99 * len(ranked))) - 1]
        assert exact <= made.p99_ns("V:A", hour * HOUR) + 1 or exact > 10**14
        assert made.p99_ns("V:A", hour * HOUR) <= max(1000, exact * 1.2)


def test_a_symbol_is_silent_after_three_times_its_p99_and_not_before() -> None:
    made = taught(2 * SECOND, start=10 * HOUR)
    limit = 3 * made.p99_ns("V:A", 10 * HOUR)
    assert 6 * SECOND <= limit <= 7.2 * SECOND
    for quiet, silent in ((limit, False), (limit + 1, True)):
        assert made.is_silent("V:A", 10 * HOUR + quiet, 10 * HOUR + quiet) == silent
    assert not made.is_silent("W:B", 20 * HOUR, 20 * HOUR)  # nothing came of it, ever


def test_a_busy_symbol_is_not_silent_within_the_floor() -> None:
    made = taught(SECOND // 1000, start=10 * HOUR)
    assert not made.is_silent("V:A", 10 * HOUR + SECOND, 10 * HOUR + SECOND)
    assert made.is_silent("V:A", 10 * HOUR + SECOND + 1, 10 * HOUR + SECOND + 1)


@pytest.mark.parametrize("n", [LEAST, LEAST + 1])
def test_nothing_is_said_before_enough_gaps(n: int) -> None:
    made = taught(SECOND, n, start=10 * HOUR)  # n records have one gap less
    assert made.is_silent("V:A", 20 * HOUR, 20 * HOUR) == (n > LEAST)


def test_each_hour_of_the_day_has_a_limit_of_its_own() -> None:
    made = monitor()
    for day in range(2):
        for hour, gap in ((9, SECOND), (15, 10 * SECOND)):
            start = (24 * day + hour) * HOUR
            made.learn(records(range(start, start + 300 * gap, gap)), 1)
    assert made.p99_ns("V:A", 9 * HOUR) < 2 * SECOND < 9 * SECOND < made.p99_ns("V:A", 15 * HOUR)


def test_old_gaps_count_less_and_less() -> None:
    made, start = monitor(), 10 * HOUR
    made.learn(records([start + n for n in range(17_000)]), 1)
    assert made.p99_ns("V:A", start) == 1000
    made.learn(records([start + n * SECOND // 10 for n in range(1, 400)]), 1)
    assert made.p99_ns("V:A", start) > SECOND // 20


@pytest.mark.parametrize(
    ("kind", "flags", "lives", "teaches"),
    [(TRADE, 0, True, True), (BAR, 0, True, True), (HEARTBEAT, 0, True, False), (REFUSAL, 0, True, False),
     (TRADE, FLAG_REPLAY, False, False)],
)  # fmt: skip
def test_what_is_a_sign_of_life_and_what_teaches(kind: int, flags: int, lives: bool, teaches: bool) -> None:
    made = monitor()
    made.learn(records([n * SECOND for n in range(1, LEAST + 10)], kind=kind, flags=flags), 7)
    assert made.has_seen("V:A") == lives
    assert (made.p99_ns("V:A", 0) > 0) == teaches


def test_reordered_records_and_unknown_symbols_teach_nothing() -> None:
    made = monitor()
    made.learn(records([5 * SECOND, 2 * SECOND, 3 * SECOND] * (LEAST + 1)), 1)
    assert made.p99_ns("V:A", 0) == 1000  # the repeated newest one
    made.learn(records([SECOND], symbol=9), 1)
    assert not made.has_seen("X:Y")


def test_a_symbol_that_is_read_later_keeps_what_others_learnt() -> None:
    made = taught(SECOND, start=10 * HOUR)
    before = made.p99_ns("V:A", 0)
    made.read({"V:A": 0, "W:B": 1, "X:C": 40})
    made.learn(records([HOUR], symbol=40), 1)
    assert (made.p99_ns("V:A", 0), made.has_seen("X:C")) == (before, True)


def test_each_silence_is_reported_once_when_it_begins() -> None:
    made, start = taught(SECOND, start=10 * HOUR), 10 * HOUR
    assert made.newly_silent(start + SECOND, start, always) == []
    assert made.newly_silent(start + 9 * SECOND, start, always) == ["V:A"]
    assert made.newly_silent(start + 10 * SECOND, start, always) == []
    made.learn(records([start + 11 * SECOND]), start + 11 * SECOND)
    assert made.newly_silent(start + 12 * SECOND, start, always) == []
    made.learn(records([start + 12 * SECOND]), start + 12 * SECOND)
    assert made.newly_silent(start + 30 * SECOND, start, always) == ["V:A"]
    made.learn(records([start + 31 * SECOND]), start + 31 * SECOND)
    assert made.newly_silent(start + 60 * SECOND, start, always) == ["V:A"], "it spoke between two calls"


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("2026-11-24T09:29:59", ""),
        ("2026-11-24T09:30:00", "2026-11-24T09:30:00"),
        ("2026-11-24T15:59:59", "2026-11-24T09:30:00"),
        ("2026-11-24T16:00:00", ""),
        ("2026-11-27T12:59:59", "2026-11-27T09:30:00"),  # a half day
        ("2026-11-27T13:00:00", ""),
        ("2026-11-28T12:00:00", ""),  # a Saturday
        ("2026-12-25T12:00:00", ""),  # a holiday
        ("2026-03-09T09:30:00", "2026-03-09T09:30:00"),  # the day after clocks went forward
    ],
)
def test_a_venue_is_open_at_its_hours(text: str, opened: str) -> None:
    found = Calendar(*NYSE).opened(wall(text))
    assert found == (wall(opened) if opened else None)


def test_a_session_may_last_over_midnight() -> None:
    futures = Calendar("America/New_York", ["sun-thu 18:00-17:00"], ["2026-11-26"])
    assert futures.opened(wall("2026-11-25T02:00:00")) == wall("2026-11-24T18:00:00")
    assert futures.opened(wall("2026-11-25T17:30:00")) is None
    assert futures.opened(wall("2026-11-26T19:00:00")) is None  # a holiday begins no session
    assert futures.opened(wall("2026-11-28T12:00:00")) is None


@given(
    minute=st.integers(0, 60 * 24 * 60),
    first=st.integers(0, 6), last=st.integers(0, 6),
    begins=st.integers(0, 1439), ends=st.integers(1, 1440),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_venue_is_open_in_one_of_its_weekly_sessions(
    minute: int, first: int, last: int, begins: int, ends: int
) -> None:
    days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
    hours = f"{days[first]}-{days[last]} {begins // 60:02}:{begins % 60:02}-{ends // 60:02}:{ends % 60:02}"
    now = datetime(2026, 1, 5) + timedelta(minutes=minute)
    length = ends - begins if ends > begins else ends - begins + 1440
    open_since = set()
    for back in (0, 1):
        day = now.date() - timedelta(days=back)
        begun = datetime.combine(day, datetime.min.time()) + timedelta(minutes=begins)
        in_week = (day.weekday() - first) % 7 <= (last - first) % 7
        if in_week and begun <= now < begun + timedelta(minutes=length):
            open_since.add(begun)
    found = Calendar("UTC", [hours]).opened(int((now - datetime(1970, 1, 1)).total_seconds()) * SECOND)
    expected = {int((each - datetime(1970, 1, 1)).total_seconds()) * SECOND for each in open_since}
    assert (found in expected) if expected else found is None


def test_a_closed_venue_is_not_silent_and_an_opening_counts_from_itself() -> None:
    closing, opening = wall("2026-11-24T15:59:50"), wall("2026-11-25T09:30:00")
    made = taught(SECOND, calendar=Calendar(*NYSE), start=closing)
    later = [("2026-11-24T15:59:58", True), ("2026-11-24T16:00:00", False), ("2026-11-25T03:00:00", False)]
    later += [("2026-11-25T09:30:03", False), ("2026-11-25T09:30:09", True)]
    for text, silent in later:
        assert made.is_silent("V:A", wall(text), wall(text)) == silent, text
    assert made.silence_ns("V:A", opening + 5 * SECOND, opening + 5 * SECOND) == 5 * SECOND


@pytest.mark.parametrize(
    ("zone", "hours", "holidays", "half_days"),
    [
        ("Nowhere/Here", ["mon-fri 09:30-16:00"], [], []),
        ("UTC", ["mo-fr 09:30-16:00"], [], []),
        ("UTC", ["mon-xyz 09:30-16:00"], [], []),
        ("UTC", ["mon-fri 9:30-16:00"], [], []),
        ("UTC", ["mon-fri 09:60-16:00"], [], []),
        ("UTC", ["mon-fri 09:30-24:01"], [], []),
        ("UTC", ["mon-fri 09:30-16:00"], ["25.12.2026"], []),
        ("UTC", ["mon-fri 09:30-16:00"], [], ["2026-11-27"]),
        ("UTC", ["mon-fri 09:30-16:00"], [], ["2026-11-31 13:00"]),
    ],
)
def test_what_is_no_calendar_is_refused(
    zone: str, hours: list[str], holidays: list[str], half_days: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Calendar(zone, hours, holidays, half_days)


def test_a_day_may_be_a_whole_one() -> None:
    always = Calendar("UTC", ["mon-sun 00:00-24:00"])
    midnight = int((date(2026, 1, 6) - date(1970, 1, 1)).days) * 24 * HOUR
    assert always.opened(midnight) == midnight
    assert always.opened(midnight - 1) == midnight - 24 * HOUR


def test_a_symbol_that_another_daemon_reads_is_not_silent() -> None:
    start = 100 * HOUR
    made = taught(SECOND, start=start)
    assert made.newly_silent(start + 9 * SECOND, start, lambda symbol: False) == []
    assert made.newly_silent(start + 10 * SECOND, start, always) == [], "it has only just come back"
    assert made.newly_silent(start + 20 * SECOND, start, always) == ["V:A"]


def test_what_was_learnt_is_known_after_a_restart(tmp_path: Path) -> None:
    path, start = tmp_path / "state" / "feed.gaps", 100 * HOUR
    first = taught(2 * SECOND, start=start)
    GapFile(path, first, 0).save()
    again = SilenceMonitor(3.0, SECOND, without=FLAG_REPLAY)
    GapFile(path, again, 0)
    again.read({"W:B": 0, "V:A": 1})
    assert again.p99_ns("V:A", start) == first.p99_ns("V:A", start) > 0
    assert again.p99_ns("W:B", start) == 0
    assert again.newly_silent(9 * SECOND, start, always) == [], "nothing came yet"
    again.learn(records([start + HOUR], 1), 10 * SECOND)
    assert again.newly_silent(30 * SECOND, start + HOUR, always) == ["V:A"]


def test_a_file_keeps_the_symbols_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "feed.gaps"
    GapFile(path, taught(SECOND, start=100 * HOUR), 0).save()
    other = SilenceMonitor()
    file = GapFile(path, other, 0)
    other.read({"V:C": 0})
    other.learn(records((SECOND * np.arange(1, LEAST + 3)).tolist()), 1)
    file.save()
    both = SilenceMonitor()
    GapFile(path, both, 0)
    both.read({"V:A": 0, "V:C": 1})
    assert min(both.p99_ns("V:A", 0), both.p99_ns("V:C", 0)) > 0


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x82\xa7buckets\x01\xa7symbols\x80", "places", "counts"])
def test_a_file_that_cannot_be_used_costs_what_was_learnt(
    content: bytes | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "feed.gaps"
    if isinstance(content, str):
        symbol = (b"\xff\xff", b"\1\0\0\0") if content == "places" else (b"\0\0", b"\1")
        content = msgspec.msgpack.encode({"buckets": HOURS * BUCKETS, "symbols": {"V:A": symbol}})
    path.write_bytes(content)
    made = SilenceMonitor()
    file = GapFile(path, made, 0)
    made.read({"V:A": 0})
    assert made.p99_ns("V:A", 0) == 0
    file.save()
    assert "V:A" not in path.read_text("latin-1")


def test_it_is_written_every_ten_minutes_and_a_full_disk_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = GapFile(tmp_path / "feed.gaps" / "below", taught(SECOND, start=100 * HOUR), 0)
    assert [file.is_due(now) for now in (1, EVERY_NS, EVERY_NS + 1, 2 * EVERY_NS)] == [
        False,
        True,
        False,
        True,
    ]
    (tmp_path / "feed.gaps").write_text("a file where a directory should be")
    file.save()
    assert "could not be written" in caplog.text
