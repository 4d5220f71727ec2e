"""How a group grows and shrinks in one run, what goes wrong meanwhile, and what that did to its sessions."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal

from tests.chaos.reading import Published

Trouble = Literal["none", "kill", "hang", "stop broker", "kill broker"]
"""None: all moves are planned. A member that is killed is replaced; one that hangs goes on later."""
Leave = Literal["terminate", "kill"]
Phase = Literal["growth", "shrinking"]
TROUBLES: tuple[Trouble, ...] = ("none", "kill", "hang", "stop broker", "kill broker")
RUNS = 2 * len(TROUBLES)
"""Seeds in a row in which each delivery meets all troubles."""
LATEST_MS = 3000
"""Trouble strikes up to so long after a move began: while daemons load, join, or take sessions over."""
FEW, MANY, LEFT = 2, 5, 3
"""Daemons before the growth, after it, and after some have left."""


@dataclass(frozen=True)
class Rescale:
    """``trouble`` strikes ``delay_ms`` after ``phase`` began.

    ``victim``: which member it strikes, counted from the oldest. ``leaves``: how daemons end, one after the
    other.
    """

    seed: int
    exactly_once: bool
    trouble: Trouble
    phase: Phase
    delay_ms: int
    victim: int
    leaves: tuple[Leave, ...]

    def __str__(self) -> str:
        delivery = "exactly once" if self.exactly_once else "at least once"
        when = f"{self.delay_ms} ms into {self.phase}, member {self.victim}"
        return f"seed {self.seed}, {delivery}: {self.trouble}, {when}; they leave by {', '.join(self.leaves)}"


def draw(seed: int) -> Rescale:
    rng = Random(seed)
    number = seed % RUNS
    trouble = TROUBLES[number % len(TROUBLES)]
    leaves: list[Leave] = [rng.choice(("terminate", "kill")) for _ in range(MANY - LEFT)]
    if trouble == "none":
        leaves = ["terminate"] * len(leaves)
    phase: Phase = rng.choice(("growth", "shrinking"))
    strikes = rng.randrange(LATEST_MS), rng.randrange(FEW)
    return Rescale(seed, number >= len(TROUBLES), trouble, phase, *strikes, tuple(leaves))


@dataclass(frozen=True)
class Move:
    """Partitions change hands from ``began_ns`` on, because of ``why``."""

    began_ns: int
    why: str
    planned: bool


@dataclass(frozen=True)
class HandOver:
    """A session was silent for ``silent_ns``; ``usual_ns``: between its answers at other times."""

    session: str
    silent_ns: int
    usual_ns: int
    why: str
    planned: bool


def hand_overs(found: Sequence[Published], moves: Sequence[Move]) -> list[HandOver]:
    """The time from the last answer of each owner to the first one of the next, of every session.

    An owner is known by its epoch, which is also another one for the sessions that a daemon keeps while it
    takes others over. An answer that came twice counts where it came first. Where something was killed during
    a silence, that is its cause, else the newest move. What was silent before the first move, for want of a
    feed, does not count.
    """
    bars: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for each in found:
        answer = each.answer
        bars[answer.session].setdefault(answer.as_of, (answer.published_at, answer.epoch))
    made = []
    for session, by_time in bars.items():
        steps = list(pairwise(at for _, at in sorted(by_time.items())))
        usual = sorted(b[0] - a[0] for a, b in steps if a[1] == b[1])
        for (before_ns, one), (after_ns, other) in steps:
            causes = [move for move in moves if move.began_ns < after_ns]
            if one != other and causes:
                before_ns = max(before_ns, moves[0].began_ns)
                silent_ns = max(0, after_ns - before_ns)
                sudden = [move for move in causes if not move.planned and move.began_ns >= before_ns]
                cause = (sudden or causes)[-1]
                median_ns = usual[len(usual) // 2] if usual else 0
                made.append(HandOver(session, silent_ns, median_ns, cause.why, cause.planned))
    return made


def summary(found: Iterable[HandOver]) -> str:
    """Percentiles of the silences, planned and not."""
    grouped: dict[bool, list[float]] = defaultdict(list)
    for each in found:
        grouped[each.planned].append(each.silent_ns / 1e9)
    lines = []
    for planned, silences in sorted(grouped.items(), reverse=True):
        ordered = sorted(silences)
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 1.0)]
        name = f"{'planned' if planned else 'unplanned'}: {len(ordered)} hand-overs"
        lines.append(f"{name}, P50 {at[0]:.2f} s, P99 {at[1]:.2f} s, worst {at[2]:.2f} s")
    return "\n".join(lines)
