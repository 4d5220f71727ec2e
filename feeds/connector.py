"""A connector: the settings of one table `[source.NAME]` or `[sink.NAME]`, and what they open."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from feeds.source import Sink, Source

SOCKET = r"^(tcp|ipc)://.+$"
"""Pattern of a ZeroMQ endpoint."""


class BadSetting(Exception):
    """A setting that only turns out to be wrong when it is used; ``key`` is its name within the table."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@dataclass(frozen=True)
class Finding:
    """What `foretick check` found out about one key."""

    key: str
    message: str
    ok: bool = True


@dataclass(frozen=True)
class Topics:
    """Where a sink's messages go; an empty topic means that the sink does not carry them."""

    answers: str
    updates: str = ""
    dead_letters: str = ""


class Connector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a connector; every field has a description, for the configuration's reference."""

    def bound(self) -> Mapping[str, str]:
        """Endpoints that this connector binds, by key."""
        return {}

    def check(self) -> Iterator[Finding]:
        """Look at what the settings refer to: files, brokers, topics."""
        yield from ()


class SourceConnector(Connector, frozen=True):
    """Settings that open a source."""

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """The source, not started; it closes within ``stop_timeout_s``. Raises BadSetting."""
        raise NotImplementedError


class SinkConnector(Connector, frozen=True):
    """Settings that open a sink."""

    @property
    def topics(self) -> Topics:
        """The topics it publishes to."""
        raise NotImplementedError

    def open(self, name: str, stop_timeout_s: float) -> Sink:
        """The sink, not started; it closes within ``stop_timeout_s``. Raises BadSetting."""
        raise NotImplementedError
