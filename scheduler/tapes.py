"""Appends to tapes: waiting records, and which tapes must run now to keep their staleness bound.

Earliest deadline first, but no earlier than needed. A tape ranks below all questions until one more batch of
waiting could make it, or a tape with a later deadline, miss its bound. It is then due and ranks above
everything but FLASH. Questions fill up the batches, so each batch is counted as a full one.

The bound holds if the device has the capacity: whenever a record arrives, the waiting records with no later
deadline, plus one full batch, must fit into the time until any deadline from the new record's on. With one
bound for all tapes: the input of one bound's time takes at most that time less one batch. Plain earliest
deadline first needs less capacity; the rest is the price of letting questions go first.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Generic, TypeVar

from engine.step import Chunk
from regions.tape import Tape
from scheduler.interfaces import Costs, Limits, PriorityClass
from scheduler.request import Failure, Request

P = TypeVar("P")


@dataclass(slots=True)
class TapeItem(Generic[P]):
    """One indivisible piece of a tape (a bar), with a payload that its owner gets back at commit.

    ``ts_event``: event time, ns; required when the tape retains a span of event time. ``since_ns``: from when
    its staleness counts, by the scheduler's clock; 0 is when it is queued.
    """

    tokens: Sequence[int]
    payload: P = None  # type: ignore[assignment] # a record without a payload is a TapeItem[None]
    ts_event: int = 0
    since_ns: int = 0
    seq: int = field(default=0, compare=False)
    """Number of its append, in order of arrival; 0 before it is queued."""
    queued_ns: int = field(default=0, compare=False)
    """When it was queued, by the scheduler's clock."""

    def queue(self, seq: int, now: int) -> None:
        """Note its place in the order of arrival, and when it came."""
        self.seq, self.queued_ns = seq, now


TapeItems = Sequence[TapeItem[Any]]
OnCommit = Callable[[Tape, int, TapeItems], None]
"""The records became visible together as a version. Requests submitted here join the next batch."""
OnDrop = Callable[[Tape, TapeItems, Failure], None]
"""The records are lost for good: the tape has a gap."""


@dataclass(eq=False, slots=True)
class TapeAppend:
    """The waiting records of one tape, oldest first; work whose units are records."""

    tape: Tape
    queue: deque[TapeItem[Any]] = field(default_factory=deque)
    failures: int = 0
    """Consecutive failed batches with the oldest records; the second failure drops them."""
    due: bool = False
    """It is near its staleness bound and ranks above sessions' questions."""

    cls = PriorityClass.STREAM
    background = False
    complete = True
    decoding = False

    @property
    def session(self) -> str:
        """The tape's name."""
        return self.tape.name

    @property
    def seq(self) -> int:
        """Number of the oldest waiting record, so that a backlog on one tape does not delay the others."""
        return self.queue[0].seq

    @property
    def deadline(self) -> int | None:
        """When its oldest record must be committed, ns; None without a bound."""
        oldest, bound = self.queue[0], self.tape.staleness_ns
        return (oldest.since_ns or oldest.queued_ns) + bound if bound else None

    @property
    def away(self) -> bool:
        """The tape's KV is lost, or on its way to the pool, or out of it for want of blocks."""
        return self.tape.away or self.tape.leaving

    @property
    def remaining(self) -> int:
        """Number of waiting records."""
        return len(self.queue)

    def head(self, n: int) -> list[TapeItem[Any]]:
        """The ``n`` oldest records."""
        return list(islice(self.queue, n))

    def lengths(self, n: int) -> list[int]:
        """Tokens of each of the ``n`` oldest records."""
        return [len(record.tokens) for record in self.head(n)]

    def times(self, n: int) -> list[int]:
        """Event time of each of the ``n`` oldest records, ns."""
        return [record.ts_event for record in self.head(n)]

    def promote(self) -> None:
        """Rank above sessions' questions until records are taken."""
        self.due = True

    def retry(self) -> bool:
        """Whether the oldest records may be tried once more after a failed batch."""
        self.failures += 1
        return self.failures == 1

    def take(self, n: int) -> list[TapeItem[Any]]:
        """Remove the ``n`` oldest records from the queue."""
        self.failures, self.due = 0, False
        return [self.queue.popleft() for _ in range(n)]

    # As of a `Request`, in records.

    def tokens_of(self, n: int) -> int:
        """Tokens of the next ``n`` records."""
        return sum(self.lengths(n))

    def units_within(self, tokens: int, most: int) -> int:
        """How many of the next ``most`` records fit into ``tokens`` tokens."""
        return bisect_right(list(accumulate(self.lengths(most))), tokens)

    def blocks_needed(self, n: int, block_size: int) -> int:
        """More blocks that the next ``n`` records need."""
        return self.tape.blocks_needed(self.tokens_of(n))

    def open(self, n: int) -> int:
        """Evict what the retention cannot keep along with the ``n`` records."""
        return self.tape.make_room(self.lengths(n), self.times(n))

    def allocate(self, n: int) -> bool:
        """Allocate the blocks of the next ``n`` records. False, with nothing changed, without room."""
        return self.tape.acquire(self.tokens_of(n))

    def defer(self) -> None:
        """Does nothing: a tape keeps its blocks."""

    def chunk(self, n: int, drafts: tuple[int, ...] = ()) -> Chunk:
        """The next ``n`` records for the executor; a tape has no drafts."""
        return Chunk(self.tape, [token for record in self.head(n) for token in record.tokens], sample=False)


