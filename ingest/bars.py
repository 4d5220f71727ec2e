"""Bars from trades, quotes or ready-made bars, in event time.

A bar covers [open, open + interval) of exchange time, aligned to the epoch. The watermark of a session is its
newest event time less the lateness; a bar closes when the watermark reaches its end, so with lateness several
are open at once. A tick of a closed bar is late: counted, dropped. Within a bar, open and close go by (event
time, arrival): among equal times the first arrival opens and the last one closes, whatever order the times
came in. Quotes make bars of the mid (rounded down to 1e-9) without volume. Volumes saturate. Empty intervals
are skipped or filled flat at the last close. A ready-made bar passes through when it opens after the one
before; its own times and interval stay. A session's first record says which kind makes its bars; records of
other kinds are ignored and counted.

One session is one symbol, so its records come from one partition; offsets are compared under that assumption.
The event clock is taken on trust: one tick stamped far in the future makes those behind it late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingest import bar_kernel
from ingest.bar_kernel import BAR, EMPTY, GAP, NEVER, OPEN, SESSION, SKEWED, Bars
from ingest.record import Records

__all__ = ["BAR", "EMPTY", "GAP", "SKEWED", "BarBuilder", "BarPolicy", "Bars"]

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
            raise ValueError("a bar's interval is above 0 ns, lateness and max_fill are not below 0")
        if self.open_bars > _MAX_OPEN:
            raise ValueError(f"the lateness spans more than {_MAX_OPEN} intervals")

    @property
    def open_bars(self) -> int:
        """The most bars a session has open at once."""
        return self.lateness_ns // self.interval_ns + 2

    @property
    def fill(self) -> int:
        """Empty bars after a real one at most."""
        return self.max_fill if self.empty == "fill" else 0


class BarBuilder:
    """Open bars of `n_sessions` sessions. One thread calls it."""

    def __init__(self, n_sessions: int, policy: BarPolicy) -> None:
        self.policy = policy
        self._sessions = np.zeros(n_sessions, SESSION)
        self._sessions["newest_event"] = self._sessions["next_index"] = NEVER
        self._slots = np.zeros((n_sessions, policy.open_bars), OPEN)
        self._slots["index"] = NEVER
        # The most bars one record can close: all open ones, and a run of empty ones after each.
        self._room = policy.open_bars + (policy.open_bars + 1) * policy.fill + 1
        self._out = np.zeros(max(1024, 2 * self._room), BAR)

    def update(self, records: Records, now_ns: int) -> Bars:
        """Take RECORD [n] in arrival order; returns the bars this closed, BAR [m]; a session's are in order.

        `now_ns` is the monotonic clock; bars carry how long their newest tick waited in the ring. Splitting
        records into other batches gives the same bars. Records of a session number outside the builder are
        skipped.
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

        `now_ns` is the monotonic clock. Ticks that come for those bars afterwards are late.
        """
        has_open = (self._slots["index"] != NEVER).any(axis=1)
        idle = has_open & (now_ns - self._sessions["last_ring"] >= limit_ns)
        return self._close(np.flatnonzero(idle).tolist())

    def flush(self) -> Bars:
        """Close every open bar, BAR [m]: the input has ended."""
        return self._close(range(len(self._sessions)))

    def mark_gap(self, sessions: Iterable[int]) -> None:
        """Records of these sessions may be lost: flag their open bars and the bar of their next record.

        A record with the gap flag does the same for its own session.
        """
        for session in sessions:
            bar_kernel.mark_gap(self._sessions[session], self._slots[session])

    @property
    def late(self) -> list[int]:
        """Late records dropped, by session, since the start."""
        return list(self._sessions["late"].tolist())

    @property
    def ignored(self) -> list[int]:
        """Records of a kind that does not make bars, by session, since the start."""
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
