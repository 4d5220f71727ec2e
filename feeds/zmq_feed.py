"""ZeroMQ publish/subscribe as a dropping source and an unacknowledged sink.

A message is three frames: topic, header (msgpack of ``Header``) and payload. A publisher at its high-water
mark drops silently, so it numbers messages and the subscriber counts the gaps. Numbers are per topic:
otherwise a subscriber to some topics would see false gaps.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio

from feeds.curve import Guarded, Keys
from feeds.decoding import Undecodable, decoded
from feeds.source import CommitPoint, Fault, Incoming, Kind, Partition, PublishRefused, SinkStopped

POLL_MS = 200
RCVHWM = 100_000
SNDHWM = 100_000
LINGER_MS = 1000
MAX_MISSING = 1 << 32
"""A number so far ahead of the one before it is no count of lost messages."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """Second frame. ``seq`` counts 1, 2, 3... per topic since ``epoch``, the publisher's start (ns)."""

    seq: int
    encoding: str
    schema: str
    source: str
    epoch: int = 0


class GapCounter:
    """Counts missing messages in the numbered streams of several publishers.

    The first message of a publisher, or of its new epoch, sets the starting point: earlier messages were not
    for us. A number that is `MAX_MISSING` ahead is ignored: the next one is compared with the one before it.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._last: dict[tuple[str, bytes], tuple[int, int]] = {}

    def see(self, topic: bytes, header: Header) -> int:
        """Note one arrival; returns how many messages are missing right before it."""
        stream = (header.source, topic)
        epoch, last = self._last.get(stream, (header.epoch, header.seq - 1))
        if epoch != header.epoch:
            last = header.seq - 1
        elif header.seq <= last:
            return 0  # repeated: nothing is missing, the highest number stays
        if header.seq - last > MAX_MISSING:
            return 0
        self._last[stream] = (header.epoch, header.seq)
        missing = header.seq - last - 1
        self.lost += missing
        return missing


class ZmqSource:
    """Subscribes to topic prefixes (*dropping*: messages not read in time are lost, and counted in ``lost``).

    ``partition`` is always 0 and ``offset`` this source's own running number over all topics, since
    publishers' numbers collide; the publisher's ``seq`` is in the headers. Messages of two frames (topic,
    payload) are accepted too, without loss counting; of other shapes the last frame comes with a fault.
    """

    kind: Kind = "dropping"

    def __init__(
        self,
        name: str,
        endpoint: str,
        topics: Sequence[str],
        *,
        bind: bool = False,
        rcvhwm: int = RCVHWM,
        max_records: int = 5000,
        keys: Keys | None = None,
        context: zmq.asyncio.Context | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self._topics = topics
        self._bind = bind
        self._rcvhwm = rcvhwm
        self._max_records = max_records
        self._guarded = Guarded(name, keys, context)
        self._clock_ns = clock_ns
        self._gaps = GapCounter()
        self._offset = 0
        self._socket: zmq.asyncio.Socket | None = None
        self.read_until_ns = 0
        """See `CatchesUp`; what is in the system's buffers still counts as to come."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._header = msgspec.msgpack.Decoder(Header)

    @property
    def handshakes_failed(self) -> int:
        """Peers that did not prove who they are, so far."""
        return self._guarded.handshakes_failed

    @property
    def lost(self) -> int:
        """Messages missing from publishers' numbering so far."""
        return self._gaps.lost

    async def start(self) -> None:
        """Bind or connect, and subscribe. A connecting subscriber does not wait for a publisher."""
        socket = self._guarded.open(zmq.SUB, self._bind)
        socket.setsockopt(zmq.RCVHWM, self._rcvhwm)
        for topic in self._topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.endpoint = await self._guarded.attach(socket, self.endpoint, self._bind)
        self._socket = socket

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Messages that have arrived, up to ``max_records`` at a time, until ``stop``."""
        self._idle.clear()
        try:
            while (socket := self._socket) is not None:
                arrived, now_ns = await socket.poll(POLL_MS), time.monotonic_ns()
                batch = self._drain(socket) if arrived else []
                if batch:
                    yield batch
                if len(batch) < self._max_records:
                    self.read_until_ns = now_ns
        finally:
            self._idle.set()

    def pause(self) -> None:
        """Nothing to pause: the publisher does not wait."""

    def resume(self) -> None:
        """See ``pause``."""

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Nothing to store: there is no log behind a publisher."""

    async def stop(self) -> None:
        """Close the socket once ``batches`` has released it (at most one poll interval)."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        # A reader that abandoned batches() halfway is not polling either: closing is safe after
        # the wait.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * POLL_MS / 1000):
                await self._idle.wait()
        await self._guarded.close(socket, 0)

    def _drain(self, socket: zmq.asyncio.Socket) -> list[Incoming]:
        """Read what has arrived, without one future per message."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        batch: list[Incoming] = []
        while len(batch) < self._max_records:
            try:
                frames = plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            # one that came meanwhile was sent after the batch began
            batch.append(self._incoming(frames, self._clock_ns()))
        return batch

    def _incoming(self, frames: list[bytes], now: int) -> Incoming:
        headers: dict[str, bytes] = {}
        fault: Fault | None = None
        if len(frames) == 3:
            try:
                header = decoded(self._header.decode, frames[1])
            except Undecodable as error:
                fault = Fault("frames", f"the second of three frames is no header: {error}")
            else:
                self._gaps.see(frames[0], header)
                headers = {
                    "schema": header.schema.encode(),
                    "encoding": header.encoding.encode(),
                    "source": header.source.encode(),
                    "seq": str(header.seq).encode(),
                }
        elif len(frames) != 2:
            fault = Fault("frames", f"a message has two or three frames, not {len(frames)}")
        offset, self._offset = self._offset, self._offset + 1
        topic = frames[0].decode(errors="replace")
        return Incoming(topic, 0, offset, None, frames[-1], headers, now, fault=fault)


