"""Compiled reading of numbers and times that stand as plain text; what they do not take is left alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.columns.decode_kernel import Bytes, read_decimal
from support.numba_kernel import kernel

Integers = npt.NDArray[np.int64]
_SHORTEST, _LONGEST = len("2024-03-05T10:00:00Z"), len("2024-03-05T10:00:00.123456789Z")


def units_of(texts: Sequence[str]) -> Integers:
    """Decimal texts in units of 1e-9; -1 unless one is digits, or digits, a point and one to nine digits."""
    out = np.full(len(texts), -1, np.int64)
    data, ends = joined(texts)
    _units(data, ends, out)
    return out


def instants_of(texts: Sequence[str]) -> Integers:
    """ISO 8601 of the years 1970 to 2199 in UTC, as ns since 1970; -1 unless one is plain.

    Such as ``2024-03-05T10:00:00Z``, or with one to nine digits of a fraction.
    """
    out = np.full(len(texts), -1, np.int64)
    data, ends = joined(texts)
    _instants(data, ends, out)
    return out


def joined(texts: Sequence[str]) -> tuple[Bytes, Integers]:
    """Texts in UTF-8 one after the other, and the end of each."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    return np.frombuffer(b"".join(encoded) or b"\0", np.uint8), ends


@kernel
def _units(data: Bytes, ends: Any, out: Any) -> None:
    start = 0
    for n in range(len(ends)):
        out[n] = read_decimal(data, start, ends[n])
        start = ends[n]


@kernel
def _digits(data: Bytes, start: int, end: int) -> Any:
    """A number of digits; -1 where another character stands."""
    value = np.int64(0)
    for i in range(start, end):
        if not 48 <= data[i] <= 57:
            return -1
        value = value * 10 + np.int64(data[i] - 48)
    return value


@kernel
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970 of a day of the Gregorian calendar, counted from a March."""
    year -= month <= 2
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    era = year // 400
    of_era = (year - era * 400) * 365 + (year - era * 400) // 4 - (year - era * 400) // 100 + of_year
    return era * 146_097 + of_era - 719_468


@kernel
def _month_days(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31


@kernel
def _instant(data: Bytes, start: int, end: int) -> Any:
    length = end - start
    if length != _SHORTEST and not _SHORTEST + 2 <= length <= _LONGEST:
        return -1
    if data[start + 4] != 45 or data[start + 7] != 45 or data[start + 10] != 84:  # dashes, and a T
        return -1
    if data[start + 13] != 58 or data[start + 16] != 58 or data[end - 1] != 90:  # colons, and a Z
        return -1
    year, month = _digits(data, start, start + 4), _digits(data, start + 5, start + 7)
    day, hour = _digits(data, start + 8, start + 10), _digits(data, start + 11, start + 13)
    minute, second = _digits(data, start + 14, start + 16), _digits(data, start + 17, start + 19)
    if not (1970 <= year < 2200 and 1 <= month <= 12 and 1 <= day <= _month_days(year, month)):
        return -1
    if not (0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
        return -1
    fraction = 0
    if length > _SHORTEST:
        if data[start + 19] != 46:  # a point
            return -1
        fraction = _digits(data, start + 20, end - 1)
        if fraction < 0:
            return -1
        for _ in range(end - 1 - start - 20, 9):
            fraction *= 10
    seconds = ((_days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second
    return seconds * 1_000_000_000 + fraction


@kernel
def _instants(data: Bytes, ends: Any, out: Any) -> None:
    start = 0
    for n in range(len(ends)):
        out[n] = _instant(data, start, ends[n])
        start = ends[n]


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    units_of(["1"])
    instants_of(["2024-03-05T10:00:00Z"])
