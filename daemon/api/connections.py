"""uvicorn's connections, bounded in time: requests that come too slowly and readers that stop are cut off."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

HEADER_BYTES = 1 << 14
"""Longest headers of a request, with its first line."""


@dataclass(frozen=True)
class Patience:
    """How long a client may take, in seconds. ``headers``: from its connection, or from the first byte of
    its next request, to the end of the headers; ``body``: from there to the end of the body. ``write``: in
    which a client with a full connection reads nothing at all.
    """

    headers: float = 10.0
    body: float = 20.0
    write: float = 10.0


class _BoundedWrites:
    """Cuts the connection of a client that does not read."""

    transport: asyncio.Transport
    patience = Patience()
    _stuck: asyncio.TimerHandle | None = None

    def _writing_paused(self) -> None:
        if self._stuck is None:
            # not `close`: that waits until the client has read what is left
            loop = asyncio.get_running_loop()
            self._stuck = loop.call_later(self.patience.write, self.transport.abort)

    def _writing_resumed(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class HttpConnection(H11Protocol, _BoundedWrites):
    """One connection of HTTP/1.1."""

    _late: asyncio.TimerHandle | None = None
    _awaited: object = None
    """The part of a request that ``_late`` waits for, as h11's state."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """The client connected; it must send a request."""
        super().connection_made(transport)
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        """Some of a request arrived."""
        super().data_received(data)
        self._await(self.conn.their_state if self.transport.get_protocol() is self else None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._await(None)
        self._writing_resumed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads less than is written."""
        super().pause_writing()
        self._writing_paused()

    def resume_writing(self) -> None:
        """It read on."""
        super().resume_writing()
        self._writing_resumed()

    def _await(self, state: object) -> None:
        """The client has to send what h11 waits for in this state, if that is anything."""
        if state is self._awaited:
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._awaited = state
        if state is h11.IDLE:
            self._late = self.loop.call_later(self.patience.headers, self.transport.abort)
        elif state is h11.SEND_BODY:
            self._late = self.loop.call_later(self.patience.body, self.transport.abort)


class WebSocketConnection(WSProtocol, _BoundedWrites):
    """One WebSocket connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._writing_resumed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads less than is written."""
        super().pause_writing()
        self._writing_paused()

    def resume_writing(self) -> None:
        """It read on."""
        super().resume_writing()
        self._writing_resumed()


def patient(patience: Patience) -> tuple[type[HttpConnection], type[WebSocketConnection]]:
    """Connections that are so patient."""
    own = {"patience": patience}
    return type("Http", (HttpConnection,), own), type("WebSocket", (WebSocketConnection,), own)


def allow_connections(most: int) -> None:
    """Raise this process's soft limit of open files for so many connections, if the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
