"""Kafka as an acknowledged sink: an idempotent producer that waits for every in-sync replica.

While the broker is down, publishes wait. Acknowledged messages are never lost; others are sent again
(at-least-once: give messages deterministic keys).
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.partitioner import DefaultPartitioner

from feeds.backoff import ConnectionLog
from feeds.kafka_client import PROBE_S, Clients
from feeds.source import PublishRefused, Refusal, SinkStopped

log = logging.getLogger(__name__)

_BROKER_AWAY = (KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError)
_HOPELESS = (TopicAuthorizationFailedError, InvalidTopicError)
_FATAL_ATTEMPTS = 3
MAX_ENTERING = 32
"""Messages of a partition that wait for room in its batch at a time.

The producer wakes all that wait whenever a batch is sent, so the time for a backlog of n messages, such as
after an outage, would grow with the square of n.
"""


class _ProducerGone(Exception):
    """The producer was replaced or stopped while a message waited on it."""


class _Generation:
    """One producer, and a future that completes when it is replaced, so that its publishers stop waiting."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self.producer = producer
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


class KafkaSink:
    """Publishes with an idempotent producer and waits for every in-sync replica.

    A message larger than ``max_bytes`` (ours) or the topic's limit (the broker's) raises PublishRefused.
    Messages above 16 KiB travel in a batch of their own, so that the broker refuses no other message with
    them.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        *,
        max_bytes: int = 1 << 20,
        stop_timeout_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.connection = ConnectionLog(name, bootstrap, log)
        settings = {
            "bootstrap_servers": bootstrap,
            "enable_idempotence": True,
            "acks": "all",
            "linger_ms": 5,
            "max_request_size": max_bytes,
            "request_timeout_ms": 10_000,
            **(options or {}),
        }
        self._clients = Clients(AIOKafkaProducer, self.connection, settings, stop_timeout_s)
        self._generation: _Generation | None = None
        self._replacing = asyncio.Lock()
        self._entering: defaultdict[tuple[str, int | None], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_ENTERING)
        )
        """By topic and partition; the others do not wait for one whose leader is away."""

    @property
    def retries(self) -> int:
        """Attempts that failed or were not acknowledged within the probe interval."""
        return self.connection.retries

    async def start(self) -> None:
        """Connect; waits for the broker as long as needed, or until ``stop``."""
        self._clients.stop.clear()
        self.connection.connecting()
        await self._replace(None)

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Return once all in-sync replicas have the message, however long the broker is down.

        Raises:
            PublishRefused: too large, not allowed, no such topic, or refused three times for an unknown
            reason. SinkStopped: the sink is not running, or was stopped before the acknowledgement.
        """
        fatal = 0
        while True:
            generation = self._generation
            if generation is None or self._clients.stop.is_set():
                raise SinkStopped(f"{self.name}: stopped before a message to {topic} was acknowledged")
            try:
                await self._attempt(generation, topic, key, payload, headers)
                self.connection.up()
                return
            except _ProducerGone:
                await self._replace(generation)  # waits until there is another one
            except _BROKER_AWAY as error:
                await self.connection.wait_before_retry(repr(error))
            except UnknownTopicOrPartitionError as error:
                await self._refuse_if_missing(generation, topic, error)
            except KafkaError as error:
                fatal += 1
                if fatal == _FATAL_ATTEMPTS or isinstance(error, _HOPELESS):
                    why: Refusal = "not_allowed" if isinstance(error, _HOPELESS) else "refused"
                    raise PublishRefused(
                        f"{self.name}: {topic} refuses the message: {error!r}", why
                    ) from error
                await self.connection.wait_before_retry(repr(error))
                await self._replace(generation)

    async def stop(self) -> None:
        """Wait ``stop_timeout_s`` for acknowledgements, then disconnect within the same time."""
        generation = self._generation
        if generation is not None:
            with contextlib.suppress(TimeoutError, KafkaError):
                async with asyncio.timeout(self._clients.stop_timeout_s):
                    await generation.producer.flush()
            await asyncio.sleep(0)  # let acknowledged publishers return first
        self._clients.stop.set()
        self._generation = None
        await self._close(generation)
        self.connection.stopped()

    async def _attempt(
        self,
        generation: _Generation,
        topic: str,
        key: bytes | None,
        payload: bytes,
        headers: Mapping[str, bytes],
    ) -> None:
        try:
            async with self._entering[topic, self._partition(generation.producer, topic, key)]:
                if generation.gone.done():
                    raise _ProducerGone
                send = generation.producer.send(topic, payload, key=key, headers=list(headers.items()))
                sent = await self._or_gone(generation, asyncio.ensure_future(send))
        except (MessageSizeTooLargeError, TypeError, ValueError) as error:
            why: Refusal = "too_large" if isinstance(error, MessageSizeTooLargeError) else "refused"
            raise PublishRefused(
                f"{self.name}: message of {len(payload)} bytes to {topic}: {error}", why
            ) from error
        try:
            await self._or_gone(generation, sent)
        except MessageSizeTooLargeError as error:
            # The broker never saw this batch's sequence number, so the producer's next would be out of
            # order.
            await self._replace(generation)
            raise PublishRefused(
                f"{self.name}: {topic} refuses {len(payload)} bytes as too large", "too_large"
            ) from error

    def _partition(self, producer: AIOKafkaProducer, topic: str, key: bytes | None) -> int | None:
        """Where the producer puts messages with this key; None while that is not known."""
        count = len(producer.client.cluster.partitions_for_topic(topic) or ())
        return None if key is None or not count else _partition_of(key, count)

    async def _or_gone(self, generation: _Generation, waiting: "asyncio.Future[Any]") -> Any:
        """The result of ``waiting``; reports the connection as down until it arrives."""
        while True:
            done, _ = await asyncio.wait(
                (waiting, generation.gone), timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting in done:
                return waiting.result()
            if done:
                waiting.cancel()
                raise _ProducerGone
            self.connection.retries += 1
            self.connection.down(f"no acknowledgement within {PROBE_S:g} s")

    async def _refuse_if_missing(self, generation: _Generation, topic: str, error: KafkaError) -> None:
        try:
            known = await generation.producer.client.fetch_all_metadata()
        except KafkaError as away:
            await self.connection.wait_before_retry(repr(away))
            return
        if topic not in known.topics():
            raise PublishRefused(f"{self.name}: topic {topic} does not exist", "no_topic") from error

    async def _replace(self, old: _Generation | None) -> None:
        """Replace ``old`` with a new producer, unless another publisher already did."""
        async with self._replacing:
            if self._generation is not old or self._clients.stop.is_set():
                return
            await self._close(old)
            producer = await self._clients.open()
            self._generation = None if producer is None else _Generation(producer)

    async def _close(self, generation: _Generation | None) -> None:
        if generation is not None:
            generation.end()
            await self._clients.close(generation.producer)


@lru_cache(maxsize=1 << 14)
def _partition_of(key: bytes, count: int) -> int:
    """Of as many; remembered, for aiokafka hashes a key in Python."""
    every = list(range(count))
    return int(DefaultPartitioner()(key, every, every))
