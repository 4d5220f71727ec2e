"""A token bucket: what a budget allows, of requests, tokens or seconds of the engine."""


class TokenBucket:
    """``rate`` a second, at most ``burst`` at once. ``now``: monotonic seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._at = burst, now

    def wait(self, now: float, least: float = 1.0) -> float:
        """Seconds until there are ``least`` tokens; 0 if there are now."""
        self._fill(now)
        return max(0.0, (least - self._tokens) / self.rate)

    def take(self, now: float, n: float = 1.0) -> None:
        """Take ``n`` tokens, there or not: what is missing has to flow in first."""
        self._fill(now)
        self._tokens -= n

    def used(self, now: float) -> float:
        """How much of the burst is taken: above 1 there is less than nothing."""
        self._fill(now)
        return 1 - self._tokens / self.burst

    def _fill(self, now: float) -> None:
        # a clock that stands still or goes back fills nothing
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
