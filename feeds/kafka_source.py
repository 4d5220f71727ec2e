"""Kafka as a pausing source: a member of a consumer group that commits only the offsets it is given.

It overrides aiokafka's defaults that trade correctness for throughput: no automatic commits, only committed
records are read, partitions stay with their owner. It waits for a broker that is down.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, ConsumerStoppedError, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from feeds.backoff import ConnectionLog
from feeds.kafka_assignor import assignor_of
from feeds.kafka_client import (
    PROBE_S,
    Clients,
    connections_of,
    partitions_of,
)
from feeds.kafka_fetcher import KafkaFetcher
from feeds.kafka_follower import KafkaStandby
from feeds.kafka_member import PLACE_S, KafkaMember
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_progress import TOPIC, ProgressTopic
from feeds.kafka_start import READ_WHOLE, KafkaStart, StartAt
from feeds.source import (
    CommitFailed,
    CommitPoint,
    ConnectionState,
    Incoming,
    Kind,
    Lag,
    Membership,
    OffsetsUnknown,
    OutgoingMessage,
    Partition,
    PartitionsLost,
    ReadCommitted,
    RebalanceListener,
)

log = logging.getLogger(__name__)

OnUnreadable = Literal["skip", "stop"]

_STANDBY_HEARTBEAT_MS = 300
"""A member hears of a rebalance by its heartbeat, so a standby's is frequent."""
_NEVER_MS = 10**12
UNREAD_S = 10.0
"""A partition of which the broker has said nothing for so long cannot be read: with records or without, it
answers within a second.
"""


