"""Compiled search for values in JSON; a payload that it does not read is left alone.

It reads whole payloads of printable text without escapes, integers below 9e18, such as times in ns, and
objects in which no place comes twice. What msgspec would refuse it never reads.
"""

from typing import Any

import numpy as np

from feeds.columns.decode_kernel import Bytes, blank, text_end
from feeds.columns.places import (
    BAD,
    BOOL,
    DEPTH,
    DIGITS,
    NULL,
    NUMBER,
    OTHER,
    TEXT,
    Integers,
    Places,
    Scanned,
    indexed,
    is_text,
    named,
    note_kinds,
)
from support.numba_kernel import inlined_kernel

_DIGITS = 19
_HEAD = 5
# columns of the stack of open objects and arrays
_PLACE, _CLOSING, _INDEX = range(3)
_OBJECT_END, _QUOTE, _COMMA, _COLON = 125, 34, 44, 58


def scan_json(raw: bytes, ends: Integers, places: Places) -> Scanned:
    """What stands at ``places`` in payloads of JSON: ``raw`` up to each of ``ends``."""
    found = Scanned.empty(raw, len(ends), len(places.tree))
    tree, names = places.tree, places.names
    _scan_all(
        found.data, ends, tree, names, found.kinds, found.a, found.b, found.seen, found.read, found.stack
    )
    return found


@inlined_kernel
def _digits_end(data: Bytes, i: int, end: int) -> int:
    while i < end and 48 <= data[i] <= 57:
        i += 1
    return i


@inlined_kernel
def _number(data: Bytes, first: int, end: int) -> Any:
    """The kind of a number, and where it ends."""
    start = first + 1 if data[first] == 45 else first
    i = _digits_end(data, start, end)
    whole = i - start
    if whole == 0 or (data[start] == 48 and whole > 1):
        return BAD, i
    kind = DIGITS
    if i < end and data[i] == 46:
        kind, start = NUMBER, i + 1
        i = _digits_end(data, start, end)
        if i == start:
            return BAD, i
    if i < end and (data[i] == 69 or data[i] == 101):
        kind, i = NUMBER, i + 1
        if i < end and (data[i] == 43 or data[i] == 45):
            i += 1
        start = i
        i = _digits_end(data, start, end)
        if i == start:
            return BAD, i
    if kind == DIGITS and (start > first and data[start] == 48):  # -0 is 0
        return BAD, i
    if kind == DIGITS and (whole > _DIGITS or (whole == _DIGITS and data[start] == 57)):  # 9e18 and more
        return BAD, i
    return kind, i


@inlined_kernel
def _is_word(data: Bytes, i: int, end: int, second: int, third: int, fourth: int) -> bool:
    return i + 4 <= end and data[i + 1] == second and data[i + 2] == third and data[i + 3] == fourth


@inlined_kernel
def _value(data: Bytes, i: int, end: int) -> Any:
    """The kind of a value, its ``a`` and ``b``, and where it ends; of an object or array, where it begins."""
    if i >= end:
        return BAD, 0, 0, i
    first = data[i]
    if first == _QUOTE:
        stop = text_end(data, i + 1, end)
        return (TEXT, i + 1, stop, stop + 1) if stop >= 0 else (BAD, 0, 0, i)
    if first == 123 or first == 91:
        return OTHER, 0, 0, i + 1
    if first == 116:
        return (BOOL, 1, 0, i + 4) if _is_word(data, i, end, 114, 117, 101) else (BAD, 0, 0, i)
    if first == 102:
        right = i + 5 <= end and data[i + 1] == 97 and _is_word(data, i + 1, end, 108, 115, 101)
        return (BOOL, 0, 0, i + 5) if right else (BAD, 0, 0, i)
    if first == 110:
        return (NULL, 0, 0, i + 4) if _is_word(data, i, end, 117, 108, 108) else (BAD, 0, 0, i)
    kind, stop = _number(data, i, end)
    return kind, i, stop, stop


@inlined_kernel
def _scan(
    data: Bytes, i: int, end: int, tree: Any, names: Bytes, kinds: Any, a: Any, b: Any, n: int, stack: Any
) -> bool:
    """Read one object."""
    depth, place, seen = -1, 0, np.int64(0)
    i = blank(data, i, end)
    if i >= end or data[i] != 123:
        return False
    while True:
        first = data[i] if i < end else 0
        kind, of_a, of_b, stop = _value(data, i, end)
        if kind == BAD:
            return False
        if place >= 0:
            kinds[place, n], a[place, n], b[place, n] = kind, of_a, of_b
        i = blank(data, stop, end)
        if kind == OTHER:
            depth += 1
            if depth == DEPTH:
                return False
            stack[depth, _PLACE], stack[depth, _CLOSING], stack[depth, _INDEX] = place, first + 2, 0
        is_first = kind == OTHER
        while depth >= 0 and i < end and data[i] == stack[depth, _CLOSING]:
            depth, is_first = depth - 1, False
            i = blank(data, i + 1, end)
        if depth < 0:
            return i == end
        if not is_first:
            if i >= end or data[i] != _COMMA:
                return False
            i = blank(data, i + 1, end)
        within = stack[depth, _PLACE]
        if stack[depth, _CLOSING] == _OBJECT_END:
            stop = text_end(data, i + 1, end) if i < end and data[i] == _QUOTE else -1
            if stop < 0:
                return False
            place = named(tree, names, within, data, i + 1, stop)
            i = blank(data, stop + 1, end)
            if i >= end or data[i] != _COLON:
                return False
            i = blank(data, i + 1, end)
        else:
            place = indexed(tree, within, stack[depth, _INDEX])
            stack[depth, _INDEX] += 1
        if place >= 0:
            if (seen >> np.int64(place)) & 1:
                return False
            seen |= np.int64(1) << np.int64(place)


@inlined_kernel
def _begin(data: Bytes, start: int, end: int) -> int:
    """Where a payload begins, behind a registry's five bytes and a byte-order mark."""
    if end - start > _HEAD and data[start] == 0:
        start += _HEAD
    if end - start >= 3 and data[start] == 0xEF and data[start + 1] == 0xBB and data[start + 2] == 0xBF:
        start += 3
    return start


@inlined_kernel
def _scan_all(
    data: Bytes,
    ends: Any,
    tree: Any,
    names: Bytes,
    kinds: Any,
    a: Any,
    b: Any,
    seen: Any,
    read: Any,
    stack: Any,
) -> None:
    start = 0
    for n in range(len(ends)):
        end = ends[n]
        begin = _begin(data, start, end)
        read[n] = _scan(data, begin, end, tree, names, kinds, a, b, n, stack) and is_text(data, begin, end)
        if read[n]:
            note_kinds(kinds, n, seen)
        start = end
