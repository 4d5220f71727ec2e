"""Records that clients push, as a source: a bounded queue that refuses what it cannot hold."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from feeds.batch_body import BodyFormat
from feeds.codec import REPLAY
from feeds.source import CommitPoint, ConnectionState, Fault, Incoming, Kind, Partition


class Full(RuntimeError):
    """There is no room for these records now; a later push may succeed."""


class Closed(RuntimeError):
    """The source is not started, or was stopped."""


@dataclass(frozen=True)
class PushLimits:
    """``waiting``: most records that wait to be read. ``body_bytes``: longest body of a push.

    ``formats``: those that a push may name.
    """

    waiting: int = 65_536
    body_bytes: int = 1 << 20
    formats: Mapping[str, BodyFormat] = field(default_factory=dict)


class PushedSource:
    """Yields what was pushed (*pausing*: while it is paused the queue fills, and then pushes are refused).

    The topic is the source's name, the partition 0, the offset a running number from 0. Nothing is stored:
    records that were pushed and not answered when the daemon ends are gone.
    """

    kind: Kind = "pausing"
    lost = 0

    def __init__(
        self,
        name: str,
        limits: PushLimits,
        *,
        max_records: int = 5000,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name, self.limits = name, limits
        self.state = ConnectionState.STOPPED
        self._max_records, self._clock_ns = max_records, clock_ns
        self._waiting: deque[Incoming] = deque()
        self._taken = True
        """The newest batch was taken: another one was asked for."""
        self._offset = 0
        self._running, self._news = True, asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of records that wait to be read."""
        return len(self._waiting)

    def push(
        self,
        payloads: Sequence[bytes],
        encoding: str = "json",
        *,
        replay: bool = False,
        faults: Sequence[tuple[str, Fault]] = (),
    ) -> None:
        """Append records, all or none. ``replay``: their event times are in the past.

        ``faults``: lines of a declared format that are no records, each with its symbol, if that is known.

        Raises:
            Full: the queue has no room. Closed: the source is not read.
        """
        if self.state is not ConnectionState.UP:
            raise Closed(f"the source {self.name} is not connected")
        if len(self._waiting) + len(payloads) + len(faults) > self.limits.waiting:
            raise Full(f"{len(self._waiting)} records wait; at most {self.limits.waiting} may")
        headers = {"encoding": encoding.encode()} | ({REPLAY: b"1"} if replay else {})
        now = self._clock_ns()
        for key, fault in faults:
            self._waiting.append(Incoming(self.name, 0, -1, key.encode() or None, b"", {}, now, fault=fault))
        for payload in payloads:
            self._waiting.append(Incoming(self.name, 0, self._offset, None, payload, headers, now))
            self._offset += 1
        self._news.set()

    async def start(self) -> None:
        """Accept pushes; those of an earlier start that were not read are still there."""
        self.state = ConnectionState.UP

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """What was pushed, up to ``max_records`` at a time, until ``stop``."""
        self._taken = True
        while self.state is ConnectionState.UP:
            if not (self._running and self._waiting):
                self._news.clear()
                await self._news.wait()
                continue
            batch = list(islice(self._waiting, self._max_records))
            for _ in batch:
                self._waiting.popleft()
            self._taken = False
            yield batch
            self._taken = True

    @property
    def read_until_ns(self) -> int:
        """See `CatchesUp`."""
        return time.monotonic_ns() if self._taken and not self._waiting else 0

    def pause(self) -> None:
        """Yield nothing until ``resume``."""
        self._running = False

    def resume(self) -> None:
        """Yield again."""
        self._running = True
        self._news.set()

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Nothing to store."""

    async def stop(self) -> None:
        """Refuse pushes; ``batches`` ends."""
        self.state = ConnectionState.STOPPED
        self._news.set()
