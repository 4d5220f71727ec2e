"""Utilisation and capacity as the daemon measures them."""

import pytest

from daemon.engine.capacity_metrics import CapacityMetrics
from metrics.store import MetricStore
from regions.pool_metadata import BlockPool

SECOND = 10**9


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_shares_over_the_last_ten_seconds() -> None:
    store, pool, clock = MetricStore.local({}), BlockPool(100), Clock()
    metrics = CapacityMetrics(store, [pool], ["a", "b", "c"], clock)
    taken = pool.take(30)
    assert taken is not None
    for second in range(1, 31):
        clock.now = second * SECOND
        # half a second of passes in each, a tenth from the eleventh on
        store.observe("foretick_stage_seconds", SECOND // (2 if second <= 10 else 10), stage="forward")
        metrics()
        if second == 10:
            assert store.value("foretick_utilisation_ratio") == pytest.approx(0.5)
            assert store.value("foretick_sessions_capacity", limit="compute") == 6
    assert store.value("foretick_utilisation_ratio") == pytest.approx(0.1)
    assert store.value("foretick_sessions_capacity", limit="compute") == 30
    assert store.value("foretick_sessions_capacity", limit="kv_memory") == 10


def test_questions_have_what_asks_and_prompts_leave() -> None:
    """A third of the tokens of passes is theirs, and passes take half of the time."""
    store, clock, told = MetricStore.local({}), Clock(), list[float]()

    def questions_most(others: float) -> int:
        told.append(others)
        return 7

    metrics = CapacityMetrics(store, [BlockPool(100)], ["a"], clock, questions_most)
    for cls, tokens in (("flash", 50), ("stream", 10), ("session", 20), ("pool", 10)):
        store.inc("foretick_batch_tokens_total", tokens, cls=cls)
    store.observe("foretick_stage_seconds", SECOND // 2, stage="forward")
    clock.now = SECOND
    metrics()
    assert told == [pytest.approx(0.5 * 30 / 90)]
    assert store.value("foretick_k_max") == 7


def test_an_idle_daemon_knows_no_capacity() -> None:
    store, clock = MetricStore.local({}), Clock()
    metrics = CapacityMetrics(store, [BlockPool(100)], ["a"], clock)
    metrics()
    clock.now = SECOND
    metrics()
    assert store.value("foretick_utilisation_ratio") == 0
    assert store.value("foretick_sessions_capacity", limit="compute") == 0
