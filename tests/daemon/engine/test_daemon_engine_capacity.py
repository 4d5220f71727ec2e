"""Utilisation and capacity as the daemon measures them."""

from collections.abc import Sequence
from math import ceil

import pytest

from daemon.engine.capacity_metrics import CapacityMetrics
from daemon.engine.question_capacity import Load, sessions_most
from flash.capacity import MAX_SESSIONS, Background, Shape
from metrics.store import MetricStore
from regions.pool_metadata import BlockPool
from scheduler.costs import Span
from scheduler.interfaces import Limits

SECOND = 10**9


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


class Costs:
    """Ten ms a pass, and five a row."""

    def batch_ns(self, spans: Sequence[Span]) -> int:
        return 10**6 * (10 + 5 * len(spans))


def load(sessions: int, data: float = 1.0) -> Load:
    """Sessions with one question a bar, eight rows a pass."""
    limits = Limits(max_batch_tokens=1000, max_batch_requests=8)
    return Load(Background(Costs(), limits, Shape(100, 4, ((20, 1, 1.0),))), sessions, data)


def used_ms(sessions: int) -> int:
    """By hand: the bars of all, and their questions."""
    return 2 * (10 * ceil(sessions / 8) + 5 * sessions)


@pytest.mark.parametrize("others", [0.0, 0.25, 1.0])
def test_sessions_are_those_whose_bars_and_questions_fit_between_two_updates(others: float) -> None:
    """Of several models, in their proportion."""
    fits = [n for n in range(1, 200) if used_ms(n) / 1000 + others < 1]
    assert sessions_most([load(2)], others) == max(fits, default=0)
    both = [(n, used_ms(round(n / 4)) + used_ms(round(n * 3 / 4))) for n in range(1, 200)]
    together = [n for n, used in both if used / 1000 + others < 1]
    assert sessions_most([load(1), load(3)], others) == max(together, default=0)
    assert sessions_most([], others) == 0


def test_there_are_as_many_as_are_looked_for() -> None:
    assert sessions_most([load(1, 1e9)], 0.0) == MAX_SESSIONS


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
    assert store.value("foretick_utilisation_ratio") == pytest.approx(0.1)
    assert store.value("foretick_sessions_capacity", limit="kv_memory") == 10


def test_questions_and_sessions_have_what_asks_and_prompts_leave() -> None:
    """A third of the tokens of passes is theirs, and passes take half of the time."""
    store, clock, loads = MetricStore.local({}), Clock(), [load(2)]
    metrics = CapacityMetrics(store, [BlockPool(100)], ["a", "b"], clock, lambda: loads)
    for cls, tokens in (("flash", 50), ("stream", 10), ("session", 20), ("pool", 10)):
        store.inc("foretick_batch_tokens_total", tokens, cls=cls)
    store.observe("foretick_stage_seconds", SECOND // 2, stage="forward")
    clock.now = SECOND
    metrics()
    others = 0.5 * 30 / 90
    # a bar of both takes 20 ms, and so does a question
    assert store.value("foretick_k_max") == (1000 * (1 - others) - 20) // 20
    assert store.value("foretick_sessions_capacity", limit="compute") == sessions_most(loads, others)


def test_a_daemon_without_a_bar_knows_no_capacity() -> None:
    store, clock = MetricStore.local({}), Clock()
    metrics = CapacityMetrics(store, [BlockPool(100)], ["a"], clock)
    metrics()
    clock.now = SECOND
    metrics()
    assert store.value("foretick_utilisation_ratio") == 0
    assert store.value("foretick_sessions_capacity", limit="compute") == 0
