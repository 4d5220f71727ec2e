"""What a pass takes in the daemon: on the device, and on the host beside it."""

from collections.abc import Callable, Sequence

from scheduler.costs import CostModel, Span


class HostCosts:
    """The costs of a profile with the host's: what a pass takes in the daemon. Off, nothing takes time.

    ``now``: a clock in ns, by which the device pauses between passes; without it, it never does.
    """

    def __init__(self, costs: CostModel, *, on: bool = True, now: Callable[[], int] | None = None) -> None:
        self._costs, self.on, self._now = costs, on, now
        self._ended = 0
        self.host_ns = 0
        """Of all passes so far: their time beside the device."""

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass with its step."""
        if not self.on:
            return 0
        host = self._costs.host_ns(len(spans))
        self.host_ns += host
        return self._costs.batch_ns(spans) + host + self._waking_ns(spans, host)

    def _waking_ns(self, spans: Sequence[Span], host: int) -> int:
        """What this pass takes longer, because the device paused before it."""
        waking = self._costs.waking
        if self._now is None or waking is None:
            return 0
        paused = max(0, self._now() - self._ended)
        longer = round(waking(paused * 1e-9) * 1e9)
        self._ended = self._now() + self._costs.batch_ns(spans) + host + longer
        return longer

    def recompute_ns(self, tokens: int) -> int:
        """See `Costs`."""
        return self._costs.recompute_ns(tokens)

    def swap_ns(self, blocks: int) -> int:
        """See `Costs`."""
        return self._costs.swap_ns(blocks)

    def swap_out_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return self._costs.swap_out_ns(blocks) if self.on else 0

    def swap_in_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return self._costs.swap_in_ns(blocks) if self.on else 0
