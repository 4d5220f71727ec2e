"""Kafka as a pausing source: a member of a consumer group that commits only the offsets it is given.

It overrides aiokafka's defaults that trade correctness for throughput: no automatic commits, only committed
records are read, partitions stay with their owner. It waits for a broker that is down.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerStoppedError, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from feeds.backoff import ConnectionLog
from feeds.kafka_assignor import StandbyAssignor
from feeds.kafka_batches import Damaged
from feeds.kafka_client import (
    NO_HEADERS,
    PROBE_S,
    broker_time_ms,
    close_client,
    committed_points,
    connections_of,
    generation_of,
    has_stopped_fetching,
    headers_of,
    open_client,
)
from feeds.kafka_follower import FOLLOW_S, KafkaFollower
from feeds.kafka_reader import damaged_message, description_of, is_of_data, read_all_raw, read_one
from feeds.source import (
    CommitFailed,
    CommitPoint,
    ConnectionState,
    DataUnreadable,
    Incoming,
    Kind,
    Lag,
    Membership,
    OffsetsUnknown,
    Partition,
    PartitionsLost,
    ReadCommitted,
    RebalanceListener,
    StartPosition,
    source_time_ns,
)

log = logging.getLogger(__name__)

_LOOK_BACK_MS = 500
"""Wait for the record before a committed offset; there may be only marks of transactions."""
_PLACE_S, _PLACE_EACH_S = 30.0, 2.0
"""Longest wait for the offsets of new partitions, and more for each; then the client is opened again."""
_REJOIN_S = 4.0
"""The same while a member that joins again sends no heartbeats: less than any session timeout."""

READ_WHOLE = 100_000
"""A partition that is at most this many records behind is read whole, however old they are."""

StartAt = int | Literal["committed", "latest", "earliest", "retention"]
OnUnreadable = Literal["skip", "stop"]

_STANDBY_HEARTBEAT_MS = 300
"""A member hears of a rebalance by its heartbeat, so a standby's is frequent."""
_NEVER_MS = 10**12
UNREAD_S = 10.0
"""A partition of which the broker has said nothing for so long cannot be read: with records or without, it
answers within a second.
"""
_LOOK_S, _POSITION_S = 1.0, 0.05
"""How often lags are noted, and the longest wait for a position, which a new partition lacks at first."""


