"""What `feeds.kafka_client` takes of aiokafka without a public way to it; and why a broker is silent."""

import asyncio
import socket
import ssl
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaConnectionError
from aiokafka.producer.sender import Sender

from feeds import kafka_client
from feeds.kafka_client import close_client, connections_of, why_closed

NOWHERE = "127.0.0.1:1"


async def test_clients_have_connections_and_a_producer_a_sender() -> None:
    for client in (AIOKafkaConsumer(bootstrap_servers=NOWHERE), AIOKafkaProducer(bootstrap_servers=NOWHERE)):
        assert isinstance(connections_of(client), AIOKafkaClient)
        assert isinstance(connections_of(client)._get_conn_lock, asyncio.Lock)
        if isinstance(client, AIOKafkaProducer):
            assert isinstance(client._sender, Sender)
        with pytest.raises(KafkaConnectionError):
            await client.start()
        await close_client(client, 1.0)


def test_a_consumer_has_a_coordinator_and_a_fetcher() -> None:
    assert {"_coordinator", "_fetcher"} <= vars_of(AIOKafkaConsumer)
    for call in ("fetch_committed_offsets", "request_rejoin", "check_errors"):
        assert callable(getattr(GroupCoordinator, call))
    assert {"generation", "member_id", "_group_instance_id"} <= vars_of(GroupCoordinator)
    assert isinstance(Fetcher.error_future, property)


def vars_of(kind: type) -> set[str]:
    """Names of the attributes that its constructor sets."""
    return set(kind.__init__.__code__.co_names)  # type: ignore[misc]  # a function


SECRET = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "u", "sasl_plain_password": "p"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "may want TLS"),
        ({"security_protocol": "SSL"}, "may want a login"),
        ({"security_protocol": "SASL_SSL", **SECRET}, ""),  # it is busy
    ],
)
async def test_what_a_silent_broker_wants_is_guessed_where_it_was_not_given(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    for name in ("SILENCE_S", "LOGIN_S"):
        monkeypatch.setattr(kafka_client, name, 0.2)
    if settings:
        settings = settings | {"ssl_context": ssl.create_default_context()}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = await why_closed({"bootstrap_servers": f"127.0.0.1:{port}", **settings})
    assert says in found
    assert bool(found) is bool(says)
