"""Reads wall-clock times in ISO 8601, exactly to nine digits of fraction, and places them in zones."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MINUTE_NS = 60 * 10**9
_SECOND_NS = 10**9
_FRACTION = 9
_DAY_MINUTES = 1440
_EPOCH = datetime(1970, 1, 1)
_EPOCH_ORDINAL = _EPOCH.toordinal()
_FIXED = re.compile(r"UTC([+-])(\d{2}):(\d{2})", re.ASCII)
_ABBREVIATIONS = frozenset(("EST", "MST", "HST", "CET", "EET", "WET", "MET"))
"""Names of the zone database that other sources use for other offsets, or for zones with daylight saving."""
_UTC_NAMES = frozenset(("UTC", "GMT", "Z"))
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d|\d{8}|\d{4}-?W\d\d(?:-?\d)?)"
    r"(?:[T _](\d\d)(?::(\d\d)(?::(\d\d)(?:[.,](\d+))?)?|(\d\d)(?:(\d\d)(?:[.,](\d+))?)?)?"
    r" ?(Z|[+-]\d\d(?::?\d\d(?::?\d\d)?)?)?)?",
    re.ASCII | re.IGNORECASE,
)
_OFFSET = re.compile(r"([+-])(\d\d)(?::?(\d\d)(?::?(\d\d))?)?", re.ASCII)


class Moment(NamedTuple):
    """An instant, ns since 1970 in UTC. ``fold_ns``: how much later its local time occurs again, or 0."""

    ns: int
    fold_ns: int = 0


class Wall(NamedTuple):
    """A time as a clock on the wall shows it, counted from 1970 there.

    ``zone``: what the text says: an offset from UTC in ns, a zone, or None. ``clock``: whether it has a time
    of the day.
    """

    minute: int
    rest_ns: int
    zone: int | tzinfo | None = None
    clock: bool = True


ParseWall = Callable[[str], Wall]
"""Text to a wall time; raises ValueError."""


def parse_zone(name: str) -> tzinfo:
    """``UTC``, an offset such as ``UTC-05:00`` (no daylight saving) or an IANA name. Raises ValueError."""
    if name in ("UTC", "GMT"):
        return UTC
    fixed = _FIXED.fullmatch(name)
    if fixed and int(fixed[2]) < 24 and int(fixed[3]) < 60:
        offset = timedelta(hours=int(fixed[2]), minutes=int(fixed[3]))
        return timezone(-offset if fixed[1] == "-" else offset)
    if name in _ABBREVIATIONS:
        raise ValueError(
            f"{name!r} is not the same everywhere: use an offset such as UTC-05:00, or an IANA name"
        )
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # a name too long for a file
        raise ValueError(
            f"{name[:64]!r} is not a known zone: use UTC, an offset such as UTC-05:00, or an IANA name"
        ) from error


def moment(wall: Wall, zone: int | tzinfo, *, whole_day: bool = False) -> Moment:
    """The instant of a wall time in ``zone`` (or an offset in ns), unless its text says where.

    ``whole_day``: it stands for its day, which begins once. Raises ValueError: the time does not exist.
    """
    at = zone if wall.zone is None else wall.zone
    since = wall.minute * MINUTE_NS + wall.rest_ns
    if isinstance(at, int):
        return Moment(since - at)
    offset, later = _offsets(wall.minute, at)
    if not later or whole_day or not wall.clock:
        return Moment(since - offset)
    if later < 0:
        shown = _EPOCH + timedelta(minutes=wall.minute)
        raise ValueError(f"{shown:%Y-%m-%d %H:%M} does not exist in {at}: clocks were put forward over it")
    return Moment(since - offset, later)


def fixed_offset(zone: tzinfo) -> int | tzinfo:
    """The offset in ns of a zone that has only one, else the zone."""
    return _ns(zone.utcoffset(None)) if isinstance(zone, timezone) else zone


@lru_cache(maxsize=1 << 14)  # cached: records of one minute share it
def _offsets(minute: int, zone: tzinfo) -> tuple[int, int]:
    """The offset of a minute at its first occurrence, ns, and how much later it occurs again.

    The second is 0 for a minute that occurs once, and negative for one that does not.
    """
    wall = _EPOCH + timedelta(minutes=minute)
    first, second = zone.utcoffset(wall), zone.utcoffset(wall.replace(fold=1))
    if first is None or second is None:
        raise ValueError(f"{zone} has no offset")
    return _ns(first), _ns(first - second)


def _ns(span: timedelta) -> int:
    return (span.days * 86_400 + span.seconds) * _SECOND_NS + span.microseconds * 1000


def parse_iso(text: str) -> Wall:
    """ISO 8601, extended or basic, with ``T``, a blank or ``_`` before the time. Raises ValueError."""
    found = _ISO.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:100]!r} is not a time in ISO 8601")
    day, hour, minute, second, fraction, minute2, second2, fraction2, offset = found.groups()
    if hour is None:
        return Wall(_day_minutes(day), 0, clock=False)
    minutes, rest = clock(int(hour), minute or minute2, second or second2, fraction or fraction2)
    return Wall(_day_minutes(day) + minutes, rest, None if offset is None else offset_ns(offset))


@lru_cache(maxsize=1024)
def _day_minutes(text: str) -> int:
    return date_minutes(date.fromisoformat(text.upper()))


def date_minutes(day: date) -> int:
    """Minutes on the wall from 1970 to midnight of a day."""
    return (day.toordinal() - _EPOCH_ORDINAL) * _DAY_MINUTES


def clock(hour: int, minute: str | None, second: str | None, fraction: str | None) -> tuple[int, int]:
    """Minutes since midnight, and ns since the minute. 24:00 is the end of the day. Raises ValueError."""
    minutes, seconds = int(minute or 0), int(second or 0)
    rest = seconds * _SECOND_NS + (fraction_ns(fraction) if fraction else 0)
    if seconds == 60:
        raise ValueError("a leap second (:60) has no place between Unix times")
    if minutes > 59 or seconds > 60 or hour > 24 or (hour == 24 and (minutes or rest)):
        raise ValueError(f"{hour:02}:{minutes:02}:{seconds:02} is not a time of the day")
    return hour * 60 + minutes, rest


def fraction_ns(digits: str) -> int:
    """The digits behind a second's point as nanoseconds, exactly. Raises ValueError beyond the ninth."""
    if digits[_FRACTION:].strip("0"):
        raise ValueError(f"a fraction of {digits[:32]!r} is finer than a nanosecond")
    return int(digits[:_FRACTION].ljust(_FRACTION, "0"))


def offset_ns(text: str) -> int:
    """``Z``, ``+hh``, ``+hh:mm`` or ``+hh:mm:ss``, with or without colons. Raises ValueError."""
    if text in "Zz":
        return 0
    found = _OFFSET.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:32]!r} is not an offset")
    sign, hours, minutes, seconds = found[1], int(found[2]), int(found[3] or 0), int(found[4] or 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f"{text!r} is not an offset")
    total = ((hours * 60 + minutes) * 60 + seconds) * _SECOND_NS
    return -total if sign == "-" else total


def named_zone(name: str, zones: Mapping[str, tzinfo]) -> tzinfo:
    """The zone of a name in a text: declared, UTC, or an IANA name with a slash. Raises ValueError."""
    declared = zones.get(name)
    if declared is not None:
        return declared
    if name.upper() in _UTC_NAMES:
        return UTC
    if "/" in name or _FIXED.fullmatch(name):
        return parse_zone(name)
    raise ValueError(f"the zone {name[:32]!r} is not the same everywhere: declare its offset in time.zones")
