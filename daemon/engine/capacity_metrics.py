"""How much of the device is used, and how many sessions and questions it could carry: as `foretick plan`."""

import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from math import floor
from typing import NamedTuple

from daemon.engine.question_capacity import Load, questions_most, sessions_most
from metrics.catalogue import ANSWERING, CLASSES
from metrics.store import MetricStore
from regions.pool_metadata import BlockPool

OVER_NS = 10_000_000_000
"""Time that the utilisation is a mean over."""


def sessions_estimate(sessions: int, share: float) -> int:
    """Return how many sessions would use all of it if ``sessions`` use this share; 0 if none is used."""
    # a quotient this little below a whole number is that number
    return floor(sessions / share + 1e-9) if share > 0 else 0


class _Spent(NamedTuple):
    """What passes have taken so far. ``for_clients``: of the ``tokens``, those of asks and prompts."""

    at: int
    forward_s: float
    tokens: float
    for_clients: float


class CapacityMetrics:
    """Writes utilisation and capacity with each heartbeat, as their only writer. ``clock``: monotonic, ns."""

    def __init__(
        self,
        store: MetricStore,
        pools: Sequence[BlockPool],
        sessions: Sized,
        clock: Callable[[], int] = time.monotonic_ns,
        loads: Callable[[], Sequence[Load]] = tuple,
    ) -> None:
        """``pools``: of all models; the fullest counts. ``loads``: of all models that have read a bar."""
        self._store, self._pools, self._sessions, self._clock = store, pools, sessions, clock
        self._loads = loads
        self._seen = deque([self._spent()])

    def __call__(self) -> None:
        """Write what there is."""
        now = self._spent()
        self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1].at <= now.at - OVER_NS:
            self._seen.popleft()
        before = self._seen[0]
        seconds, tokens = (now.at - before.at) * 1e-9, now.tokens - before.tokens
        used = min(1.0, (now.forward_s - before.forward_s) / seconds) if seconds > 0 else 0.0
        others = used * (now.for_clients - before.for_clients) / tokens if tokens else 0.0
        fullest = max(1 - pool.free_blocks / pool.total_blocks for pool in self._pools)
        loads = self._loads()
        most = {
            "compute": sessions_most(loads, others),
            "kv_memory": sessions_estimate(len(self._sessions), fullest),
        }
        self._store.set("foretick_utilisation_ratio", used)
        self._store.set("foretick_sessions_open", len(self._sessions))
        for limit, sessions in most.items():
            self._store.set("foretick_sessions_capacity", sessions, limit=limit)
        self._store.set("foretick_k_max", questions_most(loads, others))

    def _spent(self) -> _Spent:
        computed = {cls: self._store.value("foretick_batch_tokens_total", cls=cls) for cls in CLASSES}
        return _Spent(
            self._clock(),
            self._store.total_seconds("foretick_stage_seconds", stage="forward"),
            sum(computed.values()),
            sum(computed[cls] for cls in ANSWERING),
        )
