"""A source and a sink in memory."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from daemon.api.messages import Reply
from daemon.api.zmq import AnswerQuery
from feeds.codec import decode_message
from feeds.market_data import Answer, DataUpdated, DeadLetter
from feeds.source import CommitFailed, CommitPoint, Incoming, Kind, Partition, PublishRefused, SinkStopped


def awaited(answer: Callable[..., Awaitable[Reply]]) -> AnswerQuery:
    """As the daemon answers, by what has to be waited for."""
    return lambda request, client, since: partial(answer, request, client, since)


class QueueSource:
    """A source that yields what a test puts in, and records its calls."""

    def __init__(self, kind: Kind = "pausing", name: str = "test") -> None:
        self.name, self.kind = name, kind
        self.lost = 0
        self.paused = False
        self.pauses = 0
        self.starts = 0
        self.committed: dict[Partition, int] = {}
        self.state: dict[Partition, Mapping[str, bytes]] = {}
        self.refuse_commits = False
        self.refused = 0
        self._queue: asyncio.Queue[list[Incoming] | None] = asyncio.Queue()

    def put(self, *batches: Sequence[Incoming]) -> None:
        for batch in batches:
            self._queue.put_nowait(list(batch))

    def end(self) -> None:
        """No more data: ``batches`` ends after what was put."""
        self._queue.put_nowait(None)

    async def start(self) -> None:
        self.starts += 1

    async def batches(self) -> AsyncIterator[list[Incoming]]:
        while (batch := await self._queue.get()) is not None:
            yield batch

    def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    def resume(self) -> None:
        self.paused = False

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        if self.refuse_commits:
            self.refused += 1
            raise CommitFailed("the test says no")
        self.committed.update({p: point.offset for p, point in points.items()})
        self.state.update({p: point.state for p, point in points.items()})

    async def stop(self) -> None:
        pass


class MemorySink:
    """A sink that keeps its messages, delays acknowledgements, or refuses."""

    def __init__(self, name: str = "test") -> None:
        self.name = name
        self.sent: list[tuple[str, bytes | None, bytes, dict[str, bytes]]] = []
        self.acknowledging = asyncio.Event()
        self.acknowledging.set()
        self.refuses: Callable[[bytes], bool] = lambda payload: False
        self.holds: Callable[[bytes], bool] = lambda payload: True
        """Selects the messages that wait for ``acknowledging``."""
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        pass

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        if self._stopped.is_set():
            raise SinkStopped("stopped")
        if self.refuses(payload):
            raise PublishRefused("the test refuses it")
        self.sent.append((topic, key, payload, dict(headers)))
        if not self.holds(payload):
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self.acknowledging, self._stopped)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.acknowledging.is_set():
            raise SinkStopped("stopped before the acknowledgement")

    async def flush(self) -> None:
        pass

    async def stop(self) -> None:
        self._stopped.set()

    def messages(self, topic: str) -> list[Answer | DataUpdated | DeadLetter]:
        """What was sent to a topic, decoded, in order."""
        return [decode_message(payload) for to, _, payload, _ in self.sent if to == topic]  # type: ignore[misc]  # these are


class ServiceManager:
    """The service manager's end of NOTIFY_SOCKET: a path, or an abstract name after @.

    It reads as messages come: the socket's queue holds ten, and senders drop the next.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self._socket.setblocking(False)
        self._known = 0
        self._reading, self._closed = threading.Lock(), threading.Event()
        self._reader = threading.Thread(target=self._keep_reading)
        self._reader.start()

    def _keep_reading(self) -> None:
        while not self._closed.wait(0.1):
            self._read()

    def _read(self) -> None:
        with self._reading, contextlib.suppress(BlockingIOError):
            while True:
                self.messages.append(self._socket.recv(4096).decode())

    def received(self) -> list[str]:
        """What came since the last call."""
        self._read()
        known, self._known = self._known, len(self.messages)
        return self.messages[known : self._known]

    def saw(self, state: str) -> int:
        """How often a state such as READY=1 was sent so far."""
        self._read()
        return sum(state in message.splitlines() for message in self.messages)

    def close(self) -> None:
        self._closed.set()
        self._reader.join()
        self._socket.close()
