"""What a session's tape retains, known without the tape: records leave by the rule of `regions.tape`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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
        window, records, gone = self.window, self._records, []
        while records and (
            self._tokens + tokens > window.tokens
            or (window.records and len(records) + 1 > window.records)
            or (window.span_ns and records[0][2] < event - window.span_ns)
        ):
            key_gone, n, _ = records.popleft()
            self._tokens -= n
            gone.append(key_gone)
        records.append((key, tokens, event))
        self._tokens += tokens
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
