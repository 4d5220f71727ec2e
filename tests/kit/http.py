"""The HTTP port with routes of a test, and its bare clients: requests, server-sent events, WebSocket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    RejectConnection,
    Request,
    TextMessage,
)

from daemon.api.http_server import HttpServer
from daemon.supervision import Tasks

PATIENCE_S = 20.0
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def http_server(*routes: BaseRoute, **options: Any) -> AsyncIterator[HttpServer]:
    """A server of these routes, and of health and empty metrics."""
    server = HttpServer(lambda names: b"", list, more=routes, **options)
    await server.start(Tasks())
    try:
        yield server
    finally:
        await server.stop()


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def request(
    port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> Reply:
    """One request on a connection of its own; ``body`` other than bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {} if body is None or isinstance(body, bytes) else JSON
    fields = {"host": f"127.0.0.1:{port}", "connection": "close", "content-length": str(len(data)), **kind}
    async with asyncio.timeout(PATIENCE_S), connected(port) as (reader, writer):
        writer.write(head(method, path, fields | (headers or {})) + data)
        await writer.drain()
        raw = await reader.read()
    top, _, rest = raw.partition(b"\r\n\r\n")
    return _parsed(top, rest)


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def _parsed(top: bytes, rest: bytes) -> Reply:
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = _unchunked(rest)
    return Reply(int(first.split()[1]), headers, rest)


def _unchunked(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        whole, data = whole + data[:n], data[n + 2 :]
    return whole


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()


@dataclass(frozen=True)
class SentEvent:
    kind: str
    id: str
    data: Any


class Sse:
    """One stream of events; ``reader`` may be left unread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> None:
        self.reader, self.writer, self.reply = reader, writer, reply
        self._text = b""

    async def next(self, *kinds: str) -> SentEvent:
        """The next event, of one of these kinds if any are given."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                block = await self._block()
                fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
                if "event" in fields and (not kinds or fields["event"] in kinds):
                    return SentEvent(fields["event"], fields.get("id", ""), json.loads(fields["data"]))

    async def ended(self) -> bool:
        """Whether the stream ends in time; what comes before is dropped."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read() is not None

    async def _block(self) -> str:
        while b"\n\n" not in self._text:
            size = int(await self.reader.readline(), 16)
            if not size:
                raise EOFError("the stream ended")
            self._text += (await self.reader.readexactly(size + 2))[:-2]
        block, _, self._text = self._text.partition(b"\n\n")
        return block.decode()


@asynccontextmanager
async def listening(port: int, query: str = "", **headers: str) -> AsyncIterator[Sse]:
    """A stream of events, once the reply's headers are there."""
    async with connected(port) as (reader, writer):
        fields = {"host": f"127.0.0.1:{port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
        writer.write(head("GET", f"/v1/events{query}", fields))
        async with asyncio.timeout(PATIENCE_S):
            top = (await reader.readuntil(b"\r\n\r\n"))[:-4]
            reply = _parsed(top, b"")
            if reply.status != 200:
                rest = await reader.readexactly(int(reply.headers["content-length"]))
                reply = Reply(reply.status, reply.headers, rest)
        yield Sse(reader, writer, reply)


class Ws:
    """One WebSocket connection. ``closed``: the code with which the other side closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._got: list[Any] = []
        self.accepted, self.status = False, 0
        self.closed: int | None = None

    async def connect(self, port: int, headers: dict[str, str]) -> None:
        own = ("host", "sec-websocket-protocol")
        more = [(name.encode(), value.encode()) for name, value in headers.items() if name not in own]
        offered = [each for each in headers.get("sec-websocket-protocol", "").split(", ") if each]
        host = headers.get("host", f"127.0.0.1:{port}")
        self._write(Request(host=host, target="/v1/ws", subprotocols=offered, extra_headers=more))
        async with asyncio.timeout(PATIENCE_S):
            while not (self.accepted or self.status):
                await self._read()

    async def send(self, message: object) -> None:
        if isinstance(message, bytes):
            self._write(BytesMessage(message))
        else:
            self._write(TextMessage(message if isinstance(message, str) else json.dumps(message)))
        await self.writer.drain()

    async def ask(self, **message: object) -> Any:
        await self.send(message)
        return await self.next()

    async def next(self, kind: str = "") -> Any:
        """The next message, of this type if one is given. Raises EOFError after the connection's end."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while not self._got:
                    if self.closed is not None:
                        raise EOFError(f"closed with {self.closed}")
                    await self._read()
                found = self._got.pop(0)
                if not kind or found["type"] == kind:
                    return found

    def _write(self, event: Any) -> None:
        self.writer.write(self._connection.send(event))

    async def _read(self) -> None:
        data = await self._reader.read(1 << 20)
        if not data:
            self.closed = self.closed or 1006
            return
        self._connection.receive_data(data)
        for event in self._connection.events():
            match event:
                case AcceptConnection():
                    self.accepted = True
                case RejectConnection():
                    self.status, self.closed = event.status_code, 1006
                case TextMessage():
                    self._part = getattr(self, "_part", "") + event.data
                    if event.message_finished:
                        self._got.append(json.loads(self._part))
                        self._part = ""
                case CloseConnection():
                    self.closed = event.code


@asynccontextmanager
async def conversing(port: int, **headers: str) -> AsyncIterator[Ws]:
    async with connected(port) as (reader, writer):
        socket = Ws(reader, writer)
        await socket.connect(port, headers)
        yield socket