class KafkaSource:
    """Records of topics as a member of a consumer group (*pausing*: the broker keeps what we do not fetch).

    ``options`` are passed to aiokafka unchanged. ``group`` None reads every partition and commits nothing.
    ``start_at`` is where the first assignment begins, an int: at this time, ns. "committed", as all later
    assignments, begins where its listener says, else as far before the committed offset as windows span:
    those records are history. `hold` says what windows hold. Times are those of Kafka's records.
    ``skipped``: offsets skipped so far, by partition; ``moved``: partitions that went elsewhere.

    A standby is a member without partitions, and reads what the others have committed. When it is
    given partitions, it goes on there. ``behind``: committed records that it has not read, by partition; None
    before it has looked.
    """

    kind: Kind = "pausing"
    lost = 0

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topics: list[str],
        group: str | None,
        *,
        max_records: int = 5000,
        poll_ms: int = 200,
        commit_timeout_s: float = 10.0,
        stop_timeout_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        start_at: StartAt = "committed",
        on_unreadable: OnUnreadable = "skip",
    ) -> None:
        self.name = name
        self.connection = ConnectionLog(name, bootstrap, log)
        self._bootstrap = bootstrap
        self._topics = topics
        self._group = group
        self._max_records = max_records
        self._poll_ms = poll_ms
        self._commit_timeout_s = commit_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._clock_ns = clock_ns
        self._stops_at_damage = on_unreadable == "stop"
        self._config = {
            "group_id": group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
            # While paused nothing is fetched. One that left the group then would join again only with a
            # fetch, which may wait for a commit, which needs a member.
            "max_poll_interval_ms": _NEVER_MS,
            # A class of its own: aiokafka keeps the sticky assignor's state on the class, shared by all
            # consumers.
            "partition_assignment_strategy": (type("Sticky", (StandbyAssignor,), {}),),
            **(options or {}),
        }
        self._consumer: AIOKafkaConsumer | None = None
        self._read: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, tuple[int, int]] = {}
        self._looked = 0.0
        self.read_until_ns = self._caught_up_ns = 0
        """All that the partitions had then, monotonic, was taken; or is as the next batch is asked for."""
        self._marks: dict[TopicPartition, tuple[int, int]] = {}
        """An end of each partition that is behind, and when it was the end, monotonic, ns."""
        self._caught_up: dict[TopicPartition, int] = {}
        self._polled: dict[TopicPartition, tuple[int, int]] = {}
        """When the broker answered last about a partition: ms of the system's clock, and ns, monotonic."""
        self._paused = False
        self._stop = asyncio.Event()
        self._quiet_since = 0.0
        self._waits_since: int | None = None
        """Since when records are waited for, monotonic, ns; None while those that came are taken."""
        self._now = 0
        self._stamp: int | None = None
        self._stamp_ns = 0
        """Time of the newest record as its source wrote it, and in ns; 0 is unknown."""
        self.skipped: dict[Partition, int] = {}
        self._read_committed: ReadCommitted | None = None
        self.moved = 0
        self.unknown_times = 0
        """Records whose time is unknown, because it is outside the years 1990 to 2099."""
        self._start_at = start_at
        self._span_ns, self._skips, self._few = 0, False, READ_WHOLE
        self._assigned: set[TopicPartition] = set()
        self._began = False
        self._floor: dict[TopicPartition, int] = {}
        self._answered: dict[TopicPartition, int] = {}
        """Time of the newest bar that was answered before a partition was ours, ns."""
        self._listener: RebalanceListener | None = None
        self._rejoined = False
        """The group was formed again."""
        self._joining = asyncio.Lock()
        """Held until it is known what is lost."""
        self._lost: set[TopicPartition] = set()
        """Partitions that somebody else may have read meanwhile, though they are assigned to us again."""
        self._member: Membership | None = None
        """Ours by the newest assignment, with the partitions that were begun."""
        self.reached: dict[Partition, tuple[int, int]] = {}
        self._asked_for: set[TopicPartition] = set()
        """Partitions whose past was asked for, and that have not caught up."""
        self._stands_by = self._serves = False
        """It is a standby until it is given partitions; it was."""
        self._follower: KafkaFollower | None = None
        self._followed: dict[TopicPartition, CommitPoint] = {}
        self.behind: dict[Partition, int] | None = None
        self._before_serving: Callable[[], Awaitable[None]] | None = None

    def set_retention(self, span_ns: int, skips: bool, few: int = READ_WHOLE) -> None:
        """Windows span ``span_ns``; with ``skips``, a group's records twice as old are skipped.

        A partition that is ``few`` records behind is read whole.
        """
        self._span_ns, self._skips, self._few = span_ns, skips, few

    def read_committed_by(self, read: ReadCommitted) -> None:
        """See `feeds.source.MemberSource`."""
        self._read_committed = read

    def stand_by(self, before_serving: Callable[[], Awaitable[None]] | None = None) -> None:
        """Be a standby from the next `start` on: see the class."""
        self._stands_by, self._before_serving = True, before_serving
        self._config["partition_assignment_strategy"][0].standby = True
        heartbeat_ms = min(_STANDBY_HEARTBEAT_MS, self._config.get("heartbeat_interval_ms", 3000))
        self._config["heartbeat_interval_ms"] = heartbeat_ms

    @property
    def again(self) -> bool:
        """Whether the first assignment begins in a past that was asked for, which is answered again."""
        return not self._began and self._asks

    @property
    def _asks(self) -> bool:
        return self._start_at == "earliest" or isinstance(self._start_at, int)

    def set_rebalance_listener(self, listener: RebalanceListener) -> None:
        """Tell ``listener`` which partitions come and go, and begin where it says."""
        self._listener = listener

    async def stored(self) -> Mapping[Partition, CommitPoint]:
        """What the group has committed in each partition of the topics; waits for the broker."""
        if self._group is None:
            return {}
        settings = {"bootstrap_servers": self._bootstrap, **self._config}
        self._stop.clear()
        while not self._stop.is_set():
            new = partial(AIOKafkaConsumer, **settings)
            consumer = await open_client(new, self.connection, self._stop, self._stop_timeout_s, settings)
            if consumer is None:
                break
            try:
                async with asyncio.timeout(_PLACE_S):
                    # without a subscription it is no member of the group
                    cluster = await connections_of(consumer).fetch_all_metadata()
                    partitions = [
                        TopicPartition(topic, number)
                        for topic in self._topics
                        for number in cluster.partitions_for_topic(topic) or ()
                    ]
                    if self._stands_by:  # it is read again when we have the partitions
                        found = await committed_points(consumer, partitions)
                    else:
                        found = await self._committed(consumer, partitions)
                return {(p.topic, p.partition): point for p, point in found.items()}
            except (KafkaError, OffsetsUnknown, TimeoutError) as error:
                await self.connection.wait_before_retry(repr(error))
            finally:
                await close_client(consumer, self._stop_timeout_s)
        return {}

    async def peer_offsets(self) -> Mapping[Partition, CommitPoint]:
        """See `LogSource.peer_offsets`."""
        consumer = self._consumer
        if consumer is None or self._group is None:
            return {}
        theirs = [
            TopicPartition(topic, number)
            for topic in self._topics
            for number in consumer.partitions_for_topic(topic) or ()
        ]
        theirs = [partition for partition in theirs if partition not in consumer.assignment()]
        if not theirs:
            return {}
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                found = await committed_points(consumer, theirs)
        except (KafkaError, TimeoutError) as error:
            raise ConnectionError(
                f"{self.name}: the offsets of other daemons are not known: {error!r}"
            ) from error
        return {(p.topic, p.partition): point for p, point in found.items()}

    @property
    def stays(self) -> bool:
        """A member reads its partitions again without a rebalance; a standby waits for one that leaves."""
        return self._consumer is not None and not self._stands_by

    async def start(self) -> None:
        """Join the group; waits for the broker as long as needed, or until ``stop``.

        A member stays one. The next `batches` begin where its partitions would after an assignment.
        """
        self._stop.clear()
        self._assigned, self._lost = set(), set()
        self._serves, self.behind = False, None
        if self._consumer is None:
            self.connection.connecting()
            await self._open()
        self._quiet_since = time.monotonic()

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Up to ``max_records`` messages at a time, in offset order within each partition, until ``stop``.

        Raises PartitionsLost where one that stood by had partitions, and others have them all now.
        """
        self._waits_since = time.monotonic_ns()
        while (consumer := self._consumer) is not None and not self._stop.is_set():
            self.read_until_ns = self._caught_up_ns
            try:
                if self._stands_by and not consumer.assignment():
                    followed = await self._follow(consumer)
                    if followed:
                        self._waits_since = None
                        yield followed
                        self._waits_since = time.monotonic_ns()
                    continue
                each_s = _PLACE_EACH_S * len(consumer.assignment())
                async with asyncio.timeout(_PLACE_S + each_s) as limit:
                    await self._place(consumer, limit)
                await self._stop_following()
                self._pause_assigned(consumer)
                fetched = await self._fetch(consumer)
                if self._rejoined:  # the client went on from the committed offsets
                    continue
                async with asyncio.timeout(_PLACE_S):
                    fetched = await self._skip(consumer, fetched)
            except ConsumerStoppedError:
                if self._stop.is_set():
                    return
                raise
            except IllegalStateError:  # a partition was revoked meanwhile
                continue
            except (KafkaError, OffsetsUnknown, TimeoutError) as error:
                await self._reopen(error)
                continue
            await self._look(consumer, fetched)
            if fetched:
                self.connection.up()
                self._quiet_since = time.monotonic()
                self._waits_since = None
                yield [message for messages in fetched.values() for message in messages]
                self._waits_since = time.monotonic_ns()
            else:
                await self._probe(consumer)

    async def _fetch(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, list[Incoming]]:
        """Messages by partition; waits for the first. Raises DataUnreadable where the settings say so."""
        try:
            return await self._fetch_quickly(consumer)
        except Exception as error:
            if not is_of_data(error):
                raise
            why = repr(error)
        return await self._fetch_carefully(consumer, why)

    async def _fetch_carefully(
        self, consumer: AIOKafkaConsumer, why: str
    ) -> dict[TopicPartition, list[Incoming]]:
        """The same where the client cannot read some partition: it has not said which."""
        starts = {
            each: self.reached[tuple(each)][0]
            for each in consumer.assignment() - consumer.paused()
            if tuple(each) in self.reached
        }
        for partition, start in starts.items():  # what the client had read of the others is lost
            consumer.seek(partition, start)
        self._now = self._clock_ns()
        read = await read_all_raw(consumer, starts.items())
        if starts and not read:
            raise KafkaError(f"nothing can be read: {why}")
        damaged = [(p, each) for p, items in read.items() for each in items if isinstance(each, Damaged)]
        if self._stops_at_damage and (found := next((d for d in damaged if d[1].batch), None)):
            raise DataUnreadable(f"{self.name}: {description_of(*found)}")
        return {p: [self._message(p, each) for each in items] for p, items in read.items() if items}

    def _message(self, partition: TopicPartition, item: Any) -> Incoming:
        if isinstance(item, Damaged):
            return damaged_message(partition, item, self._now)
        return self._incoming(partition, item)

    async def _fetch_quickly(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, list[Incoming]]:
        """Messages by partition, at most ``max_records``; waits for the first."""
        self._now = self._clock_ns()
        fetched = await consumer.getmany(timeout_ms=self._poll_ms, max_records=1)
        stopped = consumer is not self._consumer
        if not (fetched or stopped) and has_stopped_fetching(consumer):
            raise KafkaError("the client has stopped fetching")
        if fetched and self._max_records > 1:
            self._now = self._clock_ns()
            for partition, more in (await consumer.getmany(max_records=self._max_records - 1)).items():
                fetched.setdefault(partition, []).extend(more)
        return {
            partition: [self._incoming(partition, each) for each in records]
            for partition, records in fetched.items()
        }

    def pause(self) -> None:
        """Stop fetching from every partition, including those assigned later. The membership stays alive."""
        self._paused = True
        if self._consumer is not None:
            self._pause_assigned(self._consumer)

    def resume(self) -> None:
        """Fetch again."""
        self._paused = False
        if self._waits_since is not None:
            self._waits_since = time.monotonic_ns()
        if self._consumer is not None:
            self._consumer.resume(*self._consumer.paused())

    @property
    def lags(self) -> dict[Partition, Lag]:
        """Of the partitions that are assigned, as of the last second; while paused, too."""
        now, found = self._clock_ns(), {}
        for partition, (position, end) in self._ends.items():
            waiting, read = max(0, end - position), self._read.get(partition, 0)
            found[partition.topic, partition.partition] = Lag(
                waiting, max(0, now - read) if waiting and read else 0
            )
        return found

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Store the points; those of partitions now assigned elsewhere are left to their new owner.

        Raises:
            CommitFailed: no group, the broker does not answer in time, or the group is rebalancing.
        """
        consumer = self._consumer
        if consumer is None or self._group is None:
            raise CommitFailed(f"{self.name}: cannot commit: not a started member of a consumer group")
        member = self.membership
        if member is None or not member.partitions:
            raise CommitFailed(
                f"{self.name}: cannot commit: no partition is assigned while the group rebalances"
            )
        ours = {TopicPartition(*p): each for p, each in points.items() if p in member.partitions}
        if not ours:
            return
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                await consumer.commit(ours)
        except (KafkaError, TimeoutError) as error:
            raise CommitFailed(f"{self.name}: offsets not stored: {error!r}") from error

    @property
    def membership(self) -> Membership | None:
        """Ours, as the group's coordinator told it; None while there is none.

        A new generation has no partitions until they are assigned: those known before may be others' now.
        """
        member, consumer = self._member, self._consumer
        if (
            member is None
            or consumer is None
            or generation_of(consumer) != (member.generation, member.member)
        ):
            return None
        return member

    async def stop(self) -> None:
        """Leave the group within ``stop_timeout_s``."""
        self._stop.set()
        consumer, self._consumer = self._consumer, None
        await self._stop_following()
        if consumer is not None:
            await close_client(consumer, self._stop_timeout_s)
        self.connection.stopped()

    async def _open(self) -> None:
        settings = {"bootstrap_servers": self._bootstrap, **self._config}

        def new() -> AIOKafkaConsumer:
            consumer = AIOKafkaConsumer(**settings)
            joined = partial(self._joined, consumer)
            consumer.subscribe(self._topics, listener=_Rebalance(self._leaving, joined))
            return consumer

        self._consumer = await open_client(new, self.connection, self._stop, self._stop_timeout_s, settings)

    async def _follow(self, consumer: AIOKafkaConsumer) -> list[Incoming]:
        """Messages that other members have committed since; ``consumer`` is our membership."""
        if self._serves:
            raise PartitionsLost(
                f"{self.name}: another member of the group owns all partitions; start again as its standby"
            )
        if self._follower is None:
            settings = {
                "bootstrap_servers": self._bootstrap,
                **self._config,
                **{"group_id": None, "group_instance_id": None},
            }
            new = partial(AIOKafkaConsumer, **settings)
            opened = await open_client(new, self.connection, self._stop, self._stop_timeout_s, settings)
            if opened is None:
                return []
            self._follower, self._followed, self._looked = KafkaFollower(opened, self._max_records), {}, 0.0
        if time.monotonic() - self._looked >= FOLLOW_S:
            self._looked = time.monotonic()
            await self._look_ahead(consumer, self._follower)
        self._now = self._clock_ns()
        fetched = await self._follower.read(_POSITION_S)
        messages: list[Incoming] = []
        for partition, records in fetched.items():
            messages += [self._message(partition, each) for each in records]
            self._read[partition] = messages[-1].ts_source_ns
        return messages

    async def _look_ahead(self, consumer: AIOKafkaConsumer, follower: KafkaFollower) -> None:
        """Let ``follower`` read what is committed by now, and tell the listener first."""
        names = [
            TopicPartition(topic, number)
            for topic in self._topics
            for number in consumer.partitions_for_topic(topic) or ()
        ]
        async with asyncio.timeout(_PLACE_S + _PLACE_EACH_S * len(names)) as limit:
            found = await committed_points(consumer, names)
            moved = {p: point for p, point in found.items() if self._followed.get(p) != point}
            wanted: Mapping[Partition, StartPosition] = {}
            if moved and self._listener is not None:
                points = {(p.topic, p.partition): at for p, at in moved.items()}
                with _not_counted(limit):
                    wanted = await self._listener.follows(points)

            async def place(reading: AIOKafkaConsumer, partition: TopicPartition) -> None:
                await self._resume(reading, partition, moved[partition].offset, wanted.get(tuple(partition)))

            if new := [each for each in moved if each not in follower]:
                await follower.add(new, place)
            follower.allow({partition: point.offset for partition, point in moved.items()})
            self._followed |= moved
            behind = await follower.behind()
        self.connection.up()
        self.behind = {(p.topic, p.partition): max(0, limit - at) for p, (at, limit) in behind.items()}
        ends = {p: (at, follower.consumer.highwater(p)) for p, (at, _) in behind.items()}
        self._ends = {p: (at, end) for p, (at, end) in ends.items() if end is not None}

    async def _stop_following(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            await close_client(follower.consumer, self._stop_timeout_s)

    async def _place(self, consumer: AIOKafkaConsumer, limit: asyncio.Timeout) -> None:
        """Seek in partitions that are new to us, and count those that went elsewhere."""
        async with self._joining:
            rejoined, self._rejoined = self._rejoined, False
            lost, self._lost = self._lost, set()
        assigned = set(consumer.assignment())
        gone = self._assigned - assigned
        self.moved += len(gone)
        if gone and self._listener is not None:
            self._listener.on_revoked([tuple(partition) for partition in gone])
        self._assigned -= gone | lost
        new, starts = assigned - self._assigned, dict[TopicPartition, int]()
        if new and self._stands_by and not self._serves and self._before_serving is not None:
            await self._before_serving()
        if new:
            stored = {} if self._group is None else await self._committed(consumer, sorted(new))
            wanted: Mapping[Partition, StartPosition] = {}
            if self._listener is not None:
                points = {tuple(p): stored.get(p, CommitPoint(0)) for p in new}
                with _not_counted(limit):
                    wanted = await self._listener.on_assigned(points)
            self._serves = True  # the listener answers from now on, whatever fails below
            for partition in sorted(new):
                committed = stored[partition].offset if partition in stored else None
                self._floor[partition] = committed or 0
                begin = wanted.get(tuple(partition))
                self._answered[partition] = begin.answered_ns if begin else 0
                if self._began or self._start_at == "committed":
                    await self._resume(consumer, partition, committed, begin)
                else:
                    await self._begin(consumer, partition, self._start_at)
                starts[partition] = await consumer.position(partition)
        for partition in assigned - new if rejoined else ():
            # the client goes on from the committed offset, we from where we were
            consumer.seek(partition, self.reached[partition.topic, partition.partition][1])
        if self._rejoined:  # what was new may have been somebody else's again
            return
        # all at once: what is begun is also ours, by the membership
        for partition, start in starts.items():
            self.reached[partition.topic, partition.partition] = start, start
            if self._listener is not None:
                self._listener.begins((partition.topic, partition.partition), start)
        self._began = self._began or bool(assigned)
        self._assigned = assigned
        if self._member is not None:
            self._member = self._member._replace(partitions=_names(assigned), placing=frozenset())
        if new and self._listener is not None:
            await self._listener.commit()

    async def _resume(
        self,
        consumer: AIOKafkaConsumer,
        partition: TopicPartition,
        committed: int | None,
        wanted: StartPosition | None,
    ) -> None:
        """Begin at ``wanted``, by default far enough before ``committed`` to fill the windows."""
        if committed is None:  # this client may have read on before
            await consumer.seek_to_beginning(partition)
            return
        offset, lookback_end, _ = wanted or StartPosition(committed, lookback_end=committed)
        start = min(committed, offset)
        if lookback_end and self._span_ns:
            start = min(start, await self._before(consumer, partition, min(committed, lookback_end)))
        beginning = (await consumer.beginning_offsets([partition]))[partition]
        consumer.seek(partition, max(start, beginning))

    async def _before(self, consumer: AIOKafkaConsumer, partition: TopicPartition, committed: int) -> int:
        """The offset as long before the last record below ``committed`` as windows span."""
        beginning = int((await consumer.beginning_offsets([partition]))[partition])
        back = 1
        while committed - back >= beginning:
            consumer.resume(partition)
            consumer.seek(partition, committed - back)
            options = {"timeout_ms": _LOOK_BACK_MS, "max_records": 1}
            found = (await read_one(consumer, partition, committed - back, **options))[:1]
            if found and (read_ns := source_time_ns(getattr(found[0], "timestamp", None))):
                at = await _offset_at(consumer, partition, read_ns - self._span_ns)
                # one that is older cannot be behind it: this broker does not know offsets by time
                return at if at <= found[0].offset else beginning
            back *= 2  # only marks of transactions, or a record whose time is unknown
        return beginning

    async def _joined(self, consumer: AIOKafkaConsumer) -> None:
        """There is another assignment. Partitions that we had may have been somebody else's in between.

        aiokafka does not tell: a member that hung past its session still has them until it has joined again.
        """
        self._rejoined = True
        async with self._joining:
            assigned = set(consumer.assignment())
            kept = self._assigned & assigned
            self._lost |= self._assigned - kept  # the next assignment may bring them back
            if kept and self._listener is not None:
                self._lost |= await self._look_back(consumer, kept, self._listener)
            if self._group is not None:
                owned = kept - self._lost
                self._member = Membership(
                    self._group,
                    *generation_of(consumer),
                    self._config.get("group_instance_id"),
                    _names(owned),
                    _names(assigned - owned),
                )

    async def _look_back(
        self, consumer: AIOKafkaConsumer, kept: set[TopicPartition], listener: RebalanceListener
    ) -> set[TopicPartition]:
        """Those that others had in between; all where that is not known."""
        try:
            async with asyncio.timeout(_REJOIN_S):
                stored = await self._committed(consumer, sorted(kept))
        except (KafkaError, OffsetsUnknown, TimeoutError) as error:
            log.warning("%s: it is not known whether other members had its partitions: %r", self.name, error)
            return kept
        found = listener.answered_elsewhere({(p.topic, p.partition): at for p, at in stored.items()})
        return {TopicPartition(*partition) for partition in found}

    async def _leaving(self) -> None:
        if self._listener is not None:
            await self._listener.commit()

    async def _committed(
        self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, CommitPoint]:
        """What the group has committed. aiokafka may tell what it was before a transaction that is ending."""
        if self._read_committed is None or self._group is None:
            return await committed_points(consumer, partitions)
        names = [(each.topic, each.partition) for each in partitions]
        return {TopicPartition(*p): at for p, at in (await self._read_committed(self._group, names)).items()}

    async def _begin(self, consumer: AIOKafkaConsumer, partition: TopicPartition, at: StartAt) -> None:
        if at == "earliest":
            await consumer.seek_to_beginning(partition)
        elif at == "latest":
            await consumer.seek_to_end(partition)
        elif at == "retention":
            consumer.seek(partition, await _offset_at(consumer, partition, self._clock_ns() - self._span_ns))
        elif isinstance(at, int):
            consumer.seek(partition, await _offset_at(consumer, partition, at))
        if at == "earliest" or isinstance(at, int):
            self._asked_for.add(partition)

    async def _skip(
        self, consumer: AIOKafkaConsumer, fetched: dict[TopicPartition, list[Incoming]]
    ) -> dict[TopicPartition, list[Incoming]]:
        """Without what is twice as old as windows span, and too much to read; its partitions go forward.

        Not where newer bars were answered: one symbol that is quiet holds back the committed offset.
        """
        if not (self._skips and self._span_ns):
            return fetched
        kept = dict(fetched)
        for partition, messages in fetched.items():
            asked_for = partition in self._asked_for
            floor = self._floor.get(partition, 0)
            first = next((message for message in messages if message.offset >= floor), None)
            if first is None:  # history
                continue
            if self._now - messages[-1].ts_source_ns <= self._span_ns:
                self._asked_for.discard(partition)
            newest = max(first.ts_source_ns, self._answered.get(partition, 0))
            too_old = first.ts_source_ns > 0 and newest < self._now - 2 * self._span_ns
            if not too_old or asked_for or self._group is None:
                continue
            if (consumer.highwater(partition) or 0) - first.offset <= self._few:
                continue
            held = await _offset_at(consumer, partition, self._now - self._span_ns)
            if held <= first.offset:  # a record before it has a time that is still to come
                continue
            consumer.seek(partition, held)
            del kept[partition]
            name = (partition.topic, partition.partition)
            self.skipped[name] = self.skipped.get(name, 0) + held - first.offset
            log.warning(
                "%s: %s/%d was behind: skipped offsets %d to %d, older than any window holds (%.0f s)",
                self.name, *name, first.offset, held - 1, self._span_ns / 1e9,
            )  # fmt: skip
        return kept

    def _pause_assigned(self, consumer: AIOKafkaConsumer) -> None:
        if self._paused:
            with contextlib.suppress(IllegalStateError):  # revoked meanwhile: nothing to pause
                consumer.pause(*(consumer.assignment() - consumer.paused()))

    async def _reopen(self, error: KafkaError | OffsetsUnknown | TimeoutError) -> None:
        """Restart from the committed offsets after an error that the client cannot recover from."""
        await self.connection.wait_before_retry(repr(error))
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await close_client(consumer, self._stop_timeout_s)
        self._lost |= self._assigned
        await self._open()

    async def _look(
        self, consumer: AIOKafkaConsumer, fetched: Mapping[TopicPartition, list[Incoming]]
    ) -> None:
        """Note how far each partition is read, once a second: its position also counts control batches."""
        for partition, messages in fetched.items():
            self._read[partition] = messages[-1].ts_source_ns
            read = messages[-1].last_offset + 1
            self.reached[partition.topic, partition.partition] = read, read
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        ends = {}
        for partition in consumer.assignment():
            with contextlib.suppress(KafkaError, TimeoutError, IllegalStateError):
                async with asyncio.timeout(_POSITION_S):
                    position = await consumer.position(partition)
                if self._rejoined:  # it is the committed offset
                    return
                read, before = self.reached.get((partition.topic, partition.partition), (position, 0))
                self.reached[partition.topic, partition.partition] = read, max(before, position)
                end = consumer.highwater(partition)
                if end is not None:
                    ends[partition] = position, end
                    self._note_caught_up(partition, position, end, consumer.last_poll_timestamp(partition))
        self._ends = ends
        if consumer.assignment():
            reached = min(self._caught_up.get(partition, 0) for partition in consumer.assignment())
            self._caught_up_ns = max(self._caught_up_ns, reached)
        elif (member := self.membership) and not (member.partitions or member.placing):  # nothing to read
            self._caught_up_ns = time.monotonic_ns()

    def _note_caught_up(self, partition: TopicPartition, position: int, end: int, polled_ms: int) -> None:
        """``end``: the partition's, when the broker answered last, at ``polled_ms`` of the system's clock."""
        polled_ns = self._polled_ns(partition, polled_ms)
        marked, since_ns = self._marks.get(partition, (end, polled_ns))
        if position >= min(marked, end):
            self._caught_up[partition] = polled_ns if position >= end else since_ns
            self._marks[partition] = end, polled_ns
        else:
            self._marks[partition] = marked, since_ns

    def _polled_ns(self, partition: TopicPartition, polled_ms: int) -> int:
        """When the broker answered last, ``polled_ms`` of the system's clock, on the monotonic clock, ns."""
        known_ms, polled_ns = self._polled.get(partition, (0, 0))
        if known_ms != polled_ms:  # once for each answer: the system's clock may be set meanwhile
            polled_ns = time.monotonic_ns() - max(0, time.time_ns() - polled_ms * 1_000_000)
            self._polled[partition] = polled_ms, polled_ns
        return polled_ns

    def unread(self) -> list[str]:
        """See `PartitionedSource`. One that is paused could be read, and a standby has none."""
        consumer = self._consumer
        if consumer is None:
            down = self.connection.state is ConnectionState.DOWN
            return [f"{self.name} cannot be read: {self.connection.why}"] if down else []
        assigned = consumer.assignment()
        if not assigned and self._group is not None and self._member is None and not self._stands_by:
            return [f"{self.name} waits for its partitions"]
        if self._paused:
            return []
        now, found = time.monotonic_ns(), []
        for partition in sorted(assigned - consumer.paused()):
            polled_ms = consumer.last_poll_timestamp(partition)
            if polled_ms is None:
                found.append(f"{partition.topic}/{partition.partition} is not read yet")
                continue
            polled_ns = self._polled_ns(partition, polled_ms)
            silent_s = (now - max(polled_ns, self._waits_since or now)) / 1e9
            if silent_s > UNREAD_S:
                why = f": {self.connection.why}" if self.connection.why else ""
                found.append(
                    f"{partition.topic}/{partition.partition} cannot be read: nothing of it came from the "
                    f"broker for {silent_s:.0f} s{why}"
                )
        return found

    async def _probe(self, consumer: AIOKafkaConsumer) -> None:
        if time.monotonic() - self._quiet_since < PROBE_S:
            return
        try:
            async with asyncio.timeout(PROBE_S):
                await consumer.topics()
            self.connection.up()
        except (KafkaError, TimeoutError) as error:
            self.connection.retries += 1
            self.connection.down(repr(error))
        self._quiet_since = time.monotonic()

    def _incoming(self, partition: TopicPartition, record: Any) -> Incoming:
        stamp, value = record.timestamp, record.value
        if stamp != self._stamp:  # records of one batch have few times
            self._stamp, self._stamp_ns = stamp, source_time_ns(stamp)
        if not self._stamp_ns:
            self.unknown_times += 1
        headers = headers_of(record.headers) if record.headers else NO_HEADERS
        key, offset = record.key, record.offset
        if value is None:
            topic, number = partition
            return Incoming(topic, number, offset, key, b"", headers, self._now, self._stamp_ns, null=True)
        return Incoming(partition[0], partition[1], offset, key, value, headers, self._now, self._stamp_ns)


def _names(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    return frozenset((each.topic, each.partition) for each in partitions)


@contextlib.contextmanager
def _not_counted(limit: asyncio.Timeout) -> Iterator[None]:
    """Within ``limit``, which is the broker's: the listener may take long to bring sessions back."""
    now, due = asyncio.get_running_loop().time, limit.when()
    began = now()
    limit.reschedule(None)
    yield
    limit.reschedule(None if due is None else due + now() - began)


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Calls ``leaving`` before partitions are revoked, ``joined`` as soon as there is another assignment."""

    def __init__(
        self, leaving: Callable[[], Awaitable[object]], joined: Callable[[], Awaitable[object]]
    ) -> None:
        self._leaving, self._joined = leaving, joined

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        if revoked:
            await self._leaving()

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        await self._joined()


async def _offset_at(consumer: AIOKafkaConsumer, partition: TopicPartition, time_ns: int) -> int:
    """Of the partition's first record of this time or later, else its end."""
    found = (await consumer.offsets_for_times({partition: broker_time_ms(time_ns)}))[partition]
    if found is None:
        return int((await consumer.end_offsets([partition]))[partition])
    return int(found.offset)
