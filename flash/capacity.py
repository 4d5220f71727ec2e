"""How many standing questions a device answers between two updates (*Attention Once* section 3.9.5).

The paper's questions run one after the other. Ours share passes, so the times of equation 14 are those of
passes over all sessions: what one more session or question costs depends on how many there are, and T_f is
the mean over the questions of one update.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Protocol

from flash.registry import Standing
from scheduler.costs import CostModel, Span
from scheduler.interfaces import Limits

EDGE = 1e-9
"""A quotient this little below a whole number is that number: 0.3 / 0.1 is 3."""

_LEAST_S = 1e-9
"""Of a pass: a profile may say 0."""

MAX_SESSIONS = 1 << 20
"""Where the search for a limit stops: more are said to be as many."""

AskedTimes = tuple[tuple[float, float, float], ...]
"""Of each question of a session: its tokens, those of its answer, and how often it is asked, per bar."""


class PassCosts(Protocol):
    """What a forward pass takes: a `scheduler.costs.OnlineCosts`, or a profile with the host's part."""

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass over rows of (tokens in KV, tokens to compute)."""


@dataclass(frozen=True)
class WithHost:
    """Passes on the device, and the host's part of each by a ``profile``."""

    device: PassCosts
    profile: CostModel

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass with its step."""
        return self.device.batch_ns(spans) + self.profile.host_ns(len(spans))


@dataclass(frozen=True)
class Shape:
    """A session, or the mean one: tokens that a question reads, tokens of a bar, and its questions."""

    context: int
    bar: int
    questions: AskedTimes
    ready: int = 0
    """Tokens of the ready position's header; 0: no early exit."""

    @property
    def k(self) -> float:
        """Questions of one bar."""
        return sum(times for _, _, times in self.questions)


def asked_times(
    standing: Iterable[Standing], interval_ns: int, tokens: Callable[[Standing], int]
) -> AskedTimes:
    """Of a session's questions whose bars take ``interval_ns``; ``tokens`` ask one."""
    found = []
    for each in standing:
        asked = each.question
        times = interval_ns / asked.ask_every_ns if asked.ask_every_ns else 1 / asked.ask_every_bars
        found.append((tokens(each), each.prepared.answer_tokens(asked), min(1.0, times)))
    return tuple(found)


def k_max(data: float, ingest: float, header: float, flash: float) -> int:
    """Equation 16: the most standing questions whose background time (14) fits between two updates (15).

    ``data``: time between updates. 0 where not even the update fits. Raises ValueError unless ``data`` and
    ``flash`` are above 0 and the others at least 0.
    """
    if not (data > 0 and flash > 0 and ingest >= 0 and header >= 0):
        raise ValueError("the time between updates and that of a question must be above 0, no time below 0")
    return max(0, floor((data - ingest - header) / flash + EDGE))


def max_sessions(fits: Callable[[int], bool]) -> int | None:
    """The largest number that ``fits``, which holds up to some number only; None: `MAX_SESSIONS` fit."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MAX_SESSIONS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def passes_ns(rows: int, span: Span, costs: PassCosts, limits: Limits) -> int:
    """``rows`` equal rows in as few passes as the limits allow."""
    most = max(1, min(limits.max_batch_requests, limits.max_batch_tokens // max(1, span[1])))
    whole, rest = divmod(rows, most)
    full = costs.batch_ns([span] * most) if whole else 0
    return whole * full + (costs.batch_ns([span] * rest) if rest else 0)


class Background:
    """Seconds of the background work of ``n`` sessions of one shape (the terms of equation 14)."""

    def __init__(self, costs: PassCosts, limits: Limits, shape: Shape) -> None:
        self.costs, self.limits, self.shape = costs, limits, shape

    def ingest(self, n: int) -> float:
        """A bar of each."""
        return self.passes(n, self.shape.bar)

    def header(self, n: int) -> float:
        """The ready position of each."""
        return self.passes(n, self.shape.ready) if self.shape.ready else 0.0

    def flash(self, n: int) -> float:
        """One question of each, as the mean of those of one update; 0 without questions."""
        k = self.shape.k
        if not k:
            return 0.0
        tokens = sum(tokens * times for tokens, _, times in self.shape.questions) / k
        total = self.passes(round(n * k), round(tokens))
        for _, answer, times in self.shape.questions:
            # texts of different sessions are generated side by side
            total += max(0.0, answer - 1) * self.passes(max(1, round(n * times)), 1) * min(1.0, n * times)
        return total / k

    def used(self, n: int, data: float) -> float:
        """Share of the time between updates, ``data`` s, that the bars and questions of ``n`` sessions take:
        equation 15 holds below 1.
        """
        return (self.ingest(n) + self.header(n) + self.shape.k * self.flash(n)) / data

    def k_max(self, n: int, data: float, others: float) -> int:
        """Equation 16 for ``n`` sessions with an update every ``data`` s; ``others``: share of other work.

        Without questions, those of one token count.
        """
        ingest = min(data, self.ingest(n) + others * data)
        flash = self.flash(n) or self.passes(1, 1) or _LEAST_S
        return k_max(data, ingest, self.header(n), flash)

    def passes(self, rows: int, tokens: int) -> float:
        """``rows`` rows of ``tokens`` tokens behind the context."""
        return passes_ns(rows, (self.shape.context, tokens), self.costs, self.limits) * 1e-9
