"""Sources and sinks from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from daemon.config.schema import Config
from feeds.connector import Route, SettingError
from feeds.source import Source

T = TypeVar("T")


def make_source(config: Config) -> Source | None:
    """The configured source; None for ``kind = "none"``. Raises SettingError."""
    name, connector = config.source.kind, config.source.connector
    return None if connector is None else _opened(config, "source", name, connector.open)


def make_routes(config: Config) -> list[Route]:
    """The configured sinks and the topics they carry. Raises SettingError."""
    sinks = config.sink.connectors.items()
    return [_opened(config, "sink", name, connector.open) for name, connector in sinks]


def _opened(config: Config, table: str, name: str, open_: Callable[[str, float], T]) -> T:
    # closing a broker's client may add this to the drain, at most twice
    stop_timeout_s = max(0.5, config.process.drain / 4e9)
    try:
        return open_(name, stop_timeout_s)
    except SettingError as error:
        raise SettingError(f"{table}.{name}.{error.key}", error.message) from error
