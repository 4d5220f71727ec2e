"""Bars from trades, quotes or ready-made bars, in event time.

A bar covers [open, open + interval) of exchange time, aligned to the epoch. A session's watermark is its
newest event time less the lateness. A bar closes when the watermark reaches its end, so with lateness several
bars are open at once. A tick for a closed bar is late: counted and dropped.

Within a bar, open and close go by (event time, arrival): among equal times the first arrival opens and the
last one closes, in whatever order the times came. Quotes make bars of the mid (rounded down to 1e-9) without
volume. Volumes saturate. Empty intervals are skipped, or filled flat at the last close. A ready-made bar
passes through if it opens after the one before; its own times and interval stay. A session's first record
decides which kind makes its bars; other kinds are ignored and counted.

One session is one symbol, so its records come from one partition; offsets are compared on that assumption.
Event times are trusted: one tick stamped far in the future makes the following ones late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingest import bar_kernel
from ingest.bar_kernel import BAR, EMPTY, GAP, NEVER, OPEN, REPLAYED, SESSION, SKEWED, Bars
from ingest.record import Records

__all__ = ["BAR", "EMPTY", "GAP", "REPLAYED", "SKEWED", "BarBuilder", "BarPolicy", "Bars"]

_MAX_OPEN = 4096


@dataclass(frozen=True, slots=True)
class BarPolicy:
    """How ticks become bars; times in ns.

    `max_fill` caps the empty bars after one real bar (the first ones are filled).
    """

    interval_ns: int
    lateness_ns: int = 0
    empty: Literal["skip", "fill"] = "skip"
    max_fill: int = 60

    def __post_init__(self) -> None:
        if self.interval_ns <= 0 or self.lateness_ns < 0 or self.max_fill < 0:
            raise ValueError(
                "a bar's interval must be above 0 ns; lateness and max_fill must not be negative"
            )
        if self.open_bars > _MAX_OPEN:
            raise ValueError(f"the lateness spans more than {_MAX_OPEN} intervals")

    @property
    def open_bars(self) -> int:
        """Most bars a session has open at once."""
        return self.lateness_ns // self.interval_ns + 2

    @property
    def fill(self) -> int:
        """Most empty bars after a real one."""
        return self.max_fill if self.empty == "fill" else 0


class BarBuilder:
    """Open bars of `n_sessions` sessions. Not thread-safe."""

    def __init__(self, n_sessions: int, policy: BarPolicy) -> None:
        self.policy = policy
        self._sessions = np.zeros(n_sessions, SESSION)
        self._sessions["newest_event"] = self._sessions["next_index"] = NEVER
        self._slots = np.zeros((n_sessions, policy.open_bars), OPEN)
        self._slots["index"] = NEVER
        # Most bars one record can close: all open ones, and a run of empty ones after each.
        self._room = policy.open_bars + (policy.open_bars + 1) * policy.fill + 1
        self._out = np.zeros(max(1024, 2 * self._room), BAR)

    def update(self, records: Records, now_ns: int) -> Bars:
        """Take RECORD [n] in arrival order; returns the bars this closed, BAR [m], in order within a session.

        `now_ns` is the monotonic clock; bars record how long their newest tick waited in the ring. The bars
        do not depend on how records are batched. Records of unknown session numbers are skipped.
        """
        policy, closed, start = self.policy, [], 0
        while True:
            start, n = bar_kernel.update(
                records,
                start,
                self._sessions,
                self._slots,
                policy.interval_ns,
                policy.lateness_ns,
                policy.fill,
                now_ns,
                self._out,
                self._room,
            )
            closed.append(self._out[:n].copy())
            if start >= len(records):
                return closed[0] if len(closed) == 1 else np.concatenate(closed)

    def close_idle(self, now_ns: int, limit_ns: int) -> Bars:
        """Close the open bars, BAR [m], of sessions whose newest record entered the ring `limit_ns` ago.

        `now_ns` is the monotonic clock. Later ticks for those bars are late.
        """
        has_open = (self._slots["index"] != NEVER).any(axis=1)
        idle = has_open & (now_ns - self._sessions["last_ring"] >= limit_ns)
        closed = self._close(np.flatnonzero(idle).tolist())
        closed["ts_closed"] = now_ns
        return closed

    def flush(self) -> Bars:
        """Close every open bar, BAR [m], at the end of the input."""
        return self._close(range(len(self._sessions)))

    def mark_gap(self, sessions: Iterable[int]) -> None:
        """Records of these sessions may be lost: flag their open bars and the bar of their next record.

        A record with the gap flag does the same for its own session.
        """
        for session in sessions:
            bar_kernel.mark_gap(self._sessions[session], self._slots[session])

    @property
    def late(self) -> list[int]:
        """Late records dropped since the start, by session."""
        return list(self._sessions["late"].tolist())

    @property
    def ignored(self) -> list[int]:
        """Records of an ignored kind since the start, by session."""
        return list(self._sessions["ignored"].tolist())

    def _close(self, sessions: Iterable[int]) -> Bars:
        closed = [np.zeros(0, BAR)]
        for session in sessions:
            state, slots = self._sessions[session : session + 1], self._slots[session]
            if (slots["index"] != NEVER).any():
                limit = int(slots["index"].max()) + 1
                after = int(state[0]["last_offset"]) + 1
                n = bar_kernel.close_below(state[0], slots, limit, self.policy.fill, after, self._out, 0)
                closed.append(self._out[:n].copy())
        return np.concatenate(closed)
