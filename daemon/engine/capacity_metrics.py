"""How much of the device the sessions use, and how many it could carry: what `foretick plan` predicts."""

import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from math import floor

from metrics.store import MetricStore
from regions.pool_metadata import BlockPool

OVER_NS = 10_000_000_000
"""Time that the utilisation is a mean over."""


def sessions_estimate(sessions: int, share: float) -> int:
    """Return how many sessions would use all of it if ``sessions`` use this share; 0 if none is used."""
    # a quotient this little below a whole number is that number
    return floor(sessions / share + 1e-9) if share > 0 else 0


class CapacityMetrics:
    """Writes utilisation and capacity with each heartbeat, as their only writer. ``clock``: monotonic, ns."""

    def __init__(
        self,
        store: MetricStore,
        pools: Sequence[BlockPool],
        sessions: Sized,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``pools``: of all models; the fullest counts."""
        self._store, self._pools, self._sessions, self._clock = store, pools, sessions, clock
        self._seen: deque[tuple[int, float]] = deque([(clock(), self._forward_s())])

    def __call__(self) -> None:
        """Write what there is."""
        now, spent = self._clock(), self._forward_s()
        self._seen.append((now, spent))
        while len(self._seen) > 2 and self._seen[1][0] <= now - OVER_NS:
            self._seen.popleft()
        then, before = self._seen[0]
        used = min(1.0, (spent - before) / ((now - then) * 1e-9)) if now > then else 0.0
        fullest = max(1 - pool.free_blocks / pool.total_blocks for pool in self._pools)
        shares = {"compute": used, "kv_memory": fullest}
        self._store.set("foretick_utilisation_ratio", used)
        self._store.set("foretick_sessions_open", len(self._sessions))
        for limit, share in shares.items():
            most = sessions_estimate(len(self._sessions), share)
            self._store.set("foretick_sessions_capacity", most, limit=limit)

    def _forward_s(self) -> float:
        return self._store.total_seconds("foretick_stage_seconds", stage="forward")
