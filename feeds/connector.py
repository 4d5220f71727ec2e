"""A connector: the settings of one table `[source.NAME]` or `[sink.NAME]`, and what they open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Meta

from feeds.market_data import AnyMessage, DataUpdated, DeadLetter, FlashReady, Signal
from feeds.source import Sink, Source

if TYPE_CHECKING:
    from feeds.payloads.payload_decoder import PayloadDecoder

SOCKET = r"^(tcp|ipc)://.+$"
"""Pattern of a ZeroMQ endpoint."""


def about(description: str, **limits: Any) -> Meta:
    """A key's description for the reference, and the limits that msgspec checks (``ge``, ``pattern`` ...)."""
    return Meta(description=description, **limits)


class SettingError(Exception):
    """A setting that proves wrong in use; ``key`` names it, within the connector's table."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@contextmanager
def settings_in(table: str) -> Iterator[None]:
    """Let a SettingError name its key within ``table``."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{table}.{error.key}", error.message) from error


@dataclass(frozen=True)
class Finding:
    """A result of `foretick check` for one key."""

    key: str
    message: str
    ok: bool = True


@dataclass(frozen=True)
class SinkRoute:
    """A sink and its topics; the sink does not carry messages whose topic is empty."""

    sink: Sink
    answers: str
    updates: str = ""
    dead_letters: str = ""
    ready: str = ""
    signals: str = ""

    def topic(self, message: AnyMessage) -> str:
        """The message's topic."""
        if isinstance(message, DataUpdated):
            return self.updates
        if isinstance(message, FlashReady):
            return self.ready
        if isinstance(message, Signal):
            return self.signals
        return self.dead_letters if isinstance(message, DeadLetter) else self.answers


class Connector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a connector; every field has a description, for the configuration reference."""

    def bound(self) -> Mapping[str, str]:
        """Endpoints that this connector binds, by key."""
        return {}

    def authenticates(self) -> bool:
        """Whether what it binds is closed to clients that cannot prove who they are."""
        return False

    def check(self) -> Iterator[Finding]:
        """Check what the settings refer to: files, brokers, topics."""
        yield from ()


class SourceConnector(Connector, frozen=True):
    """Settings that open a source.

    ``live``: what it sends is news, rather than a recording. ``rereads``: after a restart it sends again what
    was not committed, and what is missing from windows.
    """

    live: ClassVar[bool] = True
    rereads: ClassVar[bool] = False

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """The source, not started; it stops within ``stop_timeout_s``. Raises SettingError."""
        raise NotImplementedError

    def listen(self, name: str, stop_timeout_s: float) -> Source:
        """One that takes nothing away from a daemon which reads the same. Raises SettingError."""
        return self.open(name, stop_timeout_s)

    def payloads(self, max_bytes: int) -> PayloadDecoder:
        """The decoder of its messages, each of at most ``max_bytes``. Raises SettingError."""
        from feeds.payloads.payload_decoder import WireDecoder

        return WireDecoder(max_bytes)


class SinkConnector(Connector, frozen=True):
    """Settings that open a sink."""

    def open(self, name: str, stop_timeout_s: float) -> SinkRoute:
        """The sink and its topics, not started; it stops within ``stop_timeout_s``. Raises SettingError."""
        raise NotImplementedError
