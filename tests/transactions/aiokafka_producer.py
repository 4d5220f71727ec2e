"""aiokafka 0.14 as a transactional producer of `KafkaTransactions`, to compare it."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from feeds.kafka_client import close_client
from feeds.kafka_transactions import Fenced, GroupOffsets, OutgoingMessage, TransactionFailed
from feeds.librdkafka import StableOffsets
from feeds.source import CommitPoint, Partition

T = TypeVar("T")


class AiokafkaProducer:
    """It knows a group's name only, not the generation of its member, and one group in a transaction.

    So the transactions' own numbers are left out, and `ByOffsets` tells them by the records' offsets.
    """

    def __init__(self, bootstrap: str, transactional_id: str, timeout_s: float) -> None:
        self._settings = {
            "bootstrap_servers": bootstrap,
            "transactional_id": transactional_id,
            "request_timeout_ms": int(timeout_s * 1000),
            "transaction_timeout_ms": 30_000,
        }
        self._timeout_s = timeout_s
        self._producer: AIOKafkaProducer | None = None

    async def open(self) -> None:
        self._producer = AIOKafkaProducer(**self._settings)
        await self._bounded(self._producer.start(), unknown=False)

    async def transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        await self._bounded(self._written(messages, offsets), unknown=False)
        assert self._producer is not None
        await self._bounded(self._producer.commit_transaction(), unknown=True)

    async def close(self) -> None:
        if self._producer is not None:
            await close_client(self._producer, 1.0)

    async def _written(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        producer = self._producer
        assert producer is not None
        await producer.begin_transaction()
        for member, points in offsets:
            if member.group == self._settings["transactional_id"]:
                continue
            named = {TopicPartition(*p): OffsetAndMetadata(*point) for p, point in points.items()}
            await producer.send_offsets_to_transaction(named, member.group)
        sent = [
            await producer.send(m.topic, m.payload, key=m.key, headers=list(m.headers.items()))
            for m in messages
        ]
        await asyncio.gather(*sent)

    async def _bounded(self, doing: Awaitable[T], *, unknown: bool) -> T:
        try:
            return await asyncio.wait_for(doing, self._timeout_s + 1)
        except (ProducerFenced, InvalidProducerEpoch) as error:
            raise Fenced(repr(error)) from error
        except (KafkaError, TimeoutError, AssertionError) as error:
            raise TransactionFailed(repr(error), unknown=unknown) from error


class ByOffsets:
    """Committed points, and the number of a copy's newest transaction by the offset that it committed."""

    def __init__(
        self, stable: StableOffsets, identity: str, group: str, partition: Partition, batch: int
    ) -> None:
        self._stable, self._identity = stable, identity
        self._group, self._partition, self._batch = group, partition, batch

    async def __call__(self, group: str, partitions: Sequence[Partition]) -> Mapping[Partition, CommitPoint]:
        if group != self._identity:
            return await self._stable(group, partitions)
        found = (await self._stable(self._group, [self._partition])).get(self._partition)
        return {} if found is None else {partitions[0]: CommitPoint(-(-found.offset // self._batch))}

    async def close(self) -> None:
        await self._stable.close()
