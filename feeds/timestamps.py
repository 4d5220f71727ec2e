"""Parses timestamps in files to integer nanoseconds since the Unix epoch, without floating point."""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from feeds.decimals import SCALE, parse_fixed

ParseTime = Callable[[str], int]
"""Text to nanoseconds; raises ValueError."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIXED = re.compile(r"UTC([+-])(\d{2}):(\d{2})")
EPOCH_UNITS = {"epoch-s": 10**9, "epoch-ms": 10**6, "epoch-us": 10**3, "epoch-ns": 1}
DAY_UNITS = {"day-s": 10**9, "day-ms": 10**6, "day-us": 10**3, "day-ns": 1}
"""Times since local midnight; ns in one unit."""
_DAY_NS = 86_400 * 10**9
_DATE_DIRECTIVES = {"%Y": r"\d{4}", "%y": r"\d{2}", "%m": r"\d{2}", "%d": r"\d{2}", "%b": "[A-Za-z]{3}"}


class Instant(int):
    """A moment in nanoseconds since 1970-01-01T00:00:00Z."""

    def __str__(self) -> str:
        """ISO 8601 in UTC with nine fractional digits."""
        seconds, ns = divmod(self, 10**9)
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"


def parse_zone(name: str) -> tzinfo:
    """``UTC``, an offset such as ``UTC-05:00`` (no daylight saving) or an IANA name. Raises ValueError."""
    if name == "UTC":
        return UTC
    fixed = _FIXED.fullmatch(name)
    if fixed:
        offset = timedelta(hours=int(fixed[2]), minutes=int(fixed[3]))
        return timezone(-offset if fixed[1] == "-" else offset)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # a name too long for a file
        raise ValueError(
            f"{name!r} is not a known zone: use UTC, an offset such as UTC-05:00, or an IANA name"
        ) from error


def time_parser(pattern: str, zone: str = "UTC", day: date | None = None) -> ParseTime:
    """A parser for one declared format.

    ``pattern`` is ``epoch-s|ms|us|ns`` (decimal text allowed: exact to the nanosecond), ``day-s|ms|us|ns``
    (the same, by the clock on the wall since midnight of ``day``), ``iso`` (ISO 8601) or a strptime pattern.
    Wall times are in ``zone`` unless they carry an offset; the hour repeated in autumn is read as its first
    occurrence. A unit is never guessed.

    Raises:
        ValueError: no such zone or pattern, or times of the day without a day.
    """
    if pattern in EPOCH_UNITS:
        unit = EPOCH_UNITS[pattern]
        return lambda text: _count_ns(text, unit)
    tz = parse_zone(zone)
    if pattern in DAY_UNITS:
        if day is None:
            raise ValueError(f"{pattern} counts from midnight: of which day?")
        unit, midnight = DAY_UNITS[pattern], datetime(day.year, day.month, day.day)
        return lambda text: _day_ns(text, unit, midnight, tz)
    if pattern == "iso":
        return lambda text: _wall_ns(datetime.fromisoformat(text), tz)
    if "%" not in pattern:
        units = ", ".join((*EPOCH_UNITS, *DAY_UNITS))
        if pattern in ("", "epoch", "unix", "day"):
            raise ValueError(f"format: {pattern!r} leaves the unit open; declare one of {units}")
        raise ValueError(f"{pattern!r} is neither iso, {units}, nor a strptime pattern")
    return lambda text: _wall_ns(datetime.strptime(text, pattern), tz)


def name_date(pattern: str, *names: str) -> date:
    """The one date that the first of these file names with a date has; ``pattern`` as in strptime.

    Raises:
        ValueError: no date, more than one in a name, or a pattern that cannot be searched for.
    """
    search = re.compile(rf"(?<!\d){_date_expression(pattern)}(?!\d)")
    for name in names:
        found = set()
        for match in search.finditer(name):
            try:
                found.add(datetime.strptime(match[0], pattern).date())
            except ValueError:  # digits that are no date, such as a time of the day
                continue
        if len(found) > 1:
            raise ValueError(f"{name} has several dates like {pattern}: {', '.join(map(str, sorted(found)))}")
        if found:
            return found.pop()
    raise ValueError(f"{', '.join(names)} has no date like {pattern}")


def _date_expression(pattern: str) -> str:
    expression, position = "", 0
    while position < len(pattern):
        directive = pattern[position : position + 2]
        if directive[0] != "%":
            expression += re.escape(directive[0])
            position += 1
            continue
        if directive not in _DATE_DIRECTIVES:
            raise ValueError(f"{directive} of {pattern} is not one of {', '.join(_DATE_DIRECTIVES)}")
        expression += _DATE_DIRECTIVES[directive]
        position += 2
    return expression


def likely_unit(text: str, first_ns: int, end_ns: int) -> str:
    """The epoch unit in which ``text`` lies in that span of time, for an error's hint; "" if none."""
    for name, unit in EPOCH_UNITS.items():
        try:
            if first_ns <= _count_ns(text, unit) < end_ns:
                return name
        except ValueError:
            continue
    return ""


def _day_ns(text: str, unit: int, midnight: datetime, zone: tzinfo) -> int:
    since = _count_ns(text, unit)
    if since >= _DAY_NS:
        raise ValueError(f"{text!r} is beyond the end of the day")
    seconds, ns = divmod(since, 10**9)
    return _wall_ns(midnight + timedelta(seconds=seconds), zone) + ns


def _count_ns(text: str, unit: int) -> int:
    """Decimal text in units of ``unit`` ns, exactly."""
    if text.isdecimal() and text.isascii():
        return int(text) * unit
    whole, _, fraction = text.partition(".")
    if not (whole.isdecimal() and whole.isascii()):
        raise ValueError(f"{text!r} is not a time in decimal digits")
    if not (fraction == "" or (fraction.isdecimal() and fraction.isascii())):
        raise ValueError(f"{text!r} is not a time in decimal digits")
    exact, finer = divmod(int(parse_fixed(f"0.{fraction}")) * unit, SCALE)
    if finer:
        raise ValueError(f"{text!r} is finer than a nanosecond")
    return int(whole) * unit + exact


def _wall_ns(moment: datetime, zone: tzinfo) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone)
    since = moment.astimezone(UTC) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000


def parse_instant(value: object) -> Instant:
    """Parse an ISO 8601 time with a zone (text or a TOML datetime); ValueError without a zone."""
    example = "expected a time with a zone such as 2024-08-08T23:54:15Z"
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{example}, got {value!r}") from None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{example}, got {str(value)!r}")
    return Instant(_wall_ns(value, UTC))
