"""What `feeds.kafka_client` takes of aiokafka without a public way to it is still there."""

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaConnectionError
from aiokafka.producer.sender import Sender

from feeds.kafka_client import close_client, connections_of

NOWHERE = "127.0.0.1:1"


async def test_clients_have_connections_and_a_producer_a_sender() -> None:
    for client in (AIOKafkaConsumer(bootstrap_servers=NOWHERE), AIOKafkaProducer(bootstrap_servers=NOWHERE)):
        assert isinstance(connections_of(client), AIOKafkaClient)
        if isinstance(client, AIOKafkaProducer):
            assert isinstance(client._sender, Sender)
        with pytest.raises(KafkaConnectionError):
            await client.start()
        await close_client(client, 1.0)


def test_a_consumer_has_a_coordinator_and_a_fetcher() -> None:
    assert {"_coordinator", "_fetcher"} <= vars_of(AIOKafkaConsumer)
    assert callable(GroupCoordinator.fetch_committed_offsets)
    assert {"generation", "member_id"} <= vars_of(GroupCoordinator)
    assert isinstance(Fetcher.error_future, property)


def vars_of(kind: type) -> set[str]:
    """Names of the attributes that its constructor sets."""
    return set(kind.__init__.__code__.co_names)  # type: ignore[misc]  # a function
