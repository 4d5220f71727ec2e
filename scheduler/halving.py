"""What of a batch is tried again when the device had no memory for it: the upper half of its tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from scheduler.planner import Entry
from scheduler.request import Append


def upper_half(entries: Sequence[Entry]) -> list[Entry]:
    """The first of ``entries``, in their order, that make up half of the tokens.

    A prompt is cut to the tokens left, an append to the whole records left. The first always keeps at least
    one token or record, so that something moves.
    """
    left = max(1, sum(entry.tokens for entry in entries) // 2)
    kept: list[Entry] = []
    for entry in entries:
        n = _fitting(entry, left) or (0 if kept else 1)
        if n:
            kept.append(entry._replace(n=n))
            left -= kept[-1].tokens
    return kept


def _fitting(entry: Entry, tokens: int) -> int:
    """How much of the entry has at most so many tokens; never below 0 of them."""
    if isinstance(entry.work, Append):
        return bisect_right(list(accumulate(entry.work.lengths(entry.n))), tokens)
    return max(0, min(entry.n, tokens))
