"""The Kafka of a configuration, for commands that look back: its brokers, logins and topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daemon.config.schema import Config
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.kafka_range import KafkaRange
from feeds.kafka_sink import KafkaSink


@dataclass(frozen=True)
class Broker:
    """Where to connect, and how. ``options`` are aiokafka's."""

    bootstrap: str
    options: Mapping[str, Any]

    def reader(self) -> KafkaRange:
        """A reader, not open."""
        return KafkaRange(self.bootstrap, options=self.options)

    def sink(self) -> KafkaSink:
        """A sink, not started."""
        return KafkaSink("redrive", self.bootstrap, options=self.options)


def of_sink(config: Config) -> tuple[Broker, KafkaSinkConnector]:
    """Where answers and dead letters go. Raises SettingError where that is not Kafka."""
    sink = config.sink.connectors.get("kafka")
    if not isinstance(sink, KafkaSinkConnector):
        raise SettingError(
            "sink.kafka", "there is no such table, so answers and dead letters are not in Kafka"
        )
    return Broker(sink.bootstrap, _options(sink, "sink.kafka")), sink


def of_sources(config: Config) -> dict[str, Broker]:
    """Kafka sources by name. Raises SettingError where there is none."""
    named: dict[str, Any] = {each.name: each.connector for each in config.sources}
    named = named or {config.source.kind: config.source.connector}
    found = {
        name: Broker(source.bootstrap, _options(source, f"source.{name}"))
        for name, source in named.items()
        if isinstance(source, KafkaSourceConnector)
    }
    if not found:
        raise SettingError("source.kafka", "records do not come from Kafka, so they cannot be read again")
    return found


def _options(connector: KafkaSinkConnector | KafkaSourceConnector, table: str) -> dict[str, Any]:
    try:
        return connector.security.client_options()
    except SettingError as error:
        raise SettingError(f"{table}.security.{error.key}", error.message) from error
