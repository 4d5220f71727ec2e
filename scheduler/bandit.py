"""Which k `klpm-adaptive` uses: a bandit over the tail of the TTFT it observes (*k-LPM* section 4.2).

**Reward.** Completed requests are grouped into epochs, each under one k. The paper minimises the 99th
percentile, but in one epoch that is one or two requests. So an epoch is judged by the mean of its worst
tenth, which follows the tail without depending on a single request. This time is unbounded and depends on the
load more than on k. So the reward is the share of the last few epochs, whatever their k, that were worse: it
lies between 0 and 1, needs no scale, and a slow change of the load affects both sides of the comparison.

**Choice.** A larger k reuses more and makes the oldest request wait longer (k choices for each one before
it). So TTFT is assumed to have one minimum along the arms, and the best arm is compared with its two
neighbours only (Combes and Proutiere, *Unimodal Bandits*, 2014); an epoch under a bad k is itself part of the
tail, so fewer such trials matter here. The highest upper confidence bound of the three wins. Rewards are
discounted each epoch, so the bandit follows changing traffic (discounted UCB, Garivier and Moulines, 2011).
The price: among equal arms (all large k behave alike) the search is a random walk, and an epoch that lets the
queue grow leaves a backlog that also lowers the reward of the next ones.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from statistics import mean

ARMS: tuple[int | None, ...] = (1, 2, 3, 4, 6, 8, 16, None)
SERVING: tuple[int | None, ...] = ARMS[1:]
"""Without FCFS: one epoch of it leaves a backlog that raised the P99 of overloaded runs by 5 to 9 %, and
where FCFS is best, k = 2 is within 2 % of it (`foretick bench scheduler`, 8 seeds). The bandit begins with k
= 2, the best over most rates in the paper's figure 2 and here (``docs/scheduling.md``)."""

DOUBT, WEIGHT = 0.25, 0.5
"""The expected reward of an unknown arm, and how many epochs outweigh it. It is below that of an average arm
(a half) and above that of an arm whose every epoch is worse than the ones before, as when a queue grows
without end. Then the bandit tries an unknown arm."""

RECENT = 16
"""Epochs that an epoch is compared with."""
DISCOUNT = 0.95
"""Factor on older rewards, per epoch."""
EXPLORATION = 0.2
"""Width of the confidence bound."""


@dataclass(slots=True)
class Arm:
    """Discounted count of its epochs, and discounted sum of their rewards."""

    plays: float = 0.0
    reward: float = 0.0

    @property
    def mean(self) -> float:
        """Mean reward, pulled towards `DOUBT` while the arm has few epochs."""
        return (self.reward + WEIGHT * DOUBT) / (self.plays + WEIGHT)


class KBandit:
    """Chooses k and learns from each completed request. State is bounded; equal inputs give equal choices.

    Args:
        arms: values of k in increasing order, None (LPM) last.
        rng: only breaks ties.
        epoch: completed requests per reward.
        warm_up: completed requests to ignore after a change of k: they waited under the previous one.
        first: index in ``arms`` of the initial arm, by default the middle one.
    """

    def __init__(
        self,
        arms: Sequence[int | None] = ARMS,
        *,
        rng: random.Random,
        epoch: int = 50,
        warm_up: int = 12,
        first: int | None = None,
    ) -> None:
        self._ks = tuple(arms)
        self._rng = rng
        self._epoch, self._warm_up = epoch, warm_up
        self._arms = [Arm() for _ in arms]
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._observed: list[int] = []
        self._skip = 0
        self._at = len(arms) // 2 if first is None else first

    @property
    def k(self) -> int | None:
        """The k of this epoch; None is LPM."""
        return self._ks[self._at]

    def observe(self, ttft_ns: int) -> None:
        """Record the TTFT of a completed request."""
        if self._skip:
            self._skip -= 1
            return
        self._observed.append(ttft_ns)
        if len(self._observed) == self._epoch:
            self._reward(_tail(self._observed))
            self._observed.clear()
            before, self._at = self._at, self._choose()
            self._skip = self._warm_up if self._at != before else 0

    def _reward(self, tail: float) -> None:
        for arm in self._arms:
            arm.plays *= DISCOUNT
            arm.reward *= DISCOUNT
        if self._recent:  # the first epoch has nothing to compare with
            worse = sum(1.0 if tail < other else 0.5 * (tail == other) for other in self._recent)
            self._arms[self._at].plays += 1
            self._arms[self._at].reward += worse / len(self._recent)
        self._recent.append(tail)

    def _choose(self) -> int:
        """The best arm or a neighbour, by upper confidence bound."""
        arms = range(len(self._arms))
        best = max(arms, key=lambda i: (self._arms[i].mean, i == self._at, self._rng.random()))
        near = range(max(0, best - 1), min(len(self._arms), best + 2))
        total = sum(arm.plays for arm in self._arms)
        bounds = {i: self._bound(self._arms[i], total) for i in near}
        highest = max(bounds.values())
        return self._rng.choice([i for i, bound in bounds.items() if bound == highest])

    def _bound(self, arm: Arm, total: float) -> float:
        if not arm.plays:
            return math.inf
        return arm.mean + EXPLORATION * math.sqrt(max(0.0, math.log(total)) / arm.plays)


def _tail(ttfts: Sequence[int]) -> float:
    """Mean of the worst tenth, at least of one."""
    return mean(nlargest(max(1, len(ttfts) // 10), ttfts))
