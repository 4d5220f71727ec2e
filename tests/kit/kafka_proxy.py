"""A proxy before a Kafka listener on loopback: delays, drops and duplicates requests, cuts connections."""

import asyncio
import contextlib
import struct
from collections import Counter, deque
from dataclasses import dataclass
from enum import IntEnum
from threading import Thread
from typing import Literal, Self

LATE_REPLIES_S = 5.0
"""How long a connection to the broker stays open for what was sent late, once its client is gone."""


class Api(IntEnum):
    """Keys of Kafka's requests."""

    PRODUCE = 0
    FETCH = 1
    METADATA = 3
    OFFSET_COMMIT = 8
    HEARTBEAT = 12
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS = 24
    ADD_OFFSETS = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


Act = Literal["delay", "drop", "drop_reply", "duplicate", "cut", "cut_after"]
"""``cut``: both connections, before the request is passed on; ``cut_after``: when it is."""


@dataclass
class Fault:
    """What happens to the next ``times`` requests of one kind. ``seconds``: of a delay."""

    api: Api
    act: Act
    seconds: float = 0.0
    times: int = 1


class KafkaProxy:
    """Passes frames on. ``faults`` apply to requests of all connections, the first that fits.

    A delayed request is passed on even if its client has gone meanwhile, as a network may do. ``seen``: the
    number of requests by key, ``applied``: faults that took place, ``late``: requests that are held now.
    """

    def __init__(self, port: int, upstream: int) -> None:
        self.port = port
        self.faults: list[Fault] = []
        self.seen: Counter[int] = Counter()
        self.applied: Counter[str] = Counter()
        self.late = 0
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Stop listening, and cut all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cut()  # of tasks that ended before they began
        self._open.clear()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        for writers in self._open.values():
            for writer in writers:
                writer.transport.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open[task] = (writer,)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._open[task] = (writer, up_writer)
            passes: deque[bool] = deque()
            replies = asyncio.create_task(_replies(up_reader, writer, passes))
            try:
                await self._requests(reader, up_writer, passes)
                for _ in range(int(LATE_REPLIES_S / 0.02)):
                    if not passes or replies.done():
                        break
                    await asyncio.sleep(0.02)
            finally:
                replies.cancel()
                await asyncio.gather(replies, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in self._open.pop(task):
                each.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, passes: deque[bool]
    ) -> None:
        while True:
            try:
                frame = await _frame(reader)
            except (OSError, asyncio.IncompleteReadError):
                return
            api = struct.unpack_from(">h", frame, 4)[0]
            self.seen[api] += 1
            fault = self._fault(api)
            act = fault.act if fault else ""
            if fault and act == "delay":
                self.late += 1
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    self.late -= 1
            if act == "drop":
                continue
            if act == "cut":
                raise ConnectionAbortedError
            passes.append(act != "drop_reply")
            up.write(frame)
            if act == "duplicate":
                passes.append(False)
                up.write(frame)
            await up.drain()
            if act == "cut_after":
                await asyncio.sleep(0.05)
                raise ConnectionAbortedError

    def _fault(self, api: int) -> Fault | None:
        for fault in self.faults:
            if fault.api == api and fault.times > 0:
                fault.times -= 1
                self.applied[f"{Api(api).name} {fault.act}"] += 1
                return fault
        return None


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(4)
    return size + await reader.readexactly(struct.unpack(">i", size)[0])


async def _replies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: deque[bool]) -> None:
    """A broker answers a connection's requests in order; ``passes``: whether the client gets the reply.

    A broker that has gone is gone for the client, too.
    """
    while True:
        try:
            frame = await _frame(reader)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
            return
        if passes.popleft():
            with contextlib.suppress(OSError):  # the client is gone: replies are still taken off
                writer.write(frame)
                await writer.drain()


class ProxyThread:
    """A proxy on an event loop of its own, for clients that outlive a test's. Set ``proxy.faults`` whole."""

    def __init__(self, port: int, upstream: int) -> None:
        self.proxy = KafkaProxy(port, upstream)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="kafka proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.proxy.start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
