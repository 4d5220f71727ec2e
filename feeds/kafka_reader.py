"""Reading on where aiokafka cannot: batch by batch, of each partition by itself."""

from collections.abc import Collection, Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerStoppedError, TopicPartition
from aiokafka.errors import (
    CorruptRecordException,
    IllegalStateError,
    KafkaError,
    RecordTooLargeError,
    UnsupportedCodecError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest

from feeds.kafka_batches import BatchRecord, Damaged, ReadResult, read_batches
from feeds.kafka_client import NO_HEADERS, connections_of, headers_of
from feeds.source import Fault, Incoming, source_time_ns

_WAIT_MS, _READ_COMMITTED = 0, 1
_RECORDS = 2000
"""Once reading is batch by batch, so much is read of a partition before aiokafka has another try."""
_BYTES, _MAX_BYTES = 1 << 20, 1 << 28
_OF_DATA = (CorruptRecordException, UnsupportedCodecError, RecordTooLargeError)
_OF_THE_CLIENT = (ConsumerStoppedError, IllegalStateError, TimeoutError, KafkaError)

Item = BatchRecord | Damaged


def first_offset(item: Any) -> int:
    """The offset of a record, or the first of what cannot be read."""
    return int(item.first if isinstance(item, Damaged) else item.offset)


def description_of(partition: TopicPartition, damaged: Damaged) -> str:
    """Where the damage is and what, for people."""
    where = f"{partition.topic}/{partition.partition}"
    if damaged.first == damaged.last:
        return f"offset {damaged.first} of {where} cannot be read: {damaged.why}"
    return f"offsets {damaged.first} to {damaged.last} of {where} cannot be read: {damaged.why}"


def messages_of(partition: TopicPartition, records: Iterable[Any], now_ns: int) -> list[Incoming]:
    """Records of aiokafka or of `feeds.kafka_batches` as messages; what cannot be read has its fault."""
    (topic, number), messages = partition, list[Incoming]()
    stamp, stamp_ns = None, 0
    for record in records:
        if isinstance(record, Damaged):
            fault = Fault("corrupt", description_of(partition, record), record.last)
            messages.append(
                Incoming(topic, number, record.first, None, record.value, NO_HEADERS, now_ns, fault=fault)
            )
            continue
        if record.timestamp != stamp:  # records of one batch have few times
            stamp = record.timestamp
            stamp_ns = source_time_ns(stamp)
        headers = headers_of(record.headers) if record.headers else NO_HEADERS
        null = record.value is None
        value = b"" if null else record.value
        messages.append(
            Incoming(topic, number, record.offset, record.key, value, headers, now_ns, stamp_ns, None, null)
        )
    return messages


def is_of_data(error: Exception) -> bool:
    """Whether records are at fault, rather than the broker or the way to it.

    aiokafka raises what a decoder raises: anything. Its `KafkaError` itself says what has no other name.
    """
    return isinstance(error, _OF_DATA) or type(error) is KafkaError or not isinstance(error, _OF_THE_CLIENT)


async def read_raw(
    consumer: AIOKafkaConsumer, partition: TopicPartition, position: int, max_bytes: int = _BYTES
) -> ReadResult:
    """Read what the broker has of a partition from ``position`` on, a few batches at most.

    Raises KafkaError where the broker does not give it.
    """
    return (await fetch_raw(consumer, partition, position, max_bytes))[0]


async def fetch_raw(
    consumer: AIOKafkaConsumer, partition: TopicPartition, position: int, max_bytes: int = _BYTES
) -> tuple[ReadResult, int]:
    """The same, and the partition's end: above what can be read while a transaction is open."""
    client = connections_of(consumer)
    node = client.cluster.leader_for_partition(partition)
    if node is None or node == -1:
        raise KafkaError(f"{partition.topic}/{partition.partition} has no leader")
    wanted = [(partition.topic, [(partition.partition, position, max_bytes)])]
    response = await client.send(node, FetchRequest(_WAIT_MS, 1, max_bytes, _READ_COMMITTED, wanted))
    ((_, ((_, code, end, *rest),)),) = response.topics
    if code:
        raise for_code(code)(f"{partition.topic}/{partition.partition}@{position}")
    aborted = None
    if response.API_VERSION >= 4:
        aborted = rest[2] if response.API_VERSION >= 11 else rest[-2]
    read = read_batches(rest[-1] or b"", position, aborted)
    if read.needs > _MAX_BYTES:
        damaged = Damaged(position, position, f"its batch has {read.needs} bytes")
        return ReadResult([damaged], position + 1), int(end)
    if read.needs > max_bytes:
        return await fetch_raw(consumer, partition, position, read.needs)
    return read, int(end)


async def read_all_raw(
    consumer: AIOKafkaConsumer, positions: Collection[tuple[TopicPartition, int]]
) -> dict[TopicPartition, list[Item]]:
    """Read these partitions from where they stand, and let ``consumer`` go on behind.

    Those are left out of which nothing was read. Raises KafkaError.
    """
    found = {each: (await _read_on(consumer, each, at), at) for each, at in positions}
    items: dict[TopicPartition, list[Item]] = {}
    # from here on nothing waits: what is read is returned
    for partition, (read, at) in found.items():
        if read.next > at and _seek(consumer, partition, read.next):
            items[partition] = read.items
    return items


async def _read_on(consumer: AIOKafkaConsumer, partition: TopicPartition, position: int) -> ReadResult:
    """Read on from ``position`` until there is nothing more, or about `_RECORDS`."""
    items: list[Item] = []
    while len(items) < _RECORDS:
        read = await read_raw(consumer, partition, position)
        if read.next <= position:
            break
        items += read.items
        position = read.next
    return ReadResult(items, position)


def _seek(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> bool:
    """Go on at ``offset``; False where the partition went elsewhere meanwhile."""
    try:
        consumer.seek(partition, offset)
    except IllegalStateError:
        return False
    return True


async def read_one(
    consumer: AIOKafkaConsumer, partition: TopicPartition, position: int, **options: Any
) -> list[Any]:
    """Records of one partition from ``position`` on, as ``getmany`` with its ``options`` returns them.

    Those it cannot read are read as `read_raw` does.
    """
    try:
        return list((await consumer.getmany(partition, **options)).get(partition, ()))
    except Exception as error:
        if not is_of_data(error):
            raise
    return (await read_all_raw(consumer, [(partition, position)])).get(partition, [])
