"""Appends to tapes: records that wait, and which tapes must go now to keep their freshness bound.

Earliest deadline first, and not before it is needed. A tape stays behind all questions until waiting for one
more batch could make it, or one with a later deadline behind it, miss its bound. Whatever is due then goes in
front of everything but FLASH; questions fill up its batches, so each is counted as a full one.

The bound holds when the device has the capacity: whenever a record comes, all those that are waiting then and
have no later deadline fit, with one full batch before them, into the time until any deadline from the new
record's on. With one bound for all tapes: what comes within a bound takes no longer than the bound, less one
batch. Plain earliest deadline first asks for less; the rest is the price of letting questions go first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Generic, Protocol, TypeVar

from engine.step import Chunk
from regions.tape import Tape
from scheduler.request import Failure
from scheduler.types import Costs, Limits, PriorityClass

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class TapeItem(Generic[P]):
    """One indivisible piece of a tape (a bar) with whatever its owner wants back at commit.

    ``ts_event``: its event time, ns; needed when the tape keeps a span of event time.
    """

    tokens: Sequence[int]
    payload: P = None  # type: ignore[assignment] # a record without a payload is a TapeItem[None]
    ts_event: int = 0


Records = Sequence[TapeItem[Any]]


class TapeListener(Protocol):
    """Hears of every change of every tape, on the stepping thread, before the next batch is planned."""

    def on_commit(self, tape: Tape, version: int, records: Records) -> None:
        """`records` became visible together as `version`. What is submitted here is in the next batch."""

    def on_drop(self, tape: Tape, records: Records, failure: Failure) -> None:
        """`records` will never be on the tape: the data has a gap."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A record that waits for its batch."""

    seq: int
    record: TapeItem[Any]
    queued_ns: int


@dataclass(eq=False, slots=True)
class TapeAppend:
    """The records one tape still has to take, oldest first; a `Work` whose units are records."""

    tape: Tape
    queue: deque[Pending] = field(default_factory=deque)
    failures: int = 0
    """Batches lost in a row with the records at the head; the second loss drops them."""
    due: bool = False
    """Its staleness bound is near: it goes before sessions' questions."""

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
        """Number of the oldest waiting record, so that a tape with a backlog cannot hold up the others."""
        return self.queue[0].seq

    @property
    def deadline(self) -> int | None:
        """When its oldest record is to be committed (ns); None when nothing is promised."""
        return self.queue[0].queued_ns + self.tape.staleness_ns if self.tape.staleness_ns else None

    @property
    def lost(self) -> bool:
        """The tape's KV is lost."""
        return self.tape.lost

    @property
    def remaining(self) -> int:
        """Records that wait."""
        return len(self.queue)

    def head(self, n: int) -> list[TapeItem[Any]]:
        """The ``n`` oldest records."""
        return [pending.record for pending in islice(self.queue, n)]

    def lengths(self, n: int) -> list[int]:
        """Tokens of each of the ``n`` oldest records."""
        return [len(record.tokens) for record in self.head(n)]

    def times(self, n: int) -> list[int]:
        """Event time of each of the ``n`` oldest records, ns."""
        return [record.ts_event for record in self.head(n)]

    def take(self, n: int) -> list[TapeItem[Any]]:
        """Remove the ``n`` oldest records from the queue."""
        self.failures, self.due = 0, False
        return [self.queue.popleft().record for _ in range(n)]

    # `Work`, in records.

    def tokens_of(self, n: int) -> int:
        """See `Work`."""
        return sum(self.lengths(n))

    def units_within(self, tokens: int, most: int) -> int:
        """See `Work`."""
        return bisect_right(list(accumulate(self.lengths(most))), tokens)

    def blocks_needed(self, n: int, block_size: int) -> int:
        """See `Work`."""
        return self.tape.blocks_needed(self.tokens_of(n))

    def open(self, n: int) -> int:
        """Evict what the retention cannot keep together with the ``n`` records."""
        return self.tape.make_room(self.tokens_of(n), n, max(self.times(n)))

    def allocate(self, n: int) -> bool:
        """See `Work`."""
        return self.tape.acquire(self.tokens_of(n))

    def defer(self) -> None:
        """Nothing to give back: a tape's blocks stay its own."""

    def chunk(self, n: int, drafts: tuple[int, ...] = ()) -> Chunk:
        """See `Work`; a tape has no drafts."""
        return Chunk(self.tape, [token for record in self.head(n) for token in record.tokens], sample=False)


def due(appends: Iterable[TapeAppend], now: int, limits: Limits, costs: Costs | None) -> list[TapeAppend]:
    """The appends to promote at time ``now`` (ns), earliest deadline first.

    The first i are due when now + one full batch (the one that could go instead) + as many full batches as
    they take (`Passes`) would reach the i-th deadline. Without a cost model all with a bound are due at once.
    A call sorts the bounded appends and looks at their records.
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
    """How many batches it takes at most to empty the tapes added, whoever else fills these batches up.

    A batch ends for one of three reasons: its tokens are used up, but for less than the longest record; its
    rows are; or each tape took all that it may in one pass. So there are at most as many as these allow.
    """

    limits: Limits
    tokens: int = 0
    longest: int = 1
    alone: int = 0
    """Passes of all tapes, were each alone."""
    deepest: int = 0
    """Passes of the tape that takes the most."""

    def add(self, append: TapeAppend) -> None:
        """All that waits for one more tape."""
        lengths = append.lengths(append.remaining)
        passes = _alone(append, lengths, self.limits)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        self.alone += passes
        self.deepest = max(self.deepest, passes)

    @property
    def most(self) -> int:
        """The bound; never more than one tape after the other."""
        limits = self.limits
        full = self.tokens // max(1, limits.max_batch_tokens - self.longest + 1)
        return min(self.alone, self.deepest + full + self.alone // limits.max_batch_requests)


def _alone(append: TapeAppend, lengths: list[int], limits: Limits) -> int:
    """Passes for what waits for one tape: whole records, within what one append may be."""
    tape = append.tape
    most = min(limits.max_batch_tokens, tape.append_tokens)
    passes = tokens = records = oldest = newest = 0
    for pending, length in zip(append.queue, lengths, strict=True):
        at = pending.record.ts_event
        tokens, records, oldest, newest = tokens + length, records + 1, min(oldest, at), max(newest, at)
        wide = tape.append_span_ns and newest - oldest > tape.append_span_ns
        if not passes or tokens > most or records > tape.append_records or wide:
            passes, tokens, records, oldest, newest = passes + 1, length, 1, at, at
    return passes
