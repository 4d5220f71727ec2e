"""A token bucket, which is told the time."""

from __future__ import annotations


class Bucket:
    """``rate`` a second, at most ``burst`` at once. ``now``: monotonic seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._at = burst, now

    def wait(self, now: float) -> float:
        """Seconds until there is a whole token; 0 if there is one now."""
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self.rate)

    def take(self, now: float, n: float = 1.0) -> None:
        """Take ``n`` tokens, there or not: what is missing has to flow in first."""
        self._fill(now)
        self._tokens -= n

    def _fill(self, now: float) -> None:
        # a clock that stands still or goes back fills nothing
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
