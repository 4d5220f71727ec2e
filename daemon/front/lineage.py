"""Which records a session's window holds, and which its state depends on, version by version."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from feeds.messages import Basis, InputRange

Stream = tuple[str, int, str]
"""Topic, partition, and the source where there are several."""


class Lineage:
    """One session's, of one engine. It holds an entry for each version whose bars the window still has."""

    def __init__(self) -> None:
        self._versions: deque[tuple[int, dict[Stream, tuple[int, int]]]] = deque()
        """Bars, and first and last offset by stream; oldest first."""
        self._bars = 0
        self._last: dict[Stream, int] = {}
        self._state = -1
        self._state_first: dict[Stream, int] | None = {}
        """First offset by stream of what the state depends on; None: not known."""
        self._merged = 0

    def committed(
        self,
        bars: int,
        live: int,
        ranges: Iterable[InputRange],
        *,
        state: int = 0,
        state_bars: int = 0,
        left: bool = False,
    ) -> Basis:
        """A version with ``bars`` new bars, made from ``ranges``; the window has ``live`` bars now.

        ``state``, ``state_bars``, ``left``: as in `protocol.Committed`. The basis lacks what the engine and
        the configuration say. Bars of earlier engines that the window still has may lie anywhere before.
        """
        found = _by_stream(ranges)
        self._versions.append((bars, found))
        self._bars += bars
        self._last |= {stream: last for stream, (_, last) in found.items()}
        if state != self._state:
            self._begin(state, state_bars, left)
        elif self._state_first is not None:
            self._state_first = {stream: first for stream, (first, _) in found.items()} | self._state_first
        if bars > 1 and state_bars > live:
            self._merged += 1
        while self._versions and self._bars - self._versions[0][0] >= live:
            self._bars -= self._versions.popleft()[0]
        return Basis(
            bars=bars,
            window_bars=live,
            window=self._ranges(self._firsts(live) if self._bars >= live else dict.fromkeys(self._last, 0)),
            state_bars=state_bars,
            state=self._ranges(self._state_first or {}),
            merged=self._merged,
        )

    def _begin(self, state: int, bars: int, left: bool) -> None:
        self._state, self._merged = state, int(left)
        self._state_first = self._firsts(bars) if bars <= self._bars else None

    def _firsts(self, bars: int) -> dict[Stream, int]:
        """First offset by stream of the newest ``bars`` bars; whole versions."""
        firsts: dict[Stream, int] = {}
        rest = self._bars
        for count, found in self._versions:
            rest -= count
            if rest >= bars:
                continue
            for stream, (first, _) in found.items():
                firsts.setdefault(stream, first)
            if len(firsts) == len(self._last):
                break
        return firsts

    def _ranges(self, firsts: dict[Stream, int]) -> list[InputRange]:
        return [
            InputRange(topic, partition, first, self._last[topic, partition, source], source)
            for (topic, partition, source), first in firsts.items()
        ]


def _by_stream(ranges: Iterable[InputRange]) -> dict[Stream, tuple[int, int]]:
    return {
        (each.topic, each.partition, each.source): (each.first_offset, each.last_offset) for each in ranges
    }
