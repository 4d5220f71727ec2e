"""Partitions go from one member of a group to another that is warm, and all others are read on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from feeds.kafka_follower import FOLLOW_S
from feeds.kafka_source import KafkaSource
from feeds.source import HandingOverSource, Incoming, Partition, StandbySource
from tests.feeds.test_feeds_kafka_log import Notes
from tests.kit import until
from tests.kit.kafka import producing
from tests.kit.kafka_clients import KafkaClients

PARTITIONS = 2


class Trading:
    """A stream of numbers to both partitions, while it goes on."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap, self._topic = bootstrap, topic
        self.sent = 0

    async def run(self) -> None:
        async with producing(self._bootstrap) as producer:
            while True:
                for partition in range(PARTITIONS):
                    await producer.send_and_wait(self._topic, b"%d" % self.sent, partition=partition)
                self.sent += 1
                await asyncio.sleep(0.02)


@asynccontextmanager
async def trading(kafka: KafkaClients) -> AsyncIterator[Trading]:
    made = Trading(kafka.bootstrap, kafka.topic)
    running = asyncio.create_task(made.run())
    try:
        await until(lambda: made.sent > 5)
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Reader(Notes):
    """Commits what it has read, ten times a second. ``owned``: what it has read of its own partitions."""

    def __init__(self, source: KafkaSource, text: str) -> None:
        super().__init__(source, text)
        self.owned: list[Incoming] = []
        self._rests, self._one = asyncio.Event(), asyncio.Lock()
        self._committing = asyncio.create_task(self.commit_often())

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, kafka: KafkaClients, name: str, *, static: bool = False, warm: bool = True, **settings: Any
    ) -> AsyncIterator[Reader]:
        options = {"group_instance_id": name} if static else {}
        made = cls(kafka.source(kafka.topic, name=name, options=options, **settings), name)
        made.warm = warm
        await made.source.start()
        kafka.run(made.read())
        try:
            yield made
        finally:
            await made.rest()

    async def rest(self) -> None:
        """Commit no longer."""
        self._rests.set()
        await self._committing

    def begins(self, partition: Partition, start: int) -> None:
        super().begins(partition, start)
        self.gone = [each for each in self.gone if each != partition]

    async def read(self) -> None:
        async for batch in self.source.batches():
            self.got += batch
            mine = self.began.keys() - set(self.gone)
            self.owned += [each for each in batch if (each.topic, each.partition) in mine]

    async def commit(self) -> bool:
        async with self._one:
            return await super().commit()

    async def commit_often(self) -> None:
        while not self._rests.is_set():
            await asyncio.sleep(0.1)
            await self.commit()


def offsets(messages: list[Incoming], partition: int) -> list[int]:
    return [each.offset for each in messages if each.partition == partition]


async def hand_over_and_back(kafka: KafkaClients, *, static: bool = False) -> None:
    topic = kafka.topic
    opened = Reader.opened
    async with (
        trading(kafka) as market,
        opened(kafka, "one", static=static) as one,
    ):
        assert isinstance(one.source, HandingOverSource)
        assert isinstance(one.source, StandbySource)
        await until(lambda: len(one.began) == PARTITIONS)
        assert not await one.source.hand_over(5.0), "there is no other member"
        async with opened(kafka, "two", static=static, warm=False) as two:
            await take_over_and_back(topic, market, one, two)


async def take_over_and_back(topic: str, market: Trading, one: Reader, two: Reader) -> None:
    await until(lambda: bool(two.followed), what="it warms")
    await asyncio.sleep(6 * FOLLOW_S)
    assert not two.began, "all is read, but its windows are not full yet"
    two.warm = True
    (taken,) = two.followed
    kept = 1 - taken[1]
    before = len(offsets(one.got, kept))
    await until(lambda: taken in two.began, what="it takes over")
    assert two.came == {taken: True}
    await until(lambda: one.gone == [taken])
    assert len(offsets(one.got, kept)) > before, "the others are read on"
    await until(lambda: len(one.began) == PARTITIONS and one.source.membership is not None)
    assert one.source.membership is not None
    assert one.source.membership.partitions == {(topic, kept)}
    assert await two.source.hand_over(20.0)
    assert (two.gone, one.came) == ([taken], {taken: True})
    reached = market.sent
    await until(lambda: all(max(offsets(one.got, n), default=0) > reached for n in range(PARTITIONS)))
    for n in range(PARTITIONS):
        found = offsets(one.owned + two.owned, n)
        assert sorted(set(found)) == list(range(max(found) + 1)), "none is left out"


@pytest.mark.sampled(1)
@pytest.mark.kafka
@pytest.mark.parametrize("static", [False, True])
async def test_a_member_takes_over_warm_and_hands_over_when_it_leaves(
    real: KafkaClients, static: bool
) -> None:
    await hand_over_and_back(real, static=static)


@pytest.mark.kafka
async def test_one_that_asks_for_another_start_has_nothing_to_be_warm_for(real: KafkaClients) -> None:
    async with trading(real), Reader.opened(real, "one") as one:
        await until(lambda: len(one.began) == PARTITIONS)
        async with Reader.opened(real, "two", start_at="latest") as two:
            await until(lambda: bool(two.began))
            assert two.followed == {}


@pytest.mark.kafka
async def test_a_hand_over_that_takes_too_long_ends(
    real: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "is_level", lambda self: False)
    async with (
        trading(real),
        Reader.opened(real, "one") as one,
        Reader.opened(real, "two") as two,
    ):
        await until(lambda: one.source._member.others)
        assert not await one.source.hand_over(1.0)
        assert one.source.membership is not None
        assert len(one.source.membership.partitions) == PARTITIONS, "they stay until another is ready"
        await one.rest()
        await one.source.stop()
        await until(lambda: len(two.began) == PARTITIONS, what="it has them all the same")


def test_a_source_without_a_group_hands_nothing_over() -> None:
    source = KafkaSource("in", "127.0.0.1:1", ["t"], None)
    assert not asyncio.run(source.hand_over(1.0))
