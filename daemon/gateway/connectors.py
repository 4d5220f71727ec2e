"""Sources and sinks from the configuration."""

from collections.abc import Callable
from typing import TypeVar

from daemon.config.schema import BarsConfig, Config, SessionConfig
from feeds.connector import SinkRoute, settings_in
from feeds.payloads.payload_decoder import PayloadDecoder, WireDecoder
from feeds.source import SeekingSource, Source

T = TypeVar("T")

LEAST_TOKENS = 10
"""Of a bar's line: it has six numbers and the marks between them."""


def make_sources(config: Config) -> list[Source]:
    """The configured sources; none for ``kind = "none"`` without others. Raises SettingError."""
    sources = [
        _opened(config, table, name, connector.open) for table, (name, connector) in config.feeds.items()
    ]
    for source in sources:
        if isinstance(source, SeekingSource):
            source.set_retention(held_ns(config), config.skips)
    return sources


def make_payloads(config: Config, source: str) -> PayloadDecoder:
    """The decoder of a source's messages. Raises SettingError."""
    for table, (name, connector) in config.feeds.items():
        if name == source:
            with settings_in(table):
                return connector.payloads(config.source.max_message_bytes)
    return WireDecoder(config.source.max_message_bytes)


def held_ns(config: Config) -> int:
    """Event time that the longest window may hold, ns, if no interval is empty."""
    return max((_held_ns(session, session.bars(config.bars)) for session in config.sessions), default=0)


def _held_ns(session: SessionConfig, bars: BarsConfig) -> int:
    most = session.retention_tokens // LEAST_TOKENS
    if session.retention_records:
        most = min(most, session.retention_records)
    span = (most + 1) * bars.interval
    if session.retention_span:
        span = min(span, session.retention_span + bars.interval)
    return span + bars.lateness + bars.venue_lag


def make_routes(config: Config) -> list[SinkRoute]:
    """The configured sinks and the topics they carry. Raises SettingError."""
    sinks = config.sink.connectors.items()
    return [_opened(config, f"sink.{name}", name, connector.open) for name, connector in sinks]


def _opened(config: Config, table: str, name: str, open_: Callable[[str, float], T]) -> T:
    # closing a broker's client may add this to the drain, at most twice
    stop_timeout_s = max(0.5, config.process.drain / 4e9)
    with settings_in(table):
        return open_(name, stop_timeout_s)
