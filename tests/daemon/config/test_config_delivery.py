"""The sink of `sink.kafka.delivery = "exactly_once"`."""

from pathlib import Path

import pytest

from feeds.connectors.kafka import KafkaSinkConnector
from feeds.kafka_security import KafkaSecurity
from feeds.kafka_transactions import KafkaTransactions


async def test_the_sink_is_a_transactional_one() -> None:
    pytest.importorskip("confluent_kafka")
    route = KafkaSinkConnector(bootstrap="127.0.0.1:1", delivery="exactly_once").open("kafka", 1.0)
    assert isinstance(route.sink, KafkaTransactions)


def test_a_login_is_passed_on_to_librdkafka(tmp_path: Path) -> None:
    file = tmp_path / "login"
    file.write_text("desk\ntick tock\n")
    file.chmod(0o600)
    security = KafkaSecurity(tls=True, sasl="scram-sha-512", credentials_file=str(file))
    assert security.librdkafka_options() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "desk",
        "sasl.password": "tick tock",
    }
