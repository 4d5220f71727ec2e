"""The maintained order of waiting requests against algorithm 1, one choice at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.pool_metadata import BlockPool
from regions.prefix_index import PrefixIndex
from regions.radix import RadixCache
from regions.streaming_kv import StreamingPrompt
from scheduler.policies import Ordering
from scheduler.prefix_queue import PrefixQueue, waiting_order
from scheduler.request import Request
from tests.kit.prompts import next_tokens, remaining
from tests.lab.theory.online import choose


@dataclass(frozen=True)
class Waiting:
    """The part of a request that the queue reads."""

    id: int
    prompt: list[int]
    salt: str = ""
    tenant: str = ""
    takes: int = 1

    @property
    def spec(self) -> Waiting:
        return self


class Index:
    """Match lengths set by hand, with the interface of an index."""

    def __init__(self) -> None:
        self.matches: dict[int, int] = {}
        self.new: dict[int, int] = {}

    def watch(self, key: int, tokens: Sequence[int], salt: str) -> int:
        self.matches[key] = tokens[0]
        return tokens[0]

    def forget(self, key: int) -> None:
        del self.matches[key]
        self.new.pop(key, None)

    def changes(self) -> list[tuple[int, int]]:
        changed, self.new = sorted(self.new.items()), {}
        return changed

    def becomes(self, key: int, match: int) -> None:
        if self.matches[key] != match:
            self.matches[key] = self.new[key] = match


def expected(queue_of: dict[int, Waiting], matches: dict[int, int], k: int | None, step: int) -> list[int]:
    left = list(queue_of)  # not sorted: the order must not depend on it
    order: list[int] = []
    for at in range(step, step + len(left)):
        lengths = np.array([matches[number] for number in left], np.int64)
        order.append(left.pop(choose(at, k, np.array(left, np.int64), lengths)))
    return order


def serve(pool: BlockPool, cache: RadixCache, tokens: list[int], salt: str) -> None:
    """Compute a prompt, save it in the cache and end it."""
    reader = StreamingPrompt(pool, cache, frame_limit=1000, salt=salt)
    reader.update(tokens)
    reader.match()
    assert reader.acquire(remaining(reader))
    reader.wrote(reader.next_slots(remaining(reader)), next_tokens(reader, remaining(reader)))
    reader.save()
    reader.release()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "take", "discard", "change", "change", "k"]),
        st.integers(0, 60),
        st.integers(0, 5),
    ),
    max_size=80,
)


@settings(max_examples=150)
@given(OPERATIONS, st.sampled_from([None, 1, 2, 3, 5]), st.integers(0, 40))
def test_the_order_is_that_of_the_theory(
    operations: list[tuple[str, int, int]], k: int | None, at_once: int
) -> None:
    """Whatever is added, admitted, cancelled, cached and evicted, few changes at a time or many."""
    index, step = Index(), 0
    now = [k]
    queue = PrefixQueue(index, lambda: now[0])
    waiting: dict[int, Waiting] = {}
    for number in range(100, 100 + at_once):
        waiting[number] = Waiting(number, [number % 4])
        queue.add(waiting[number])
    for name, n, match in operations:
        numbers = sorted(waiting)
        if name == "add":
            waiting[n] = Waiting(n, [match])
            queue.add(waiting[n])
        elif name == "k":
            now[0] = match or None
        elif numbers and name == "take":
            # a plan admits the first, sometimes one further down; it is taken while others wait
            number = [request.id for request in islice(queue, n % 3 + 1)][-1]
            queue.admitted(waiting.pop(number))
            step += 1
        elif numbers and name == "discard":
            queue.discard(waiting.pop(numbers[n % len(numbers)]))
        elif numbers and name == "change":
            index.becomes(numbers[n % len(numbers)], match)
        assert len(queue) == len(waiting)
        if n % 2:  # not after every operation, so that changes meet additions and admissions
            assert [request.id for request in queue] == expected(waiting, index.matches, now[0], step)
    assert [request.id for request in queue] == expected(waiting, index.matches, now[0], step)
    for request in waiting.values():
        queue.discard(request)
    assert list(queue) == []
    assert index.matches == {}, "the index follows none that do not wait"


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "serve", "serve", "reclaim"]),
            st.lists(st.integers(0, 1), min_size=2, max_size=10),
        ),
        max_size=40,
    ),
    st.sampled_from([None, 2, 3]),
)
def test_the_order_follows_the_prefix_cache(operations: list[tuple[str, list[int]]], k: int | None) -> None:
    """With the real cache: a served prompt stays cached until it is evicted."""
    pool = BlockPool(30, block_size=4)
    cache = RadixCache(pool, 60)
    queue = PrefixQueue(PrefixIndex(cache), lambda: k)
    waiting: dict[int, Waiting] = {}
    step = 0
    for number, (name, tokens) in enumerate(operations):
        if name == "add":
            waiting[number] = Waiting(number, tokens, "tenant")
            queue.add(waiting[number])
        elif name == "serve" and waiting:
            first = next(iter(queue))
            queue.admitted(waiting.pop(first.id))
            step += 1
            serve(pool, cache, first.prompt, "tenant")
        elif name == "reclaim":
            cache.reclaim(len(tokens))
        matches = {n: cache.match_length(r.prompt[:-1], r.salt) for n, r in waiting.items()}
        assert [request.id for request in queue] == expected(waiting, matches, k, step)


@pytest.mark.parametrize(("k", "order"), [(1, [1, 2, 3, 4]), (2, [1, 4, 2, 3]), (None, [4, 3, 1, 2])])
def test_each_policy_by_hand(k: int | None, order: list[int]) -> None:
    """FCFS, k-LPM and LPM over matches 0, 0, 5, 7."""
    queue = PrefixQueue(Index(), lambda: k)
    for number, match in ((1, 0), (2, 0), (3, 5), (4, 7)):
        queue.add(Waiting(number, [match]))
    assert [request.id for request in queue] == order


def test_the_step_counts_admissions_only() -> None:
    """Under k = 2 the second admission takes the longest match, whatever was cancelled in between."""
    queue = PrefixQueue(Index(), lambda: 2)
    for number, match in ((1, 0), (2, 0), (3, 5), (4, 7)):
        queue.add(Waiting(number, [match]))
    queue.admitted(Waiting(1, [0]))
    assert next(iter(queue)).id == 4
    queue.discard(Waiting(4, [7]))
    assert next(iter(queue)).id == 3
    queue.admitted(Waiting(3, [5]))
    assert next(iter(queue)).id == 2


def test_a_replaced_prompt_is_looked_up_again_and_keeps_its_age() -> None:
    index = Index()
    queue = PrefixQueue(index, lambda: None)
    for number in (1, 2, 3):
        queue.add(Waiting(number, [1]))
    queue.add(Waiting(1, [0]))
    assert [request.id for request in queue] == [2, 3, 1]
    queue.add(Waiting(1, [1]))
    assert [request.id for request in queue] == [1, 2, 3]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30), st.sampled_from([None, 2, 3])
)
def test_matches_count_in_whole_blocks(matches: list[tuple[int, int]], k: int | None) -> None:
    """As the theory's order over the blocks, before and after matches change."""
    index = Index()
    queue = PrefixQueue(index, lambda: k, 16)
    waiting = {number: Waiting(number, [match]) for number, (match, _) in enumerate(matches)}
    for request in waiting.values():
        queue.add(request)
    for _ in range(2):
        blocks = {number: match // 16 for number, match in index.matches.items()}
        assert [request.id for request in queue] == expected(waiting, blocks, k, 0)
        for number, (_, after) in enumerate(matches):
            index.becomes(number, after)


@pytest.mark.parametrize(("name", "order"), [("lpm", [3, 2, 1]), ("klpm", [1, 3, 2])])
def test_a_few_tokens_by_chance_put_no_prompt_before_an_older_one(name: str, order: list[int]) -> None:
    """Matches of 16, 17 and 18 tokens, then one of 40: two blocks of 16 are more than one."""
    index = Index()
    queue, _ = waiting_order(Ordering(name, 2), cast(PrefixIndex, index), None, 16)
    assert queue is not None
    for number, match in ((1, 16), (2, 17), (3, 18)):
        queue.add(cast(Request, Waiting(number, [match])))
    assert [request.id for request in queue] == ([3, 2, 1] if name == "lpm" else [1, 2, 3])
    index.becomes(3, 40)
    assert [request.id for request in queue] == order
