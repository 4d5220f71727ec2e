"""The protocols of sources and sinks, for every transport."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence, Set
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from metrics.catalogue import Reason

Kind = Literal["pausing", "dropping"]
"""``pausing``: the upstream keeps data while we pause. ``dropping``: unread data is lost."""

Partition = tuple[str, int]
"""A topic and a partition number."""


class ConnectionState(StrEnum):
    """State of a connection."""

    STOPPED = "stopped"
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


YEAR_1990 = 631_152_000 * 10**9
YEAR_2100 = 4_102_444_800 * 10**9
"""Nanoseconds since 1970 of the first moment that counts as a time, and of the first that no longer does."""


def source_time_ns(stamp_ms: int | None) -> int:
    """Convert a source's time, ms since 1970, to ns; 0, which is unknown, outside the years 1990 to 2099.

    Producers write such times: microseconds where milliseconds are due, -1, or a clock that was never set.
    """
    if stamp_ms is not None and YEAR_1990 <= (time_ns := stamp_ms * 1_000_000) < YEAR_2100:
        return time_ns
    return 0


class Fault(msgspec.Struct, frozen=True, gc=False):
    """Why the source could not read a message, which becomes a DLQ record.

    ``last``: the last offset, where it stands for several that look the same; -1: its own.
    ``is_line``: it is a line of a file or a pushed body, which is no message and becomes no DLQ
    record. Its symbol is the message's key, and ``ts_event`` its time; 0: not known.
    """

    reason: Reason
    message: str
    last: int = -1
    is_line: bool = False
    ts_event: int = 0


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """One message as it arrived. ``ts_recv_ns``: this process's wall clock on arrival.

    ``ts_source_ns``: wall clock when the source had it, such as a broker; 0 where that is unknown, or on
    arrival. ``fault``: it could not be read. ``null``: it has no payload at all, not an empty one.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    payload: bytes
    headers: Mapping[str, bytes] = {}
    ts_recv_ns: int = 0
    ts_source_ns: int = 0
    fault: Fault | None = None
    null: bool = False

    @property
    def last_offset(self) -> int:
        """The offset of the last message that it stands for."""
        return self.offset if self.fault is None else max(self.offset, self.fault.last)


class Lag(NamedTuple):
    """Of one partition: records not read yet, and ns since the newest one that was read, 0 without any."""

    records: int
    age_ns: int


class CommitPoint(NamedTuple):
    """The next offset to read of a partition, and records that are stored before it, by name."""

    offset: int
    state: Mapping[str, bytes] = MappingProxyType({})


class OutgoingMessage(NamedTuple):
    """One message to publish. Without a payload it deletes what a compacted topic has of its key."""

    topic: str
    key: bytes | None
    payload: bytes | None
    headers: Mapping[str, bytes] = {}


class Membership(NamedTuple):
    """A member of a consumer group and the partitions it owns; without a generation: no member in particular.

    ``placing``: partitions assigned to it of which it is not known yet whether others have answered them.
    """

    group: str
    generation: int = -1
    member: str = ""
    instance: str | None = None
    partitions: frozenset[Partition] = frozenset()
    placing: frozenset[Partition] = frozenset()


class CommitFailed(RuntimeError):
    """Offsets were not stored. The next successful commit stores later ones, so nothing is lost."""


Refusal = Literal["too_large", "not_allowed", "no_topic", "refused"]
"""Why a sink refuses a message for good."""


class OffsetsUnknown(RuntimeError):
    """The committed offsets cannot be read now."""


class DataUnreadable(RuntimeError):
    """Records cannot be read, and the settings say to stop there."""


class PartitionsLost(RuntimeError):
    """Another member of the group reads all that this one read."""


class PublishRefused(RuntimeError):
    """The message can never be delivered as it is (too large, not allowed); retrying is pointless."""

    def __init__(self, message: str, reason: Refusal = "refused") -> None:
        super().__init__(message)
        self.reason = reason


class SinkStopped(RuntimeError):
    """The sink was stopped before this message was acknowledged."""


