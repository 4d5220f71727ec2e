"""Compiled reading of numbers and times that stand as plain text; what they do not take is left alone."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from feeds.columns.decode_kernel import FNV_START, Bytes, name_hash, read_decimal, same
from support.numba_kernel import inlined_kernel

Integers = npt.NDArray[np.int64]
_MAX_PROBES = 64
"""Texts that are compared to find one."""
_SHORTEST, _LONGEST = len("2024-03-05T10:00:00Z"), len("2024-03-05T10:00:00.123456789Z")


def units_of(texts: Sequence[str]) -> Integers:
    """Decimal texts in units of 1e-9; -1 unless one is digits, or digits, a point and one to nine digits."""
    out = np.full(len(texts), -1, np.int64)
    _units(*spans(texts), out)
    return out


def instants_of(texts: Sequence[str]) -> Integers:
    """ISO 8601 of the years 1970 to 2199 in UTC, as ns since 1970; -1 unless one is plain.

    Such as ``2024-03-05T10:00:00Z``, or with one to nine digits of a fraction.
    """
    out = np.full(len(texts), -1, np.int64)
    _instants(*spans(texts), out)
    return out


class Words(Sequence[str]):
    """Texts of UTF-8 in ``raw``, from each of ``starts`` to each of ``ends``, made when they are needed."""

    def __init__(self, raw: bytes, starts: Integers, ends: Integers) -> None:
        self._raw, self.starts, self.ends = raw, starts, ends

    @property
    def data(self) -> Bytes:
        """The bytes they are in."""
        return np.frombuffer(self._raw or b"\0", np.uint8)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> "Words": ...

    def __getitem__(self, at: int | slice) -> "str | Words":
        if isinstance(at, slice):
            return Words(self._raw, self.starts[at], self.ends[at])
        return self._raw[self.starts[at] : self.ends[at]].decode()


def distinct(raw: bytes, starts: Integers, ends: Integers) -> tuple[Integers, Words]:
    """The place of each text among the words, few of which are equal; -1 where its start is -1."""
    codes, firsts = np.empty((2, len(starts)), np.int64)
    table = np.full(1 << (2 * len(starts)).bit_length(), -1, np.int64)
    count = _distinct(np.frombuffer(raw or b"\0", np.uint8), starts, ends, table, codes, firsts)
    return codes, Words(raw, starts[firsts[:count]], ends[firsts[:count]])


def spans(texts: Sequence[str]) -> tuple[Bytes, Integers, Integers]:
    """Bytes that hold texts in UTF-8, and where each begins and ends."""
    if isinstance(texts, Words):
        return texts.data, texts.starts, texts.ends
    encoded = [text.encode() for text in texts]
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ends = np.cumsum(sizes)
    return np.frombuffer(b"".join(encoded) or b"\0", np.uint8), ends - sizes, ends


def integers_of(raw: bytes, starts: Integers, ends: Integers) -> Integers:
    """Integers below 9e18, with or without a minus; 0 where there is none."""
    out = np.zeros(len(starts), np.int64)
    _integers(np.frombuffer(raw or b"\0", np.uint8), starts, ends, out)
    return out


@inlined_kernel
def _integers(data: Bytes, starts: Any, ends: Any, out: Any) -> None:
    for n in range(len(ends)):
        start = starts[n]
        negative = start < ends[n] and data[start] == 45
        value = _digits(data, start + 1 if negative else start, ends[n])
        out[n] = -value if negative else value


@inlined_kernel
def _distinct(data: Bytes, starts: Any, ends: Any, table: Any, codes: Any, firsts: Any) -> int:
    """Number texts as they come first; a full stretch of the table makes a text a word of its own."""
    count, mask = 0, np.uint64(len(table) - 1)
    for n in range(len(starts)):
        codes[n] = -1
        if starts[n] < 0:
            continue
        slot = name_hash(data, starts[n], ends[n], FNV_START) & mask
        for _ in range(_MAX_PROBES):
            word = table[slot]
            if word < 0:
                table[slot] = count
                break
            first = firsts[word]
            if ends[first] - starts[first] == ends[n] - starts[n] and same(
                data, starts[n], ends[n], data, starts[first]
            ):
                codes[n] = word
                break
            slot = (slot + np.uint64(1)) & mask
        if codes[n] < 0:
            codes[n], firsts[count] = count, n
            count += 1
    return count


@inlined_kernel
def _units(data: Bytes, starts: Any, ends: Any, out: Any) -> None:
    for n in range(len(ends)):
        out[n] = read_decimal(data, starts[n], ends[n])


@inlined_kernel
def _digits(data: Bytes, start: int, end: int) -> Any:
    """A number of digits; -1 where another character stands."""
    value = np.int64(0)
    for i in range(start, end):
        if not 48 <= data[i] <= 57:
            return -1
        value = value * 10 + np.int64(data[i] - 48)
    return value


@inlined_kernel
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970 of a day of the Gregorian calendar, counted from a March."""
    year -= month <= 2
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    era = year // 400
    of_era = (year - era * 400) * 365 + (year - era * 400) // 4 - (year - era * 400) // 100 + of_year
    return era * 146_097 + of_era - 719_468


@inlined_kernel
def _month_days(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31


@inlined_kernel
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


@inlined_kernel
def _instants(data: Bytes, starts: Any, ends: Any, out: Any) -> None:
    for n in range(len(ends)):
        out[n] = _instant(data, starts[n], ends[n])


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    units_of(["1"])
    instants_of(["2024-03-05T10:00:00Z"])
    codes, _ = distinct(b"1", np.zeros(1, np.int64), np.ones(1, np.int64))
    integers_of(b"1", codes, codes + 1)
