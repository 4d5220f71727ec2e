"""Parses timestamps in files to integer nanoseconds since the Unix epoch, without floating point."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from feeds.decimal9 import parse_fixed9

ParseTime = Callable[[str], int]
"""Text to nanoseconds; raises ValueError."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIXED = re.compile(r"UTC([+-])(\d{2}):(\d{2})")
_EPOCH_UNITS = {"epoch-s": 10**9, "epoch-ms": 10**6, "epoch-us": 10**3, "epoch-ns": 1}


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
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not a known zone: use UTC, an offset such as UTC-05:00, or an IANA name"
        ) from error


def time_parser(pattern: str, zone: str = "UTC") -> ParseTime:
    """A parser for one declared format.

    ``pattern`` is ``epoch-s|ms|us|ns`` (decimal text allowed: exact to the nanosecond), ``iso`` (ISO 8601) or
    a strptime pattern. Wall times are in ``zone`` unless they carry an offset; the hour repeated in autumn is
    read as its first occurrence.

    Raises:
        ValueError: no such zone or pattern.
    """
    unit = _EPOCH_UNITS.get(pattern)
    if unit is not None:
        return lambda text: _epoch_ns(text, unit)
    tz = parse_zone(zone)
    if pattern == "iso":
        return lambda text: _wall_ns(datetime.fromisoformat(text), tz)
    if "%" not in pattern:
        raise ValueError(f"{pattern!r} is neither iso, {', '.join(_EPOCH_UNITS)}, nor a strptime pattern")
    return lambda text: _wall_ns(datetime.strptime(text, pattern), tz)


def _epoch_ns(text: str, unit: int) -> int:
    if text.isdecimal() and text.isascii():
        return int(text) * unit
    whole, _, fraction = text.partition(".")
    if not (whole.isdecimal() and whole.isascii()):
        raise ValueError(f"{text!r} is not a time since the epoch")
    exact = int(parse_fixed9(f"0.{fraction}")) * unit
    if exact % 10**9:
        raise ValueError(f"{text!r} is finer than a nanosecond")
    return int(whole) * unit + exact // 10**9


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
