"""The engine process's part of the metrics, written as the scheduler tells it."""

from __future__ import annotations

from collections.abc import Mapping

from metrics.store import MetricStore
from regions.pool import KVPool
from scheduler.observer import Observer
from scheduler.request import Request
from scheduler.types import PriorityClass


class EngineObserver(Observer):
    """Turns the scheduler's calls into metrics, on the worker thread, their only writer."""

    def __init__(self, store: MetricStore, pool: KVPool) -> None:
        self._store = store
        self._pool = pool
        self._names = {cls: cls.name.lower() for cls in PriorityClass}

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        """From queued to the first batch."""
        self._store.observe("foretick_stage_seconds", ns, stage=f"queue_{self._names[cls]}")

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A forward pass ended; the pool is counted here, once a pass."""
        self._store.inc("foretick_batches_total")
        for cls, count in tokens.items():
            self._store.inc("foretick_batch_tokens_total", count, **{"class": self._names[cls]})
        self._store.observe("foretick_stage_seconds", forward_ns, stage="forward")
        self._store.set("foretick_pool_blocks", self._pool.free_blocks, state="free")
        used = self._pool.total_blocks - self._pool.free_blocks
        self._store.set("foretick_pool_blocks", used, state="used")

    def preempted(self, request: Request) -> None:
        """A request lost its KV."""
        self._store.inc("foretick_preemptions_total")

    def out_of_memory(self, *, retried: bool) -> None:
        """A forward pass found no memory."""
        self._store.inc("foretick_oom_total", outcome="retried" if retried else "failed")

    def evicted(self, session: str, tokens: int) -> None:
        """A tape's oldest records left."""
        self._store.inc("foretick_evicted_tokens_total", tokens, session=session)

    def waiting(self, counts: Mapping[PriorityClass, int]) -> None:
        """Live work by class after a step."""
        for cls, count in counts.items():
            self._store.set("foretick_waiting_requests", count, **{"class": self._names[cls]})
