"""The places in documents that a format reads from, for compiled code, and the values that it finds there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.columns.decode_kernel import Bytes
from support.numba_kernel import inlined_kernel, kernel

Integers = npt.NDArray[np.int64]
Enums = Mapping[int, Mapping[int, str]]
"""By place: the names of values by number."""

ABSENT, NULL, OTHER, BOOL, INT, FLOAT, SINGLE, ENUM, TIME, TEXT, DIGITS, NUMBER, BYTES, ARRAY, MAP = range(15)
"""Kinds of values. OTHER: an object or an array.

With a value (``a``): BOOL, INT, the bits of FLOAT and SINGLE, the number of an ENUM; TIME: s and ns. With
a span of the bytes, from ``a`` to ``b``: TEXT, DIGITS (an integer of JSON), NUMBER (another number of JSON).
BYTES, ARRAY and MAP are not kept.
"""
BAD = -1
"""Nothing that compiled code reads."""
DEPTH = 32
"""Of values within each other; deeper ones are not read."""
_MAX_PLACES = 62
_MAX_INDEX = 1 << 31
# columns of a tree
NAME, NAME_END, INDEX, FIRST, LAST = range(5)


@dataclass(eq=False)
class Place:
    """A name or an index, and what is named within it. ``number``: its row in a tree."""

    name: str = ""
    within: dict[str, "Place"] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, eq=False)
class Places:
    """Places by name, one in the other.

    ``tree`` [places, 5]: where each name begins and ends in ``names``, its index in an array (-1: none), and
    from where to where the places within it stand. ``numbers``: the rows of references.
    """

    root: Place
    numbers: dict[str, int]
    tree: Integers
    names: Bytes

    @classmethod
    def compile(cls, refs: Iterable[str]) -> "Places | None":
        """None where there are too many, or several names are one index."""
        root, of_refs = Place(), dict[str, Place]()
        for ref in refs:
            names = ref.split(".")
            place = root
            for name in names[names[0] == "$" :]:
                place = place.within.setdefault(name, Place(name))
            of_refs[ref] = place
        every = [root]
        rows, texts, size = list[list[int]](), list[bytes](), 0
        for number, place in enumerate(every):  # it grows: places within one stand together
            place.number = number
            within = place.within.values()
            indexes = [int(each.name) for each in within if each.name.isdecimal()]
            if len(indexes) > len(set(indexes)) or max(indexes, default=0) >= _MAX_INDEX:
                return None
            text = place.name.encode()
            index = int(place.name) if place.name.isdecimal() else -1
            rows.append([size, size + len(text), index, len(every), len(every) + len(within)])
            texts.append(text)
            size += len(text)
            every.extend(within)
        if len(every) > _MAX_PLACES:
            return None
        names_data = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
        numbers = {ref: place.number for ref, place in of_refs.items()}
        return cls(root, numbers, np.array(rows, np.int64), names_data)


@dataclass(frozen=True, eq=False)
class Scanned:
    """What stands at each place of each payload.

    ``raw``: all payloads in one. ``kinds`` [places, n]; ``a``, ``b`` [places, n]: see the kinds.
    ``seen`` [places]: the kinds that occur, a bit each. ``read`` [n]: which payloads were read at all.
    ``enums``: of places with an enumeration, the names of its values.
    """

    raw: bytes
    kinds: npt.NDArray[np.uint8]
    a: Integers
    b: Integers
    seen: Integers
    read: npt.NDArray[np.bool_]
    enums: Enums = field(default_factory=dict)

    @classmethod
    def empty(cls, raw: bytes, count: int, places: int, enums: Enums = MappingProxyType({})) -> "Scanned":
        """Return one of ``count`` payloads and ``places`` places, in which nothing is noted."""
        a, b = np.zeros((2, places, count), np.int64)
        kinds, read = np.zeros((places, count), np.uint8), np.zeros(count, np.bool_)
        return cls(raw, kinds, a, b, np.zeros(places, np.int64), read, enums)

    @property
    def data(self) -> Bytes:
        """The bytes of all payloads."""
        return np.frombuffer(self.raw or b"\0", np.uint8)

    @property
    def stack(self) -> Integers:
        """What compiled code notes of each value that others are within."""
        return np.zeros((DEPTH, 3), np.int64)


@inlined_kernel
def named(tree: Any, names: Bytes, place: int, data: Bytes, start: int, end: int) -> int:
    """The place of this name within another; -1 where there is none, or ``place`` is none."""
    if place < 0:
        return -1
    for each in range(tree[place, FIRST], tree[place, LAST]):
        at = tree[each, NAME]
        if tree[each, NAME_END] - at == end - start:
            i = start
            while i < end and data[i] == names[at + i - start]:
                i += 1
            if i == end:
                return int(each)
    return -1


@inlined_kernel
def indexed(tree: Any, place: int, index: int) -> int:
    """The place of an element of an array; -1 where there is none."""
    if place < 0:
        return -1
    for each in range(tree[place, FIRST], tree[place, LAST]):
        if tree[each, INDEX] == index:
            return int(each)
    return -1


@inlined_kernel
def note_kinds(kinds: Any, n: int, seen: Any) -> None:
    """Note which kinds a payload has, in ``seen`` [places]."""
    for place in range(len(seen)):
        seen[place] |= np.int64(1) << np.int64(kinds[place, n])


@inlined_kernel
def is_text(data: Bytes, start: int, end: int) -> bool:
    """Whether the bytes are text in UTF-8."""
    bits = np.uint8(0)
    for i in range(start, end):
        bits |= data[i]
    return bool(bits < 0x80) or is_utf8(data, start, end)


@kernel
def is_utf8(data: Bytes, start: int, end: int) -> bool:
    """Whether the bytes are UTF-8, without overlong forms and surrogates (RFC 3629, section 4)."""
    i = start
    while i < end:
        first = data[i]
        i += 1
        if first < 0x80:
            continue
        if first < 0xC2 or first > 0xF4:
            return False
        more = 1 if first < 0xE0 else 2 if first < 0xF0 else 3
        least = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        most = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if i + more > end or not least <= data[i] <= most:
            return False
        for at in range(i + 1, i + more):
            if data[at] & 0xC0 != 0x80:
                return False
        i += more
    return True
