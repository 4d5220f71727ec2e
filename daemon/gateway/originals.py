"""Messages on their way to the engine, kept for a while as they came, by their records' running numbers.

A session that refuses a record knows its ring record only; its DLQ record is to hold what was received.
"""

from collections import deque
from collections.abc import Sequence

from feeds.source import Incoming

KEPT_BYTES = 16 << 20
"""Bytes of payloads that are kept: seconds of any feed, and a refusal comes within milliseconds."""
_OVERHEAD = 512
"""Bytes that a message takes besides its payload, about."""


class Originals:
    """The newest messages, about ``kept_bytes`` of them, while they are wanted."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._wanted = False
        self._most, self._bytes = kept_bytes, 0
        self._runs: deque[tuple[int, Sequence[Incoming], int]] = deque()
        """First number, messages of consecutive numbers, bytes; oldest first."""

    def want(self, wanted: bool) -> None:
        """Whether a session may refuse a record."""
        self._wanted = wanted

    def keep(self, first: int, messages: Sequence[Incoming]) -> None:
        """Messages, one record each, numbered from ``first`` on; numbers ascend from call to call."""
        if not self._wanted:
            return
        size = sum(len(message.payload) + _OVERHEAD for message in messages)
        self._runs.append((first, messages, size))
        self._bytes += size
        while self._bytes > self._most and len(self._runs) > 1:
            self._bytes -= self._runs.popleft()[2]

    def find(self, number: int) -> Incoming | None:
        """The message of record ``number``; None if it is not kept any more."""
        for first, messages, _ in reversed(self._runs):
            if first <= number:
                return messages[number - first] if number < first + len(messages) else None
        return None

    def clear(self) -> None:
        """Numbers begin again."""
        self._runs.clear()
        self._bytes = 0
