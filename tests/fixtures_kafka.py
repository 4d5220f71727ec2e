"""The `real_kafka` fixture: Apache Kafka out of Maven Central, or the broker that FORETICK_KAFKA names."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kafka_server import KafkaServer, missing_tools


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
    need_tools()
    with KafkaServer() as server:
        yield RealKafka(server.bootstrap, server)


@pytest.fixture(scope="module")
def secured_kafka() -> Iterator[KafkaServer]:
    """A broker of our own with a listener that demands TLS and a login."""
    need_tools("openssl")
    with KafkaServer(secured=True) as server:
        yield server


def need_tools(*more: str) -> None:
    """Skip the test, or fail in CI, when Java, Maven or one of ``more`` is missing."""
    missing = [*missing_tools(), *(program for program in more if shutil.which(program) is None)]
    if missing:
        message = f"Apache Kafka needs Java and Maven: apt-get install {' '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
