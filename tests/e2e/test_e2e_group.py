"""Two daemons in one consumer group: each serves its partitions' sessions, and takes over the other's."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.partitioner import DefaultPartitioner
from msgspec.structs import replace

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, ErrorReply
from daemon.audit.completeness import Audit
from daemon.config.schema import Config, QueryConfig, RecoveryConfig, SinkConfig, SourceConfig
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.codec import decode_message
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.durations import Duration
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer
from tests.kit import SECOND, START, inproc_config, trade, until
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics

Delivery = Literal["at_least_once", "exactly_once"]


def symbols() -> list[str]:
    """A symbol for each of two partitions."""
    found: dict[int, str] = {}
    for dead_letter in "ABCDEFGH":
        key = f"V:{dead_letter * 3}"
        found.setdefault(DefaultPartitioner()(key.encode(), [0, 1], [0, 1]), key)
    return [found[0], found[1]]


class Market:
    """Trades of both symbols, a second of event time after the other."""

    def __init__(self, kafka: RealKafka, topic: str) -> None:
        self.sink, self.topic, self.seconds = KafkaSink("market", kafka.bootstrap), topic, 0

    async def trade(self, seconds: int) -> None:
        for _ in range(seconds):
            for symbol in symbols():
                payload = trade(symbol, START + self.seconds * SECOND)
                await self.sink.publish(self.topic, symbol.encode(), payload, {})
            self.seconds += 1

    @property
    def newest(self) -> int:
        """Event time of the newest trade in a closed bar."""
        return START + (self.seconds - 2) * SECOND


class Group:
    """Daemons of one configuration, and what they have published. Each has a transactional id of its own."""

    def __init__(
        self, kafka: RealKafka, name: str, snapshots: Path, delivery: Delivery = "at_least_once"
    ) -> None:
        self.kafka, self.name, self.snapshots, self.delivery = kafka, name, snapshots, delivery
        self.gateways: list[Gateway] = []
        self.published: list[Answer] = []

    def config(self, member: str, **query: object) -> Config:
        source = KafkaSourceConnector(
            self.kafka.bootstrap,
            (f"{self.name}.ticks",),
            f"{self.name}.group",
            instance=member,
            session_timeout=Duration(6 * SECOND),
        )
        return replace(
            inproc_config(symbols()),
            source=SourceConfig(kind="kafka", kafka=source, backlog_policy="wait"),
            sink=SinkConfig(kafka=self.sink(member)),
            recovery=RecoveryConfig(Duration(SECOND // 5), str(self.snapshots)),
            query=QueryConfig("tcp://127.0.0.1:*", **query),  # type: ignore[arg-type]  # a QueryConfig's
        )

    def sink(self, member: str) -> KafkaSinkConnector:
        found = KafkaSinkConnector(self.kafka.bootstrap, f"{self.name}.answers")
        if self.delivery == "at_least_once":
            return found
        return replace(found, delivery=self.delivery, transactional_id=f"{self.name}.{member}")

    async def join(self, member: str, **query: object) -> Gateway:
        gateway = make_gateway(self.config(member, **query), commit_every_s=0.1)
        self.gateways.append(gateway)
        await asyncio.wait_for(gateway.start(), 120)
        return gateway

    async def read(self) -> None:
        consumer = AIOKafkaConsumer(
            f"{self.name}.answers",
            bootstrap_servers=self.kafka.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            async for message in consumer:
                found = decode_message(message.value)
                if isinstance(found, Answer):
                    self.published.append(found)
        finally:
            await consumer.stop()

    def as_of(self, session: str) -> int:
        return max((answer.as_of for answer in self.published if answer.session == session), default=0)

    async def answered(self, market: Market) -> None:
        """Wait until every session has all six answers about the newest closed bar."""
        names = [session.name for session in self.gateways[0].config.sessions]

        def done() -> bool:
            newest = [a for a in self.published if a.as_of >= market.newest]
            return all(len({a.question for a in newest if a.session == name}) == 6 for name in names)

        await until(done, 120.0)

    async def shared(self) -> None:
        """Wait until each daemon has one partition, and knows of the other's."""
        one, other = self.gateways[-2:]

        def split() -> bool:
            names = [session.name for session in one.config.sessions]
            known = [(one.input.owner(name), other.input.owner(name)) for name in names]
            return (
                all((a is None) != (b is None) for a, b in known) and len({a is None for a, _ in known}) == 2
            )

        await until(split, 120.0, "two owners")


@pytest.fixture(params=["at_least_once", "exactly_once"])
async def group(
    request: pytest.FixtureRequest, real_kafka: RealKafka, tmp_path: Path
) -> AsyncIterator[Group]:
    quiet_client_log()
    name = f"g{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {f"{name}.ticks": 2, f"{name}.answers": 1})
    made = Group(real_kafka, name, tmp_path, request.param)
    reading = asyncio.create_task(made.read())
    yield made
    reading.cancel()
    for gateway in made.gateways:
        if not gateway.stopping:
            await gateway.stop()
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.kafka
async def test_sessions_move_between_daemons_and_questions_find_them(group: Group) -> None:
    market = Market(group.kafka, f"{group.name}.ticks")
    await market.sink.start()
    try:
        first = await group.join("one")
        await market.trade(5)
        await group.answered(market)
        second = await group.join("two", forward=False)
        await market.trade(3)
        await group.shared()
        await market.trade(3)
        await group.answered(market)
        names = [session.name for session in first.config.sessions]
        theirs = next(name for name in names if second.input.owner(name) is None)
        mine = next(name for name in names if name != theirs)
        assert first.query is not None
        assert second.query is not None
        async with AsyncQueryClient(first.query.endpoint) as client:
            reply = await client.request(Answers(1, theirs))
            assert isinstance(reply, AnswersReply)
            assert {answer.as_of for answer in reply.answers} == {group.as_of(theirs)}
        async with AsyncQueryClient(second.query.endpoint) as client:
            refused = await client.request(Answers(2, mine))
            assert isinstance(refused, ErrorReply)
            assert (refused.code, refused.address) == ("moved", first.query.endpoint)
        await second.stop()
        await market.trade(3)
        await group.answered(market)  # the first one reads both again
        await until(lambda: first.input.owner(theirs) is None, 30.0)
        # not prefilled again: the other one left a snapshot where both keep theirs
        assert first.store.value("foretick_snapshots_restored_total", session=theirs) == 1
        assert first.store.value("foretick_snapshots_restored_total", session=mine) == 0
        audit = Audit(whole=True)
        for answer in group.published:
            audit.take(answer)
        assert not any(gateway.failed.done() for gateway in group.gateways), "none ends by itself"
        for each in audit.result():
            assert each.holds(exactly_once=group.delivery == "exactly_once"), each
            assert each.epochs > 1 or each.session == mine
    finally:
        await market.sink.stop()
