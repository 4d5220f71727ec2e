"""A venue's WebSocket stream as a source: it connects, subscribes, and connects again whenever that ends."""

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from feeds.backoff import ConnectionLog, Sleep, until
from feeds.source import CommitPoint, ConnectionState, Incoming, Kind, Partition

log = logging.getLogger(__name__)

OPEN_S, CLOSE_S = 10.0, 1.0
"""Longest wait for a connection, and for the end of one."""


@dataclass(frozen=True)
class Stream:
    """``subscribe``: messages that are sent once it is connected. ``headers``: of the request.

    ``ping_s``: how often it is asked whether the venue lives, by ``ping`` if that is not empty, else by the
    protocol; 0: never. ``ignored``: replies that are no messages of the format. ``silence_s``: a connection
    on which nothing comes for so long is dead; 0: never. ``proxy``: its URL, True for the system's, None for
    none.
    """

    url: str
    subscribe: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    ping_s: float = 20.0
    ping: str = ""
    ignored: frozenset[bytes] = frozenset()
    silence_s: float = 60.0
    tls: ssl.SSLContext | None = None
    proxy: str | bool | None = None
    max_bytes: int = 1 << 20

    @property
    def shown(self) -> str:
        """The URL without what may be secret in it."""
        return self.url.partition("?")[0]


async def check(stream: Stream) -> None:
    """Connect, subscribe and leave. Raises OSError, WebSocketException, TimeoutError."""
    async with _connection(stream) as connection:
        for message in stream.subscribe:
            await connection.send(message)


@contextlib.asynccontextmanager
async def _connection(stream: Stream) -> AsyncGenerator[ClientConnection, None]:
    """A connection, closed at the end; by force where the venue does not answer that it is."""
    by_protocol = None if stream.ping else stream.ping_s or None
    connection = await connect(
        stream.url,
        additional_headers=dict(stream.headers),
        ssl=stream.tls,
        proxy=stream.proxy,  # type: ignore[arg-type]  # True is the library's word for the system's
        open_timeout=OPEN_S,
        close_timeout=CLOSE_S,
        ping_interval=by_protocol,
        ping_timeout=by_protocol,
        max_size=stream.max_bytes,
    )
    try:
        yield connection
    finally:
        try:
            await connection.close()
        finally:  # in a cancelled task a timeout of Python 3.11.2 leaves it open
            connection.transport.abort()


class WebSocketSource:
    """Yields one message for each frame (*dropping*: a venue sends again nothing that was sent meanwhile).

    ``lost``: frames that found no room among the ``waiting``, the oldest. ``breaks``: how often a connection
    ended that had brought something. The topic is the source's name, the partition 0, the offset a running
    number from 0.
    """

    kind: Kind = "dropping"

    def __init__(
        self,
        name: str,
        stream: Stream,
        *,
        waiting: int = 100_000,
        max_records: int = 5000,
        sleep: Sleep = asyncio.sleep,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name, self.lost, self.breaks = name, 0, 0
        self._stream, self._max_records, self._clock_ns = stream, max_records, clock_ns

        async def jittered(seconds: float) -> None:
            """Clients that lost a venue together do not come back together."""
            await sleep(seconds * random.uniform(0.5, 1.5))

        self.connection = ConnectionLog(name, stream.shown, log, jittered)
        self._waiting: deque[Incoming] = deque()
        self._room = waiting
        self._offset = 0
        self._taken = True
        """The newest batch was taken: another one was asked for."""
        self._read_until_ns = 0
        self._news, self._connected, self._stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect and subscribe, retrying as long as needed."""
        self._stop.clear()
        self._connected.clear()
        self.connection.connecting()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_on())
        await until(self._stop, self._connected.wait())

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """What has come, up to ``max_records`` at a time, until ``stop``."""
        self._taken = True
        while not self._stop.is_set():
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                continue
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_records))]
            self._taken = False
            yield batch
            self._taken = True

    @property
    def read_until_ns(self) -> int:
        """See `CatchesUp`; a time at which it was connected."""
        if self._taken and not self._waiting and self.connection.state is ConnectionState.UP:
            self._read_until_ns = time.monotonic_ns()
        return self._read_until_ns

    def pause(self) -> None:
        """Nothing to pause: the venue does not wait."""

    def resume(self) -> None:
        """See ``pause``."""

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Nothing to store: there is no log behind a stream."""

    async def stop(self) -> None:
        """Disconnect."""
        self._stop.set()
        self._news.set()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        self.connection.stopped()

    async def _read_on(self) -> None:
        """Connect again and again."""
        while True:
            before = self._offset
            try:
                await self._read()
                why: object = "the venue closed the connection"
            except TimeoutError:
                why = f"nothing came for {self._stream.silence_s:g} s, or it was not open within {OPEN_S:g} s"
            except (OSError, WebSocketException, EOFError) as error:
                why = str(error) or repr(error)
            self.breaks += self._offset > before
            await self.connection.wait_before_retry(why)

    async def _read(self) -> None:
        """One connection, to its end."""
        stream = self._stream
        async with _connection(stream) as connection, contextlib.AsyncExitStack() as stack:
            for message in stream.subscribe:
                await connection.send(message)
            self._connected.set()
            if stream.ping and stream.ping_s:
                pinging = asyncio.create_task(self._ping(connection))
                stack.callback(pinging.cancel)
            while True:
                async with asyncio.timeout(stream.silence_s or None):
                    frame = await connection.recv(decode=False)
                self.connection.up()  # a venue that only closes connections is not asked at full speed
                self._take(bytes(frame))

    async def _ping(self, connection: ClientConnection) -> None:
        while True:
            await asyncio.sleep(self._stream.ping_s)
            with contextlib.suppress(WebSocketException):  # the reader meets it, too
                await connection.send(self._stream.ping)

    def _take(self, frame: bytes) -> None:
        if frame in self._stream.ignored:
            return
        if len(self._waiting) >= self._room:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(Incoming(self.name, 0, self._offset, None, frame, {}, self._clock_ns()))
        self._offset += 1
        self._news.set()
