"""Compiled search for values in messages of Protobuf 3; a payload that it does not read is left alone.

It reads whole messages whose texts are UTF-8 and whose numbers have the range of their type, without groups,
in which no member that counts comes twice. What protobuf would refuse it never reads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from feeds.columns.decode_kernel import Bytes, same
from feeds.columns.places import DEPTH, Enums, Integers, Scanned, is_text, note_kinds
from support.numba_kernel import inlined_kernel

# Columns of a plan. MEMBER: its number; TYPE: its type's, in descriptors. NODE: of a message, where its
# members stand. PLACE: -1, it does not count. SLOT: 0 for `a` of the place, 1 for `b`. MISSING: the kind
# that it has where it is not there. ONCE: a bit that may be set once; -1: any number of times.
MEMBER, TYPE, NODE, PLACE, SLOT, KIND, MISSING, ONCE, REPEATED = range(9)
COLUMNS = 9
DOUBLE, SINGLE_FLOAT, INT64, UINT64, INT32, FIXED64, FIXED32, TRUTH = range(1, 9)
STRING, GROUP, MESSAGE, BYTE_STRING, UINT32, ENUMERATION, SFIXED32, SFIXED64, SINT32, SINT64 = range(9, 19)
"""Types by their number in descriptors."""
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
"""How values are written."""
# columns of the stack of open messages
_NODE, _END = range(2)


@dataclass(frozen=True, eq=False)
class ProtobufPlan:
    """How to find the values of ``places`` places in a message, by its descriptor.

    ``nodes`` [messages, 2]: from where to where the members of each stand in ``members`` [n, COLUMNS].
    """

    places: int
    nodes: Integers
    members: Integers
    enums: Enums

    def scan(self, raw: bytes, ends: Integers, head: bytes) -> Scanned:
        """What stands where in payloads with this ``head``: ``raw`` up to each of ``ends``."""
        found = Scanned.empty(raw, len(ends), self.places, self.enums)
        front, nodes, members = np.frombuffer(head or b"\0", np.uint8)[: len(head)], self.nodes, self.members
        _scan_all(
            found.data,
            ends,
            front,
            nodes,
            members,
            found.kinds,
            found.a,
            found.b,
            found.seen,
            found.read,
            found.stack,
        )
        return found


@inlined_kernel
def _varint(data: Bytes, i: int, end: int) -> Any:
    """A number, and where it ends: -1 where it is cut off, or longer than 64 bits."""
    value, shift = np.uint64(0), np.uint64(0)
    while i < end:
        byte = np.uint64(data[i])
        i += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            return np.int64(0), -1
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return np.int64(value), i
        shift += np.uint64(7)
        if shift > np.uint64(63):
            return np.int64(0), -1
    return np.int64(0), -1


@inlined_kernel
def _short(data: Bytes, i: int, end: int) -> Any:
    """A tag or a size, which has at most five bytes, and where it ends; -1 where it is none."""
    value, stop = _varint(data, i, end)
    return value, (stop if stop - i <= 5 else -1)


@inlined_kernel
def _little_endian(data: Bytes, i: int, width: int) -> Any:
    value = np.uint64(0)
    for at in range(width):
        value |= np.uint64(data[i + at]) << np.uint64(8 * at)
    return np.int64(value)


@inlined_kernel
def _wire(kind: int) -> int:
    """How a type is written."""
    if kind in (DOUBLE, FIXED64, SFIXED64):
        return _EIGHT
    if kind in (SINGLE_FLOAT, FIXED32, SFIXED32):
        return _FOUR
    return _SIZED if kind in (STRING, BYTE_STRING, MESSAGE) else _VARINT


@inlined_kernel
def _number(data: Bytes, i: int, end: int, kind: int) -> Any:
    """A number of some type, and where it ends; -1 for one that is cut off, or not in the type's range."""
    wire = _wire(kind)
    if wire in (_EIGHT, _FOUR):
        width = 8 if wire == _EIGHT else 4
        if width > end - i:
            return np.int64(0), -1
        value, i = _little_endian(data, i, width), i + width
        if kind == SFIXED32:
            value = (value << np.int64(32)) >> np.int64(32)
        return (value, -1) if kind == FIXED64 and value < 0 else (value, i)
    value, i = _varint(data, i, end)
    if kind in (SINT32, SINT64):
        if kind == SINT32 and not 0 <= value < 1 << 32:
            return value, -1
        half = np.int64(np.uint64(value) >> np.uint64(1))
        return half ^ -(value & np.int64(1)), i
    inside = True
    if kind in (INT32, ENUMERATION):
        inside = -(1 << 31) <= value < 1 << 31
    elif kind == UINT32:
        inside = 0 <= value < 1 << 32
    elif kind == UINT64:
        inside = value >= 0
    elif kind == TRUTH:
        inside = 0 <= value <= 1
    return value, (i if inside else -1)


