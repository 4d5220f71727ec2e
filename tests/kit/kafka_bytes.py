"""Batches of Kafka records as bytes, whole or damaged, and how to have a broker store them as they are."""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c

from feeds.kafka_batches import CODECS
from tests.kit.kafka import producing

NAMES = {"none": 0} | {name: number for number, (name, *_) in CODECS.items()}


def varint(value: int) -> bytes:
    """An integer as records hold it: zigzag, seven bits a byte."""
    left, out = (value << 1) ^ (value >> 63), bytearray()
    left &= (1 << 64) - 1
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes((*out, left))


def sized(data: bytes | None) -> bytes:
    """Bytes after their length, -1 for None."""
    return varint(-1) if data is None else varint(len(data)) + data


@dataclass(frozen=True)
class Rec:
    """A record of a batch; names of headers may be any bytes. ``time_ms`` counts from the batch's."""

    value: bytes | None = b"x"
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    time_ms: int = 0
    raw: bytes | None = field(default=None, repr=False)
    """Instead of all that: the bytes behind its offset."""

    def packed(self, delta: int) -> bytes:
        """As it stands in a batch."""
        if self.raw is not None:
            body = b"\0" + varint(self.time_ms) + varint(delta) + self.raw
        else:
            headers = b"".join(sized(name) + sized(value) for name, value in self.headers)
            body = b"\0" + varint(self.time_ms) + varint(delta) + sized(self.key) + sized(self.value)
            body += varint(len(self.headers)) + headers
        return sized(body)


def batch(
    records: Sequence[Rec],
    codec: str | int = "none",
    *,
    base: int = 0,
    first_ms: int = 1_709_632_800_000,
    newest_ms: int = 0,
    attributes: int = 0,
    producer: int = -1,
    count: int | None = None,
    delta: int | None = None,
    body: bytes | None = None,
    checksum: int | None = None,
) -> bytes:
    """A batch of format 2; what is given by name replaces what is right."""
    number = NAMES[codec] if isinstance(codec, str) else codec
    if body is None:
        body = b"".join(each.packed(at) for at, each in enumerate(records))
        body = CODECS[number][1](body) if number in CODECS else body
    count = len(records) if count is None else count
    delta = len(records) - 1 if delta is None else delta
    checked = struct.pack(
        ">hiqqqhii", number | attributes, delta, first_ms, newest_ms or first_ms, producer, 0, -1, count
    )
    right = calc_crc32c(checked + body)
    head = struct.pack(">ibI", 0, 2, right if checksum is None else checksum)
    return struct.pack(">qi", base, len(head) + len(checked) + len(body)) + head + checked + body


_NOT_YET = (3, 5, 6)
"""What a broker says while a topic that was just created has no leader."""


def _code(reply: Any) -> int:
    ((_, ((_, code, *_),)),) = reply.topics
    return int(code)


async def store(bootstrap: str, topic: str, partition: int, *batches: bytes) -> None:
    """Have the broker store batches as they are; raises where it refuses one."""
    async with producing(bootstrap) as producer:
        await producer.partitions_for(topic)
        for each in batches:
            request = ProduceRequest(None, -1, 10_000, [(topic, [(partition, each)])])
            (node,) = {each.nodeId for each in producer.client.cluster.brokers()}
            async with asyncio.timeout(20):
                while code := _code(await producer.client.send(node, request)):
                    if code not in _NOT_YET:
                        raise RuntimeError(f"the broker refuses a batch: error {code}")
                    await asyncio.sleep(0.05)
