"""Exactly once: answers, and the offsets that they cover, in one transaction after another.

A message is staged when it is made. It goes out when its version is complete, and all versions of its session
before: then offsets and progress cover the version, and a transaction takes both at the same moment.

Where a partition has gone to another member, what is not committed of its sessions is dropped, for the new
owner makes it again. A transaction that the group or the broker refuses has no effect, so the rest goes into
the next one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from daemon.gateway.checkpoint.offsets import OffsetTracker, Stream
from daemon.gateway.checkpoint.outbox import Delivery, DeliveryOutcome, Done, RefusedMessage
from feeds.codec import encode
from feeds.connector import SinkRoute
from feeds.kafka_transactions import (
    OUTCOMES,
    Fenced,
    KafkaTransactions,
    MessagesRefused,
    PartitionsMoved,
)
from feeds.market_data import Answer, AnyMessage, DataUpdated, DeadLetter, FlashReady
from feeds.source import (
    CommitPoint,
    Membership,
    MemberSource,
    OutgoingMessage,
    SinkStopped,
    StandbySource,
)
from metrics.store import MetricStore

log = logging.getLogger(__name__)

TASK = "publish transactions"
SETTLE_S = 5.0
"""A member that leaves its partitions waits no longer: the group waits for it."""


@dataclass(frozen=True)
class _Staged:
    """``version`` 0 is complete. ``stream``: of the newest record behind it, if any."""

    session: str
    version: int
    message: OutgoingMessage
    published: Done
    original: AnyMessage
    stream: Stream | None


def _completed(staged: Iterable[_Staged]) -> list[_Staged]:
    """The same, complete whatever becomes of their sessions and engine."""
    return [replace(each, version=0) for each in staged]


class Transactions:
    """Stages messages to one route, and commits those of complete versions."""

    def __init__(
        self,
        route: SinkRoute,
        sink: KafkaTransactions,
        source: MemberSource,
        tracker: OffsetTracker,
        store: MetricStore,
        delivery: Delivery,
    ) -> None:
        self._route, self._sink, self._source = route, sink, source
        self._tracker, self._store, self._delivery = tracker, store, delivery
        self._outcomes = {
            outcome: store.growth("foretick_transactions_total", sink.outcomes[outcome], outcome=outcome)
            for outcome in OUTCOMES
        }
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
        self._again: set[str] = set()
        """Sessions whose messages of the transaction under way will be made again."""
        self._rewound: set[Stream] = set()
        """Streams that are read again since that transaction was made; its points are outdated."""
        self._gives_up = False
        self._on_revoked: Callable[[Collection[Stream]], None]
        self._is_held: Callable[[], bool]
        source.read_committed_by(sink.committed)

    def set_rebalance_listener(
        self, on_revoked: Callable[[Collection[Stream]], None], is_held: Callable[[], bool]
    ) -> None:
        """``on_revoked`` is called where streams are another member's; before anything is committed.

        ``is_held()``: whether the source is not read until less waits to be committed.
        """
        self._on_revoked, self._is_held = on_revoked, is_held

    def stand_by(self, source: StandbySource) -> None:
        """Leave the transactional id to the daemon that answers, until ``source`` gets its partitions."""
        self._sink.stand_by()
        source.stand_by(self._sink.begin)

    def put(
        self,
        session: str,
        message: AnyMessage,
        key: str,
        headers: Mapping[str, bytes],
        published: Done,
    ) -> None:
        """Stage; ``published`` is called once it is in effect. DLQ records are complete at once."""
        topic = self._route.topic(message)
        if not topic:
            published(DeliveryOutcome.DELIVERED)
            return
        match message:
            case Answer() | DataUpdated() | FlashReady():
                version = message.data_version
            case _:
                version = 0
        encoded = OutgoingMessage(topic, key.encode(), encode(message), headers)
        self._delivery.wait_for(1)
        stream = self._tracker.source_of(session)
        self._staged.append(_Staged(session, version, encoded, published, message, stream))
        if version <= self._complete.get(session, 0):
            self._wake.set()

    def complete(self, session: str, version: int) -> None:
        """All results of this version, and of those before, are staged; the tracker covers them."""
        self._complete[session] = version
        self._wake.set()

    def remove(self, session: str) -> None:
        """A session is gone; what is staged still goes out."""
        self._staged = [
            replace(each, version=0) if each.session == session else each for each in self._staged
        ]
        self._complete.pop(session, None)
        self._wake.set()

    def drop(self, session: str, *, complete: bool) -> None:
        """What is staged of this session will be made again; ``complete``: complete versions, too."""

        def again(staged: _Staged) -> bool:
            return staged.session == session and (complete or not self._is_complete(staged))

        if complete:
            self._again.add(session)
        dropped = [each for each in self._staged if again(each)]
        self._staged = [each for each in self._staged if not again(each)]
        self._finish(dropped)

    def rewind(self, stream: Stream) -> None:
        """The stream is read again from where others have left it."""
        self._rewound.add(stream)

    def forget(self) -> None:
        """The engine is gone: versions that are not complete will be made again."""
        complete, dropped = self._take(), self._staged
        # the next engine may make their versions again, and those are not complete
        self._staged = _completed(complete)
        self._complete.clear()
        self._finish(dropped)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """The source is not read meanwhile, so partitions that are not known to be ours are not."""
        self._gives_up = True
        try:
            yield
        finally:
            self._gives_up = False

    async def settle(self, within_s: float | None = None) -> bool:
        """Let all that is complete now be committed; False where that takes longer (`SETTLE_S`)."""
        if self._stopped:
            return True
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._wake.set()
        await asyncio.wait([done], timeout=SETTLE_S if within_s is None else within_s)
        return self._stopped or (done.done() and not done.cancelled() and done.result())

    async def run(self) -> None:
        """Commit as soon as something is complete. Raises Fenced.

        A transaction that is under way when this is cancelled goes on, for `stop` to wait for.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            settling = len(self._waiting)
            try:
                self._under_way = asyncio.create_task(self._commit())
                done = await asyncio.shield(self._under_way)
            except Exception:
                self._end()
                raise
            self._settled(settling, done)

    def _settled(self, count: int, done: bool) -> None:
        """Tell the first ``count`` of those that wait."""
        settled, self._waiting = self._waiting[:count], self._waiting[count:]
        for each in settled:
            each.set_result(done)

    def _end(self) -> None:
        """Nothing is committed from now on."""
        self._stopped = True
        self._settled(len(self._waiting), False)

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
        self._end()

    async def _commit(self) -> bool:
        """Commit all that is complete, in one transaction if none is refused; False where it was given up."""
        while True:
            taken, points = self._take(), self._tracker.to_commit()
            if not (taken or points):
                return True
            self._again.clear()
            self._rewound.clear()
            began, written = time.monotonic_ns(), False
            messages = [each.message for each in taken] + self._source.records_of(points)
            sources = {each.stream for each in taken if each.stream is not None}
            try:
                await self._sink.commit(messages, points, self._membership, sources)
            except PartitionsMoved as error:
                log.warning("%s", error)
                self._put_back(taken, points)
                self._moved(error.partitions - self._rewound)
                continue
            except MessagesRefused as error:
                self._refuse(taken, points, error)
                continue
            except SinkStopped as error:
                log.warning("%s", error)
            else:
                written = True
                self._source.note_stored(points)
                self.stored.update(points)
            finally:
                for outcome, total in self._outcomes.items():
                    total.update(self._sink.outcomes[outcome])
            self._finish(taken, time.monotonic_ns() - began if written else None)
            return written

    def _membership(self) -> Membership | None:
        found = self._source.membership
        if self._gives_up:
            found = found or Membership("")
        if found and (self._gives_up or self._is_held()):
            found = found._replace(placing=frozenset())
        return found and found._replace(partitions=found.partitions - self._rewound)

    def _put_back(self, taken: Iterable[_Staged], points: Iterable[Stream]) -> None:
        """The transaction has no effect: what is not made again goes into the next one."""
        self._tracker.not_committed(points)
        made_again = [each for each in taken if each.session in self._again]
        left = [each for each in taken if each.session not in self._again]
        self._staged = [*_completed(left), *self._staged]
        self._finish(made_again)

    def _moved(self, streams: Collection[Stream]) -> None:
        """Another member makes again what is complete of these streams, and so do we if they come back."""
        self._on_revoked(streams)
        moved = [each for each in self._staged if each.stream in streams]
        self._staged = [each for each in self._staged if each.stream not in streams]
        self._finish(moved)

    def _refuse(self, taken: list[_Staged], points: Collection[Stream], error: MessagesRefused) -> None:
        """The next transaction has a DLQ record in place of each message that the broker never takes.

        Raises Fenced where it does not take the records of progress.
        """
        if max(error.reasons) >= len(taken):
            raise Fenced(f"{self._sink.name}: where sessions stand cannot be stored: {error}") from error
        refused = {
            index: reason
            for index, reason in error.reasons.items()
            if taken[index].session not in self._again
        }
        self._put_back([each for index, each in enumerate(taken) if index not in refused], points)
        for index, reason in refused.items():
            each, (topic, key, payload, headers) = taken[index], taken[index].message
            if isinstance(each.original, DeadLetter):  # a DLQ record about a DLQ record would be refused, too
                log.error("%s refused a DLQ record for good: %s", self._sink.name, error)
            else:
                why = f"{self._sink.name} refuses a message for good: {error}"
                dead_letter = RefusedMessage(
                    each.original, topic, key or b"", payload or b"", headers, reason, why
                )
                self._delivery.on_refused(dead_letter, lambda: None)
            self._delivery.wait_for(-1)
            each.published(DeliveryOutcome.REFUSED)

    def _is_complete(self, staged: _Staged) -> bool:
        return staged.version <= self._complete.get(staged.session, 0)

    def _take(self) -> list[_Staged]:
        """What is complete, version by version within a session."""
        ready = [each for each in self._staged if self._is_complete(each)]
        self._staged = [each for each in self._staged if not self._is_complete(each)]
        return sorted(ready, key=lambda each: each.version)

    def _finish(self, taken: list[_Staged], took_ns: int | None = None) -> None:
        """``took_ns``: of the transaction that they are in; None: they are in none."""
        self._delivery.wait_for(-len(taken))
        if took_ns is not None:
            self._store.observe("foretick_transaction_seconds", took_ns)
        for each in taken:
            each.published(DeliveryOutcome.STOPPED if took_ns is None else DeliveryOutcome.DELIVERED)