class ZmqSink:
    """Publishes on a PUB socket, without acknowledgement: ``publish`` returns once libzmq has the message."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        bind: bool = True,
        sndhwm: int = SNDHWM,
        max_bytes: int = 1 << 20,
        keys: Keys | None = None,
        context: zmq.asyncio.Context | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self._bind = bind
        self._sndhwm = sndhwm
        self._max_bytes = max_bytes
        self._guarded = Guarded(name, keys, context)
        self._epoch = clock_ns()
        self._sequence: dict[str, int] = {}
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def handshakes_failed(self) -> int:
        """Peers that did not prove who they are, so far."""
        return self._guarded.handshakes_failed

    async def start(self) -> None:
        """Bind or connect; ``endpoint`` then has the real port in place of ``*``."""
        socket = self._guarded.open(zmq.PUB, self._bind)
        socket.setsockopt(zmq.SNDHWM, self._sndhwm)
        self.endpoint = await self._guarded.attach(socket, self.endpoint, self._bind)
        self._socket = socket

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Number and send one message. ``headers`` may name schema, encoding and source; the key is not sent.

        Raises:
            PublishRefused: the payload is larger than ``max_bytes``.
            SinkStopped: the sink is not running.
        """
        if self._socket is None:
            raise SinkStopped(f"{self.name}: not running, message to {topic} not sent")
        if len(payload) > self._max_bytes:
            raise PublishRefused(
                f"{self.name}: {len(payload)} bytes are more than the limit of {self._max_bytes}"
            )
        seq = self._sequence[topic] = self._sequence.get(topic, 0) + 1
        header = Header(
            seq,
            headers.get("encoding", b"json").decode(),
            headers.get("schema", b"").decode(),
            headers.get("source", self.name.encode()).decode(),
            self._epoch,
        )
        await self._socket.send_multipart((topic.encode(), msgspec.msgpack.encode(header), payload))

    async def stop(self) -> None:
        """Close; libzmq continues to send queued messages for at most ``LINGER_MS``."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await self._guarded.close(socket, LINGER_MS)
