"""Watched match lengths against a fresh look-up of each."""

import gc
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from regions.ephemeral import Fork
from regions.prefix_index import PrefixIndex
from regions.radix import TokenArray, common_length
from tests.regions.contents import SYSTEM, cached, pool_with_cache, prompt, write

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "a"])
KEYS = st.integers(0, 12)


class Watched(RuleBasedStateMachine):
    """Prompts are computed, saved, evicted, watched and forgotten in any order."""

    @initialize(budget=st.sampled_from([12, 40, 1000]))
    def start(self, budget: int) -> None:
        self.pool, self.cache = pool_with_cache(60, budget)
        self.watch = PrefixIndex(self.cache)
        self.prompts: dict[int, tuple[list[int], str]] = {}
        self.reported: dict[int, int] = {}
        self.readers: list[Fork] = []

    def length(self, key: int) -> int:
        tokens, salt = self.prompts[key]
        return self.cache.match_length(tokens[:-1], salt)

    @rule(key=KEYS, tokens=PROMPTS, salt=SALTS)
    def follow(self, key: int, tokens: list[int], salt: str) -> None:
        self.prompts[key] = tokens, salt
        self.reported[key] = self.watch.watch(key, tokens, salt)
        assert self.reported[key] == self.length(key)

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        self.watch.forget(key)
        self.prompts.pop(key, None)
        self.reported.pop(key, None)

    @rule(tokens=PROMPTS, salt=SALTS, stays=st.booleans())
    def compute(self, tokens: list[int], salt: str, stays: bool) -> None:
        """Read what is cached of a prompt, compute the rest, save it."""
        context = self.cache.match(tokens, salt)
        at = context.tokens if context else 0
        fork = Fork(self.pool, frame_limit=1000, context=context)
        if context:
            context.release()
        if write(self.pool, fork, tokens[:at], tokens[at:]):
            self.cache.save(tokens, fork, salt)
        if stays:
            self.readers.append(fork)
        else:
            fork.release()

    @rule(which=st.integers(0, 100))
    def end_reader(self, which: int) -> None:
        if self.readers:
            self.readers.pop(which % len(self.readers)).release()

    @rule(blocks=st.integers(0, 20))
    def reclaim(self, blocks: int) -> None:
        self.cache.reclaim(blocks)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule()
    def ask(self) -> None:
        """Each prompt whose length changed since the last call is reported once, in order of the keys."""
        lengths = [(key, self.length(key)) for key in sorted(self.prompts)]
        expected = [(key, length) for key, length in lengths if length != self.reported[key]]
        assert self.watch.changes() == expected
        self.reported.update(expected)
        assert not self.watch._touched, "reported prompts are not visited again"

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "watch"):
            self.watch.check_integrity()
            self.cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "watch"):
            self.ask()
            assert self.watch.changes() == []
            for key in list(self.prompts):
                self.forget(key)
            self.watch.check_integrity()


Watched.TestCase.settings = settings(max_examples=75, stateful_step_count=40)
TestWatched = Watched.TestCase


@pytest.mark.parametrize("others", [10, 200])
def test_only_the_prompts_a_change_concerns_are_looked_at(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number may wait: only the one prompt that continues like the saved one is compared."""
    pool, cache = pool_with_cache(400)
    compared = []

    def counting(a: TokenArray, b: TokenArray) -> int:
        compared.append(len(a))
        return common_length(a, b)

    monkeypatch.setattr("regions.prefix_index.common_length", counting)
    watch = PrefixIndex(cache)
    cached(pool, cache, [*SYSTEM, 0, 0])
    for key in range(others):
        watch.watch(key, [*SYSTEM, key + 1, 9, 9])
    compared.clear()
    cached(pool, cache, [*SYSTEM, 4, 9, 8])
    assert watch.changes() == [(3, len(SYSTEM) + 2)]
    assert len(compared) == 1


@given(PROMPTS)
def test_arrays_and_lists_are_followed_alike(tokens: list[int]) -> None:
    pool, cache = pool_with_cache(20)
    watch = PrefixIndex(cache)
    watch.watch(1, tokens)
    watch.watch(2, np.array(tokens, np.int32))
    cached(pool, cache, tokens)
    assert watch.changes() == [(key, len(tokens) - 1) for key in (1, 2) if len(tokens) > 1]


def test_a_dropped_watch_gets_no_more_changes_and_keeps_nothing_alive() -> None:
    """No reference cycle: a device's memory must not wait for the garbage collector."""
    pool, cache = pool_with_cache(20)
    watch = PrefixIndex(cache)
    for tail in (1, 2):
        cached(pool, cache, [*SYSTEM, tail])
    watch.watch(1, [*SYSTEM, 4])
    gone = ref(pool)
    gc.disable()
    try:
        del watch
        fork = prompt(pool, [1, 2])
        assert cache.save([1, 2], fork) == 2
        fork.release()
        del pool, cache, fork
        assert gone() is None
    finally:
        gc.enable()
