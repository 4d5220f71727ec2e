"""Load with restarts in between: memory stays flat, and nothing is left behind (docs/testing.md)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from feeds.kafka_client import quiet_client_log
from feeds.mock_broker import MockBroker
from tests.soak.resources import Held
from tests.soak.soaking import SESSIONS, Life, Soak

SHORT_S, LONG_S = 2.0, 120.0
"""Of each of five loads."""
MAX_GAIN = 40.0
"""MiB in any life: an engine gains about 23 until its allocators and caches have settled."""
MAX_GROWTH = 20.0
"""MiB an hour of load, in a life of at least `LONG_LIFE_S`."""
LONG_LIFE_S = 200.0
SLACK = 2
"""Threads, or descriptors of a kind, that come and go."""
LEAST_SAMPLES = 8


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Soak]:
    quiet_client_log()
    with MockBroker() as broker:
        made = Soak(tmp_path, broker)
        yield made
        made.close()


async def test_a_short_soak_leaves_nothing_behind(run: Soak) -> None:
    lives = await soak(run, SHORT_S)
    assert all(life.gain() < MAX_GAIN for life in lives), run.report()


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_memory_is_flat_over_an_hour_s_load(run: Soak) -> None:
    lives = await soak(run, LONG_S)
    assert all(life.gain() < MAX_GAIN for life in lives), run.report()
    long_lives = [life for life in lives if life.seconds >= LONG_LIFE_S]
    assert len(long_lives) >= 2, run.report()
    assert all(life.growth() < MAX_GROWTH for life in long_lives), run.report()


async def soak(run: Soak, seconds: float) -> list[Life]:
    """Load with a restart or a change in between; returns the lives that were long enough to judge."""
    await run.start()
    await run.load(seconds)
    before = run.now()
    await run.kill_engine()
    await run.load(seconds)
    await run.have_snapshots()
    await run.change_sessions(SESSIONS[:-1])
    await run.files_go(SESSIONS[-1])
    await run.change_sessions(SESSIONS)
    await run.fall_idle()
    await run.load(seconds)
    after = run.now()
    assert not {role: more for role in before if (more := grown(before[role], after[role]))}
    await run.kill_gateway()
    await run.load(2 * seconds)
    assert run.daemon.metric("foretick_answers_total") > 0
    assert run.daemon.metric("foretick_integrity_failures_total") == 0
    await run.have_snapshots()
    assert run.daemon.terminate(20) == 0
    print(run.report())
    assert run.left() == []
    return [life for life in run.lives.values() if len(life.samples) >= LEAST_SAMPLES]


def grown(before: Held, after: Held) -> list[str]:
    """What there is more of than before."""
    old, new = ({"threads": each.threads, **each.descriptors} for each in (before, after))
    return [
        f"{name}: {old.get(name, 0)}, then {n}" for name, n in new.items() if n > old.get(name, 0) + SLACK
    ]
