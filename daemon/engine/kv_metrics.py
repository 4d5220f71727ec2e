"""What the engine's memory looks like, for the metrics: told by the heartbeat, also when nothing is idle."""

from __future__ import annotations

from daemon.engine.maintenance import Tiers
from engine.engine import Engine
from metrics.store import MetricStore


class KvReport:
    """Writes the metrics of pool, prefix cache and tiers; each of them is written by nobody else.

    It reads counters of the worker's thread: each is a whole number, at most one pass old.
    """

    def __init__(self, engine: Engine, tiers: Tiers, store: MetricStore) -> None:
        self._engine, self._tiers, self._store = engine, tiers, store
        self._counted: dict[tuple[str, ...], int] = {}

    def __call__(self) -> None:
        """Write what there is."""
        host, residency, cache = self._tiers.host, self._tiers.residency, self._engine.cache
        self._store.set("foretick_pool_fragmentation_ratio", self._engine.pool.blocks.fragmentation)
        self._store.set("foretick_prefix_cache_tokens", cache.tokens)
        self._count("foretick_prefix_tokens_total", cache.matched_tokens, event="reused")
        self._count("foretick_prefix_tokens_total", cache.saved_tokens, event="saved")
        self._count("foretick_prefix_tokens_total", cache.evicted_tokens, event="evicted")
        if host is not None:
            free, total = host.pool.free_blocks, host.pool.total_blocks
            self._store.set("foretick_host_blocks", free, state="free")
            self._store.set("foretick_host_blocks", total - free, state="used")
            self._count("foretick_swaps_total", host.swapped_out, direction="out")
            self._count("foretick_swaps_total", host.swapped_in, direction="in")
        if residency is not None:
            self._count("foretick_spills_total", residency.spills.total())
            self._count("foretick_snapshot_failures_total", residency.failures)
            for outcome, count in dict(residency.restores).items():
                self._count("foretick_restores_total", count, outcome=outcome)

    def _count(self, name: str, total: int, **labels: str) -> None:
        key = (name, *labels.values())
        self._store.inc(name, total - self._counted.get(key, 0), **labels)
        self._counted[key] = total