class KafkaSource:
    """Records of topics as a member of a consumer group (*pausing*: the broker keeps what we do not fetch).

    ``options`` are passed to aiokafka unchanged. ``group`` None reads every partition and commits nothing.
    ``start_at`` is where the first assignment begins, an int: at this time, ns. "committed", as all later
    assignments, begins where its listener says, else as far before the committed offset as windows span:
    those records are history. `set_retention` says what windows hold. Times are those of Kafka's records.

    A standby is a member without partitions, and reads what the others have committed. When it is
    given partitions, it goes on there.
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
        security: Mapping[str, Any] | None = None,
        progress_topic: str = TOPIC,
        clock_ns: Callable[[], int] = time.time_ns,
        start_at: StartAt = "committed",
        on_unreadable: OnUnreadable = "skip",
    ) -> None:
        settings = {
            "bootstrap_servers": bootstrap,
            "group_id": group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
            # While paused nothing is fetched. One that left the group then would join again only with a
            # fetch, which may wait for a commit, which needs a member.
            "max_poll_interval_ms": _NEVER_MS,
            "partition_assignment_strategy": (assignor_of(),),
            **(security or {}),
            **(options or {}),
        }
        self.name = name
        self.connection = ConnectionLog(name, bootstrap, log)
        self.read_until_ns = 0
        self._topics, self._group = topics, group
        self._commit_timeout_s = commit_timeout_s
        self._clock_ns = clock_ns
        self._clients = Clients(AIOKafkaConsumer, self.connection, settings, stop_timeout_s)
        self._consumer: AIOKafkaConsumer | None = None
        self._fetcher = KafkaFetcher(
            name, max_records, poll_ms, clock_ns, self._clients.stop, on_unreadable == "stop"
        )
        self._positions = KafkaPositions()
        self._progress = None
        if group is not None:
            brokers = {"bootstrap_servers": bootstrap, **(security or {})}
            self._progress = ProgressTopic(progress_topic, group, brokers, self._clients)
        self._start = KafkaStart(name, start_at, group is not None, clock_ns)
        self._member = KafkaMember(
            name, group, settings.get("group_instance_id"), self._start, self._positions, self._progress
        )
        self._standby = KafkaStandby(
            topics, max_records, self._clients, self._fetcher, self._positions, self._start, self._member
        )
        self._is_standby = False
        self._paused = False
        self._quiet_since = 0.0
        self._waits_since: int | None = None
        """Since when records are waited for, monotonic, ns; None while those that came are taken."""

    # Settings, before it starts.

    def set_retention(self, span_ns: int, skips: bool, few: int = READ_WHOLE) -> None:
        """Windows span ``span_ns``; with ``skips``, a group's records twice as old are skipped.

        A partition that is ``few`` records behind is read whole.
        """
        self._start.set_retention(span_ns, skips, few)

    def set_rebalance_listener(self, listener: RebalanceListener) -> None:
        """Tell ``listener`` which partitions come and go, and begin where it says."""
        self._member.set_listener(listener)

    def read_committed_by(self, read: ReadCommitted) -> None:
        """See `MemberSource`."""
        self._member.read_committed_by(read)

    def records_of(self, points: Mapping[Partition, CommitPoint]) -> list[OutgoingMessage]:
        """See `MemberSource`."""
        return [] if self._progress is None else self._progress.changes(points)

    def note_stored(self, points: Mapping[Partition, CommitPoint]) -> None:
        """See `MemberSource`."""
        if self._progress is not None:
            self._progress.note(points)

    def stand_by(self, before_serving: Callable[[], Awaitable[None]] | None = None) -> None:
        """Be a standby from the next `start` on: see the class."""
        self._is_standby = True
        settings = self._clients.settings
        settings["partition_assignment_strategy"] = (assignor_of(standby=True),)
        heartbeat_ms = min(_STANDBY_HEARTBEAT_MS, settings.get("heartbeat_interval_ms", 3000))
        settings["heartbeat_interval_ms"] = heartbeat_ms
        if before_serving is not None:
            self._member.serve_after(before_serving)

    # What it has read.

    @property
    def again(self) -> bool:
        """See `LogSource`."""
        return self._start.again

    @property
    def stays(self) -> bool:
        """A member reads its partitions again without a rebalance; a standby waits for one that leaves."""
        return self._consumer is not None and not self._is_standby

    @property
    def reached(self) -> Mapping[Partition, tuple[int, int]]:
        """See `LogSource`."""
        return self._positions.reached

    @property
    def behind(self) -> Mapping[Partition, int] | None:
        """See `StandbySource`."""
        return self._standby.behind

    @property
    def skipped(self) -> Mapping[Partition, int]:
        """See `SeekingSource`."""
        return self._start.skipped

    @property
    def moved(self) -> int:
        """See `SeekingSource`."""
        return self._member.moved

    @property
    def unknown_times(self) -> int:
        """Records whose time is unknown, because it is outside the years 1990 to 2099."""
        return self._fetcher.unknown_times

    @property
    def lags(self) -> dict[Partition, Lag]:
        """Of the partitions that are assigned, as of the last second; while paused, too."""
        return self._positions.lags(self._clock_ns())

    @property
    def membership(self) -> Membership | None:
        """See `MemberSource`."""
        return self._member.of(self._consumer)

    def unread(self) -> list[str]:
        """See `PartitionedSource`. One that is paused could be read, and a standby has none."""
        consumer = self._consumer
        if consumer is None:
            down = self.connection.state is ConnectionState.DOWN
            return [f"{self.name} cannot be read: {self.connection.why}"] if down else []
        assigned = consumer.assignment()
        if not assigned and self._group is not None and self._member.is_new and not self._is_standby:
            return [f"{self.name} waits for its partitions"]
        if self._paused:
            return []
        now, found = time.monotonic_ns(), []
        for partition in sorted(assigned - consumer.paused()):
            polled_ms = consumer.last_poll_timestamp(partition)
            if polled_ms is None:
                found.append(f"{partition.topic}/{partition.partition} is not read yet")
                continue
            polled_ns = self._positions.polled_ns(partition, polled_ms)
            silent_s = (now - max(polled_ns, self._waits_since or now)) / 1e9
            if silent_s > UNREAD_S:
                why = f": {self.connection.why}" if self.connection.why else ""
                found.append(
                    f"{partition.topic}/{partition.partition} cannot be read: nothing of it came from the "
                    f"broker for {silent_s:.0f} s{why}"
                )
        return found

    # Committed offsets.

    async def stored(self) -> Mapping[Partition, CommitPoint]:
        """What the group has committed in each partition of the topics; waits for the broker."""
        stop = self._clients.stop
        stop.clear()
        while self._group is not None and not stop.is_set():
            consumer = await self._clients.open()
            if consumer is None:
                break
            try:
                async with asyncio.timeout(PLACE_S):
                    # without a subscription it is no member of the group
                    cluster = await connections_of(consumer).fetch_all_metadata()
                    partitions = partitions_of(cluster, self._topics)
                    if self._is_standby:  # it is read again when we have the partitions
                        return await self._member.offsets(consumer, partitions)
                    return await self._member.committed(consumer, partitions)
            except (KafkaError, OffsetsUnknown, TimeoutError) as error:
                await self.connection.wait_before_retry(repr(error))
            finally:
                await self._clients.close(consumer)
        return {}

    async def peer_offsets(self) -> Mapping[Partition, CommitPoint]:
        """See `LogSource.peer_offsets`."""
        consumer = self._consumer
        if consumer is None or self._group is None:
            return {}
        ours = consumer.assignment()
        theirs = [each for each in partitions_of(consumer, self._topics) if each not in ours]
        if not theirs:
            return {}
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                return await self._member.offsets(consumer, theirs)
        except (KafkaError, TimeoutError) as error:
            raise ConnectionError(
                f"{self.name}: the offsets of other daemons are not known: {error!r}"
            ) from error

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
        if self._progress is not None:
            await self._progress.write(ours, self._commit_timeout_s)
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                await consumer.commit({partition: each.offset for partition, each in ours.items()})
        except (KafkaError, TimeoutError) as error:
            raise CommitFailed(f"{self.name}: offsets not stored: {error!r}") from error

    # Reading.

    async def start(self) -> None:
        """Join the group; waits for the broker as long as needed, or until ``stop``.

        A member stays one. The next `batches` begin where its partitions would after an assignment.
        """
        self._clients.stop.clear()
        self._member.start()
        self._standby.forget()
        if self._consumer is None:
            self.connection.connecting()
            await self._open()
        self._quiet_since = time.monotonic()

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Up to ``max_records`` messages at a time, in offset order within each partition, until ``stop``.

        Raises PartitionsLost where one that stood by had partitions, and others have them all now.
        """
        self._waits_since = time.monotonic_ns()
        while (consumer := self._consumer) is not None and not self._clients.stop.is_set():
            self.read_until_ns = self._positions.caught_up_ns
            try:
                messages = await self._next(consumer)
            except ConsumerStoppedError:
                if self._clients.stop.is_set():
                    return
                raise
            except IllegalStateError:  # a partition was revoked meanwhile
                continue
            except (KafkaError, OffsetsUnknown, TimeoutError) as error:
                await self._reopen(error)
                continue
            if messages:
                self._waits_since = None
                yield messages
                self._waits_since = time.monotonic_ns()

    async def _next(self, consumer: AIOKafkaConsumer) -> list[Incoming]:
        """The next messages; none after a pause without any."""
        if self._is_standby and not consumer.assignment():
            if self._member.serves:
                raise PartitionsLost(
                    f"{self.name}: another member of the group owns all partitions; start again as its "
                    "standby"
                )
            return await self._standby.read(consumer)
        await self._member.place(consumer)
        await self._standby.stop()
        self._pause_assigned(consumer)
        fetched = await self._fetcher.fetch(consumer, self._positions.reached)
        if self._member.rejoined:  # the client went on from the committed offsets
            return []
        async with asyncio.timeout(PLACE_S):
            fetched = await self._start.skip(consumer, fetched)
        self._positions.note(fetched)
        await self._positions.look(consumer, self.membership, lambda: self._member.rejoined)
        if fetched:
            self.connection.up()
            self._quiet_since = time.monotonic()
        else:
            await self._probe(consumer)
        return [message for messages in fetched.values() for message in messages]

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

    def _pause_assigned(self, consumer: AIOKafkaConsumer) -> None:
        if self._paused:
            with contextlib.suppress(IllegalStateError):  # revoked meanwhile: nothing to pause
                consumer.pause(*(consumer.assignment() - consumer.paused()))

    async def _probe(self, consumer: AIOKafkaConsumer) -> None:
        """See whether a silent broker answers."""
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

    async def stop(self) -> None:
        """Leave the group within ``stop_timeout_s``."""
        self._clients.stop.set()
        consumer, self._consumer = self._consumer, None
        await self._standby.stop()
        await self._clients.close(consumer)
        if self._progress is not None:
            await self._progress.stop()
        self.connection.stopped()

    async def _open(self) -> None:
        self._consumer = await self._clients.open(
            lambda consumer: self._member.subscribe(consumer, self._topics)
        )

    async def _reopen(self, error: KafkaError | OffsetsUnknown | TimeoutError) -> None:
        """Restart from the committed offsets after an error that the client cannot recover from."""
        await self.connection.wait_before_retry(repr(error))
        consumer, self._consumer = self._consumer, None
        await self._clients.close(consumer)
        self._member.lose_all()
        await self._open()
