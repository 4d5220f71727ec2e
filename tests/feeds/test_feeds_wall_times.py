"""Wall times against `datetime`, `zoneinfo` by brute force and plain arithmetic on the digits."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.timestamps import parse_instant, time_parser
from feeds.wall_times import Moment, parse_zone
from tests.feeds.declared import EPOCH, ns

ZONES = [
    "America/New_York",
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "America/St_Johns",
    "Africa/Casablanca",
    "Asia/Kolkata",
    "Antarctica/Troll",
    "America/Havana",
]
MOMENTS = st.datetimes(datetime(1990, 1, 2), datetime(2037, 12, 30))


def instants(wall: datetime, zone: str) -> list[int]:
    """Every instant at which clocks of a zone show this: each minute's offset within a day is tried."""
    tz = ZoneInfo(zone)
    offsets = {
        (wall.replace(tzinfo=UTC) + timedelta(hours=hours)).astimezone(tz).utcoffset()
        for hours in range(-30, 31)
    }
    found = set()
    for offset in offsets:
        assert offset is not None
        instant = wall.replace(tzinfo=UTC) - offset
        if instant.astimezone(tz).replace(tzinfo=None) == wall:
            found.add(ns(instant))
    return sorted(found)


def near_a_change(zone: str) -> list[datetime]:
    """Walls in the hours around the changes of a zone's clocks in 2010 and 2024."""
    tz, found = ZoneInfo(zone), []
    for year in (2010, 2024):
        hour = datetime(year, 1, 1, tzinfo=UTC)
        while hour.year == year:
            after = hour + timedelta(hours=1)
            if hour.astimezone(tz).utcoffset() != after.astimezone(tz).utcoffset():
                found.append(after.astimezone(tz).replace(tzinfo=None))
            hour = after
    return found


CHANGES = {zone: near_a_change(zone) for zone in ZONES if near_a_change(zone)}


@given(st.data())
def test_a_wall_time_is_every_instant_at_which_clocks_show_it(data: st.DataObject) -> None:
    zone = data.draw(st.sampled_from(ZONES))
    around = data.draw(st.sampled_from(CHANGES.get(zone, [datetime(2024, 3, 5)])))
    shift = timedelta(seconds=data.draw(st.integers(-3 * 3600, 3 * 3600)))
    wall = data.draw(st.sampled_from([around + shift, data.draw(MOMENTS)])).replace(microsecond=0)
    expected = instants(wall, zone)
    for pattern in ("iso", "%Y-%m-%d %H:%M:%S"):
        parse = time_parser(pattern, zone)
        if not expected:
            with pytest.raises(ValueError, match=f"in {zone}"):
                parse(str(wall))
            continue
        found = parse(str(wall))
        assert found == Moment(expected[0], expected[-1] - expected[0])


@given(
    MOMENTS, st.text("0123456789", min_size=1, max_size=12), st.sampled_from("T t_"), st.sampled_from(".,")
)
@example(datetime(2024, 3, 5, 10), "000000001000", "T", ".")
def test_fractions_are_exact_to_the_ninth_digit(
    wall: datetime, digits: str, between: str, point: str
) -> None:
    whole = wall.replace(microsecond=0)
    text = f"{whole:%Y-%m-%d}{between}{whole:%H:%M:%S}{point}{digits}"
    expected = ns(whole.replace(tzinfo=UTC)) + int(digits.ljust(12, "0")) // 1000
    if int(digits.ljust(12, "0")) % 1000:
        with pytest.raises(ValueError, match="nanosecond"):
            time_parser("iso")(text)
        with pytest.raises(ValueError, match="nanosecond"):
            time_parser(f"%Y-%m-%d{between}%H:%M:%S{point}%f")(text)
        return
    for zone, end in (("UTC", ""), ("Asia/Tokyo", "Z"), ("Asia/Tokyo", "z"), ("Asia/Tokyo", "+00:00")):
        assert time_parser("iso", zone)(text + end) == Moment(expected)
    assert time_parser(f"%Y-%m-%d{between}%H:%M:%S{point}%f")(text) == Moment(expected)
    assert parse_instant(f"{text}Z") == expected
    compact = f"{whole:%Y%m%d%H%M%S}{digits}"
    assert time_parser("%Y%m%d%H%M%S%f")(compact) == Moment(expected)


PATTERNS = [
    "%Y-%m-%d %H:%M:%S",
    "%d.%m.%Y %H:%M:%S",
    "%m/%d/%y %I:%M:%S %p",
    "%a, %d %b %Y %H:%M:%S",
    "%A %d %B %Y %H%M%S",
    "%Y %j %H:%M:%S",
    "%Y%m%d %H%M%S",
    "100%% %Y-%m-%dT%H:%M:%SZ",
]


@given(MOMENTS, st.sampled_from(PATTERNS))
def test_patterns_read_what_strftime_writes(wall: datetime, pattern: str) -> None:
    whole = wall.replace(microsecond=0, tzinfo=UTC)
    assert time_parser(pattern)(whole.strftime(pattern)) == Moment(ns(whole))


@given(st.integers(0, 86_399))
def test_digits_without_anything_between_may_lack_only_the_first(second: int) -> None:
    """09:05:00 as 90500, which `strptime` reads as 9:05:0, 11500 as 11:50:0."""
    text = f"{second // 3600}{second // 60 % 60:02}{second % 60:02}"
    expected = ns(datetime(2024, 3, 5, tzinfo=UTC)) + second * 10**9
    assert time_parser("%Y%m%d %H%M%S")(f"20240305 {text}") == Moment(expected)


