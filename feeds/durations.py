"""Durations in the spelling of the configuration, as integer nanoseconds."""

import re
from fractions import Fraction

_UNITS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
_DURATION = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)(ns|us|ms|s|m|h|d)")
_MAX_NS = 2**63 - 1


class Duration(int):
    """A length of time in nanoseconds; 0 means "off" where a setting can be switched off."""

    def __str__(self) -> str:
        """The shortest spelling that `parse_duration` reads back, such as "90s" or "1m"."""
        if self == 0:
            return "0s"
        unit = max((u for u in _UNITS if self % _UNITS[u] == 0), key=_UNITS.__getitem__)
        return f"{self // _UNITS[unit]}{unit}"


def parse_duration(text: object) -> Duration:
    """Parse "250ms", "1s", "1.5s", "1m", "2h", "" for off. Raises ValueError that says what is wrong."""
    if text == "":
        return Duration(0)
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"expected a duration such as 250ms, 1s, 1m or 2h, got {text!r}")
    ns = Fraction(match[1]) * _UNITS[match[2]]
    if ns != int(ns):
        raise ValueError(f"{text!r} is not a whole number of nanoseconds")
    if ns > _MAX_NS:
        raise ValueError(f"{text!r} is longer than 292 years")
    return Duration(int(ns))
