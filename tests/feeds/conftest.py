"""Kafka clients of a topic: at an embedded broker, or at an Apache Kafka."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from feeds.mock_broker import MockBroker
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics
from tests.kit.kafka_clients import KafkaClients
from tests.kit.records import TOPIC


@pytest.fixture(params=[1])
def broker(request: pytest.FixtureRequest) -> Iterator[MockBroker]:
    """An embedded broker with `TOPIC`; its number of partitions may be given."""
    with MockBroker() as broker:
        broker.create_topic(TOPIC, request.param)
        yield broker


@pytest.fixture
async def kafka(broker: MockBroker) -> AsyncIterator[KafkaClients]:
    # the embedded broker takes a session's time to let a member leave
    options = {"fetch_max_wait_ms": 20, "session_timeout_ms": 2000}
    async with KafkaClients(broker.bootstrap, TOPIC, options) as clients:
        yield clients


@pytest.fixture
async def real(real_kafka: RealKafka) -> AsyncIterator[KafkaClients]:
    """Clients of a topic of two partitions that no other run uses."""
    topic = f"md.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {topic: 2})
    async with KafkaClients(real_kafka.bootstrap, topic) as clients:
        yield clients
