"""Refreshed windows in a daemon: room in the pool, and answers that continue meanwhile."""

from typing import Any

import msgspec

from daemon.config.checks import cross_check
from daemon.config.schema import Config, FlashConfig, PoolConfig, QuestionConfig, SchedulerConfig
from daemon.engine.metrics import EngineObserver
from daemon.engine.pool_size import PoolSizes
from engine.divergence import Divergence
from feeds.durations import Duration
from metrics.store import MetricStore
from regions.kv_tensors import KVPool, LayerShape
from tests.kit import inproc_config, sessions, until
from tests.kit.inproc import running


def test_the_pool_has_room_for_the_fresh_windows() -> None:
    """One for each exact session, and the largest of those that are only compared."""
    names = ("V:A", "V:B", "V:C")

    def config(**settings: Any) -> Config:
        return Config(sessions=sessions(*names, retention_tokens=1000, lines="decimal", **settings))

    def blocks(config: Config) -> int:
        return PoolSizes(config, 0).all(())

    off = config(divergence_every=Duration(0))
    assert blocks(config()) == blocks(off) + 2 * 1000 // 16
    assert blocks(config(semantics="exact")) == blocks(off) + 2 * 3000 // 16
    numbered = msgspec.structs.replace(off, flash=FlashConfig(placement="frozen"))
    assert blocks(numbered) == blocks(off) + 2 * 1000 // 16
    least = 3 * (1000 + 1000) + 2048 + 256  # windows, appends, a question and its answer
    for semantics, needed in (("carry", least), ("exact", least + 3000)):
        for blocks, refused in ((-(-needed // 16) - 1, True), (-(-needed // 16), False)):
            set_by_hand = config(semantics=semantics)
            set_by_hand = msgspec.structs.replace(set_by_hand, pool=PoolConfig(blocks=blocks))
            keys = [problem.key for problem in cross_check(set_by_hand)]
            assert keys == (["pool.blocks"] if refused else [])
            numbered = msgspec.structs.replace(set_by_hand, flash=FlashConfig(placement="frozen"))
            assert bool(cross_check(numbered)) == (refused or semantics == "carry")


def test_lines_that_the_model_decides_may_be_the_shortest() -> None:
    """The engine checks again when it knows; before, nothing is refused that some lines would fit."""
    config = Config(sessions=sessions("V:A", retention_tokens=1000))
    least = 2 * 6 * 64 + 2048 + 256
    for blocks, refused in ((-(-least // 16) - 1, True), (-(-least // 16), False)):
        problems = cross_check(msgspec.structs.replace(config, pool=PoolConfig(blocks=blocks)))
        assert bool([*problems]) == refused


async def test_the_daemon_refreshes_compares_and_keeps_event_time() -> None:
    """Records in, answers out: windows are replaced while answers continue; old bars are evicted by time."""
    config = inproc_config(
        sessions=sessions(
            "V:AAA",
            retention_tokens=512,
            retention_span=Duration(9 * 10**9),
            semantics="exact",
            refresh_every=5,
        ),
        questions=(QuestionConfig(name="up", text="Up or down?"),),
        scheduler=SchedulerConfig(chunk_min=64, max_new_tokens=64),
        standing="none",
    )
    async with running(config) as daemon:
        for bars in range(1, 40):
            await daemon.advance()
            assert daemon.state().live_records == min(bars, 10)
        await until(lambda: daemon.count("refreshes", session="aaa") >= 4)
        samples = daemon.count("divergence_samples", session="aaa")
        assert samples == daemon.count("refreshes", session="aaa")
        assert await daemon.gateway.stop()


def test_refreshes_and_comparisons_are_counted_by_session() -> None:
    store = MetricStore.local({"session": ["a", "b"], "source": ["s"], "sink": ["k"]})
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    observer.refreshed("a")
    observer.refresh_restarted()
    observer.refresh_failed("a")
    observer.compared("b", [Divergence(True, 0.5), Divergence(False, 1.0)])
    assert store.value("foretick_refreshes_total", session="a") == 1
    assert store.value("foretick_refresh_restarts_total") == 1
    assert store.value("foretick_refresh_failures_total", session="a") == 1
    assert store.value("foretick_divergence_samples_total", session="b") == 2
    assert store.value("foretick_divergence_agreements_total", session="b") == 1
    assert store.value("foretick_divergence_kl_nats", session="b") == 0.75
