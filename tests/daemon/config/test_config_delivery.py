"""`sink.kafka.delivery = "exactly_once"`: what it needs, and what is said where it is missing."""

from pathlib import Path

import pytest

from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from feeds.connectors.kafka import KafkaSinkConnector
from feeds.kafka_security import KafkaSecurity
from feeds.kafka_transactions import KafkaTransactions

SESSION = '[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
SINK = '[sink.kafka]\nbootstrap = "{}"\ndelivery = "exactly_once"\n'
SOURCE = '[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "{}"\n'
MORE = '[[sources]]\nname = "b"\n[sources.zeromq]\nendpoint = "tcp://127.0.0.1:5555"\n'


def loaded(folder: Path, text: str) -> None:
    file = folder / "foretick.toml"
    file.write_text(SESSION + text)
    load_config(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SINK.format("a:1"), "exactly_once commits offsets with answers"),
        (SINK.format("a:1") + SOURCE.format("a:1") + MORE, "exactly_once commits offsets with answers"),
        (
            SINK.format("a:1,b:1") + SOURCE.format("b:1"),
            "the sink's brokers are a:1, b:1, the source's are b:1",
        ),
    ],
)
def test_without_its_source_it_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(tmp_path, text)


def test_the_same_brokers_in_another_order_will_do(tmp_path: Path) -> None:
    loaded(tmp_path, SINK.format("a:1, b:1") + SOURCE.format("b:1,a:1"))


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
