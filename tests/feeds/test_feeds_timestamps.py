"""Timestamps in files to nanoseconds, against datetime.timestamp of well-known instants."""

from datetime import UTC, date, datetime
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from feeds.timestamps import name_date, parse_zone, time_parser


def at(*parts: int, us: int = 0) -> int:
    return int(datetime(*parts, tzinfo=UTC).timestamp()) * 10**9 + us * 1000  # type: ignore[arg-type, misc]  # ints only


@pytest.mark.parametrize(
    ("pattern", "zone", "text", "expected"),
    [
        ("%Y%m%d %H%M%S%f", "UTC-05:00", "20200101 170000065", at(2020, 1, 1, 22, us=65_000)),
        ("%Y%m%d %H%M%S%f", "UTC-05:00", "20200701 170000065", at(2020, 7, 1, 22, us=65_000)),
        ("%Y-%m-%d %H:%M", "UTC+05:30", "2020-01-01 00:00", at(2019, 12, 31, 18, 30)),
        ("%m/%d/%Y %H:%M", "America/New_York", "11/5/2019 9:30", at(2019, 11, 5, 14, 30)),
        ("%m/%d/%Y %H:%M", "America/New_York", "7/5/2019 9:30", at(2019, 7, 5, 13, 30)),
        ("%m/%d/%Y %H:%M", "America/New_York", "11/3/2019 1:30", at(2019, 11, 3, 5, 30)),
        ("iso", "UTC", "2021-12-31 23:01:00.000000", at(2021, 12, 31, 23, 1)),
        ("iso", "America/New_York", "2021-12-31T23:01:00+01:00", at(2021, 12, 31, 22, 1)),
        ("epoch-s", "UTC", "1577916000.065", at(2020, 1, 1, 22, us=65_000)),
        ("epoch-s", "UTC", "1577916000", at(2020, 1, 1, 22)),
        ("epoch-ms", "UTC", "1577916000065", at(2020, 1, 1, 22, us=65_000)),
        ("epoch-us", "UTC", "1577916000065000", at(2020, 1, 1, 22, us=65_000)),
        ("epoch-ns", "UTC", "1577916000065000001", at(2020, 1, 1, 22, us=65_000) + 1),
        ("epoch-ms", "UTC", "1577916000065.000001", at(2020, 1, 1, 22, us=65_000) + 1),
    ],
)
def test_known_instants(pattern: str, zone: str, text: str, expected: int) -> None:
    assert time_parser(pattern, zone)(text).ns == expected


@given(st.integers(0, 4 * 10**18))
def test_epoch_seconds_are_exact_to_the_nanosecond(ns: int) -> None:
    assert time_parser("epoch-s")(f"{ns // 10**9}.{ns % 10**9:09d}").ns == ns


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        *(("epoch-ms", "12x"), ("epoch-ms", ""), ("epoch-ms", "-5"), ("epoch-ms", "1e3")),
        *(("epoch-ms", "1.0000001"), ("epoch-ns", "1.5"), ("iso", "yesterday"), ("%Y", "20x0")),
    ],
)
def test_unreadable_stamps_are_value_errors(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        time_parser(pattern)(text)


def test_times_of_the_day_need_a_day() -> None:
    with pytest.raises(ValueError, match="of which day"):
        time_parser("day-ms")


@given(
    st.dates(date(1990, 1, 1), date(2099, 12, 31)),
    st.integers(0, 86_400 * 10**9 - 1),
    st.sampled_from(["UTC", "UTC-05:00", "America/New_York", "Europe/Berlin", "Asia/Tokyo"]),
)
def test_times_of_the_day_are_wall_times(day: date, since: int, zone: str) -> None:
    hours, rest = divmod(since // 1000, 3_600 * 10**6)
    minutes, micros = divmod(rest, 60 * 10**6)
    seconds, micros = divmod(micros, 10**6)
    wall = datetime(day.year, day.month, day.day, hours, minutes, seconds, micros, parse_zone(zone))
    assume(wall.astimezone(UTC).astimezone(wall.tzinfo) == wall.replace(fold=0))
    exact = Fraction(int(wall.timestamp())) * 10**9 + wall.microsecond * 1000 + since % 1000
    assert time_parser("day-ns", zone, day)(str(since)).ns == exact
    assert time_parser("day-s", zone, day)(f"{since // 10**9}.{since % 10**9:09d}").ns == exact
    assert time_parser("day-ms", zone, day)(f"{since // 10**6}.{since % 10**6:06d}").ns == exact
    with pytest.raises(ValueError, match="end of the day"):
        time_parser("day-ns", zone, day)(str(since + 86_400 * 10**9))


@given(
    st.dates(date(1990, 1, 1), date(2068, 12, 31)),
    st.sampled_from(["%Y%m%d", "%Y-%m-%d", "%d%b%y", "%y%m%d"]),
)
def test_a_file_names_its_day(day: date, pattern: str) -> None:
    text = day.strftime(pattern)
    assert name_date(pattern, f"AMZN_{text}_34200000_57600000_message_10.csv") == day
    assert name_date(pattern, "trades.zip", f"{text}_spy_minute_trade.csv") == day


def test_a_day_that_is_not_sure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no date like %Y%m%d"):
        name_date("%Y%m%d", "spy.csv")
    with pytest.raises(ValueError, match=r"2024-01-02, 2024-01-05"):
        name_date("%Y%m%d", "20240102_20240105.csv")
    with pytest.raises(ValueError, match="%H of %Y%H"):
        name_date("%Y%H", "2024")
    assert name_date("%Y%m%d", "20240102_20240102.csv") == date(2024, 1, 2)
