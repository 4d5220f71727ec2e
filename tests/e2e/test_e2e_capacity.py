"""A running daemon shows what `foretick plan` predicts, under the same names."""

from __future__ import annotations

from lab.plan.load import Load
from lab.plan.plan import simulate
from lab.plan.sources import sources_of
from tests.kit import MemorySink, QueueSource, inproc_config, sessions, until
from tests.kit.inproc import Tape, running

STAGE = "foretick_stage_seconds"


async def test_a_running_daemon_shows_its_capacity() -> None:
    config = inproc_config(sessions=sessions("V:AAA", "V:BBB", retention_tokens=1024))
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    async with running(config, source, sink) as gateway:
        for second in range(6):
            source.put(tape.second(second))
        closed = await until(
            lambda: gateway.store.count(STAGE, stage="close_to_answer"), what="a stage of an answer"
        )
        assert closed <= gateway.store.count(STAGE, stage="end_to_end")
        await until(lambda: gateway.store.value("foretick_utilisation_ratio"), what="a utilisation")
        for limit in ("compute", "kv_memory"):
            assert gateway.store.value("foretick_sessions_capacity", limit=limit) >= 2
        took = gateway.store.quantile(STAGE, 0.5, stage="close_to_answer")
        assert 0 < took <= 1.1 * gateway.store.quantile(STAGE, 1.0, stage="end_to_end")
    predicted = simulate(sources_of(config), Load(ticks=8, seconds=6))
    assert predicted.sessions_capacity.keys() == {"compute", "kv_memory"}
    assert predicted.close_to_answer_s is not None
