"""HTTP connections with bounds that uvicorn lacks: the time that a request may take, and its size."""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from daemon.api.http_errors import Problem
from daemon.api.limits import Connections

HEADER_BYTES = 1 << 14
"""Longest headers of a request, with its first line."""
TOO_LONG = f"The headers have at most {HEADER_BYTES} bytes."
MAX_PIPELINED = 64
"""Requests that wait on one connection for the reply to an earlier one."""

Part = Literal["headers", "body", ""]


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


class HttpConnection(HttpToolsProtocol):
    """One connection of HTTP/1.1.

    It overrides what asyncio and httptools call, and uvicorn's reply to bytes that are no request. Complete
    headers are measured by `daemon.api.auth_middleware`.
    """

    limit: Connections
    timeouts: Timeouts
    _part: Part = "headers"
    """The part of a request that the client has to send or is sending; "" between requests."""
    _complete = 0
    """Requests that have come."""
    _due: tuple[int, Part] = (0, "")
    """The request and the part of it that ``_timer`` waits for."""
    _timer: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes of that part, without those that came together with an earlier one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect a request."""
        super().connection_made(cast(asyncio.Transport, Joining(transport)))
        self.limit.opened(self.client)
        self._expect("headers")

    def data_received(self, data: bytes) -> None:
        """Read some of a request, and bound the time and the size of the rest."""
        super().data_received(data)
        # a WebSocket, which `daemon.api.auth_middleware` counts
        if self.transport.get_protocol() is not self:
            self._leave()
            return
        # the line ends that may precede a request are part of it
        part = self._part or ("" if self._is_busy else "headers")
        if not self._expect(part):
            self._received += len(data)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif part == "headers" and self._received > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LONG)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._leave()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        super().on_message_begin()
        self._part = "headers"

    def on_headers_complete(self) -> None:
        """Note the end of the headers. An error here is replied to with status 400."""
        super().on_headers_complete()
        self._part = "body"

    def on_message_complete(self) -> None:
        """Note the last byte of a request."""
        super().on_message_complete()
        self._part, self._complete = "", self._complete + 1

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and close.

        Only close where the client would take this for the reply to an earlier request.
        """
        if self._is_busy and (self._part != "body" or self.pipeline or self.cycle.response_started):
            self.transport.abort()
            return
        body = msgspec.json.encode(Problem("bad_request", msg))
        headers = (
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        )
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + lines + b"\r\n" + body)
        self.transport.close()

    @property
    def _is_busy(self) -> bool:
        """Whether a request waits for its reply, or for the end of it."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self, part: Part) -> bool:
        """Cut the connection unless this part is complete in time. Whether another one was expected."""
        due = self._complete, part
        if due == self._due:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer, self._received = due, None, 0
        if part:
            limit_s = self.timeouts.headers if part == "headers" else self.timeouts.body
            self._timer = self.loop.call_later(limit_s, self.transport.abort)
        return True

    def _leave(self) -> None:
        self.limit.closed(self.client)
        self._expect("")


def connection_class(timeouts: Timeouts, limit: Connections) -> type[Any]:
    """A class of connections with these timeouts; ``limit`` counts them."""
    return type("Http", (HttpConnection,), {"timeouts": timeouts, "limit": limit})


def allow_connections(most: int) -> None:
    """Raise this process's soft limit of open files for ``connections``, if the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
