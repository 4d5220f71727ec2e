"""Messages on their way to the engine, kept for a while as they came.

A session that refuses a record knows its ring record only; its DLQ record is to hold what was received.
"""

from collections import deque
from collections.abc import Sequence

from daemon.protocol import NameStream
from feeds.source import Incoming

_OVERHEAD = 512
"""Bytes that a message takes besides its payload, about."""


class Originals:
    """The newest messages, about ``kept_bytes`` of them, while they are wanted.

    That is seconds of any feed, and a refusal comes within milliseconds.
    """

    def __init__(self, kept_bytes: int = 16 << 20) -> None:
        self._wanted = False
        self._most, self._bytes = kept_bytes, 0
        self._runs: deque[tuple[str, int, Sequence[Incoming], int]] = deque()
        """Source, part, messages, bytes; oldest first."""

    def want(self, wanted: bool) -> None:
        """Whether a session may refuse a record."""
        self._wanted = wanted

    def keep(self, source: str, messages: Sequence[Incoming], part: int = 0) -> None:
        """Messages of one source, each for its record number ``part``."""
        if not self._wanted:
            return
        size = sum(len(message.payload) + _OVERHEAD for message in messages)
        self._runs.append((source, part, messages, size))
        self._bytes += size
        while self._bytes > self._most and len(self._runs) > 1:
            self._bytes -= self._runs.popleft()[3]

    def find(self, stream: NameStream | None, offset: int, part: int = 0) -> Incoming | None:
        """The newest message there; None if it is not kept any more."""
        if stream is None:
            return None
        place = stream.topic, stream.partition, offset
        for source, of_part, messages, _ in reversed(self._runs):
            if (source, of_part) == (stream.source, part):
                for each in reversed(messages):
                    if (each.topic, each.partition, each.offset) == place:
                        return each
        return None

    def clear(self) -> None:
        """The sources are read again."""
        self._runs.clear()
        self._bytes = 0
