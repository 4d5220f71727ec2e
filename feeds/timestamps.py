"""Parses timestamps in files to integer nanoseconds since the Unix epoch, without floating point."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from fractions import Fraction
from typing import NoReturn

from feeds.time_patterns import has_clock, pattern_parser
from feeds.wall_times import (
    MINUTE_NS,
    Moment,
    ParseWall,
    Wall,
    date_minutes,
    fixed_offset,
    moment,
    parse_iso,
    parse_zone,
)

ParseTime = Callable[[str], Moment]
"""Text to an instant; raises ValueError."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_UNITS = {"epoch-s": 10**9, "epoch-ms": 10**6, "epoch-us": 10**3, "epoch-ns": 1}
DAY_UNITS = {"day-s": 10**9, "day-ms": 10**6, "day-us": 10**3, "day-ns": 1}
"""Times since local midnight; ns in one unit."""
EXCEL = "excel"
"""Times as spreadsheets count them: days since this day, to the millisecond."""
_EXCEL_DAY = date(1899, 12, 30)
_DAY_MS = 86_400_000
_SURE_DECIMALS = 9
"""Decimals of a day that tell milliseconds apart."""
_DAY_NS = 86_400 * 10**9
_DATE_DIRECTIVES = {"%Y": r"\d{4}", "%y": r"\d{2}", "%m": r"\d{2}", "%d": r"\d{2}", "%b": "[A-Za-z]{3}"}
_COUNT = re.compile(r"(\d{0,40})(?:\.(\d{0,40}))?(?:[eE]([+-]?\d{1,2}))?", re.ASCII)
_MAX_DIGITS = 40
_ROUNDED = 6
"""Significant digits that spreadsheets show of a long number: a time of so few was rounded."""


class Instant(int):
    """A moment in nanoseconds since 1970-01-01T00:00:00Z."""

    def __str__(self) -> str:
        """ISO 8601 in UTC with nine fractional digits."""
        seconds, ns = divmod(self, 10**9)
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"


def time_parser(
    pattern: str,
    zone: str = "UTC",
    day: date | None = None,
    *,
    zones: Mapping[str, str] | None = None,
    whole_days: bool = False,
) -> ParseTime:
    """A parser for one declared format.

    ``pattern`` is ``epoch-s|ms|us|ns`` (decimal text allowed: exact to the nanosecond), ``day-s|ms|us|ns``
    (the same, by the clock on the wall since midnight of ``day``), ``iso`` (ISO 8601), ``excel`` (days since
    1899-12-30, or two texts: such days, and a part of one) or a strptime pattern.
    Wall times are in ``zone`` unless they carry an offset or, with ``%Z``, the name of a zone, which
    ``zones`` may declare. ``whole_days``: a date alone is enough, and stands for the beginning of the day. A
    unit is never guessed.

    Raises:
        ValueError: no such zone or pattern, or times of the day without a day.
    """
    if pattern in EPOCH_UNITS:
        unit = EPOCH_UNITS[pattern]
        return lambda text: Moment(_count_ns(text, unit))
    if pattern in DAY_UNITS:
        if day is None:
            raise ValueError(f"{pattern} counts from midnight: of which day?")
        wall = _since_midnight(DAY_UNITS[pattern], day)
    elif pattern == "iso":
        wall = parse_iso
    elif pattern == EXCEL:
        wall = _excel
    elif "%" in pattern:
        if not (whole_days or has_clock(pattern)):
            raise ValueError(
                f"{pattern!r} has no time of the day; where it is in another column, name both in "
                "time.field, such as [0, 1]"
            )
        wall = pattern_parser(pattern, {name: parse_zone(each) for name, each in (zones or {}).items()})
    else:
        raise ValueError(_unknown(pattern))
    return _in_zone(wall, zone, whole_days)


def _unknown(pattern: str) -> str:
    units = ", ".join((*EPOCH_UNITS, *DAY_UNITS))
    if pattern in ("", "epoch", "unix", "day"):
        return f"format: {pattern!r} leaves the unit open; declare one of {units}"
    return f"{pattern!r} is neither iso, excel, {units}, nor a strptime pattern"


def _in_zone(parse_wall: ParseWall, zone: str, whole_days: bool) -> ParseTime:
    tz = fixed_offset(parse_zone(zone))

    def parse(text: str) -> Moment:
        wall = parse_wall(text)
        if not (wall.clock or whole_days):
            raise ValueError(f"{text[:100]!r} has no time of the day")
        return moment(wall, tz, whole_day=whole_days)

    return parse


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


def _since_midnight(unit: int, day: date) -> ParseWall:
    midnight = date_minutes(day)

    def parse(text: str) -> Wall:
        since = _count_ns(text, unit)
        if since >= _DAY_NS:
            raise ValueError(f"{text[:100]!r} is beyond the end of the day")
        minutes, rest = divmod(since, MINUTE_NS)
        return Wall(midnight + minutes, rest)

    return parse


def _excel(text: str) -> Wall:
    since = 0
    for part in text.split(" "):
        found = _COUNT.fullmatch(part)
        if found is None or not (found[1] or found[2]):
            _not_a_time(part)
        since += round(ms := Fraction(part) * _DAY_MS)
        if len(found[2] or "") - int(found[3] or 0) < _SURE_DECIMALS and ms % 60_000:
            raise ValueError(f"{text[:100]!r} has too few digits for a time: it was rounded")
    minutes, rest = divmod(since, 60_000)
    return Wall(date_minutes(_EXCEL_DAY) + minutes, rest * 10**6)


def _count_ns(text: str, unit: int) -> int:
    """Decimal text in units of ``unit`` ns, exactly."""
    if text.isdecimal() and text.isascii():
        return int(text[:_MAX_DIGITS]) * unit if len(text) <= _MAX_DIGITS else _not_a_time(text)
    found = _COUNT.fullmatch(text)
    if found is None or not (found[1] or found[2]):
        return _not_a_time(text)
    whole, fraction, exponent = found[1], found[2] or "", int(found[3] or 0)
    digits = whole + fraction
    if exponent > 0 and len(digits.strip("0")) <= _ROUNDED:
        raise ValueError(f"{text!r} has too few digits for a time: it was rounded")
    value, places = int(digits) * unit, len(fraction) - exponent
    if places <= 0:
        return value * int(10**-places)
    exact, rest = divmod(value, int(10**places))
    if rest:
        raise ValueError(f"{text[:100]!r} is finer than a nanosecond")
    return exact


def _not_a_time(text: str) -> NoReturn:
    raise ValueError(f"{text[:100]!r} is not a time in decimal digits")


def parse_instant(value: object) -> Instant:
    """Parse an ISO 8601 time with a zone (text or a TOML datetime); ValueError without a zone."""
    example = "expected a time with a zone such as 2024-08-08T23:54:15Z"
    if isinstance(value, str):
        try:
            wall = parse_iso(value)
        except ValueError as error:
            raise ValueError(f"{example}, got {value[:100]!r}: {error}") from None
        if wall.zone is None:
            raise ValueError(f"{example}, got {value[:100]!r}")
        return Instant(moment(wall, UTC).ns)
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{example}, got {str(value)[:100]!r}")
    since = value.astimezone(UTC) - _EPOCH
    return Instant((since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
