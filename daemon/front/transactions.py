"""Exactly once: answers, and the offsets that they cover, in one transaction after another.

A message is staged when it is made. It goes out when its version is complete, and all versions of its session
before: then offsets and progress cover the version, and a transaction takes both at the same moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from daemon.front.delivery import Delivery, Done, Outcome
from daemon.front.offsets import OffsetTracker, Stream
from feeds.codec import encode
from feeds.connector import Route
from feeds.messages import Answer, AnyMessage, DataUpdated, FlashReady
from feeds.source import CommitPoint, Membership, MemberSource, SinkStopped
from feeds.transactions import Fenced, KafkaTransactions, Message, PartitionsMoved, Written
from metrics.store import MetricStore

log = logging.getLogger(__name__)

TASK = "publish transactions"
SETTLE_S = 5.0
"""A member that leaves its partitions waits no longer: the group waits for it."""


@dataclass(frozen=True)
class _Staged:
    session: str
    version: int
    message: Message
    published: Done


def _whatever(staged: _Staged) -> _Staged:
    """The same, to go out whatever becomes of its session."""
    return _Staged("", 0, staged.message, staged.published)


class Transactions:
    """Stages messages to one route, and commits those of complete versions."""

    def __init__(
        self,
        route: Route,
        sink: KafkaTransactions,
        source: MemberSource,
        tracker: OffsetTracker,
        store: MetricStore,
        delivery: Delivery,
    ) -> None:
        self._route, self._sink, self._source = route, sink, source
        self._tracker, self._store, self._delivery = tracker, store, delivery
        self._staged: list[_Staged] = []
        self._complete: dict[str, int] = {}
        """Newest version by session that is complete, and all before it."""
        self._wake = asyncio.Event()
        self.stored: dict[Stream, CommitPoint] = {}
        """What was committed last, by stream."""
        self._waiting: list[asyncio.Future[bool]] = []
        self._under_way: asyncio.Task[bool] | None = None
        """The newest transaction."""
        self._stopped = False

    def put(
        self,
        session: str,
        message: AnyMessage,
        key: str,
        headers: Mapping[str, bytes],
        published: Done,
    ) -> None:
        """Stage; ``published`` is called once it is in effect. Dead letters are complete at once."""
        topic = self._route.topic(message)
        if not topic:
            published(Outcome.DELIVERED)
            return
        match message:
            case Answer() | DataUpdated() | FlashReady():
                version = message.data_version
            case _:
                version = 0
        encoded = Message(topic, key.encode(), encode(message), headers)
        self._delivery.wait_for(1)
        self._staged.append(_Staged(session, version, encoded, published))
        if version <= self._complete.get(session, 0):
            self._wake.set()

    def complete(self, session: str, version: int) -> None:
        """All results of this version, and of those before, are staged; the tracker covers them."""
        self._complete[session] = version
        self._wake.set()

    def remove(self, session: str) -> None:
        """A session is gone; what is staged still goes out."""
        self._staged = [_whatever(each) if each.session == session else each for each in self._staged]
        self._complete.pop(session, None)
        self._wake.set()

    def drop(self, session: str, *, complete: bool) -> None:
        """What is staged of this session will be made again; ``complete``: complete versions, too."""

        def again(staged: _Staged) -> bool:
            return staged.session == session and (complete or not self._is_complete(staged))

        dropped = [each for each in self._staged if again(each)]
        self._staged = [each for each in self._staged if not again(each)]
        self._finish(dropped, None, 0)

    def forget(self) -> None:
        """The engine is gone: versions that are not complete will be made again."""
        complete, dropped = self._take(), self._staged
        # the next engine may make their versions again, and those are not complete
        self._staged = [_whatever(each) for each in complete]
        self._complete.clear()
        self._finish(dropped, None, 0)

    async def settle(self, within_s: float = SETTLE_S) -> bool:
        """Let all that is complete now be committed; False where that takes longer."""
        if self._stopped:
            return True
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._wake.set()
        await asyncio.wait([done], timeout=within_s)
        return self._stopped or (done.done() and not done.cancelled() and done.result())

    async def run(self) -> None:
        """Commit as soon as something is complete. Raises Fenced, PartitionsMoved.

        A transaction that is under way when this is cancelled goes on, for `stop` to wait for.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                self._under_way = asyncio.create_task(self._commit())
                done = await asyncio.shield(self._under_way)
            except (Fenced, PartitionsMoved):
                self._stopped = True
                raise
            for each in waiting:
                each.set_result(done)

    async def stop(self, within_s: float) -> None:
        """Commit what is complete, for at most so long; nothing is committed afterwards. `run` has ended.

        Later offsets cover the messages of the transaction under way, so they wait until it is in effect.
        """
        try:
            async with asyncio.timeout(within_s):
                if not self._stopped and (self._under_way is None or await self._under_way):
                    await self._commit()
        except TimeoutError:
            log.error("a transaction was not committed within %g s", within_s)
        except Exception:
            log.exception("the last transaction failed")
        self._stopped = True

    async def _commit(self) -> bool:
        """One transaction of all that is complete; False where it was given up."""
        taken = self._take()
        points = self._tracker.to_commit()
        if not (taken or points):
            return True
        began = time.monotonic_ns()
        written = None
        messages = [each.message for each in taken]
        losses = self._source.losses

        def member() -> Membership | None:
            """Of a partition that came back, the points may lie before those of its owner in between."""
            found = self._source.membership
            if found is None or self._source.losses == losses:
                return found
            return found._replace(partitions=frozenset())

        try:
            written = await self._sink.commit(messages, points, member)
        except SinkStopped as error:
            log.warning("%s", error)
        else:
            self.stored.update(points)
        self._finish(taken, written, time.monotonic_ns() - began)
        return written is not None

    def _is_complete(self, staged: _Staged) -> bool:
        return staged.version <= self._complete.get(staged.session, 0)

    def _take(self) -> list[_Staged]:
        """What is complete, version by version within a session."""
        ready = [each for each in self._staged if self._is_complete(each)]
        self._staged = [each for each in self._staged if not self._is_complete(each)]
        return sorted(ready, key=lambda each: each.version)

    def _finish(self, taken: list[_Staged], written: Written | None, took_ns: int) -> None:
        self._delivery.wait_for(-len(taken))
        if written is not None:
            self._store.inc("foretick_transactions_total", outcome="committed")
            self._store.inc("foretick_transactions_total", written.aborted, outcome="aborted")
            self._store.inc("foretick_transactions_total", written.unknown, outcome="unknown")
            self._store.observe("foretick_transaction_seconds", took_ns)
        for index, each in enumerate(taken):
            if written is None:
                each.published(Outcome.STOPPED)
            else:
                each.published(Outcome.REFUSED if index in written.refused else Outcome.DELIVERED)
