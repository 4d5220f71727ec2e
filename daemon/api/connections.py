"""uvicorn's connections, bounded in time: requests that come too slowly and readers that stop are cut off."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from daemon.api.errors import Problem
from daemon.api.limits import Connections

HEADER_BYTES = 1 << 14
"""Longest headers of a request, with its first line."""
MOST_PIPELINED = 64
"""Requests that wait on one connection for the reply to an earlier one."""
_TOO_LONG = f"The headers have at most {HEADER_BYTES} bytes."


@dataclass(frozen=True)
class Timeouts:
    """How long a client may take, in seconds. ``headers``: from its connection, or from the first byte of
    its next request, to the end of the headers; ``body``: from there to the end of the body. ``write``: in
    which a client with a full connection reads nothing at all.
    """

    headers: float = 10.0
    body: float = 20.0
    write: float = 10.0


class Joining:
    """A transport that sends the head of a response together with what follows in the same turn of the event
    loop: one system call less, and the client wakes up once.

    Only a head waits, and only for one write, so a client that does not read is noticed as without it. A body
    that looks like a head may wait alike: the order stays.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data``; a head, at the latest in the event loop's next turn."""
        if data.startswith(b"HTTP/1.1 ") and not self._head:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what is there, and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._head = b""
        self._transport.abort()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class _BoundedWrites:
    """Cuts the connection of a client that does not read."""

    transport: asyncio.Transport
    timeouts = Timeouts()
    _stuck: asyncio.TimerHandle | None = None

    def _writing_paused(self) -> None:
        if self._stuck is None:
            # not `close`: that waits until the client has read what is left
            loop = asyncio.get_running_loop()
            self._stuck = loop.call_later(self.timeouts.write, self.transport.abort)

    def _writing_resumed(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class HttpConnection(HttpToolsProtocol, _BoundedWrites):
    """One connection of HTTP/1.1.

    llhttp, the parser, bounds neither the time nor the size of a request's headers; this class does.
    """

    limit: Connections
    _part: Literal["headers", "body"] | None = "headers"
    """The part of a request that the client has to send or is sending; None between requests."""
    _timed: Literal["headers", "body"] | None = None
    """The part that ``_late`` waits for."""
    _late: asyncio.TimerHandle | None = None
    _header_bytes = 0
    """Received of headers that are not complete."""
    _shared = False
    """Whether the bytes just received ended another part before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """The client connected; it must send a request."""
        super().connection_made(cast(asyncio.Transport, Joining(transport)))
        self.limit.opened(self.client)
        self._limit_time("headers")

    def data_received(self, data: bytes) -> None:
        """Some of a request arrived."""
        self._shared = False
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # a WebSocket from now on
            self._limit_time(None)
            return
        if self._part is None and not self._shared and not self._is_busy:
            self._part = "headers"  # the line ends that may precede a request are part of it
        if self._part == "headers" and not self._shared:
            self._header_bytes += len(data)
            if self._header_bytes > HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(_TOO_LONG)
        if self._shared:
            self._limit_time(None)  # what is next has a time of its own
        self._limit_time(self._part)

    @property
    def _is_busy(self) -> bool:
        """Whether a request waits for its response, or for the end of it."""
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse what arrives, which is not HTTP, and close.

        Where a response is due to an earlier request, or has begun, the client would take this one for it.
        """
        if self._is_busy and (self._part != "body" or self.pipeline or self.cycle.response_started):
            self.transport.abort()
            return
        body = msgspec.json.encode(Problem("bad_request", msg))
        head = [
            STATUS_LINE[400],
            *(b"%s: %s\r\n" % header for header in self.server_state.default_headers),
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join(head))
        self.transport.write(body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.limit.closed(self.client)
        self._limit_time(None)
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

    # What the parser calls.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._part, self._header_bytes = "headers", 0

    def on_headers_complete(self) -> None:
        """The request may begin. An error here is replied to with status 400."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEADER_BYTES:
            raise ValueError(_TOO_LONG)
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError(f"At most {MOST_PIPELINED} requests wait.")
        super().on_headers_complete()
        self._part, self._shared = "body", True

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        super().on_message_complete()
        self._part, self._shared = None, True

    def _limit_time(self, part: Literal["headers", "body"] | None) -> None:
        """The client has so long to end this part, if any."""
        if part == self._timed:
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._timed = part
        if part is not None:
            limit_s = self.timeouts.headers if part == "headers" else self.timeouts.body
            self._late = self.loop.call_later(limit_s, self.transport.abort)


class WebSocketConnection(WSProtocol, _BoundedWrites):
    """One WebSocket connection, which was one of HTTP until its first request."""

    limit: Connections

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.limit.closed(self.client)
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


def connection_classes(
    timeouts: Timeouts, limit: Connections
) -> tuple[type[HttpConnection], type[WebSocketConnection]]:
    """Connection classes with these timeouts; ``limit`` counts their connections."""
    own = {"timeouts": timeouts, "limit": limit}
    return type("Http", (HttpConnection,), own), type("WebSocket", (WebSocketConnection,), own)


def allow_connections(most: int) -> None:
    """Raise this process's soft limit of open files for so many connections, if the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
