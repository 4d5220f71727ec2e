"""The spare engine, which has loaded the model, takes over from one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from daemon.config.schema import ProcessConfig
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.durations import Duration
from tests.kit import SECOND, START, MemorySink, QueueSource, incoming, inproc_config, trade, until
from tests.kit.inproc import ANSWERS, answers


def engines() -> dict[int, str]:
    """Engine processes of this one, and what they were started as."""
    found = {}
    for each in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (each / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            if "daemon.engine.process" in command:
                found[int(child)] = command
    return found


async def test_a_killed_engine_is_replaced_by_the_spare() -> None:
    source, sink = QueueSource(), MemorySink()
    config = inproc_config(process=ProcessConfig(mode="two", drain=Duration(5 * SECOND)))
    gateway = make_gateway(
        config, source=source, routes=[SinkRoute(sink, ANSWERS)], restart_after_s=(0.0,), spare_after_s=0.0
    )
    try:
        await asyncio.wait_for(gateway.start(), 180)
        (first,) = engines() if len(engines()) == 1 else (min(engines()),)
        source.put([incoming(trade("V:AAA", START + n * SECOND), n) for n in range(4)])
        await until(lambda: answers(sink), 60.0)
        await until(lambda: len(engines()) == 2, 30.0)
        (spare,) = engines().keys() - {first}
        os.kill(first, signal.SIGKILL)
        await until(lambda: gateway.store.value("foretick_engine_restarts_total") == 1, 30.0)
        await until(lambda: not gateway.status.not_ready(), 60.0)
        assert spare in engines()
        before = len(answers(sink))
        source.put([incoming(trade("V:AAA", START + n * SECOND), n) for n in range(4, 12)])
        await until(lambda: len(answers(sink)) > before, 60.0)
        await until(lambda: len(engines()) == 2, 30.0)  # and there is another spare
    finally:
        await gateway.stop()
    assert engines() == {}
