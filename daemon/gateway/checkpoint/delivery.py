"""Delivers messages to sinks: one queue per session and sink, so that no sink waits for another.

DLQ records have their own queues. Each queue is delivered in order. A broker that is down delays neither
other sessions nor the same session's ZeroMQ subscribers.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from daemon.supervision import Tasks
from daemon.traces.trace_context import TRACEPARENT, read_traceparent
from feeds.codec import encode
from feeds.connector import SinkRoute
from feeds.market_data import AnyMessage, DeadLetter
from feeds.source import PublishRefused, Sink, SinkStopped

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Limit of messages waiting for their sinks; above it a source that can wait is paused."""


class DeliveryOutcome(IntEnum):
    """What happened to a message; with several sinks, the worst outcome counts."""

    DELIVERED = 0
    """Every sink acknowledged it."""
    REFUSED = 1
    """A sink refused it for good, or dropped it for newer messages."""
    STOPPED = 2
    """A sink stopped before acknowledging it."""


Done = Callable[[DeliveryOutcome], None]
OnRefused = Callable[["RefusedMessage", Callable[[], None]], None]
"""Takes a message, but no DLQ record, that a sink refuses for good; it waits until the function is called."""


class RefusedMessage(NamedTuple):
    """A message that a sink refused for good, as it was to be sent to ``topic``."""

    message: AnyMessage
    topic: str
    key: bytes
    payload: bytes
    headers: Mapping[str, bytes]
    reason: str
    error: str


@dataclass
class _Outgoing:
    payload: bytes
    key: bytes
    headers: Mapping[str, bytes]
    message: AnyMessage
    done: Done
    open: int
    """Sinks that have not finished with it."""
    outcome: DeliveryOutcome = DeliveryOutcome.DELIVERED

    def finish(self, outcome: DeliveryOutcome) -> bool:
        """A sink has finished with it; returns whether all have."""
        self.outcome = max(self.outcome, outcome)
        self.open -= 1
        return not self.open


