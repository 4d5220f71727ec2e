"""Freshness as a promise: which tapes must go now so that no record is committed later than promised.

Earliest deadline first, and not before it is needed: a tape stays behind all questions until waiting for
one more batch could make it, or one with a later deadline behind it, miss its bound. Whatever is due then
goes in front of everything but FLASH; questions fill up its batches, so each is counted as a full one.

The promise holds when the device has the capacity: whenever a record comes, all those that are waiting then
and have no later deadline fit, with one full batch before them, into the time until any deadline from the new
record's on. With one bound for all tapes: what comes within a bound takes no longer than the bound, less one
batch. That asks for more than earliest deadline first would need which never waits; it is what letting
questions go first costs, since what has waited may meet a burst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Append
from scheduler.types import Costs, Limits


def due(appends: Iterable[Append], now: int, limits: Limits, costs: Costs | None) -> list[Append]:
    """The appends to promote at time `now` (ns), earliest deadline first.

    The first i are due when now + one full batch (the one that could go instead) + as many full batches as
    they take (`Passes`) would reach the i-th deadline. Without a cost model all with a bound are due at once.
    A call sorts the bounded appends and looks at their records.
    """
    bounded = [(append.deadline, append.seq, append) for append in appends if append.tape.staleness_ns]
    if not bounded:
        return []
    bounded.sort(key=lambda item: item[:2])
    if costs is None:
        return [append for _, _, append in bounded]
    context = max(append.tape.live_tokens for _, _, append in bounded)
    batch = costs.batch_ns([(context, limits.max_batch_tokens)])
    passes = Passes(limits)
    last = 0
    for place, (deadline, _, append) in enumerate(bounded, 1):
        assert deadline is not None  # it has a bound
        passes.add(append)
        if now + batch * (1 + passes.most) >= deadline:
            last = place
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

    def add(self, append: Append) -> None:
        """All that waits for one more tape."""
        lengths = [len(pending.record.tokens) for pending in append.queue]
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


def _alone(append: Append, lengths: list[int], limits: Limits) -> int:
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
