"""`[source.kafka]` and `[sink.kafka]`."""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from feeds.connector import Finding, Route, SinkConnector, SourceConnector
from feeds.source import Source


class KafkaSourceConnector(SourceConnector, frozen=True):
    """A member of a consumer group. Back-pressure pauses its partitions."""

    bootstrap: Annotated[str, Meta(min_length=1, description="brokers, host:port, comma separated")]
    topics: Annotated[tuple[str, ...], Meta(min_length=1, description="topics read")] = ("md.trades.v1",)
    group: Annotated[str, Meta(min_length=1, description="consumer group")] = "foretick"
    client_id: Annotated[str, Meta(min_length=1, description="name shown by the broker")] = "foretick"
    max_records: Annotated[int, Meta(ge=1, description="most records fetched at a time")] = 2000

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A consumer that commits what it is told to."""
        from feeds.kafka import KafkaSource

        return KafkaSource(
            name,
            self.bootstrap,
            list(self.topics),
            self.group,
            max_records=self.max_records,
            stop_timeout_s=stop_timeout_s,
            options={"client_id": self.client_id},
        )

    def check(self) -> Iterator[Finding]:
        """The broker answers and has the topics."""
        return _topics(self.bootstrap, self.topics)


class KafkaSinkConnector(SinkConnector, frozen=True):
    """Publishes answers to Kafka with an idempotent producer."""

    bootstrap: Annotated[str, Meta(min_length=1, description="brokers, host:port, comma separated")]
    topic: Annotated[str, Meta(min_length=1, description="topic of the answers")] = "answers.v1"
    dlq: Annotated[str, Meta(min_length=1, description="topic of records that could not be read")] = "dlq.v1"

    def open(self, name: str, stop_timeout_s: float) -> Route:
        """An idempotent producer. No updates: on Kafka the answers tell that the data moved."""
        from feeds.kafka import KafkaSink

        sink = KafkaSink(name, self.bootstrap, stop_timeout_s=stop_timeout_s)
        return Route(sink, self.topic, dead_letters=self.dlq)

    def check(self) -> Iterator[Finding]:
        """The broker answers and has the topics."""
        return _topics(self.bootstrap, (self.topic, self.dlq))


def _topics(bootstrap: str, topics: tuple[str, ...]) -> Iterator[Finding]:
    from feeds.kafka import BrokerError, missing_topics

    try:
        missing = asyncio.run(missing_topics(bootstrap, topics))
    except BrokerError as error:
        yield Finding("bootstrap", str(error), ok=False)
        return
    yield Finding("bootstrap", f"{bootstrap} answers")
    for topic in topics:
        there = topic not in missing
        yield Finding("topic", f"{topic} {'exists' if there else 'does not exist'}", ok=there)


SOURCE, SINK = KafkaSourceConnector, KafkaSinkConnector