@runtime_checkable
class Source(Protocol):
    """A stream of messages in batches."""

    name: str
    kind: Kind

    @property
    def lost(self) -> int:
        """Messages known to be lost upstream, from gaps in sequence numbers."""

    async def start(self) -> None:
        """Connect; returns once messages can arrive, retrying as long as needed."""

    def batches(self) -> AsyncGenerator[Sequence[Incoming], None]:
        """Batches in arrival order, until ``stop`` or the end of the data. One consumer at a time."""

    def pause(self) -> None:
        """Stop fetching; a dropping source ignores this."""

    def resume(self) -> None:
        """Fetch again."""

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Store the next offset to read of each partition, with its records. Raises CommitFailed."""

    async def stop(self) -> None:
        """Disconnect in bounded time; ``batches`` ends."""


@runtime_checkable
class SeekingSource(Protocol):
    """A source that can start and jump to where windows begin."""

    @property
    def skipped(self) -> Mapping[Partition, int]:
        """Offsets skipped so far, by partition."""

    @property
    def deleted(self) -> Mapping[Partition, int]:
        """Offsets that were deleted before they were read, so far, by partition."""

    @property
    def moved(self) -> int:
        """Partitions that went elsewhere."""

    def set_retention(self, span_ns: int, skips: bool) -> None:
        """Windows span ``span_ns``; with ``skips``, older records are skipped when it is far behind."""


@runtime_checkable
class PartitionedSource(Protocol):
    """A source of partitions, any of which may be unreadable while the others are read."""

    def unread(self) -> list[str]:
        """What of it cannot be read now, or was not yet, for people."""


@runtime_checkable
class CatchesUp(Protocol):
    """A source that tells how far it is read."""

    @property
    def read_until_ns(self) -> int:
        """All that it had at this monotonic time was taken from ``batches``; 0 where it does not know."""


class StartPosition(NamedTuple):
    """Where to read: at ``offset``, or earlier: as far before offset ``lookback_end``, if given, as windows
    span.

    ``answered_ns``: time of the newest bar that was answered, by the records' clock; 0 where none is known.
    """

    offset: int
    lookback_end: int | None = None
    answered_ns: int = 0


class RebalanceListener(Protocol):
    """What reads a log: it learns which partitions come and go."""

    def claims(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, CommitPoint]:
        """What to store before anything of these partitions, which come, is answered: with what is stored,
        who answers. Before `on_assigned`; empty where that may wait for the first answers.
        """

    def truncated(self, partitions: Collection[Partition]) -> None:
        """The logs of these partitions, which come, end before what was read: their offsets come again."""

    async def on_assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """These partitions come, with what was committed last; `CommitPoint` (0) where nothing was.

        Returns where to begin, at most at the committed offset, where that is known. In the others, reading
        begins as far back before it as windows span.
        """

    async def follows(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Others have committed this, and what is below is read next: to be warm, and no further.

        Returns as `on_assigned`.
        """

    def answered_elsewhere(self, stored: Mapping[Partition, CommitPoint]) -> Set[Partition]:
        """Those of our partitions, with what is committed, that others have had in between and committed."""

    def begins(self, partition: Partition, start: int) -> None:
        """Reading begins at ``start``: after `on_assigned`, before its first record."""

    async def commit(self) -> bool:
        """Partitions have come, or are about to go: commit now."""

    def on_revoked(self, partitions: Collection[Partition]) -> None:
        """These partitions are somebody else's."""

    def follows_no_longer(self, partitions: Collection[Partition]) -> None:
        """What others commit in these is not read any more; they may come back, or be given to us."""

    def is_level(self) -> bool:
        """Whether all is taken that was read so far, but for a little."""

    def is_warm(self) -> bool:
        """Whether what was read behind owners is in the windows, but for a bar of each session."""

    def costs(self) -> Mapping[Partition, float]:
        """What our partitions cost, in answers a second; those that are too new to tell are left out."""

    def handed_over(self, partition: Partition, *, planned: bool, silent_ns: int) -> None:
        """Reading began of one that another member had; ``planned``: which handed it over.

        ``silent_ns``: since the group began to be formed again, as far as this member knows.
        """


@runtime_checkable
class LogSource(Protocol):
    """A source that stores commit points in the log it reads."""

    @property
    def reached(self) -> Mapping[Partition, tuple[int, int]]:
        """By partition, the offset after the newest record that was yielded, and the one to be fetched next.

        The second may be behind marks that are no records.
        """

    @property
    def again(self) -> bool:
        """Whether it begins in a past that was asked for."""

    @property
    def stays(self) -> bool:
        """Whether another `start` reads again what it has; otherwise it must be stopped first."""

    async def peer_offsets(self) -> Mapping[Partition, CommitPoint]:
        """What is committed in partitions that other readers of the group have. Raises ConnectionError."""

    async def stored(self) -> Mapping[Partition, CommitPoint]:
        """What is committed, before `start`; waits for the broker as long as needed."""

    def set_rebalance_listener(self, listener: RebalanceListener) -> None:
        """Tell ``listener`` about partitions."""


@runtime_checkable
class MemberSource(Protocol):
    """A source that is read by the members of a group."""

    def read_committed_by(self, read: "ReadCommitted") -> None:
        """Read where a partition begins by ``read``, instead of the source's own way."""

    def records_of(self, points: Mapping[Partition, CommitPoint]) -> list[OutgoingMessage]:
        """What to write in the transaction that commits these points: their records that changed."""

    def note_stored(self, points: Mapping[Partition, CommitPoint]) -> None:
        """A transaction has committed these points."""

    @property
    def membership(self) -> Membership | None:
        """Ours; None while there is none."""


@runtime_checkable
class StandbySource(Protocol):
    """A source that can wait for its partitions, and read meanwhile what their readers have committed."""

    @property
    def behind(self) -> Mapping[Partition, int] | None:
        """Committed records that are not read yet, by partition; None before it has looked."""

    def stand_by(self, before_serving: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait so from the next start on.

        ``before_serving`` is called when it is given partitions, before it reads what is committed.
        """


@runtime_checkable
class HandingOverSource(Protocol):
    """A source whose partitions others can take over while they are still read here."""

    async def hand_over(self, within_s: float) -> bool:
        """Leave them to other readers, which warm up first; whether all are theirs, within that time.

        False at once where there are no others. It is stopped next.
        """


class ReadCommitted(Protocol):
    """Reads what a group has committed, once no transaction is about to change it."""

    async def __call__(self, group: str, partitions: Sequence[Partition]) -> Mapping[Partition, CommitPoint]:
        """The points of these partitions, where there are any. Raises OffsetsUnknown."""


@runtime_checkable
class Sink(Protocol):
    """Delivers messages to topics."""

    name: str

    async def start(self) -> None:
        """Connect, retrying as long as needed."""

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Deliver one message; returns after acknowledgement. Raises PublishRefused, SinkStopped."""

    async def stop(self) -> None:
        """Disconnect in bounded time; waiting publishes raise SinkStopped."""
