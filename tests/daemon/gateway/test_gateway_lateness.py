"""Prompts are refused while tapes are late, and for no longer."""

import pytest

from daemon import protocol
from daemon.ages import Times
from daemon.api.messages import QueryError
from daemon.engine.tape_feeder import missed
from daemon.gateway.load_shedder import LoadShedder
from ingest.plane import TapeRecord
from ingest.rollup import SummedBar
from metrics.store import MetricStore
from tests.kit.engine_events import inputs_below

SECOND = 10**9


def version(late: int) -> protocol.Committed:
    return protocol.Committed("aaa", 1, 3, 40, 2, Times(0, 0, 0), inputs_below(3), late)


def test_a_prompt_is_refused_for_a_second_after_a_late_version() -> None:
    now, store = [5], MetricStore.local({"session": ["aaa"], "source": ["x"]})
    lateness = LoadShedder(store, lambda: now[0])
    lateness.admit()
    lateness.committed(version(0))
    lateness.admit()
    lateness.committed(version(2))
    for _ in range(2):
        with pytest.raises(QueryError, match="aaa is late") as refused:
            lateness.admit()
        assert refused.value.code == "overloaded"
        now[0] += SECOND - 1
    now[0] -= SECOND - 2
    lateness.admit()
    assert store.value("foretick_prompts_refused_total") == 2


@pytest.mark.parametrize(("objective", "expected"), [(0, 0), (9, 2), (10, 1), (20, 0)])
@pytest.mark.parametrize("event", [100, 100 - 3600 * SECOND, 100 + 365 * 86400 * SECOND])
def test_a_freshness_objective_counts_from_the_record_that_closed_the_bar(
    objective: int, expected: int, event: int
) -> None:
    """Whatever the venue's clock and the source's say: they may jump."""
    bar = SummedBar(event, 1, 1, 1, 1, 0)
    records = [TapeRecord((1,), event, event, 3, closed, 0, 0, 0, 0, bar) for closed in (85, 90, 95)]
    assert missed(records, objective, 100) == expected
