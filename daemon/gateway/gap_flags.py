"""Symbols, by their numbers in the ring, whose next record follows a gap."""

from collections.abc import Iterable

import numpy as np

from daemon.gateway.checkpoint.offsets import Stream
from ingest.record import FLAG_GAP, Records


class GapFlags:
    """Each gap is flagged once for each symbol, on its next record, or on its next one of a stream."""

    def __init__(self) -> None:
        self._symbols: set[int] = set()
        self._jumped: dict[Stream, set[int]] = {}
        self._firsts: list[tuple[int, int]] = []
        """Number of the stream and offset of records that follow a jump, and are not packed yet."""

    def note(self, symbols: Iterable[int]) -> None:
        """Records of these symbols are missing."""
        self._symbols.update(symbols)

    def note_jump(self, stream: Stream, symbols: Iterable[int]) -> None:
        """Offsets of ``stream`` were not read."""
        self._jumped[stream] = set(symbols)

    def note_first(self, symbol: int, stream: Stream, number: int, offset: int) -> None:
        """The symbol's next record of ``stream``, which has this number, goes to `flag`."""
        if self._take_jump(symbol, stream):
            self._firsts.append((number, offset))

    def take(self, symbol: int, stream: Stream | None = None) -> bool:
        """Whether the symbol's next record, of ``stream``, follows a gap."""
        gap = symbol in self._symbols
        self._symbols.discard(symbol)
        return (stream is not None and self._take_jump(symbol, stream)) or gap

    def _take_jump(self, symbol: int, stream: Stream) -> bool:
        waiting = self._jumped.get(stream, set())
        found = symbol in waiting
        waiting.discard(symbol)
        return found

    def flag(self, packed: Records) -> None:
        """Set the flags of records that were decoded as columns."""
        for stream, offset in self._firsts:
            packed["flags"][(packed["stream"] == stream) & (packed["offset"] == offset)] |= FLAG_GAP
        self._firsts.clear()
        for symbol in sorted(self._symbols):
            own = np.flatnonzero(packed["symbol"] == symbol)
            if len(own):
                packed["flags"][own[0]] |= FLAG_GAP
                self._symbols.discard(symbol)
