"""What a reader of a log keeps beside its offsets: records by name, in a compacted topic.

Kafka keeps 4,096 bytes with an offset, too few for hundreds of sessions. A compacted topic keeps the newest
record of every key. A key is (group, topic, partition, name), and names are each writer's own: one that wakes
up after its partitions went elsewhere overwrites nothing of their new owner's.

Records are written before the offsets that they go with, or in one transaction with them. So what is read
after the offsets is as new as they are, or newer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from feeds.backoff import ConnectionLog, until
from feeds.kafka_batches import Damaged
from feeds.kafka_client import (
    BrokerError,
    Clients,
    connections_of,
    missing_topics,
    partitions_of,
    quiet_client_log,
    start_client,
)
from feeds.kafka_reader import fetch_raw
from feeds.source import (
    CommitFailed,
    CommitPoint,
    OutgoingMessage,
    Partition,
)

log = logging.getLogger(__name__)

TOPIC = "foretick.progress.v1"
TOPIC_CONFIGS = {
    "cleanup.policy": "compact",
    # the newest segment is never compacted, so this bounds what a start reads
    "segment.bytes": str(16 << 20),
    "segment.ms": str(3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
}
_READ_S = 30.0
_PENDING_S = 0.02
"""Between looks at a transaction that is ending."""
_BYTES = 4 << 20
_REPLICAS = 3
"""Of the topic, where there are as many brokers."""
_CREATED = (0, 36)
"""Codes of a topic that was created, or was there already."""


class _Key(msgspec.Struct, frozen=True, array_like=True):
    group: str
    topic: str
    partition: int
    name: str


_decode_key = msgspec.json.Decoder(_Key).decode


class ProgressTopic:
    """The records of ``group`` in ``topic``. Not thread-safe.

    ``settings``: of a client: brokers and security. ``clients``: opens the one that reads.
    """

    def __init__(self, topic: str, group: str, settings: Mapping[str, Any], clients: Clients) -> None:
        self.topic, self._group, self._settings = topic, group, dict(settings)
        self._clients = clients
        # what it does not acknowledge in time is written again by the next commit, by another one
        producer = {**settings, "enable_idempotence": True, "linger_ms": 5, "request_timeout_ms": 10_000}
        self._producers = Clients(AIOKafkaProducer, clients.connection, producer, clients.stop_timeout_s)
        self._producer: Any = None
        self._client: Any = None
        self._next: dict[TopicPartition, int] = {}
        self._records: dict[Partition, dict[str, bytes]] = {}
        self._ours: dict[Partition, dict[str, bytes]] = {}
        """What `changes` replaces: what was there when the partition came, and what we wrote since."""
        self._reading = asyncio.Lock()

    async def join(self, points: Mapping[Partition, CommitPoint]) -> dict[Partition, CommitPoint]:
        """The points, which were read just now, with their records. Raises KafkaError, TimeoutError."""
        async with self._reading:
            try:
                async with asyncio.timeout(_READ_S):
                    await self._catch_up()
            except (KafkaError, TimeoutError):  # another broker may lead it now
                await self._close()
                raise
        return {
            partition: point._replace(state=dict(self._records.get(partition, {})))
            for partition, point in points.items()
        }

    async def all_of(self, topics: Collection[str] = ()) -> dict[Partition, Mapping[str, bytes]]:
        """All records, of partitions of ``topics`` (all). Raises KafkaError, TimeoutError."""
        await self.join({})
        return {each: found for each, found in self._records.items() if not topics or each[0] in topics}

    def note(self, points: Mapping[Partition, CommitPoint]) -> None:
        """These points are stored, and their partitions are ours."""
        self._ours.update({partition: dict(point.state) for partition, point in points.items()})

    def changes(self, points: Mapping[Partition, CommitPoint]) -> list[OutgoingMessage]:
        """Records to write before these points are committed; those that a point lacks are deleted, last."""
        written: list[OutgoingMessage] = []
        deleted: list[OutgoingMessage] = []
        for partition, point in points.items():
            before = self._ours.get(partition, {})
            changed = {name: value for name, value in point.state.items() if before.get(name) != value}
            written += self._messages(partition, changed)
            deleted += self._messages(partition, dict.fromkeys(before.keys() - point.state.keys()))
        return written + deleted

    async def write(self, points: Mapping[Partition, CommitPoint], timeout_s: float) -> None:
        """Store the records of these points. Raises CommitFailed."""
        messages = self.changes(points)
        if not messages:
            return
        try:
            async with asyncio.timeout(timeout_s):
                for batch in _split(messages):
                    await self._produce(batch)
        except (TimeoutError, KafkaError, BrokerError) as error:
            producer, self._producer = self._producer, None
            await self._producers.close(producer)
            raise CommitFailed(f"progress is not stored in {self.topic}: {error!r}") from error
        self.note(points)

    async def _produce(self, messages: Iterable[OutgoingMessage]) -> None:
        if self._producer is None:
            await ensure_topic(self._settings, self.topic)
            self._producers.stop.clear()
            self._producer = await self._producers.open()
            if self._producer is None:
                raise KafkaError("stopped")
        sent = [await self._producer.send(self.topic, each.payload, each.key) for each in messages]
        await asyncio.gather(*sent)

    async def stop(self) -> None:
        """Disconnect."""
        self._producers.stop.set()
        producer, self._producer = self._producer, None
        await self._producers.close(producer)
        await self._close()

    async def _close(self) -> None:
        client, self._client = self._client, None
        await self._clients.close(client)

    def _messages(
        self, partition: Partition, records: Mapping[str, bytes | None]
    ) -> Iterator[OutgoingMessage]:
        for name, value in records.items():
            yield OutgoingMessage(self.topic, msgspec.json.encode(_Key(self._group, *partition, name)), value)

    async def _catch_up(self) -> None:
        """Read to the end, with all transactions that were open."""
        if self._client is None:
            try:
                await ensure_topic(self._settings, self.topic)
            except BrokerError as error:
                raise KafkaError(str(error)) from error
            self._client = await self._clients.open(group_id=None, group_instance_id=None)
            if self._client is None:
                raise KafkaError("stopped")
        client = connections_of(self._client)
        client.add_topic(self.topic)
        while not (places := _led(client.cluster, self.topic)):  # it was created just now
            await client.force_metadata_update()
            await asyncio.sleep(_PENDING_S)
        for place in places:
            await self._catch_up_with(place)

    async def _catch_up_with(self, place: TopicPartition) -> None:
        at = self._next.get(place, 0)
        while not self._clients.stop.is_set():
            read, end = await fetch_raw(self._client, place, at, _BYTES)
            if read.next > at:
                self._next[place] = at = read.next
                for item in read.items:
                    self._take(item)
            elif at >= end:
                return
            else:
                await until(self._clients.stop, asyncio.sleep(_PENDING_S))

    def _take(self, item: Any) -> None:
        if isinstance(item, Damaged):
            log.warning("%s: offsets %d to %d cannot be read: %s", self.topic, *item[:3])
            return
        try:
            key = _decode_key(item.key or b"")
        except msgspec.DecodeError:
            return  # somebody else's
        if key.group != self._group:
            return
        records = self._records.setdefault((key.topic, key.partition), {})
        if item.value is None:
            records.pop(key.name, None)
        else:
            records[key.name] = item.value


def _led(cluster: Any, topic: str) -> list[TopicPartition]:
    """The topic's partitions, once all of them have a leader."""
    places = partitions_of(cluster, [topic])
    return [] if any(cluster.leader_for_partition(each) in (None, -1) for each in places) else places


