"""A transactional producer of librdkafka (confluent-kafka), and committed offsets read by it.

Its calls block, so each producer has a thread; a transaction is one piece of work there. Two faults of
aiokafka 0.14's transactions decide against that one: it commits offsets without the group's generation, so a
member that lost its partitions can still commit them, and it knows one group in a transaction
(docs/delivery.md).
"""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from feeds.kafka_transactions import Fenced, GroupOffsets, MessagesRefused, TransactionFailed
from feeds.source import CommitPoint, Membership, OffsetsUnknown, OutgoingMessage, Partition, Refusal

log = logging.getLogger(__name__)
T = TypeVar("T")

SLICE_S = 0.5
"""Longest single call, so that a producer that is given up ends soon."""
HANGS_S = 2.0
"""A call so late hangs (`send_offsets_to_transaction` does not observe its timeout, librdkafka #5456): its
thread is left behind.
"""
LOGGED_S = 1.0
"""What an idle producer logs waits no longer: the library keeps it until a call asks for it."""

_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
_HOPELESS: Mapping[int, Refusal] = {
    KafkaError.MSG_SIZE_TOO_LARGE: "too_large",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "not_allowed",
    KafkaError.TOPIC_EXCEPTION: "no_topic",
    KafkaError.INVALID_RECORD: "refused",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "no_topic",
    KafkaError._UNKNOWN_TOPIC: "no_topic",
}


def group_metadata(member: Membership) -> bytes:
    """What librdkafka's own consumer returns as its group's metadata: CGMDv2.

    The magic, the generation (int32 of this machine), group and member id, each ended by a zero byte, then 1
    without an instance id, or 0 and the instance id, ended likewise.
    """
    instance = b"\1" if member.instance is None else b"\0" + member.instance.encode() + b"\0"
    return b"".join(
        (
            b"CGMDv2:",
            struct.pack("=i", member.generation),
            member.group.encode() + b"\0",
            member.member.encode() + b"\0",
            instance,
        )
    )


def check_group_metadata() -> None:
    """Compare `group_metadata` with the library's own bytes. Raises RuntimeError where they differ."""
    for instance in (None, "one"):
        options = {"bootstrap.servers": "127.0.0.1:1", "group.id": "group", "log_level": 0}
        consumer = Consumer(options | ({} if instance is None else {"group.instance.id": instance}))
        try:
            theirs = consumer.consumer_group_metadata()
        finally:
            consumer.close()
        if theirs != group_metadata(Membership("group", instance=instance)):
            raise RuntimeError(f"this confluent-kafka has another form of group metadata: {theirs!r}")