@inlined_kernel
def _packed(data: Bytes, i: int, end: int, kind: int) -> bool:
    """Whether these bytes are numbers of a type, one after the other."""
    while 0 <= i < end:
        _, i = _number(data, i, end, kind)
    return i == end


@inlined_kernel
def _unknown(data: Bytes, i: int, end: int, wire: int) -> int:
    """Where a member that the schema does not have ends; -1 where it is cut off, or a group."""
    if wire == _VARINT:
        _, i = _varint(data, i, end)
        return int(i)
    size = np.int64(8 if wire == _EIGHT else 4)
    if wire == _SIZED:
        size, i = _short(data, i, end)
    elif wire != _EIGHT and wire != _FOUR:
        return -1
    return int(i + size) if i >= 0 and 0 <= size <= end - i else -1


@inlined_kernel
def _missing(nodes: Any, members: Any, node: int, kinds: Any, n: int) -> None:
    """Members without presence are there with their default."""
    for row in range(nodes[node, 0], nodes[node, 1]):
        if members[row, MISSING] > 0:
            kinds[members[row, PLACE], n] = members[row, MISSING]


@inlined_kernel
def _row(nodes: Any, members: Any, node: int, member: int, last: int) -> int:
    """The row of a member, which mostly is behind the ``last`` one; -1 where the schema does not have it."""
    begin, end = nodes[node, 0], nodes[node, 1]
    if begin <= last + 1 < end and members[last + 1, MEMBER] == member:
        return last + 1
    for row in range(begin, end):
        if members[row, MEMBER] == member:
            return int(row)
    return -1


@inlined_kernel
def _sized(data: Bytes, i: int, end: int, members: Any, row: int, kinds: Any, a: Any, b: Any, n: int) -> int:
    """Read a member that has a size in front, unless it is a message; where it ends, -1: it is not read."""
    size, i = _short(data, i, end)
    if i < 0 or not 0 <= size <= end - i:
        return -1
    kind, place, stop = members[row, TYPE], members[row, PLACE], i + size
    if kind in (STRING, BYTE_STRING):
        if (kind == STRING or place >= 0) and not is_text(data, i, stop):
            return -1
        if place >= 0:
            kinds[place, n], a[place, n], b[place, n] = members[row, KIND], i, stop
        return int(stop)
    return int(stop) if members[row, REPEATED] and _packed(data, i, stop, kind) else -1


@inlined_kernel
def _scan(
    data: Bytes, i: int, nodes: Any, members: Any, kinds: Any, a: Any, b: Any, n: int, stack: Any
) -> bool:
    """Read the message that the stack begins with."""
    depth, once, row = 0, np.int64(0), -1
    _missing(nodes, members, 0, kinds, n)
    while True:
        while depth >= 0 and i == stack[depth, _END]:
            depth -= 1
        if depth < 0:
            return True
        end = stack[depth, _END]
        tag, i = _short(data, i, end)
        if i < 0 or not 8 <= tag < 1 << 32:
            return False
        wire = tag & 7
        row = _row(nodes, members, stack[depth, _NODE], tag >> 3, row)
        if row < 0:
            i = _unknown(data, i, end, wire)
            if i < 0:
                return False
            continue
        bit, kind, place = members[row, ONCE], members[row, TYPE], members[row, PLACE]
        if bit >= 0:
            if (once >> bit) & 1:
                return False
            once |= np.int64(1) << bit
        if kind == MESSAGE:
            size, i = _short(data, i, end)
            depth += 1
            if wire != _SIZED or depth == DEPTH or i < 0 or not 0 <= size <= end - i:
                return False
            stack[depth, _NODE], stack[depth, _END] = members[row, NODE], i + size
            if place >= 0:
                kinds[place, n] = members[row, KIND]
            _missing(nodes, members, members[row, NODE], kinds, n)
        elif wire == _SIZED:
            i = _sized(data, i, end, members, row, kinds, a, b, n)
        elif wire == _wire(kind):
            value, i = _number(data, i, end, kind)
            if place >= 0 and members[row, SLOT]:
                b[place, n] = value
            elif place >= 0:
                kinds[place, n], a[place, n] = members[row, KIND], value
        else:
            return False
        if i < 0:
            return False


@inlined_kernel
def _scan_all(
    data: Bytes,
    ends: Any,
    head: Bytes,
    nodes: Any,
    members: Any,
    kinds: Any,
    a: Any,
    b: Any,
    seen: Any,
    read: Any,
    stack: Any,
) -> None:
    start = 0
    for n in range(len(ends)):
        stack[0, _NODE], stack[0, _END] = 0, ends[n]
        if len(head) <= ends[n] - start and same(data, start, start + len(head), head, 0):
            read[n] = _scan(data, start + len(head), nodes, members, kinds, a, b, n, stack)
        if read[n]:
            note_kinds(kinds, n, seen)
        start = ends[n]