def _split(messages: Iterable[OutgoingMessage]) -> list[list[OutgoingMessage]]:
    """What is written, and what is deleted only once that is stored."""
    parts = [[each for each in messages if (each.payload is None) is deleted] for deleted in (False, True)]
    return [part for part in parts if part]


async def read_progress(
    topic: str, group: str, settings: Mapping[str, Any], topics: Collection[str] = (), timeout_s: float = 10.0
) -> dict[Partition, Mapping[str, bytes]]:
    """The records of a group by partition, of ``topics`` (all). Raises BrokerError."""
    quiet_client_log()
    if await missing_topics(settings["bootstrap_servers"], [topic], options=_rest(settings)):
        return {}
    connection = ConnectionLog(topic, settings["bootstrap_servers"], log)
    found = ProgressTopic(topic, group, settings, Clients(AIOKafkaConsumer, connection, settings, 1.0))
    try:
        async with asyncio.timeout(timeout_s):
            return await found.all_of(topics)
    except (KafkaError, TimeoutError) as error:
        where = settings["bootstrap_servers"]
        raise BrokerError(f"Kafka at {where} tells nothing of the group {group!r}: {error!r}") from error
    finally:
        await found.stop()


async def ensure_topic(settings: Mapping[str, Any], topic: str) -> None:
    """Create the topic where there is none. Raises KafkaError, BrokerError."""
    if not await missing_topics(settings["bootstrap_servers"], [topic], options=_rest(settings)):
        return
    admin = AIOKafkaAdminClient(**settings)
    try:
        await start_client(admin)
        brokers = len((await admin.describe_cluster())["brokers"])
        new = NewTopic(topic, 1, min(_REPLICAS, brokers), topic_configs=TOPIC_CONFIGS)
        reply = await admin.create_topics([new])
        if (code := reply.topic_errors[0][1]) not in _CREATED:
            log.warning("the topic %s cannot be created: error %d of the broker", topic, code)
    # AttributeError: of aiokafka, where no broker is the controller, as in librdkafka's mock cluster;
    # a broker may create the topic when it is first asked for
    except (KafkaError, AttributeError) as error:
        log.warning("the topic %s cannot be created: %r", topic, error)
    finally:
        await admin.close()


async def is_compacted(settings: Mapping[str, Any], topic: str) -> bool | None:
    """Whether the topic keeps the newest record of each key; None where there is no such topic.

    True where the broker does not tell. Raises BrokerError, KafkaError.
    """
    if await missing_topics(settings["bootstrap_servers"], [topic], options=_rest(settings)):
        return None
    admin = AIOKafkaAdminClient(**settings)
    try:
        await start_client(admin)
        (reply,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        ((_, _, _, _, entries),) = reply.resources
        return all("compact" in value for name, value, *_ in entries if name == "cleanup.policy")
    except (KafkaError, AttributeError, ValueError):  # as in `ensure_topic`
        return True
    finally:
        await admin.close()


def _rest(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "bootstrap_servers"}
