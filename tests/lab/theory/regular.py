"""The regular arrival shuffled queue and what is proven on it (*k-LPM* definition 4, theorem 2, corollary 3).

The paper's lower bounds are asymptotic. They are written out here for a given n and failure probability,
from the inequalities of its proofs, so that a test can hold a run against a number.
"""

from dataclasses import dataclass

import numpy as np

from lab.theory.query_stream import QueryStream


@dataclass(frozen=True)
class RegularQueue:
    """Definition 4: n queries (user)(doc), k for each user, one arrival every `gap`, in random order.

    Lengths are in tokens, `gap` (the paper's s) in time. With c_attn > 0 the bounds use that all prompts are
    equally long, so each token costs 1 + c_attn (user + doc): the argument of corollary 3.

    Raises ValueError when k does not divide n or a number is out of range.
    """

    n: int
    k: int
    user: int
    doc: int
    gap: float
    c_attn: float = 0.0

    def __post_init__(self) -> None:
        if min(self.n, self.k, self.user, self.doc) < 1 or self.gap < 0 or self.c_attn < 0:
            raise ValueError("n, k, user and doc must be 1 or more, gap and c_attn 0 or more")
        if self.n % self.k:
            raise ValueError(f"k = {self.k} does not divide n = {self.n}")

    @property
    def backlog(self) -> float:
        """The earliest start theorem 2 allows: when the last query has arrived."""
        return self.gap * self.n

    @property
    def token_time(self) -> float:
        """Time a token takes, attention included."""
        return 1 + self.c_attn * (self.user + self.doc)

    def stream(self, rng: np.random.Generator) -> QueryStream:
        """One shuffle. Query i belongs to user i // k and arrives at gap · σ(i), σ uniform on 1..n.

        The paper's formula pairs x_σ(i) with s · σ(i), which would shuffle nothing; its message is meant.
        """
        users = self.n // self.k
        prompts = tuple((i // self.k,) * self.user + (users + i,) * self.doc for i in range(self.n))
        return QueryStream(prompts, tuple(self.gap * int(at) for at in rng.permutation(self.n) + 1))

    def klpm_at_most(self, start: float) -> float:
        """Theorem 2: the greatest TTFT of k-LPM, for every order of arrival.

        The proof compares two lines, one rising with slope user + k · doc - gap. Where that slope is negative
        (a machine that was idle all along) the statement is false, so ValueError is raised, as for a `start`
        before the last arrival.
        """
        self._check_start(start)
        if self.gap > self.token_time * (self.user + self.k * self.doc):
            raise ValueError(
                "theorem 2 needs gap <= user + k * doc: these arrive slower than they are served"
            )
        return start + self.n * (self._shared() - self.gap / self.k)

    def lpm_at_least(self, start: float, delta: float) -> float:
        """Theorem 2: the greatest TTFT of LPM with random ties, with probability 1 - delta or more.

        For any q and j, one of the q oldest is not among the first j processed, except with probability
        (j / n) ** q. The paper takes q = n ** 3/4 and j = n - n ** 1/2; this takes the best q.
        """
        self._check_start(start)
        q = np.arange(1, self.n + 1)
        j = np.floor(self.n * delta ** (1 / q))
        return start + float((j * self._shared() - q * self.gap).max()) - self._first_saving()

    def fcfs_at_least(self, start: float, delta: float) -> float:
        """Theorem 2: the greatest TTFT of FCFS, with probability 1 - delta or more.

        On average k - 1 queries follow one of the same user; Markov's inequality bounds them by
        (k - 1) / delta.
        """
        self._check_start(start)
        work = self.n * (self.user + self.doc) - self.user * (self.k - 1) / delta
        return start + self.token_time * work - self.n * self.gap - self._first_saving()

    def separates(self, delta: float) -> bool:
        """Corollary 3: whether n is large enough for k-LPM to beat both with probability 1 - delta."""
        start = self.backlog
        least = min(self.lpm_at_least(start, delta / 2), self.fcfs_at_least(start, delta / 2))
        return self.klpm_at_most(start) < least

    def _shared(self) -> float:
        """Mean time of a query when each user's prompt is processed once."""
        return self.token_time * (self.user / self.k + self.doc)

    def _first_saving(self) -> float:
        """The first query is processed without an attention term (definition 2)."""
        return (self.token_time - 1) * (self.user + self.doc)

    def _check_start(self, start: float) -> None:
        if start < self.backlog:
            raise ValueError(f"theorem 2 needs a start at or after the last arrival, {self.backlog}")
