"""Sources and sinks from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from daemon.config.schema import Config
from feeds.connector import Route, SettingError
from feeds.source import Source

T = TypeVar("T")


def make_sources(config: Config) -> list[Source]:
    """The configured sources; none for ``kind = "none"`` without others. Raises SettingError."""
    return [_opened(config, table, name, connector.open) for table, (name, connector) in config.feeds.items()]


def make_routes(config: Config) -> list[Route]:
    """The configured sinks and the topics they carry. Raises SettingError."""
    sinks = config.sink.connectors.items()
    return [_opened(config, f"sink.{name}", name, connector.open) for name, connector in sinks]


def _opened(config: Config, table: str, name: str, open_: Callable[[str, float], T]) -> T:
    # closing a broker's client may add this to the drain, at most twice
    stop_timeout_s = max(0.5, config.process.drain / 4e9)
    try:
        return open_(name, stop_timeout_s)
    except SettingError as error:
        raise SettingError(f"{table}.{error.key}", error.message) from error
