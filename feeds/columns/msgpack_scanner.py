"""Compiled search for values in msgpack; a payload that it does not read is left alone.

It reads whole payloads whose keys and texts are UTF-8, without extensions, and maps in which no place comes
twice. What msgspec would refuse it never reads.
"""

from typing import Any

import numpy as np

from feeds.columns.decode_kernel import Bytes, big_endian
from feeds.columns.places import (
    ARRAY,
    BAD,
    BOOL,
    BYTES,
    DEPTH,
    FLOAT,
    INT,
    MAP,
    NULL,
    OTHER,
    SINGLE,
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

# columns of the stack of open maps and arrays
_PLACE, _REST, _INDEX = range(3)


def scan_msgpack(raw: bytes, ends: Integers, places: Places) -> Scanned:
    """What stands at ``places`` in payloads of msgpack: ``raw`` up to each of ``ends``."""
    found = Scanned.empty(raw, len(ends), len(places.tree))
    tree, names = places.tree, places.names
    _scan_all(
        found.data, ends, tree, names, found.kinds, found.a, found.b, found.seen, found.read, found.stack
    )
    return found


@inlined_kernel
def _sized(data: Bytes, kind: int, start: int, size: Any, end: int) -> Any:
    """A text, or bytes, of this size."""
    if size > end - start or (kind == TEXT and not is_text(data, start, start + size)):
        return BAD, 0, 0, start
    return kind, start, start + size, start + size


@inlined_kernel
def _with_head(data: Bytes, i: int, end: int, head: Any) -> Any:
    """The kind of a value, its ``a`` and ``b``, and where it ends, behind a first byte of 0xC4 to 0xDF."""
    width = 0
    kind = BAD
    if head <= 0xC6:
        kind, width = BYTES, 1 << (head - 0xC4)
    elif head == 0xCA or head == 0xCB:
        kind, width = (SINGLE, 4) if head == 0xCA else (FLOAT, 8)
    elif 0xCC <= head <= 0xD3:
        kind, width = INT, 1 << ((head - 0xCC) & 3)
    elif 0xD9 <= head <= 0xDB:
        kind, width = TEXT, 1 << (head - 0xD9)
    elif head >= 0xDC:
        kind, width = (ARRAY if head <= 0xDD else MAP), 2 << ((head - 0xDC) & 1)
    if kind == BAD or width > end - i:
        return BAD, 0, 0, i
    value = np.int64(big_endian(data, i, width))
    i += width
    if kind in (TEXT, BYTES):
        return _sized(data, kind, i, value, end)
    if kind == INT:
        if head == 0xCF and value < 0:
            return BAD, 0, 0, i
        if head >= 0xD0:
            unused = np.int64(64 - 8 * width)
            value = (value << unused) >> unused
    return kind, value, 0, i


@inlined_kernel
def _value(data: Bytes, i: int, end: int) -> Any:
    """The kind of a value, its ``a`` and ``b``, and where it ends; of a map or array its size as ``a``."""
    if i >= end:
        return BAD, 0, 0, i
    head = np.int64(data[i])
    i += 1
    if head <= 0x7F:
        return INT, head, 0, i
    if head <= 0x8F:
        return MAP, head - 0x80, 0, i
    if head <= 0x9F:
        return ARRAY, head - 0x90, 0, i
    if head <= 0xBF:
        return _sized(data, TEXT, i, head - 0xA0, end)
    if head >= 0xE0:
        return INT, head - 0x100, 0, i
    if head >= 0xC4:
        return _with_head(data, i, end, head)
    if head == 0xC0:
        return NULL, 0, 0, i
    return (BAD, 0, 0, i) if head == 0xC1 else (BOOL, head - 0xC2, 0, i)


@inlined_kernel
def _scan(
    data: Bytes, i: int, end: int, tree: Any, names: Bytes, kinds: Any, a: Any, b: Any, n: int, stack: Any
) -> bool:
    """Read one map."""
    depth, place, seen = -1, 0, np.int64(0)
    while True:
        kind, of_a, of_b, i = _value(data, i, end)
        if kind == BAD or (depth < 0 and kind != MAP):
            return False
        opens = kind in (MAP, ARRAY)
        if place >= 0:
            if kind == BYTES:
                if not is_text(data, of_a, of_b):
                    return False
                kind = TEXT
            kinds[place, n] = OTHER if opens else kind
            if not opens:
                a[place, n], b[place, n] = of_a, of_b
        if opens:
            depth += 1
            if depth == DEPTH:
                return False
            stack[depth, _PLACE], stack[depth, _REST] = place, of_a
            stack[depth, _INDEX] = -1 if kind == MAP else 0
        while depth >= 0 and stack[depth, _REST] == 0:
            depth -= 1
        if depth < 0:
            return bool(i == end)
        stack[depth, _REST] -= 1
        within = stack[depth, _PLACE]
        if stack[depth, _INDEX] < 0:
            kind, start, stop, i = _value(data, i, end)
            if kind != TEXT:
                return False
            place = named(tree, names, within, data, start, stop)
        else:
            place = indexed(tree, within, stack[depth, _INDEX])
            stack[depth, _INDEX] += 1
        if place >= 0:
            if (seen >> np.int64(place)) & 1:
                return False
            seen |= np.int64(1) << np.int64(place)


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
        read[n] = _scan(data, start, ends[n], tree, names, kinds, a, b, n, stack)
        if read[n]:
            note_kinds(kinds, n, seen)
        start = ends[n]
