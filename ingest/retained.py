"""What a session's tape retains, known without the tape: records leave by the rule of `regions.tape`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from ingest.backlog import Window

K = TypeVar("K")


class Retained(Generic[K]):
    """The records of a window, oldest first, each by a key. It evicts as `regions.tape.Tape` does."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._records: deque[tuple[K, int, int]] = deque()
        self._tokens = 0

    def add(self, key: K, tokens: int, event: int) -> list[K]:
        """Append a record of so many tokens, its event time in ns; returns the keys that leave for it."""
        return self.extend([(key, tokens, event)])

    def extend(self, rows: Sequence[tuple[K, int, int]]) -> list[K]:
        """Append records, each with its tokens and event time; returns the keys that leave for them."""
        window, records, gone = self.window, self._records, []
        records.extend(rows)
        self._tokens += sum(tokens for _, tokens, _ in rows)
        oldest = max(event for _, _, event in rows) - window.span_ns if window.span_ns else 0
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
        return (key for key, _, _ in self._records)

    def rows(self) -> list[tuple[K, int, int]]:
        """Key, tokens and event time of its records, to be stored."""
        return list(self._records)

    def restore(self, rows: list[tuple[K, int, int]]) -> None:
        """Go on from stored ``rows``."""
        self._records = deque(rows)
        self._tokens = sum(tokens for _, tokens, _ in rows)