class Delivery:
    """Delivers the messages put into ``queues`` over ``routes``.

    ``lossless``: the source can wait, so nothing is dropped; above ``backlog`` messages `gate` is cleared,
    which pauses it. Otherwise a queue that holds ``backlog`` messages for a sink drops its oldest.
    """

    def __init__(
        self,
        routes: Sequence[SinkRoute],
        queues: Iterable[str],
        on_refused: OnRefused,
        *,
        lossless: bool = True,
        backlog: int = BACKLOG,
    ) -> None:
        self._routes, self._on_refused = routes, on_refused
        self._lossless = lossless
        self._backlog = backlog
        self._queues: dict[tuple[str, int], asyncio.Queue[tuple[str, _Outgoing] | None]] = {
            (name, index): asyncio.Queue() for name in queues for index in range(len(routes))
        }
        self._tasks = Tasks()
        self._leaving: set[asyncio.Task[None]] = set()
        """They still deliver what was in queues that are closed."""
        self.waiting = 0
        """Messages that some sink has neither acknowledged nor refused."""
        self.gate = asyncio.Event()
        """Set while sources may be read."""
        self.gate.set()

    def start(self, tasks: Tasks) -> None:
        """Start delivering, in one of ``tasks`` per session and sink."""
        self._tasks = tasks
        for name, index in self._queues:
            self._start(name, index)

    def add(self, name: str) -> None:
        """Open another queue, once started."""
        for index in range(len(self._routes)):
            self._queues[name, index] = asyncio.Queue()
            self._start(name, index)

    def remove(self, name: str) -> None:
        """Close a queue; what waits in it is still delivered."""
        for index in range(len(self._routes)):
            self._queues.pop((name, index)).put_nowait(None)
            task = self._tasks.expect_end(self._named(name, index))
            if task is not None:
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    def _named(self, name: str, index: int) -> str:
        return f"publish {name or 'DLQ records'} to {self._routes[index].sink.name}"

    def _start(self, name: str, index: int) -> None:
        work = partial(self._deliver_all, self._routes[index].sink, self._queues[name, index])
        self._tasks.start(self._named(name, index), work)

    async def stop(self, drain_s: float) -> int:
        """Deliver waiting messages for at most ``drain_s`` seconds; returns how many are left."""
        deadline = time.monotonic() + drain_s
        # what a sink refuses meanwhile becomes a DLQ record, so their queues end last
        for dead_letters in (False, True):
            ending = [each for each in self._queues if (each[0] == "") is dead_letters]
            for each in ending:
                self._queues[each].put_nowait(None)
            tasks = [self._tasks.expect_end(self._named(*each)) for each in ending]
            running = [task for task in tasks if task is not None]
            running += [] if dead_letters else self._leaving
            if running:
                _, late = await asyncio.wait(running, timeout=max(0.0, deadline - time.monotonic()))
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        return self.waiting

    def put(self, name: str, message: AnyMessage, key: str, headers: Mapping[str, bytes], done: Done) -> None:
        """Append to the queue ``name``; ``done`` is called once, when every sink has finished with it."""
        takers = [(i, topic) for i, route in enumerate(self._routes) if (topic := route.topic(message))]
        outgoing = _Outgoing(encode(message), key.encode(), headers, message, done, max(1, len(takers)))
        self.wait_for(1)
        if not takers:
            self._finish(outgoing, DeliveryOutcome.DELIVERED)
        for index, topic in takers:
            queue = self._queues[name, index]
            if not self._lossless and queue.qsize() >= self._backlog:
                self._drop_oldest(self._routes[index].sink, queue)
            queue.put_nowait((topic, outgoing))

    def wait_for(self, more: int) -> None:
        """Count messages that wait; too many close the gate."""
        self.waiting += more
        if more > 0 and self.waiting >= self._backlog:
            self.gate.clear()
        elif more < 0 and self.waiting < self._backlog // 2:
            self.gate.set()

    def _drop_oldest(self, sink: Sink, queue: asyncio.Queue[tuple[str, _Outgoing] | None]) -> None:
        oldest = queue.get_nowait()
        if oldest is None:  # stopping: the end marker stays
            queue.put_nowait(None)
            return
        log.warning("%s is behind by %d messages: dropping the oldest", sink.name, self._backlog)
        self._finish(oldest[1], DeliveryOutcome.REFUSED)

    async def _deliver_all(self, sink: Sink, queue: asyncio.Queue[tuple[str, _Outgoing] | None]) -> None:
        ended = False
        while not ended:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            ended = batch[-1] is None  # the end marker is put last
            await asyncio.gather(*(self._deliver(sink, *item) for item in batch if item))

    async def _deliver(self, sink: Sink, topic: str, outgoing: _Outgoing) -> None:
        try:
            await sink.publish(topic, outgoing.key, outgoing.payload, outgoing.headers)
        except SinkStopped:
            self._finish(outgoing, DeliveryOutcome.STOPPED)
        # it can never be delivered, so its records count as acknowledged
        except PublishRefused as error:
            self._refused(sink, topic, outgoing, error.reason, str(error))
        except Exception as error:
            trace = read_traceparent(outgoing.headers.get(TRACEPARENT, b"").decode())
            extra = {} if trace is None else {"trace_id": trace.trace_id}
            log.exception("%s failed to publish a message", sink.name, extra=extra)
            self._refused(sink, topic, outgoing, "other", repr(error))
        else:
            self._finish(outgoing, DeliveryOutcome.DELIVERED)

    def _refused(self, sink: Sink, topic: str, outgoing: _Outgoing, reason: str, error: str) -> None:
        message, settle = outgoing.message, partial(self._finish, outgoing, DeliveryOutcome.REFUSED)
        if isinstance(message, DeadLetter):  # a DLQ record about a DLQ record would be refused, too
            log.error("%s refused a DLQ record for good: %s", sink.name, error)
            settle()
            return
        why = f"{sink.name} refuses a message for good: {error}"
        self._on_refused(
            RefusedMessage(message, topic, outgoing.key, outgoing.payload, outgoing.headers, reason, why),
            settle,
        )

    def _finish(self, outgoing: _Outgoing, outcome: DeliveryOutcome) -> None:
        if outgoing.finish(outcome):
            self.wait_for(-1)
            outgoing.done(outgoing.outcome)