class LibrdkafkaProducer:
    """A transactional producer in a thread of its own. ``options`` are librdkafka's.

    ``timeout_s``: longest time for one transaction, well below ``transaction_s``, after which the broker
    aborts it and fences this producer.
    """

    def __init__(
        self,
        bootstrap: str,
        transactional_id: str,
        options: Mapping[str, Any],
        *,
        timeout_s: float = 10.0,
        transaction_s: float = 30.0,
    ) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(transaction_s * 1000),
            "acks": "all",
            "linger.ms": 0,
            "socket.timeout.ms": int(timeout_s * 1000),
            # the broker refuses a new transaction while it writes the end of the last one: ask again soon
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 1000,
            # a broker that is back is found within a stop's drain; ten seconds by default
            "reconnect.backoff.max.ms": 1000,
            # Where all brokers were away, librdkafka 2.16 by default forgets them and begins with the
            # bootstrap servers again, but not the group's coordinator that it knew: no offset is sent any
            # more (librdkafka #5511). Moved brokers are found by the next producer, after a timeout.
            "metadata.recovery.strategy": "none",
            "topic.metadata.propagation.max.ms": int(timeout_s * 300),
            **options,
        }
        self._timeout_s = timeout_s
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="transactions", daemon=True).start()
        self._producer: Producer | None = None
        self._closing = False
        self._deadline = 0.0

    async def open(self) -> None:
        """Initialise: end what an earlier producer left open, and fence it. Raises TransactionFailed."""
        await self._run(self._open)

    async def transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        """Write and commit. Raises Fenced, MessagesRefused, TransactionFailed."""
        await self._run(partial(self._transact, messages, offsets))

    async def close(self) -> None:
        """Give it up; its thread ends within moments."""
        self._closing = True
        self._work.put(None)

    async def _run(self, work: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._work.put((work, done))
        try:
            async with asyncio.timeout(self._timeout_s + HANGS_S):
                await asyncio.wrap_future(done)
        except TimeoutError:
            raise TransactionFailed("librdkafka does not come back from a call") from None

    def _serve(self) -> None:
        """The thread: one piece of work after another, then close."""
        while (item := self._next()) is not None:
            work, done = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        self._close()

    def _next(self) -> tuple[Callable[[], None], Future[None]] | None:
        """The next piece of work; meanwhile what the library logs is logged."""
        while True:
            try:
                return self._work.get(timeout=LOGGED_S)
            except Empty:
                if self._producer is not None:
                    self._producer.poll(0)

    def _open(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._producer = Producer(self._settings, logger=log)
            self._patiently(self._producer.init_transactions)
        except KafkaException as error:
            raise _translated(error, unknown=False) from error

    def _transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        assert self._producer is not None  # it is open
        self._deadline = time.monotonic() + self._timeout_s
        failed: dict[int, KafkaError] = {}
        try:
            self._producer.begin_transaction()
            for index, message in enumerate(messages):
                self._produce(index, message, failed)
            for member, points in offsets:
                listed = [TopicPartition(*p, point.offset) for p, point in points.items()]
                self._patiently(
                    partial(self._producer.send_offsets_to_transaction, listed, group_metadata(member))
                )
            self._flush()
        except KafkaException as error:
            self._refuse(messages, failed)
            raise _translated(error, unknown=False) from error
        self._refuse(messages, failed)
        try:
            self._patiently(self._producer.commit_transaction)
        except KafkaException as error:
            self._refuse(messages, failed)
            raise _translated(error, unknown=True) from error

    def _produce(self, index: int, message: OutgoingMessage, failed: dict[int, KafkaError]) -> None:
        assert self._producer is not None

        def reported(error: KafkaError | None, _message: object) -> None:
            if error is not None:
                failed[index] = error

        while True:
            try:
                self._producer.produce(
                    message.topic,
                    message.payload,
                    message.key,
                    headers=list(message.headers.items()),
                    on_delivery=reported,
                )
                return
            except BufferError:  # the library's queue is full
                self._producer.poll(SLICE_S)
                if self._late():
                    raise TransactionFailed("the queue of messages stays full", unknown=False) from None
            except KafkaException as error:
                reported(error.args[0], None)
                raise

    def _flush(self) -> None:
        assert self._producer is not None
        while self._producer.flush(SLICE_S):
            if self._late():
                raise TransactionFailed("messages are not acknowledged", unknown=False)

    def _refuse(self, messages: Sequence[OutgoingMessage], failed: Mapping[int, KafkaError]) -> None:
        hopeless = {index: error for index, error in failed.items() if error.code() in _HOPELESS}
        if not hopeless:
            return
        why = next(iter(hopeless.values()))
        too_large = [i for i, error in hopeless.items() if error.code() == KafkaError.MSG_SIZE_TOO_LARGE]
        if too_large:  # of a batch that was refused as a whole, the largest is sure to be one
            largest = max(too_large, key=lambda i: len(messages[i].payload or b""))
            raise MessagesRefused({largest: "too_large"}, why.str())
        raise MessagesRefused({i: _HOPELESS[error.code()] for i, error in hopeless.items()}, why.str())

    def _patiently(self, call: Callable[[float], None]) -> None:
        """Call again while the library says that it goes on trying."""
        while True:
            try:
                call(SLICE_S)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or self._late():
                    raise

    def _late(self) -> bool:
        return self._closing or time.monotonic() > self._deadline

    def _close(self) -> None:
        """Drop it. Not by ``close``, which aborts: a late reply then fails an assertion of librdkafka."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()


class StableOffsets:
    """Committed points of groups, read by consumers that join none of them.

    Not by an admin client: librdkafka 2.16 crashes where the group's coordinator has moved.
    """

    def __init__(self, bootstrap: str, options: Mapping[str, Any], timeout_s: float = 10.0) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "isolation.level": "read_committed",  # offsets of a transaction that is ending are waited for
            "enable.auto.commit": False,
            "log_level": 0,  # only a poll would take what it logs; calls raise what they fail of
            **options,
        }
        self._timeout_s = timeout_s
        self._consumers: dict[str, Consumer] = {}

    async def __call__(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, CommitPoint]:
        """The points of these partitions, where there are any; waits for transactions that are ending.

        Raises OffsetsUnknown.
        """
        if group not in self._consumers:
            self._consumers[group] = Consumer(self._settings | {"group.id": group}, logger=log)
        asked = [TopicPartition(*each) for each in partitions]
        try:
            found = await asyncio.to_thread(self._consumers[group].committed, asked, timeout=self._timeout_s)
        except KafkaException as error:
            raise OffsetsUnknown(f"committed offsets: {error.args[0].str()}") from error
        if failed := [each.error for each in found if each.error is not None]:
            raise OffsetsUnknown(f"committed offsets: {failed[0].str()}")
        return {(each.topic, each.partition): CommitPoint(each.offset) for each in found if each.offset >= 0}

    async def close(self) -> None:
        """Disconnect."""
        consumers, self._consumers = self._consumers, {}
        for each in consumers.values():
            await asyncio.to_thread(each.close)


def _translated(raised: KafkaException, *, unknown: bool) -> Exception:
    error: KafkaError = raised.args[0]
    # an id that the broker has forgotten is like any failure, but for the outcome of a commit under way
    forgotten = unknown and error.code() == KafkaError.INVALID_PRODUCER_ID_MAPPING
    if forgotten or error.code() in _FENCED:
        return Fenced(
            f"{error.str()} ({error.name()}): another process has this transactional id, or a transaction "
            "took longer than its limit"
        )
    return TransactionFailed(f"{error.str()} ({error.name()})", unknown=unknown)
