"""Patterns of times, in strptime's directives: read exactly, or refused when they are declared."""

import re
from collections.abc import Mapping
from datetime import date, tzinfo
from functools import lru_cache

from feeds.wall_times import ParseWall, Wall, clock, date_minutes, named_zone, offset_ns

_DIGITS = {
    "Y": (4, 4),
    "y": (2, 2),
    "m": (1, 2),
    "d": (1, 2),
    "H": (1, 2),
    "I": (1, 2),
    "M": (1, 2),
    "S": (1, 2),
}
_DIGITS["j"] = (1, 3)
"""Directives of numbers: their least and most digits. ``%f`` has any number."""
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
           "November", "December")  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES: dict[str, tuple[str, ...]] = {
    "B": _MONTHS,
    "b": tuple(name[:3] for name in _MONTHS),
    "A": _DAYS,
    "a": tuple(name[:3] for name in _DAYS),
    "p": ("AM", "PM"),
}
_OTHERS = {"f": r"\d+", "z": r"Z|[+-]\d\d:?\d\d(?::?\d\d)?", "Z": r"[A-Za-z][A-Za-z0-9_+:/-]*"}
_KNOWN = "".join((*_DIGITS, *_NAMES, *_OTHERS))


def has_clock(pattern: str) -> bool:
    """Whether a pattern has a time of the day."""
    return bool({"%H", "%I"} & set(_directives(pattern)))


def pattern_parser(pattern: str, zones: Mapping[str, tzinfo]) -> ParseWall:
    """A parser for a pattern; ``zones``: of names that ``%Z`` may find.

    Numbers that follow each other without anything between have all their digits, apart from the first.

    Raises:
        ValueError: a pattern that does not say which time it is.
    """
    _check(_directives(pattern))
    expression = re.compile(_expression(pattern), re.ASCII | re.IGNORECASE)

    def parse(text: str) -> Wall:
        found = expression.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:100]!r} is not a time like {pattern}")
        return _wall(found.groupdict(), zones)

    return parse


def _directives(pattern: str) -> list[str]:
    return [each for each in re.findall(r"%.?", pattern, re.DOTALL) if each != "%%"]


def _check(directives: list[str]) -> None:
    for each in directives:
        if len(each) < 2 or each[1] not in _KNOWN:
            raise ValueError(f"{each!r} is not one of {', '.join(f'%{known}' for known in _KNOWN)}")
        if directives.count(each) > 1:
            raise ValueError(f"{each} is there twice")
    found = {each[1] for each in directives}
    for one, other in (("Y", "y"), ("b", "B"), ("m", "b"), ("m", "B"), ("a", "A"), ("H", "I"), ("z", "Z")):
        if {one, other} <= found:
            raise ValueError(f"%{one} and %{other} say the same")
    if not ({"Y", "y"} & found and (({"m", "b", "B"} & found and "d" in found) or "j" in found)):
        raise ValueError(
            "the pattern has no date (%Y, %m and %d); where date and time are in two columns, name both in "
            "time.field, such as [0, 1]"
        )
    if ("p" in found) != ("I" in found):
        raise ValueError("%I, the hour of 1 to 12, and %p go together")
    for finer, coarser in (("f", "S"), ("S", "M"), ("M", "HI")):
        if finer in found and not set(coarser) & found:
            raise ValueError(f"%{finer} needs %{coarser[0]}")


def _expression(pattern: str) -> str:
    """A regular expression with a group for each directive."""
    parts = re.findall(r"%.|\s+|[^%\s]", pattern, re.DOTALL)
    expression = ""
    for index, part in enumerate(parts):
        if part.isspace():
            expression += r"\s+"
        elif part[0] != "%" or part == "%%":
            expression += re.escape(part[-1])
        else:
            expression += f"(?P<{part[1]}>{_group(parts, index)})"
    return expression


def _group(parts: list[str], index: int) -> str:
    directive = parts[index][1]
    if directive in _NAMES:
        return "|".join(_NAMES[directive])
    if directive in _OTHERS:
        return _OTHERS[directive]
    least, most = _DIGITS[directive]
    first = index == 0 or not _is_number(parts[index - 1])
    return rf"\d{{{least if first and not _runs_into_fraction(parts, index) else most},{most}}}"


def _is_number(part: str) -> bool:
    return part[0] == "%" and (part[1] in _DIGITS or part[1] == "f")


def _runs_into_fraction(parts: list[str], index: int) -> bool:
    """Whether digits of unknown number follow at once, so that a missing digit would not be seen."""
    while index < len(parts) and _is_number(parts[index]):
        if parts[index] == "%f":
            return True
        index += 1
    return False


def _wall(found: dict[str, str], zones: Mapping[str, tzinfo]) -> Wall:
    get = found.get
    year = int(found["Y"]) if "Y" in found else _year(int(found["y"]))
    month = get("m") or get("b") or get("B")
    minutes = _date(year, month, get("d"), get("j"), get("a") or get("A"))
    zone: int | tzinfo | None = None
    if "z" in found:
        zone = offset_ns(found["z"])
    elif "Z" in found:
        zone = named_zone(found["Z"], zones)
    if "H" not in found and "I" not in found:
        return Wall(minutes, 0, zone, clock=False)
    hour = int(found["H"]) if "H" in found else _hour(int(found["I"]), found["p"])
    passed, rest = clock(hour, get("M"), get("S"), get("f"))
    return Wall(minutes + passed, rest, zone)


def _year(short: int) -> int:
    return short + (1900 if short > 68 else 2000)


def _hour(hour: int, half: str) -> int:
    if not 1 <= hour <= 12:
        raise ValueError(f"{hour} is not an hour of 1 to 12")
    return hour % 12 + (12 if half.upper() == "PM" else 0)


@lru_cache(maxsize=1024)
def _date(year: int, month: str | None, day: str | None, of_year: str | None, weekday: str | None) -> int:
    """Minutes from 1970 to midnight."""
    if month is None or day is None:
        which = date.fromordinal(date(year, 1, 1).toordinal() + int(of_year or 0) - 1)
        if which.year != year:
            raise ValueError(f"{year} has no day {of_year}")
    else:
        which = date(year, int(month) if month.isdecimal() else _index(month, _MONTHS) + 1, int(day))
    if weekday is not None and _index(weekday, _DAYS) != which.weekday():
        raise ValueError(f"{which} is not a {weekday[:9]}")
    return date_minutes(which)


def _index(name: str, names: tuple[str, ...]) -> int:
    return next(index for index, each in enumerate(names) if each[:3].lower() == name[:3].lower())
