"""Sources and sinks from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from daemon.config.schema import Config, SessionConfig
from feeds.connector import Route, SettingError
from feeds.source import SeekingSource, Source

T = TypeVar("T")

LEAST_TOKENS = 10
"""Of a bar's line: it has six numbers and the marks between them."""


def make_source(config: Config) -> Source | None:
    """The configured source; None for ``kind = "none"``. Raises SettingError."""
    name, connector = config.source.kind, config.source.connector
    if connector is None:
        return None
    source = _opened(config, "source", name, connector.open)
    if isinstance(source, SeekingSource):
        source.hold(held_ns(config), config.source.skips)
    return source


def held_ns(config: Config) -> int:
    """Event time that the longest window may hold, ns, if no interval is empty."""
    bars = config.bars
    return max((_held_bars(s, bars.interval) for s in config.sessions), default=0) + bars.lateness


def _held_bars(session: SessionConfig, interval_ns: int) -> int:
    most = session.retention_tokens // LEAST_TOKENS
    if session.retention_records:
        most = min(most, session.retention_records)
    span = (most + 1) * interval_ns
    return min(span, session.retention_span + interval_ns) if session.retention_span else span


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