@given(MOMENTS, st.integers(-1439, 1439))
def test_offsets_count(wall: datetime, minutes: int) -> None:
    whole = wall.replace(microsecond=0)
    sign, size = "-" if minutes < 0 else "+", abs(minutes)
    expected = Moment(ns(whole.replace(tzinfo=UTC)) - minutes * 60 * 10**9)
    for offset in (f"{sign}{size // 60:02}:{size % 60:02}", f"{sign}{size // 60:02}{size % 60:02}"):
        assert time_parser("iso", "Asia/Tokyo")(f"{whole}{offset}") == expected
        assert time_parser("%Y-%m-%d %H:%M:%S %z", "Asia/Tokyo")(f"{whole} {offset}") == expected


@pytest.mark.parametrize(
    ("name", "zones", "expected"),
    [
        ("UTC", {}, 10),
        ("GMT", {}, 10),
        ("Z", {}, 10),
        ("America/New_York", {}, 15),
        ("UTC+01:00", {}, 9),
        ("EST", {"EST": "UTC-05:00"}, 15),
        ("IST", {"IST": "Asia/Kolkata"}, None),
        ("EST", {}, ValueError),
        ("IST", {}, ValueError),
        ("CET", {}, ValueError),
        ("Mars/Base", {}, ValueError),
    ],
)
def test_named_zones_mean_what_they_say_or_are_refused(
    name: str, zones: dict[str, str], expected: object
) -> None:
    parse = time_parser("%Y-%m-%d %H:%M %Z", "Asia/Tokyo", zones=zones)
    if expected is ValueError:
        with pytest.raises(ValueError, match=r"time.zones|known zone"):
            parse(f"2024-03-05 10:00 {name}")
        return
    hours = 4.5 if expected is None else float(str(expected))
    assert parse(f"2024-03-05 10:00 {name}") == Moment(
        ns(datetime(2024, 3, 5, tzinfo=UTC)) + int(hours * 3600) * 10**9
    )


@pytest.mark.parametrize("name", ["EST", "MST", "CET", "WET"])
def test_an_abbreviation_is_no_zone_of_a_format(name: str) -> None:
    with pytest.raises(ValueError, match="everywhere"):
        parse_zone(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2016-12-31T23:59:60Z", "leap second"),
        ("2024-03-05T24:00:01", "not a time of the day"),
        ("2024-03-05T25:00", "not a time of the day"),
        ("2024-03-05T10:60", "not a time of the day"),
        ("2024-02-30T10:00", "day is out of range"),
        ("2024-03-05", "no time of the day"),
        ("2024-03-05T10:00+24:00", "not an offset"),
        ("2024-03-05T10:00 EST", "not a time in ISO 8601"),
        ("10:00", "not a time in ISO 8601"),
        ("x" * 5000, "'x{100}'"),
    ],
)
def test_what_is_no_time_says_so(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        time_parser("iso")(text)
    assert len(str(refused.value)) < 200


def test_twenty_four_hours_are_the_end_of_the_day() -> None:
    expected = Moment(ns(datetime(2024, 3, 6, tzinfo=UTC)))
    assert time_parser("iso")("2024-03-05T24:00:00.000") == expected
    assert time_parser("%d.%m.%Y %H:%M")("05.03.2024 24:00") == expected


@given(st.dates(date(1990, 1, 2), date(2037, 12, 30)), st.sampled_from(ZONES))
def test_a_date_alone_is_the_beginning_of_its_day_for_bars_of_days(day: date, zone: str) -> None:
    """Also where midnight occurs twice or not at all: the first instant whose date it is."""
    found = time_parser("iso", zone, whole_days=True)(str(day))
    assert found == time_parser("%Y-%m-%d", zone, whole_days=True)(str(day))
    here, before = (
        (EPOCH + timedelta(microseconds=(found.ns - back) // 1000)).astimezone(ZoneInfo(zone)).date()
        for back in (0, 1000)
    )
    assert (here, before) == (day, day - timedelta(days=1))


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("%Y-%m-%d", "no time of the day.*time.field"),
        ("%H:%M", "no date.*two columns"),
        ("%Y-%m-%d %I:%M", "%p go"),
        ("%Y-%m-%d %H:%M %p", "%p go"),
        ("%Y-%m-%d %H %U", "'%U' is not one of"),
        ("%Y%m%d%H%M%S%S", "%S is there twice"),
        ("%Y-%m-%d %H:%S", "%S needs %M"),
        ("%Y-%m-%d %H:%M %z %Z", "say the same"),
        ("%Y-%m-%d %H%", "'%' is not"),
    ],
)
def test_a_pattern_that_does_not_say_which_time_it_is_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        time_parser(pattern)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.7096328e+12", 1_709_632_800_000_000_000),
        ("1709632800000.5", 1_709_632_800_000_500_000),
        ("17096328000001e-1", 1_709_632_800_000_100_000),
        ("1709632800000.", 1_709_632_800_000_000_000),
    ],
)
def test_counts_may_have_exponents(text: str, expected: int) -> None:
    assert time_parser("epoch-ms")(text) == Moment(expected)


def test_a_count_that_a_spreadsheet_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match="too few digits"):
        time_parser("epoch-ms")("1.70963E+12")
