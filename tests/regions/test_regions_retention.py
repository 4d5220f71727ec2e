"""Priorities of cached prefixes, against a plain list of edges that is searched whole each time."""

from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.cache_priority import DEFAULT, LONGEST_NS, PrefixRetention
from regions.radix import Node, RadixCache
from tests.regions.contents import cached, pool_with_cache

Key = tuple[str, tuple[int, ...]]
"""A salt, and the whole prefix up to the end of an edge."""


@dataclass
class Edge:
    parent: Key
    used: int
    priority: int = DEFAULT
    until: int = 0


class Plain:
    """The edges of all tries; nothing is kept in order."""

    def __init__(self, budget: int, most: int) -> None:
        self.budget, self.most = budget, most
        self.edges: dict[Key, Edge] = {}
        self.uses = count(1)

    def size(self, key: Key) -> int:
        return len(key[1]) - len(self.edges[key].parent[1])

    def priority(self, key: Key, now: int) -> int:
        edge = self.edges[key]
        return edge.priority if edge.priority < DEFAULT or now < edge.until else DEFAULT

    def owned(self, salt: str, now: int) -> int:
        mine = (key for key in self.edges if key[0] == salt and self.priority(key, now) > DEFAULT)
        return sum(map(self.size, mine))

    def path(self, salt: str, tokens: tuple[int, ...]) -> tuple[list[Key], int]:
        """The edges along ``tokens``, the last one perhaps in part, and the matching tokens."""
        found, matched = [], 0
        for key in sorted((key for key in self.edges if key[0] == salt), key=lambda each: len(each[1])):
            above = len(self.edges[key].parent[1])
            if key[1][: above + 1] == tokens[: above + 1] and above < len(tokens):
                found.append(key)
                both = zip(key[1], tokens, strict=False)
                matched = next((i for i, (a, b) in enumerate(both) if a != b), min(len(key[1]), len(tokens)))
        return found, matched

    def touch(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.edges[key].used = next(self.uses)

    def evict(self, wanted: int, along: list[Key], now: int) -> bool:
        if sum(map(self.size, along)) + wanted > self.budget:
            return False
        while sum(map(self.size, self.edges)) + wanted > self.budget:
            parents = {edge.parent for edge in self.edges.values()}
            leaves = [key for key in self.edges if key not in parents and key not in along]
            if not leaves:
                return False
            del self.edges[min(leaves, key=lambda key: (self.priority(key, now), self.edges[key].used))]
        return True

    def use(self, salt: str, tokens: tuple[int, ...], retention: PrefixRetention, now: int) -> None:
        self.touch(self.path(salt, tokens)[0])  # by match
        path, matched = self.path(salt, tokens)
        delta = len(tokens) - matched
        if path and (delta or self.priority(path[-1], now) < retention.priority):
            lower, upper = path[-1], (salt, tokens[:matched])
            if upper != lower:
                edge = self.edges[lower]
                self.edges[upper] = Edge(edge.parent, next(self.uses), edge.priority, edge.until)
                edge.parent = path[-1] = upper
        used = list(path)
        if delta and self.evict(delta, path, now):
            new = salt, tokens
            self.edges[new] = Edge((salt, tokens[:matched]), next(self.uses))
            used.append(new)
        self.touch(path)
        until = now + retention.for_ns
        for key in used:
            edge, before = self.edges[key], self.priority(key, now)
            if key in path and before > retention.priority:
                continue
            if before == retention.priority != DEFAULT:
                edge.until = max(edge.until, until)
            elif retention.priority <= DEFAULT:
                edge.priority, edge.until = retention.priority, 0
            elif before > DEFAULT or self.owned(salt, now) + self.size(key) <= self.most:
                edge.priority, edge.until = retention.priority, until
            else:
                edge.priority = DEFAULT


def edges_of(cache: RadixCache) -> dict[Key, int]:
    found: dict[Key, int] = {}

    def walk(node: Node, above: tuple[int, ...]) -> None:
        for child in node.children.values():
            whole = above + tuple(child.tokens.tolist())
            found[child.salt, whole] = cache.priorities.of(child)
            walk(child, whole)

    for root in cache._roots.values():
        walk(root, ())
    return found


USES = st.tuples(
    st.sampled_from("ab"),
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.sampled_from([0, 20, DEFAULT, DEFAULT, 60, 100]),
    st.integers(0, 30),
    st.integers(0, 9),
)


@settings(max_examples=200)
@given(st.lists(USES, max_size=40), st.sampled_from([12, 25]))
def test_the_lowest_priority_goes_first_and_among_equals_the_least_recently_used(
    uses: list[tuple[str, list[int], int, int, int]], budget: int
) -> None:
    now = 0
    pool, cache = pool_with_cache(60, budget, 1, retained_share=0.4, clock=lambda: now)
    plain = Plain(budget, int(budget * 0.4))
    for salt, tokens, priority, for_ns, passed in uses:
        now += passed
        retention = PrefixRetention(priority, for_ns, owner=salt)
        cached(pool, cache, tokens, salt, retention)
        plain.use(salt, tuple(tokens), retention, now)
        cache.priorities.expire()
        assert edges_of(cache) == {key: plain.priority(key, now) for key in plain.edges}
        cache.check_integrity()


@settings(max_examples=50)
@given(st.lists(USES, min_size=10, max_size=40), st.integers(1, 60))
def test_the_pool_gets_every_block_back_whatever_their_priorities(
    uses: list[tuple[str, list[int], int, int, int]], blocks: int
) -> None:
    pool, cache = pool_with_cache(60, block_size=1, clock=lambda: 0)
    for salt, tokens, priority, for_ns, _ in uses:
        cached(pool, cache, tokens, salt, PrefixRetention(priority, for_ns, owner=salt))
    free, most = pool.blocks.free_blocks, cache.reclaimable
    cache.reclaim(blocks)
    assert pool.blocks.free_blocks - free >= min(blocks, most)
    cache.check_integrity()
    cache.clear()
    assert pool.blocks.free_blocks == 60
    assert cache.priorities.retained_tokens == 0


def test_one_owner_cannot_fill_the_cache_for_ever() -> None:
    now = 0
    pool, cache = pool_with_cache(100, 40, 1, retained_share=0.25, clock=lambda: now)
    greedy = PrefixRetention(100, 50, "greedy")
    for first in range(4):
        cached(pool, cache, [first] * 8, "greedy", greedy)
    assert cache.priorities.retained_tokens == 8
    assert cache.priorities.refused_tokens == 24
    for first in range(10, 14):
        cached(pool, cache, [first] * 8, "other")
    assert [cache.match_length([first] * 8, "greedy") for first in range(4)] == [8, 0, 0, 0]
    now = 50
    for first in range(20, 25):
        cached(pool, cache, [first] * 8, "other")
    assert not cache.match_length([0] * 8, "greedy")
    assert cache.priorities.retained_tokens == 0


def test_impossible_priorities_are_refused() -> None:
    for priority, for_ns in ((-1, 0), (101, 0), (50, -1), (50, LONGEST_NS + 1)):
        with pytest.raises(ValueError, match=r"retention_(priority|seconds)"):
            PrefixRetention(priority, for_ns)