Work = Request | TapeAppend
"""What the planner and the allocation handle. It advances in units: tokens, or whole records."""


def due(appends: Iterable[TapeAppend], now: int, limits: Limits, costs: Costs | None) -> list[TapeAppend]:
    """The appends to promote at time ``now`` (ns), earliest deadline first.

    The first i are due when now + one full batch (one that could run first) + the full batches they need
    (`Passes`) would reach the i-th deadline. Without a cost model, all tapes with a bound are due at once.
    Each call sorts these appends and reads their records.
    """
    bounded = [
        (deadline, append.seq, append) for append in appends if (deadline := append.deadline) is not None
    ]
    if not bounded:
        return []
    bounded.sort(key=lambda item: item[:2])
    if costs is None:
        return [append for _, _, append in bounded]
    context = max(append.tape.live_tokens for _, _, append in bounded)
    batch = costs.batch_ns([(context, limits.max_batch_tokens)])
    passes = Passes(limits)
    last = 0
    for number, (deadline, _, append) in enumerate(bounded, 1):
        passes.add(append)
        if now + batch * (1 + passes.most) >= deadline:
            last = number
    return [append for _, _, append in bounded[:last]]


@dataclass(slots=True)
class Passes:
    """An upper bound on the batches that empty the added tapes, whatever else fills these batches.

    A batch ends for one of three reasons: its tokens are used up, except for less than the longest record;
    its rows are used up; or every tape took the most it may in one pass. Each reason occurs a bounded number
    of times.
    """

    limits: Limits
    tokens: int = 0
    longest: int = 1
    alone: int = 0
    """Sum of the passes of all tapes, each by itself."""
    deepest: int = 0
    """Most passes of any tape."""

    def add(self, append: TapeAppend) -> None:
        """Add all waiting records of one tape."""
        lengths = append.lengths(append.remaining)
        passes = _alone(append, lengths, self.limits)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        self.alone += passes
        self.deepest = max(self.deepest, passes)

    @property
    def most(self) -> int:
        """The bound; at most the passes of all tapes one after the other."""
        limits = self.limits
        full = self.tokens // max(1, limits.max_batch_tokens - self.longest + 1)
        return min(self.alone, self.deepest + full + self.alone // limits.max_batch_requests)


def _alone(append: TapeAppend, lengths: list[int], limits: Limits) -> int:
    """Passes for one tape's waiting records: whole records, within the limits of one append."""
    retention = append.tape.retention
    most = min(limits.max_batch_tokens, retention.tokens)
    max_records = retention.records or len(lengths)
    passes = tokens = records = oldest = newest = 0
    for item, length in zip(append.queue, lengths, strict=True):
        at = item.ts_event
        tokens, records, oldest, newest = tokens + length, records + 1, min(oldest, at), max(newest, at)
        wide = retention.span_ns and newest - oldest > retention.span_ns
        if not passes or tokens > most or records > max_records or wide:
            passes, tokens, records, oldest, newest = passes + 1, length, 1, at, at
    return passes
