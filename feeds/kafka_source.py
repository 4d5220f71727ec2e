"""Kafka as a pausing source: a member of a consumer group that commits only the offsets it is given.

It overrides aiokafka's defaults that trade correctness for throughput: no automatic commits, only committed
records are read, partitions stay with their owner. It waits for a broker that is down.

One client is the member of the group and fetches nothing; another one reads, also while the group is formed
again. A third one reads, behind their owners, the partitions that this member is to take over.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, ConsumerStoppedError, TopicPartition
from aiokafka.errors import KafkaError

from feeds.backoff import ConnectionLog
from feeds.kafka_assignor import WarmUpAssignor
from feeds.kafka_client import (
    PROBE_S,
    Clients,
    check_membership,
    connections_of,
    leave_at_close,
    partitions_of,
)
from feeds.kafka_fetcher import KafkaFetcher
from feeds.kafka_follower import WarmUps
from feeds.kafka_member import PLACE_S, KafkaMember
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_progress import TOPIC, ProgressTopic
from feeds.kafka_reading import KafkaReading
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

_HEARTBEAT_MS = 100
"""A member hears of a rebalance by its heartbeat, and all wait for the last one."""
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

    What it is to take over it first reads behind its owner, up to what that has committed. A standby does so
    with all partitions, and is given none while others serve.
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
        settings = _client_settings(bootstrap, group, security or {}, options or {})
        self.name = name
        self.connection = ConnectionLog(name, bootstrap, log)
        self.read_until_ns = 0
        self._topics, self._group = topics, group
        self._commit_timeout_s = commit_timeout_s
        self._clock_ns = clock_ns
        self._clients = Clients(AIOKafkaConsumer, self.connection, settings, stop_timeout_s)
        self._assignor = WarmUpAssignor()
        self._consumer: AIOKafkaConsumer | None = None
        """The member of the group."""
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
            name,
            group,
            settings.get("group_instance_id"),
            self._start,
            self._positions,
            self._progress,
            self._assignor,
        )
        of_all = self._fetcher, self._positions, self._start, self._member
        self._warm_ups = WarmUps(topics, max_records, self._clients, *of_all)
        self._reading = KafkaReading(self._clients, *of_all, self._warm_ups)
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
        self._assignor.stand_by()
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
        return self._consumer is not None and not self._assignor.is_standby

    @property
    def reached(self) -> Mapping[Partition, tuple[int, int]]:
        """See `LogSource`."""
        return self._positions.reached

    @property
    def behind(self) -> Mapping[Partition, int] | None:
        """See `StandbySource`."""
        return self._warm_ups.behind

    @property
    def skipped(self) -> Mapping[Partition, int]:
        """See `SeekingSource`."""
        return self._start.skipped

    @property
    def deleted(self) -> Mapping[Partition, int]:
        """See `SeekingSource`."""
        return self._start.deleted

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
        if not assigned and self._group is not None and self._member.is_new and not self._assignor.is_standby:
            return [f"{self.name} waits for its partitions"]
        now, found, reader = time.monotonic_ns(), [], self._reading.reader
        begun = self._reading.partitions
        for partition in sorted(assigned - self._reading.paused):
            polled_ms = (
                reader.consumer.last_poll_timestamp(partition) if reader and partition in begun else None
            )
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
                    if self._assignor.is_standby:  # it is read again when we have the partitions
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
        if member is None or not member.partitions or self._member.joining:
            raise CommitFailed(f"{self.name}: cannot commit while the group rebalances")
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
        await self._reading.restart()
        if self._consumer is None:
            self.connection.connecting()
            await self._open()
        self._quiet_since = time.monotonic()

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """Up to ``max_records`` messages at a time, in offset order within each partition, until ``stop``.

        Raises PartitionsLost where one that stood by had partitions, and others have them all now.
        """
        self._waits_since = time.monotonic_ns()
        try:
            while (consumer := self._consumer) is not None and not self._clients.stop.is_set():
                self.read_until_ns = self._positions.caught_up_ns
                try:
                    messages = await self._next(consumer)
                except ConsumerStoppedError:
                    if self._clients.stop.is_set():
                        return
                    raise
                except (KafkaError, OffsetsUnknown, TimeoutError) as error:
                    await self._reopen(error)
                    continue
                if messages:
                    self._waits_since = None
                    yield messages
                    self._waits_since = time.monotonic_ns()
        finally:
            await self._reading.rest()

    async def _next(self, consumer: AIOKafkaConsumer) -> list[Incoming]:
        """The next messages; none after a pause without any."""
        if self._assignor.is_standby and self._member.serves and not consumer.assignment():
            raise PartitionsLost(
                f"{self.name}: another member of the group owns all partitions; start again as its standby"
            )
        if self._group is not None:
            check_membership(consumer)
        fetched, warm = await self._reading.next(consumer)
        if fetched:
            self.connection.up()
            self._quiet_since = time.monotonic()
        elif self._reading.partitions:
            await self._probe(consumer)
        return [message for found in (fetched, warm) for messages in found.values() for message in messages]

    async def hand_over(self, within_s: float) -> bool:
        """See `HandingOverSource`."""
        consumer = self._consumer
        if consumer is None or self._assignor.is_standby or not self._member.others:
            return False
        self._member.leave(consumer)
        try:
            async with asyncio.timeout(within_s):
                await self._member.left.wait()
        except TimeoutError:
            log.warning("%s: not all partitions were handed over within %g s", self.name, within_s)
        has_left = self._member.left.is_set()
        if has_left and self._clients.settings.get("group_instance_id"):
            leave_at_close(consumer)
        return has_left

    def pause(self) -> None:
        """Stop fetching from every partition, including those assigned later. The membership stays alive."""
        self._reading.pause(True)

    def resume(self) -> None:
        """Fetch again."""
        if self._waits_since is not None:
            self._waits_since = time.monotonic_ns()
        self._reading.pause(False)

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
        await self._close()
        if self._progress is not None:
            await self._progress.stop()
        self.connection.stopped()

    async def _open(self) -> None:
        self._consumer = await self._clients.open(
            lambda consumer: self._member.subscribe(consumer, self._topics, self._reading.hold),
            partition_assignment_strategy=(self._assignor,),
            auto_offset_reset="latest",  # it reads nothing
        )

    async def _close(self) -> None:
        await self._reading.rest()
        consumer, self._consumer = self._consumer, None
        await self._clients.close(consumer)
        await self._reading.close()

    async def _reopen(self, error: KafkaError | OffsetsUnknown | TimeoutError) -> None:
        """Restart from the committed offsets after an error that the client cannot recover from."""
        await self.connection.wait_before_retry(repr(error))
        await self._close()
        self._member.lose_all()
        await self._open()


def _client_settings(
    bootstrap: str, group: str | None, security: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Of a client that is a member of the group."""
    found = {
        "bootstrap_servers": bootstrap,
        "group_id": group,
        "auto_offset_reset": "none",  # see `KafkaStart.go_on`
        "enable_auto_commit": False,
        "isolation_level": "read_committed",
        # A member fetches nothing, and is one all the same.
        "max_poll_interval_ms": _NEVER_MS,
        **security,
        **options,
    }
    heartbeat_ms = min(_HEARTBEAT_MS, found.get("heartbeat_interval_ms", _HEARTBEAT_MS))
    return {**found, "heartbeat_interval_ms": heartbeat_ms}
