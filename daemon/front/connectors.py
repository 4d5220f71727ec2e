"""Sources and sinks from the configuration."""

from __future__ import annotations

from daemon.config.schema import Config
from daemon.engine.spec import SettingError
from daemon.front.delivery import Route
from feeds.connector import BadSetting
from feeds.source import Source


def make_source(config: Config) -> Source | None:
    """The configured source; None for ``kind = "none"``. Raises SettingError."""
    name, connector = config.source.kind, config.source.connector
    if connector is None:
        return None
    try:
        return connector.open(name, _stop_timeout_s(config))
    except BadSetting as error:
        raise SettingError(f"source.{name}.{error.key}", error.message) from error


def make_routes(config: Config) -> list[Route]:
    """The configured sinks and the topics they carry. Raises SettingError."""
    routes: list[Route] = []
    for name, connector in config.sink.connectors.items():
        try:
            sink = connector.open(name, _stop_timeout_s(config))
        except BadSetting as error:
            raise SettingError(f"sink.{name}.{error.key}", error.message) from error
        topics = connector.topics
        routes.append(Route(sink, topics.answers, topics.updates, topics.dead_letters))
    return routes


def _stop_timeout_s(config: Config) -> float:
    """What closing a broker's client may add to the drain, at most twice."""
    return max(0.5, config.process.drain / 4e9)
