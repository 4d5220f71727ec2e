"""The Kafka of a configuration, for commands that look back: its brokers, logins and topics."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from daemon.audit.file_log import FileLog
from daemon.config.schema import Config
from daemon.progress import Progress, decode_stored, order, session_of
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.connectors.replay import ReplayConnector
from feeds.decoding import Undecodable
from feeds.kafka_progress import TOPIC, read_progress
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
    """Where answers and DLQ records go. Raises SettingError where that is not Kafka."""
    sink = config.sink.connectors.get("kafka")
    if not isinstance(sink, KafkaSinkConnector):
        raise SettingError(
            "sink.kafka", "there is no such table, so answers and DLQ records are not in Kafka"
        )
    return Broker(sink.bootstrap, _options(sink, "sink.kafka")), sink


def of_sources(config: Config) -> dict[str, Broker]:
    """Kafka sources by name. Raises SettingError where there is none."""
    found = any_sources(config)
    if not found:
        raise SettingError("source.kafka", "records do not come from Kafka, so they cannot be read again")
    return found


def logs_of(config: Config) -> dict[str, Broker | FileLog]:
    """What keeps the records of sources, by their names. Raises SettingError where nothing does."""
    found: dict[str, Broker | FileLog] = {**any_sources(config)}
    found |= {
        name: FileLog(each) for name, each in config.feeds.values() if isinstance(each, ReplayConnector)
    }
    if not found:
        kinds = ", ".join(sorted(name for name, _ in config.feeds.values())) or "none"
        why = f"records come from {kinds}, which keeps none, so they cannot be read again"
        raise SettingError("source.kind", why)
    return found


def any_sources(config: Config) -> dict[str, Broker]:
    """Kafka sources by name, if any. Raises SettingError."""
    return {
        name: Broker(source.bootstrap, _options(source, f"source.{name}"))
        for name, source in _sources(config).items()
    }


@dataclass(frozen=True)
class Group:
    """A consumer group, and the topics that it reads; without any, all that it has read."""

    broker: Broker
    name: str
    topics: Sequence[str] = ()
    progress_topic: str = TOPIC

    async def progress(self) -> dict[str, Progress]:
        """How far the answers of sessions are acknowledged. Raises BrokerError."""
        found: dict[str, Progress] = {}
        settings = {"bootstrap_servers": self.broker.bootstrap, **self.broker.options}
        stored = await read_progress(self.progress_topic, self.name, settings, self.topics)
        for state in stored.values():
            for name, record in state.items():
                with suppress(Undecodable):  # somebody else's
                    each, session = decode_stored(record).progress, session_of(name)
                    found[session] = max(each, found.get(session, each), key=order)
        found.pop("", None)  # of engines
        return found


def groups_of(config: Config, name: str = "") -> list[Group]:
    """Consumer groups of the Kafka sources, or the one of this name on their brokers. Raises SettingError."""
    sources = _sources(config)
    return [
        Group(broker, name or sources[source].group, sources[source].topics, sources[source].progress_topic)
        for source, broker in (of_sources(config) if sources or name else {}).items()
    ]


def _sources(config: Config) -> dict[str, KafkaSourceConnector]:
    return {name: each for name, each in config.feeds.values() if isinstance(each, KafkaSourceConnector)}


def _options(connector: KafkaSinkConnector | KafkaSourceConnector, table: str) -> dict[str, Any]:
    try:
        return connector.security.client_options()
    except SettingError as error:
        raise SettingError(f"{table}.security.{error.key}", error.message) from error
