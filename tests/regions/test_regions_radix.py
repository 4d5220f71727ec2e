"""The prefix cache against a plain set of all prefixes, with KV whose contents are checked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.ephemeral import Fork
from regions.radix import RadixCache, common_length, token_array
from regions.tape import Retention, Tape
from tests.regions.contents import SYSTEM, cached, pool_with_cache, prompt, reads, write

Tuple = tuple[int, ...]


class Model:
    """All cached prefixes as one plain set per salt; it asks the cache for evictions."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.prefixes: dict[str, set[Tuple]] = {"a": set(), "b": set()}
        self.evicted = 0

    def longest(self, tokens: list[int], salt: str) -> int:
        known = self.prefixes[salt]
        return max((n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in known), default=0)

    def saved(self, tokens: list[int], salt: str) -> None:
        self.prefixes[salt] |= {tuple(tokens[:n]) for n in range(1, len(tokens) + 1)}

    def check(self) -> None:
        """As many prefixes are missing as tokens were evicted, and none of which a longer one is left."""
        missing = 0
        for salt, known in self.prefixes.items():
            left = {p for p in known if self.cache.match_length(p, salt) == len(p)}
            assert all(p[:-1] in left for p in left if len(p) > 1)
            missing += len(known) - len(left)
            self.prefixes[salt] = left
        assert missing == self.cache.evicted_tokens - self.evicted
        self.evicted = self.cache.evicted_tokens
        assert self.cache.tokens == sum(map(len, self.prefixes.values()))


OPERATIONS = st.tuples(
    st.sampled_from(["open", "open", "write", "save", "save", "keep", "release", "reclaim", "fill", "clear"]),
    st.integers(0, 30),
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.sampled_from("ab"),
)


@settings(max_examples=100)
@given(st.lists(OPERATIONS, max_size=50), st.sampled_from([15, 40, 1000]))
def test_matches_are_the_longest_cached_prefixes(
    operations: list[tuple[str, int, list[int], str]], budget: int
) -> None:
    """Any order of saving, cutting, evicting and filling the pool: right lengths, right KV, no lost block."""
    pool, cache = pool_with_cache(40, budget)
    model = Model(cache)
    readers: list[tuple[Fork, list[int], str]] = []
    for name, n, tokens, salt in operations:
        at = n % len(readers) if readers else 0
        if name == "open":
            expected = model.longest(tokens, salt)
            context = cache.match(tokens, salt)
            assert (context.tokens if context else 0) == expected
            fork = Fork(pool, frame_limit=1000, context=context)
            if context:
                context.release()
            readers.append((fork, tokens[:expected], salt))
            if write(pool, fork, tokens[:expected], tokens[expected:]):
                readers[-1] = (fork, tokens, salt)
        elif name == "reclaim":
            free, sure = pool.blocks.free_blocks, cache.reclaimable
            cache.reclaim(n)
            assert pool.blocks.free_blocks - free >= min(n, sure)
        elif name == "fill":
            runs = pool.take(pool.free_blocks)
            assert runs is not None
            pool.blocks.release(runs)
        elif name == "clear":
            cache.clear()
            assert cache.tokens == len(cache._parents) == 0
        elif readers and name == "write":
            fork, had, salt = readers[at]
            if write(pool, fork, had, tokens):
                readers[at] = (fork, had + tokens, salt)
        elif readers and name == "save":
            fork, had, salt = readers[at]
            had = had[: len(had) - n % 3]
            expected, refused = len(had) - model.longest(had, salt), cache.refused
            added = cache.save(had, fork, salt)
            assert added == (expected if cache.refused == refused else 0)
            assert cache.tokens <= budget
            if added:
                model.saved(had, salt)
        elif readers and name == "keep":
            fork, had, salt = readers[at]
            fork.keep(min(n, fork.length))
            readers[at] = (fork, had[: fork.cached_tokens + fork.length], salt)
        elif readers and name == "release":
            readers.pop(at)[0].release()
        model.check()
        cache.check_integrity()
        pool.check_integrity()
        for fork, had, salt in readers:
            assert reads(pool, fork.extents, had)
            assert cache.match_length(had, salt) == model.longest(had, salt)
    for fork, _, _ in readers:
        fork.release()
    assert pool.free_blocks == pool.total_blocks


