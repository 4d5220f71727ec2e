"""What a session's tape retains, known without the tape: records leave by the rule of `regions.tape`."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

from ingest.backlog import TapeWindow

K = TypeVar("K")
_MAX_DEFERRED = 4096


class Retained(Generic[K]):
    """The records of a window, oldest first, each by a key. It evicts as `regions.tape.Tape` does."""

    def __init__(self, window: TapeWindow) -> None:
        self._window = window
        self._records: deque[tuple[K, int, int]] = deque()
        self._tokens = 0
        self._deferred: list[tuple[Sequence[K], Sequence[int], Sequence[int]]] = []
        self._waiting = 0

    def change(self, window: TapeWindow) -> None:
        """Retain another window from the next record on."""
        self._settle()
        self._window = window

    def clear(self) -> None:
        """The window is reset: it is empty."""
        self._records.clear()
        self._deferred, self._tokens, self._waiting = [], 0, 0

    def add(self, key: K, tokens: int, event: int) -> list[K]:
        """Append a record of ``tokens`` tokens, its event time in ns; returns the keys that leave for it."""
        self._settle()
        return self._extend([(key, tokens, event)])

    def defer(self, keys: Sequence[K], tokens: Sequence[int], events: Sequence[int]) -> None:
        """Append records, which are looked at later: most of them have left by then."""
        self._deferred.append((keys, tokens, events))
        self._waiting += len(keys)
        if self._waiting >= _MAX_DEFERRED:
            self._settle()

    def _settle(self) -> None:
        """Append what was deferred, but for records that have left anyway."""
        if not self._deferred:
            return
        window, tokens, rows = self._window, 0, list[tuple[K, int, int]]()
        for row in chain.from_iterable(
            zip(*map(reversed, each), strict=True) for each in reversed(self._deferred)
        ):
            tokens += row[1]
            if rows and (tokens > window.tokens or (window.records and len(rows) == window.records)):
                self._records.clear()
                self._tokens = 0
                break
            rows.append(row)
        newest = max(event for _, _, events in self._deferred for event in events)
        self._deferred, self._waiting = [], 0
        self._extend(rows[::-1], newest)

    def _extend(self, rows: list[tuple[K, int, int]], newest: int = 0) -> list[K]:
        """Append records, of which the newest event time may be that of one that has left already."""
        window, records, gone = self._window, self._records, []
        records.extend(rows)
        self._tokens += sum(tokens for _, tokens, _ in rows)
        newest = max(newest, *(event for _, _, event in rows))
        oldest = newest - window.span_ns if window.span_ns else 0
        while len(records) > 1 and (
            self._tokens > window.tokens
            or (window.records and len(records) > window.records)
            or records[0][2] < oldest
        ):
            key, tokens, _ = records.popleft()
            self._tokens -= tokens
            gone.append(key)
        return gone

    def __iter__(self) -> Iterator[K]:
        """The keys of its records, oldest first."""
        self._settle()
        return (key for key, _, _ in self._records)

    def rows(self) -> list[tuple[K, int, int]]:
        """Key, tokens and event time of its records, to be stored."""
        self._settle()
        return list(self._records)

    def restore(self, rows: list[tuple[K, int, int]]) -> None:
        """Go on from stored ``rows``."""
        self._deferred, self._waiting = [], 0
        self._records = deque(rows)
        self._tokens = sum(tokens for _, tokens, _ in rows)
