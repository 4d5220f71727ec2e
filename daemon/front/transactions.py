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
from daemon.front.offsets import OffsetTracker
from feeds.codec import encode
from feeds.connector import Route
from feeds.messages import Answer, AnyMessage, DataUpdated, FlashReady
from feeds.source import CommitPoint, Membership, MemberSource, SinkStopped
from feeds.transactions import Fenced, KafkaTransactions, Message, PartitionsMoved, Written
from metrics.store import MetricStore

log = logging.getLogger(__name__)

TASK = "publish transactions"


@dataclass(frozen=True)
class _Staged:
    session: str
    version: int
    message: Message
    published: Done


class _Forgotten(Exception):
    """What a transaction covers will be read again."""


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
        self._forgotten = 0
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()
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
        versioned = isinstance(message, Answer | DataUpdated | FlashReady)
        version = message.data_version if versioned else 0
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
        self._staged = [
            _Staged("", 0, each.message, each.published) if each.session == session else each
            for each in self._staged
        ]
        self._complete.pop(session, None)
        self._wake.set()

    def forget(self) -> None:
        """The engine is gone: what is not in effect will be read and answered again. `idle` must follow."""
        self._delivery.wait_for(-len(self._staged))
        self._staged.clear()
        self._complete.clear()
        self._forgotten += 1

    async def idle(self) -> None:
        """Wait for the end of a transaction under way: what is committed is known then."""
        async with self._one:
            pass

    async def run(self) -> None:
        """Commit as soon as something is complete. Raises Fenced, PartitionsMoved."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.commit()

    async def commit(self) -> bool:
        """One transaction of all that is complete; False where it was given up.

        Raises Fenced, PartitionsMoved.
        """
        async with self._one:
            if self._stopped:
                return True
            taken = self._take()
            points = {p: CommitPoint(offset) for p, offset in self._tracker.to_commit().items()}
            if not (taken or points):
                return True
            forgotten, began = self._forgotten, time.monotonic_ns()

            def member() -> Membership | None:
                if self._forgotten != forgotten:
                    raise _Forgotten
                return self._source.membership

            written = None
            try:
                written = await self._sink.commit([each.message for each in taken], points, member)
            except _Forgotten:
                log.info("a transaction of %d messages was dropped: they are made again", len(taken))
            except SinkStopped as error:
                log.warning("%s", error)
            except (Fenced, PartitionsMoved):
                self._stopped = True
                raise
            self._finish(taken, written, time.monotonic_ns() - began)
            return written is not None

    async def stop(self, within_s: float) -> None:
        """Commit what is complete, for at most so long; nothing is committed afterwards."""
        try:
            async with asyncio.timeout(within_s):
                await self.commit()
        except TimeoutError:
            log.error("a transaction was not committed within %g s", within_s)
        except Exception:
            log.exception("the last transaction failed")
        self._stopped = True

    def _take(self) -> list[_Staged]:
        """What is complete, version by version within a session."""
        ready = [each for each in self._staged if each.version <= self._complete.get(each.session, 0)]
        self._staged = [each for each in self._staged if each.version > self._complete.get(each.session, 0)]
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
