"""The data plane's state of one session as plain data: what a snapshot keeps of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ingest.rollup import SummedBar


class Rows(msgspec.Struct, frozen=True):
    """A numpy array as bytes, with a description of its elements."""

    layout: str
    data: bytes
    columns: int = 0
    """Of an array of two dimensions."""

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Rows:
        """A copy of ``array``."""
        columns = array.shape[1] if array.ndim == 2 else 0
        return cls(_layout(array.dtype), array.tobytes(), columns)

    def array(self, dtype: npt.DTypeLike, columns: int = 0) -> npt.NDArray[Any]:
        """The array again. Raises ValueError unless it has elements of ``dtype`` and ``columns`` columns."""
        wanted = np.dtype(dtype)
        if self.layout != _layout(wanted) or self.columns != columns:
            raise ValueError("the stored rows have another layout than this program's")
        found: npt.NDArray[Any] = np.frombuffer(self.data, wanted).copy()
        return found.reshape(-1, columns) if columns else found


def _layout(dtype: np.dtype[Any]) -> str:
    return repr(dtype.descr)


class BuilderState(msgspec.Struct, frozen=True):
    """Rows of a session in `ingest.bars`: its own (1), those of its feeds, and its open bars.

    ``identities``: of `ingest.identity.packed_tables`.
    """

    session: Rows
    feeds: Rows
    slots: Rows
    identities: Rows


class CompactState(msgspec.Struct, frozen=True):
    """State of an `ingest.compact.CompactEncoder`."""

    anchor: tuple[str, str, str] | None
    """Reference, unit and volume, as decimal text."""
    window: Rows
    tokens: int
    inexact: int
    age: int


class LateUpdateState(msgspec.Struct, frozen=True):
    """State of an `ingest.late_updates.Amender`."""

    retained: list[tuple[tuple[int, int] | None, int, int]]
    bars: Rows
    newest: int
    gap: int
    late_open: int
    splits: list[tuple[int, int, float]]
    begins: bool


class PlaneState(msgspec.Struct, frozen=True):
    """A session between two records: its builder, the closed bars that wait, and its encoder.

    ``shortest``: tokens of its shortest line. ``retained``: of each record on its tape the opening of its
    bar (None: a correction, or an event), tokens and event time. ``texts``: those that waiting rows have, by
    number.
    """

    builder: BuilderState
    waiting: Rows
    shortest: int
    retained: list[tuple[int | None, int, int]]
    compact: CompactState | None = None
    amender: LateUpdateState | None = None
    texts: dict[int, str] = {}


class Taken(msgspec.Struct, frozen=True):
    """Where the newest record of one symbol was read: see `ingest.record`.

    ``stream`` 0: it had no record, or not from a stream. ``more``: its message has more records. ``others``:
    the newest offset of each further stream of the symbol.
    """

    stream: int
    offset: int
    part: int
    more: bool
    others: tuple[tuple[int, int], ...] = ()


class RollupState(msgspec.Struct, frozen=True):
    """A session's bars: those summed up and those of its window, and how many of them stand where.

    See `daemon.engine.rollups`.
    """

    rollup: dict[int, list[list[SummedBar]]]
    window: tuple[SummedBar, ...]
    summed: int
    shown: int
    lost: bool
