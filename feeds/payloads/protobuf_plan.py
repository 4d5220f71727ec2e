"""Plans by which compiled code finds a format's values in messages of Protobuf, from their descriptors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, timestamp_pb2

from feeds.columns import protobuf_scanner as scanner
from feeds.columns.places import ABSENT, BOOL, ENUM, FLOAT, INT, OTHER, SINGLE, TEXT, TIME, Place, Places

TIMESTAMP = timestamp_pb2.Timestamp.DESCRIPTOR.full_name
_KINDS = {
    scanner.DOUBLE: FLOAT, scanner.SINGLE_FLOAT: SINGLE, scanner.TRUTH: BOOL, scanner.STRING: TEXT,
    scanner.BYTE_STRING: TEXT, scanner.ENUMERATION: ENUM, scanner.MESSAGE: OTHER,
}  # fmt: skip
_MAX_BITS = 62


class _NotCovered(Exception):
    """Compiled code does not read such messages."""


@dataclass
class _Builder:
    nodes: list[list[list[int]]] = field(default_factory=list)
    """The members of each message."""
    enums: dict[int, dict[int, str]] = field(default_factory=dict)
    bits: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    """Messages in which nothing counts, by name."""

    def bit(self) -> int:
        self.bits += 1
        if self.bits > _MAX_BITS:
            raise _NotCovered
        return self.bits - 1

    def message(self, descriptor: Any, within: Mapping[str, Place]) -> int:
        """The node of a message. ``within``: the places in it that count."""
        if not within and descriptor.full_name in self.plain:
            return self.plain[descriptor.full_name]
        _check(descriptor)
        node, rows, once = len(self.nodes), list[list[int]](), dict[str, int]()
        self.nodes.append(rows)
        if not within:
            self.plain[descriptor.full_name] = node
        for oneof in descriptor.oneofs:  # a member of it replaces another
            if any(each.name in within for each in oneof.fields):
                bit = self.bit()
                once |= dict.fromkeys((each.name for each in oneof.fields), bit)
        rows += [
            self._member(each, within.get(each.name), once.get(each.name, -1)) for each in descriptor.fields
        ]
        return node

    def _member(self, each: Any, place: Place | None, once: int) -> list[int]:
        if once < 0 and place is not None:
            once = self.bit()
        if place is not None and each.is_repeated:
            raise _NotCovered
        number, kind, node = -1 if place is None else place.number, _KINDS.get(each.type, INT), -1
        if each.type == scanner.MESSAGE:
            if place is not None and each.message_type.full_name == TIMESTAMP:
                kind, node = TIME, self._timestamp(number)
            else:
                node = self.message(each.message_type, {} if place is None else place.within)
        if kind == ENUM and place is not None:
            _check(each.enum_type)
            self.enums[number] = {value.number: value.name for value in each.enum_type.values[::-1]}
        missing = kind if number >= 0 and not each.has_presence else ABSENT
        return [each.number, each.type, node, number, 0, kind, missing, once, int(each.is_repeated)]

    def _timestamp(self, place: int) -> int:
        """A time's seconds and nanoseconds are the two numbers of its place."""
        seconds = [1, scanner.INT64, -1, place, 0, TIME, ABSENT, self.bit(), 0]
        nanos = [2, scanner.INT32, -1, place, 1, TIME, ABSENT, self.bit(), 0]
        self.nodes.append([seconds, nanos])
        return len(self.nodes) - 1


def compile_plan(descriptor: Any, places: Places) -> scanner.ProtobufPlan | None:
    """None where places are in arrays or maps, or where it is no message of Protobuf 3."""
    builder = _Builder()
    try:
        builder.message(descriptor, places.root.within)
    except _NotCovered:
        return None
    ends = np.cumsum([len(rows) for rows in builder.nodes])
    nodes = np.stack([np.append(0, ends[:-1]), ends], axis=1).astype(np.int64)
    members = np.array([row for rows in builder.nodes for row in rows], np.int64).reshape(-1, scanner.COLUMNS)
    return scanner.ProtobufPlan(len(places.tree), nodes, members, builder.enums)


def _check(descriptor: Any) -> None:
    """Raise _NotCovered unless a message or an enumeration is of Protobuf 3."""
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.file.CopyToProto(file)
    if file.syntax != "proto3":
        raise _NotCovered
