"""Which cached prefixes stay longest: their priorities, as in TensorRT-LLM's KV cache retention.

A prefix of a lower priority is evicted before any of a higher one, and the least recently used first among
equals. Nothing is kept indefinitely: a priority above the default holds for a limited time, and an owner (a
tenant) may raise a limited number of tokens.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

LOWEST, DEFAULT, HIGHEST = 0, 35, 100
LONGEST_NS = 24 * 3600 * 1_000_000_000
"""The longest time that a priority holds."""

Edge = TypeVar("Edge", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefixRetention:
    """``priority``: 0 to 100, 35 being every other prefix's. Above that it holds for ``for_ns``.

    ``owner``: whose share it uses. Raises ValueError for values out of range.
    """

    priority: int = DEFAULT
    for_ns: int = 0
    owner: str = ""

    def __post_init__(self) -> None:
        if not LOWEST <= self.priority <= HIGHEST:
            raise ValueError(f"retention_priority must be from {LOWEST} to {HIGHEST}, not {self.priority}")
        if not 0 <= self.for_ns <= LONGEST_NS:
            most = LONGEST_NS // 1_000_000_000
            raise ValueError(f"retention_seconds must be from 0 to {most}, not {self.for_ns / 1e9:g}")


ORDINARY = PrefixRetention()


class _Kept(NamedTuple):
    priority: int
    until: int
    owner: str
    tokens: int


class Priorities(Generic[Edge]):
    """The edges of a cache that have another priority than the default.

    Each owner may have ``most`` tokens above the default. ``clock`` gives ns.
    """

    def __init__(self, most: int, clock: Callable[[], int]) -> None:
        self._most, self._clock = most, clock
        self._kept: dict[Edge, _Kept] = {}
        self._tokens: Counter[str] = Counter()  # above the default, by owner
        self.refused_tokens = 0
        """Tokens that stayed at the default, because their owner has no share left."""
        self.retained_tokens = 0
        """Tokens above the default."""

    def of(self, edge: Edge) -> int:
        """The priority of an edge, as of the last `expire`."""
        kept = self._kept.get(edge)
        return DEFAULT if kept is None else kept.priority

    def expire(self) -> None:
        """Return to the default what was kept for long enough."""
        if not self._kept:
            return
        now = self._clock()
        gone = [edge for edge, kept in self._kept.items() if kept.priority > DEFAULT and kept.until <= now]
        for edge in gone:
            self.drop(edge)

    def bound(self, most: int) -> None:
        """An owner may hold ``most`` tokens from now on; what is beyond returns to the default."""
        self._most = most
        for edge, kept in list(self._kept.items()):
            if kept.priority > DEFAULT and self._tokens[kept.owner] > most:
                self.drop(edge)

    def levels(self) -> Sequence[int]:
        """All priorities that there are, the lowest first."""
        return sorted({DEFAULT, *(kept.priority for kept in self._kept.values())})

    def keep(self, path: Sequence[tuple[Edge, int]], retention: PrefixRetention, *, new: Edge | None) -> None:
        """A request used the edges of ``path``, each with its tokens, root first; ``new`` was not there.

        A new edge gets the request's priority. The others keep theirs if it is higher.
        """
        if retention == ORDINARY and not self._kept:
            return
        until = self._clock() + retention.for_ns
        for edge, tokens in path:
            if edge == new or self.of(edge) < retention.priority:
                self._set(edge, _Kept(retention.priority, until, retention.owner, tokens))
            elif (kept := self._kept.get(edge)) is not None and kept.priority == retention.priority:
                self._kept[edge] = kept._replace(until=max(kept.until, until))

    def split(self, upper: Edge, upper_tokens: int, lower: Edge) -> None:
        """``lower`` gave its first ``upper_tokens`` to the new edge ``upper``."""
        kept = self._kept.get(lower)
        if kept is not None:
            self._kept[upper] = kept._replace(tokens=upper_tokens)
            self._kept[lower] = kept._replace(tokens=kept.tokens - upper_tokens)

    def drop(self, edge: Edge) -> None:
        """The edge has no priority of its own any more. Idempotent."""
        kept = self._kept.pop(edge, None)
        if kept is not None and kept.priority > DEFAULT:
            self._tokens[kept.owner] -= kept.tokens
            self.retained_tokens -= kept.tokens
            self._tokens += Counter()  # forget owners without any

    def check_integrity(self) -> None:
        """Raise AssertionError unless the owners' tokens are those of their edges, and within the share."""
        tokens: Counter[str] = Counter()
        for kept in self._kept.values():
            assert kept.priority != DEFAULT, "an edge of the default is kept"
            if kept.priority > DEFAULT:
                tokens[kept.owner] += kept.tokens
        assert self.retained_tokens == tokens.total(), "the tokens are miscounted"
        assert tokens == self._tokens, "the owners' tokens are miscounted"
        assert all(each <= self._most for each in tokens.values()), "an owner has more than its share"

    def _set(self, edge: Edge, wanted: _Kept) -> None:
        before = self._kept.get(edge)
        above = wanted.priority > DEFAULT
        had = before is not None and before.priority > DEFAULT and before.owner == wanted.owner
        if above and not had and self._tokens[wanted.owner] + wanted.tokens > self._most:
            self.refused_tokens += wanted.tokens
            if self.of(edge) < DEFAULT:
                self.drop(edge)
            return
        self.drop(edge)
        if above:
            self._tokens[wanted.owner] += wanted.tokens
            self.retained_tokens += wanted.tokens
        if wanted.priority != DEFAULT:
            self._kept[edge] = wanted
