"""Sources and sinks from the configuration."""

from __future__ import annotations

from pathlib import Path

from daemon.config.schema import Config
from daemon.engine.spec import SettingError
from daemon.front.delivery import Route
from feeds.file_format import FormatError, load_format
from feeds.kafka import KafkaSink, KafkaSource
from feeds.replay_source import ReplaySource
from feeds.source import Source
from feeds.zeromq import ZmqSink, ZmqSource

UPDATES = "data_updated.v1"
"""Topic of `DataUpdated` on ZeroMQ; on Kafka the answers alone tell."""


def _stop_timeout_s(config: Config) -> float:
    """What closing a broker's client may add, twice at most, to the drain."""
    return max(0.5, config.process.drain / 4e9)


def make_source(config: Config) -> Source | None:
    """The configured source; None for ``kind = "none"``. Raises SettingError."""
    settings = config.source
    if settings.kind == "kafka" and settings.kafka is not None:
        kafka = settings.kafka
        return KafkaSource(
            "kafka",
            kafka.bootstrap,
            list(kafka.topics),
            kafka.group,
            max_records=kafka.max_records,
            stop_timeout_s=_stop_timeout_s(config),
            options={"client_id": kafka.client_id},
        )
    if settings.kind == "zeromq" and settings.zeromq is not None:
        zeromq = settings.zeromq
        return ZmqSource("zeromq", zeromq.endpoint, zeromq.topics, bind=zeromq.bind, rcvhwm=zeromq.hwm)
    if settings.kind == "replay" and settings.replay is not None:
        replay = settings.replay
        try:
            form = load_format(replay.format)
        except FormatError as error:
            raise SettingError("source.replay.format", str(error)) from error
        return ReplaySource(
            "replay",
            Path(replay.file),
            form,
            speed=replay.speed,
            from_ns=replay.from_,
            until_ns=replay.until,
        )
    return None


def make_routes(config: Config) -> list[Route]:
    """The configured sinks and the topics they carry."""
    routes: list[Route] = []
    if config.sink.kafka is not None:
        kafka = config.sink.kafka
        routes.append(
            Route(
                KafkaSink("kafka", kafka.bootstrap, stop_timeout_s=_stop_timeout_s(config)),
                kafka.topic,
                dead_letters=kafka.dlq,
            )
        )
    if config.sink.zeromq is not None:
        zeromq = config.sink.zeromq
        routes.append(
            Route(ZmqSink("zeromq", zeromq.endpoint, bind=zeromq.bind), "answers.v1", UPDATES, "dlq.v1")
        )
    return routes
