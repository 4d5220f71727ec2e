"""The `real_kafka` fixture: Apache Kafka out of Maven Central, or the broker that FORETICK_KAFKA names."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.ahead import is_needed
from tests.kafka_server import KafkaServer, missing_tools


@dataclass(frozen=True)
class RealKafka:
    """A broker under test. ``server`` is None when it is somebody else's, whom we do not stop and start."""

    bootstrap: str
    server: KafkaServer | None


@pytest.fixture(scope="session", autouse=True)
def starting_kafka(request: pytest.FixtureRequest) -> Iterator[Future[KafkaServer] | None]:
    """Ours, while it starts."""
    if not is_needed("real_kafka", request) or os.environ.get("FORETICK_KAFKA") or missing_tools():
        yield None
        return
    with ThreadPoolExecutor(1) as background:
        starting = background.submit(KafkaServer().__enter__)
        yield starting
        if starting.exception() is None:
            starting.result().close()


@pytest.fixture(scope="session")
def real_kafka(starting_kafka: Future[KafkaServer] | None) -> RealKafka:
    if given := os.environ.get("FORETICK_KAFKA"):
        return RealKafka(given, None)
    if starting_kafka is None:
        message = f"Apache Kafka needs Java and Maven: apt-get install {' '.join(missing_tools())}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    server = starting_kafka.result()
    return RealKafka(server.bootstrap, server)