def test_eviction_takes_the_leaf_used_longest_ago_and_keeps_the_shared_branch() -> None:
    pool, cache = pool_with_cache(100)
    for tail in (1, 2, 3):
        assert cached(pool, cache, SYSTEM + [tail] * 8) == (18 if tail == 1 else 8)
    context = cache.match(SYSTEM + [1] * 8)
    assert context is not None
    context.release()
    left = []
    while len(cache._parents):
        cache.reclaim(1)
        left.append([cache.match_length(SYSTEM + [tail] * 8) for tail in (1, 2, 3)])
    assert left == [[18, 10, 18], [18, 10, 10], [10, 10, 10], [0, 0, 0]]
    assert cache.evicted_tokens == cache.saved_tokens == 34


def test_a_prefix_with_readers_is_not_evicted() -> None:
    """While a tape or prompt reads a prefix it stays cached; afterwards it can be evicted."""
    pool, cache = pool_with_cache(60)
    cached(pool, cache, SYSTEM + [1] * 8)
    cached(pool, cache, SYSTEM + [2] * 8)
    context = cache.match(SYSTEM)
    assert context is not None
    extents = context.extents
    tape = Tape("t", pool, context, Retention(20), frame_limit=100)
    cache.reclaim(pool.total_blocks)
    assert [cache.match_length(SYSTEM + [tail] * 8) for tail in (1, 2)] == [10, 10]
    assert cache.reclaimable == 0
    assert reads(pool, extents, SYSTEM)
    tape.release()
    assert pool.free_blocks == 60
    cache.reclaim(1)
    assert cache.match(SYSTEM) is None


def test_a_reader_references_no_more_than_it_reads() -> None:
    """The match of a part of an edge leaves the blocks behind it to be reclaimed."""
    pool, cache = pool_with_cache(60)
    cached(pool, cache, list(range(40)))
    context = cache.match([*range(9), 99])
    assert context is not None
    assert (context.tokens, context.coord, context.origin) == (9, 9, 0)
    assert cache.reclaimable == 10 - 3
    assert pool.free_blocks == 60 - 3
    cache.reclaim(60)
    assert reads(pool, context.extents, list(range(9)))
    context.release()
    assert pool.blocks.free_blocks == 60


def test_only_the_delta_is_added() -> None:
    """Extending a cached prefix adds references only to the new tokens' blocks."""
    pool, cache = pool_with_cache(60)
    assert cached(pool, cache, list(range(16))) == 16
    before = pool.blocks.references.copy()
    assert cached(pool, cache, list(range(24))) == 8
    changed = np.flatnonzero(pool.blocks.references != before)
    assert len(changed) == 2
    assert (before[changed] == 0).all()
    assert cached(pool, cache, list(range(24))) == 0
    assert (cache.tokens, len(cache._parents), cache.saved_tokens) == (24, 2, 24)
    assert cache.matched_tokens == 40


def test_saves_are_gated_by_the_budget() -> None:
    """Prefixes without readers are evicted; otherwise the save is refused and counted, changing nothing."""
    pool, cache = pool_with_cache(60, 20)
    cached(pool, cache, [1] * 8)
    cached(pool, cache, [2] * 8)
    assert cached(pool, cache, [3] * 21) == 0
    assert (cache.refused, cache.evicted_tokens, cache.tokens) == (1, 0, 16)
    assert cached(pool, cache, [3] * 10) == 10
    assert [cache.match_length([n] * 8) for n in (1, 2, 3)] == [0, 8, 8]
    cached_part = cache.match([2] * 8)
    assert cached_part is not None
    assert cached(pool, cache, [4] * 12) == 12
    assert [cache.match_length([n] * 8) for n in (2, 3, 4)] == [8, 0, 8]
    both = cache.match([4] * 12)
    assert both is not None
    assert cached(pool, cache, [5] * 4) == 0
    assert (cache.refused, cache.tokens) == (2, 20)
    cached_part.release()
    both.release()


