"""Budgets of engine time: a standing question that has used up its share of the engine skips versions.

A budget is a token bucket of engine seconds: it fills at the question's `engine_share`, up to what that is in
the window. A question may overdraw it by what it is being asked, and then waits until it is above 0 again. So
in any time t it takes at most share * (t + window), and its last answer.
"""

from collections.abc import Callable

from flash.registry import Key, Standing
from support.token_bucket import TokenBucket

_LEAST_S = 1e-9


class QuestionBudgets:
    """The budgets of one engine's questions, by name and hash: all sessions that ask one share its budget.

    ``clock``: monotonic ns. ``window_s``: seconds of its share that a question may take at once.
    """

    def __init__(self, clock: Callable[[], int], window_s: float) -> None:
        self._clock, self._window_s = clock, window_s
        self._buckets: dict[Key, TokenBucket] = {}

    def allows(self, item: Standing) -> bool:
        """Whether a question may be asked now."""
        bucket = self._bucket(item)
        return bucket is None or bucket.wait(self._clock() / 1e9, _LEAST_S) == 0

    def used(self, item: Standing) -> float:
        """How much of what a question may take at once is taken; above 1 it is not asked."""
        bucket = self._bucket(item)
        return 0.0 if bucket is None else bucket.used(self._clock() / 1e9)

    def charge(self, item: Standing, engine_ns: int) -> None:
        """A question took engine time."""
        bucket = self._bucket(item)
        if bucket is not None:
            bucket.take(self._clock() / 1e9, engine_ns / 1e9)

    def _bucket(self, item: Standing) -> TokenBucket | None:
        """Of a question with a budget; another share begins with a full one."""
        share = item.question.engine_share
        if not share:
            return None
        bucket = self._buckets.get(item.key)
        if bucket is None or bucket.rate != share:
            bucket = TokenBucket(share, share * self._window_s, self._clock() / 1e9)
            self._buckets[item.key] = bucket
        return bucket
