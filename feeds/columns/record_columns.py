"""Records of a file as columns, each of which can still be had whole; and messages that stand for them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from feeds.columns.decode import Columns
from feeds.market_data import Recorded
from feeds.source import Incoming

Integers = npt.NDArray[np.int64]
_PART = 40
"""Bits of a place within its part."""


@dataclass(eq=False)
class Keys:
    """Symbols, VENUE:SYMBOL, that the column ``key`` counts."""

    names: Sequence[str]
    _numbers: tuple[Mapping[str, int], Integers] | None = None

    def numbers(self, positions: Mapping[str, int]) -> Integers:
        """Their numbers among others; -1 where they have none."""
        if self._numbers is None or self._numbers[0] is not positions:
            found = np.array([positions.get(name, -1) for name in self.names], np.int64)
            self._numbers = positions, found
        return self._numbers[1]


@dataclass(eq=False)
class RecordColumns:
    """Records one after the other. ``whole``: one of them without its number, by its place in ``places``."""

    rows: Columns
    keys: Keys
    places: Integers
    whole: Callable[[int], Recorded]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def times(self) -> Integers:
        """Event times, ns."""
        times: Integers = self.rows["ts_event"]
        return times

    def record(self, at: int) -> Recorded:
        """One record."""
        return msgspec.structs.replace(self.whole(int(self.places[at])), seq=int(self.rows["seq"][at]))

    def records(self) -> Iterator[Recorded]:
        """All of them."""
        return map(self.record, range(len(self)))

    def part(self, at: slice | npt.NDArray[np.bool_]) -> "RecordColumns":
        """Some of them."""
        return RecordColumns(self.rows[at], self.keys, self.places[at], self.whole)

    def number(self, first: int) -> None:
        """Number them from ``first`` on."""
        self.rows["seq"] = np.arange(first, first + len(self), dtype=np.uint64)


def in_one(parts: Sequence[RecordColumns], order: Integers) -> RecordColumns:
    """The records of all parts, in this order of them all."""
    names: dict[str, int] = {}
    keys, places = [], []
    for number, part in enumerate(parts):
        of_part = np.array([names.setdefault(name, len(names)) for name in part.keys.names], np.int64)
        keys.append(of_part[part.rows["key"]])
        places.append(part.places + (number << _PART))
    rows = np.concatenate([part.rows for part in parts])[order]
    rows["key"] = np.concatenate(keys)[order]
    wholes = [part.whole for part in parts]

    def whole(place: int) -> Recorded:
        return wholes[place >> _PART](place & (1 << _PART) - 1)

    return RecordColumns(rows, Keys(list(names)), np.concatenate(places)[order], whole)


@dataclass(frozen=True, eq=False)
class ColumnBatch(Sequence[Incoming]):
    """Messages of one record each, which are made only where they are asked for.

    Their offsets are their records' numbers less one. ``message``: the message of a record.
    """

    stream: tuple[str, int]
    columns: RecordColumns
    received_ns: int
    message: Callable[[Recorded], Incoming] = field(repr=False)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Incoming: ...

    @overload
    def __getitem__(self, at: slice) -> "ColumnBatch": ...

    def __getitem__(self, at: int | slice) -> "Incoming | ColumnBatch":
        if not isinstance(at, slice):
            return self.message(self.columns.record(range(len(self))[at]))
        return ColumnBatch(self.stream, self.columns.part(at), self.received_ns, self.message)