def test_an_extension_does_not_evict_what_it_extends() -> None:
    pool, cache = pool_with_cache(60, 12)
    cached(pool, cache, list(range(8)))
    cached(pool, cache, [50] * 4)
    fork = prompt(pool, list(range(12)))  # computed it all, so it reads nothing of what it extends
    assert cache.save(list(range(12)), fork) == 4
    fork.release()
    assert cache.match_length(list(range(12))) == 12
    assert cache.match_length([50] * 4) == 0


def test_what_was_computed_twice_still_frees_its_first_copy() -> None:
    """Blocks are promised as free although a live reader's own tokens hang below them in the trie."""
    pool, cache = pool_with_cache(12)
    first, second = prompt(pool, list(range(16))), prompt(pool, list(range(16)))
    cache.save(list(range(16)), first)
    first.release()
    assert write(pool, second, list(range(16)), list(range(16, 20)))
    assert cache.save(list(range(20)), second) == 4
    assert pool.free_blocks == 12 - 5
    runs = pool.take(7)
    assert runs is not None
    pool.blocks.release(runs)
    assert cache.tokens == 0
    assert reads(pool, second.extents, list(range(20)))
    second.release()


def test_looking_up_a_length_references_and_touches_nothing() -> None:
    pool, cache = pool_with_cache(60)
    cached(pool, cache, [1] * 8)
    cached(pool, cache, [2] * 8)
    assert cache.match_length(np.array([1] * 5, np.int32)) == 5
    assert (cache.matched_tokens, cache.reclaimable) == (0, 4)
    cache.reclaim(1)
    assert [cache.match_length([n] * 8) for n in (1, 2)] == [0, 8]


def test_only_prompts_can_be_cached() -> None:
    """Refused: a fork of a tape, tokens other than those in KV, and more than there are."""
    pool, cache = pool_with_cache(60)
    cached(pool, cache, SYSTEM)
    context = cache.match(SYSTEM)
    assert context is not None
    tape = Tape("t", pool, context, Retention(20), frame_limit=100)
    young = tape.fork()
    assert tape.acquire(4)
    tape.wrote(tape.next_slots(4), [1] * 4)
    tape.commit([4])
    fork = tape.fork()
    for reader in (young, fork):
        with pytest.raises(ValueError, match="fork"):
            cache.save(SYSTEM, reader)
        reader.release()
    tape.release()
    own = prompt(pool, [1, 2, 3])
    with pytest.raises(ValueError, match="in KV"):
        cache.save([1, 2, 4], own)
    with pytest.raises(ValueError, match="only 3"):
        cache.save([1, 2, 3, 4], own)
    assert cache.save([], own) == 0
    assert cache.match([]) is None
    own.release()


def test_a_prompt_that_was_saved_at_every_token_is_read_as_one_extent() -> None:
    """A path of 1,100 nodes: found, split, evicted, and attention still reads one run of slots."""
    pool, cache = pool_with_cache(400)
    tokens = [n % 7 for n in range(1100)]
    fork = prompt(pool, tokens)
    for n in range(1, 1101):
        assert cache.save(tokens[:n], fork) == 1
    context = cache.match(tokens[:1097])
    assert context is not None
    assert (len(cache._parents), len(context.extents), context.tokens) == (1100, 1, 1097)
    context.release()
    cache.reclaim(400)
    assert cache.match_length(tokens) == 1100
    fork.release()
    cache.reclaim(200)
    assert 0 < cache.match_length(tokens) <= 300
    cache.check_integrity()


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_the_common_length_is_that_of_a_plain_comparison(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(token_array(a), token_array(b)) == expected
