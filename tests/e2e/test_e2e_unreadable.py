"""What of a source cannot be read: the daemon is not ready and names it, or ends and names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.supervision import TaskEnded
from feeds.connector import SinkRoute
from feeds.market_data import DeadLetter
from feeds.source import DataUnreadable, Fault, Incoming
from tests.kit import (
    SECOND,
    START,
    TOPIC,
    MemorySink,
    QueueSource,
    incoming,
    inproc_config,
    trade,
    until,
)
from tests.kit.inproc import ANSWERS, DEAD, UPDATES, answers

WHY = f"offsets 4 to 6 of {TOPIC}/0 cannot be read: its checksum is wrong"


class Partitioned(QueueSource):
    """Says which partitions are not read, and ends once ``stops`` is set."""

    def __init__(self, name: str = "test") -> None:
        super().__init__(name=name)
        self.not_read: list[str] = []
        self.stops = False

    def unread(self) -> list[str]:
        return self.not_read

    async def batches(self) -> AsyncIterator[list[Incoming]]:
        async for batch in super().batches():
            if self.stops:
                raise DataUnreadable(WHY)
            yield batch


def ticks(symbol: str, *offsets: int) -> list[Incoming]:
    return [incoming(trade(symbol, START + n * SECOND), n) for n in offsets]


async def make(*sources: Partitioned) -> tuple[Gateway, MemorySink]:
    sink = MemorySink()
    config = inproc_config(("V:AAA", "V:BBB"))
    routes = [SinkRoute(sink, ANSWERS, UPDATES, DEAD)]
    gateway = make_gateway(
        config, source=sources if len(sources) > 1 else sources[0], routes=routes, commit_every_s=0.05
    )
    await asyncio.wait_for(gateway.start(), 180)
    return gateway, sink


@pytest.mark.parametrize("names", [["test"], ["one", "two"]])
async def test_ready_only_while_each_partition_is_read_and_the_end_at_damage_is_the_daemons(names):
    sources = [Partitioned(name) for name in names]
    gateway, _ = await make(*sources)
    prefix = "" if len(names) == 1 else f"source {names[0]}: "
    try:
        assert gateway.status.not_ready() == []
        sources[0].not_read = [f"{TOPIC}/3 is not read yet"]
        assert gateway.status.not_ready() == [f"{prefix}{TOPIC}/3 is not read yet"]
        sources[0].not_read = []
        assert gateway.status.not_ready() == []
        sources[0].stops = True
        sources[0].put([])
        with pytest.raises(TaskEnded, match=WHY):
            await asyncio.wait_for(gateway.run(asyncio.Event()), 20)
        assert WHY in str(gateway.status.not_ready())
    finally:
        await gateway.stop()


async def test_a_batch_that_cannot_be_read_is_a_dead_letter_record_and_the_next_answers_carry_gap():
    source = Partitioned()
    gateway, sink = await make(source)
    try:
        source.put(ticks("V:AAA", 0, 1, 2, 3))
        await until(lambda: answers(sink, "aaa"))
        assert not any("gap" in a.flags for a in answers(sink, "aaa"))
        source.put(
            [Incoming(TOPIC, 0, 4, None, b"", fault=Fault("corrupt", WHY, 6)), *ticks("V:AAA", 7, 8, 9)]
        )
        await until(lambda: any("gap" in a.flags for a in answers(sink, "aaa")))
        await until(lambda: sink.messages(DEAD))
        (dead_letter,) = [each for each in sink.messages(DEAD) if isinstance(each, DeadLetter)]
        assert (dead_letter.stage, dead_letter.reason, dead_letter.offset, dead_letter.payload) == (
            "read",
            "corrupt",
            4,
            b"",
        )
        assert WHY in dead_letter.error
        assert gateway.store.value("foretick_records_skipped_total", source="test") == 3
        await until(lambda: source.committed.get((TOPIC, 0), 0) > 6)
    finally:
        await gateway.stop()
