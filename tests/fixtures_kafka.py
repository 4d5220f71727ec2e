"""The `real_kafka` fixture: Apache Kafka out of Maven Central, or the broker that FORETICK_KAFKA names."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kafka_server import KafkaServer


@dataclass(frozen=True)
class RealKafka:
    """A broker under test. ``server`` is None when it is somebody else's, whom we do not stop and start."""

    bootstrap: str
    server: KafkaServer | None


@pytest.fixture(scope="session")
def real_kafka() -> Iterator[RealKafka]:
    if given := os.environ.get("FORETICK_KAFKA"):
        yield RealKafka(given, None)
        return
    with KafkaServer() as server:
        yield RealKafka(server.bootstrap, server)


@pytest.fixture(scope="module")
def secured_kafka() -> Iterator[KafkaServer]:
    """A broker of our own with a listener that demands TLS and a login."""
    with KafkaServer(secured=True) as server:
        yield server
