"""Prompts that are still coming in: who vanished is noticed by the time since the newest piece."""

from __future__ import annotations

from collections import OrderedDict

from scheduler.request import Request


class Streams:
    """Unfinished prompts by their newest input, the oldest first. Every operation takes constant time."""

    def __init__(self, timeout_ns: int) -> None:
        self._timeout = timeout_ns
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, request: Request) -> None:
        """Input came for it, at `last_chunk_ns`."""
        self._last[request.id] = request.last_chunk_ns
        self._last.move_to_end(request.id)

    def forget(self, request: Request) -> None:
        """Its prompt is finished, or it ended."""
        self._last.pop(request.id, None)

    def expired(self, now: int) -> list[int]:
        """Numbers of those without input for the whole timeout."""
        found: list[int] = []
        for request_id, last in self._last.items():
            if not self._timeout or now - last < self._timeout:
                break
            found.append(request_id)
        return found

    def next_due(self, now: int) -> float | None:
        """Seconds until the next expires, 0 if it has; None without any."""
        if not self._timeout or not self._last:
            return None
        return max(0, next(iter(self._last.values())) + self._timeout - now) * 1e-9
