"""The counting device against token lists: blocks, aliasing, invalidation, the prefix cache, its watchers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from engine.step import Chunk
from scheduler.simulation.device import (
    NOWHERE,
    CopyStream,
    SimClock,
    SimExecutor,
    SimMemory,
    SimReader,
    SimTier,
)
from scheduler.simulation.prefixes import Node, SimCache
from scheduler.simulation.tokens import Segments
from tests.scheduler.simulated import LinearCosts

BLOCK, POOL, HOST = 4, 24, 10
# Documents that begin alike and differ later, so that matches end on edges as well as between them.
DOCUMENTS = (range(0, 5), range(0, 9), range(20, 26), range(100, 101), range(40, 47))
PROMPTS = st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=4).map(Segments)
SALTS = ("", "other")


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Devices(RuleBasedStateMachine):
    """Random lives of readers; the oracle is each prompt as a list, and the tree walked from its roots."""

    readers = Bundle("readers")

    @initialize(keep=st.booleans())
    def begin(self, keep: bool) -> None:
        self.clock = SimClock()
        self.cache = SimCache(BLOCK, keep=keep)
        self.memory = SimMemory(POOL, BLOCK, self.cache)
        self.tier = SimTier(HOST, LinearCosts(), CopyStream(self.clock))
        self.live: dict[SimReader, tuple[list[int], str]] = {}
        self.watched: dict[int, tuple[list[int], str]] = {}
        self.lengths: dict[int, int] = {}
        self.keys = 0

    @rule(target=readers, prompt=PROMPTS, salt=st.sampled_from(SALTS))
    def open(self, prompt: Segments, salt: str) -> SimReader:
        reader = SimReader(self.memory, self.cache, self.tier, salt)
        assert reader.update(prompt) == 0
        self.live[reader] = list(prompt), salt
        return reader

    @rule(target=readers, prompt=PROMPTS, salt=st.sampled_from(SALTS))
    def live_through(self, prompt: Segments, salt: str) -> SimReader:
        """As the scheduler leads a reader when nothing is in the way: match, compute, save."""
        reader = self.open(prompt, salt)
        self.match(reader)
        self.compute(reader, len(prompt))
        self.save(reader)
        return reader

    @rule(reader=readers, n=st.integers(1, 12))
    def compute(self, reader: SimReader, n: int) -> None:
        n = min(n, len(self.live[reader][0]) - reader.length)
        if not (n > 0):
            return
        needed, free, before = reader.blocks_needed(n), self.memory.free_blocks, reader.blocks
        taken = reader.acquire(n)
        assert taken is (needed <= free)
        if taken:
            assert reader.blocks == before + needed
            assert not reader.swapped
            reader.wrote(NOWHERE, range(n))

    @rule(reader=readers, prompt=PROMPTS)
    def update(self, reader: SimReader, prompt: Segments) -> None:
        old, salt = self.live[reader]
        before, kept = reader.length, min(reader.length, common(old, list(prompt)))
        assert reader.update(prompt) == before - kept
        assert reader.length == kept
        self.live[reader] = list(prompt), salt

    @rule(reader=readers, n=st.integers(0, 20))
    def keep(self, reader: SimReader, n: int) -> None:
        expected = min(reader.length, n)
        reader.keep(n)
        assert reader.length == expected

    @rule(reader=readers)
    def reset(self, reader: SimReader) -> None:
        reader.reset()
        assert (reader.length, reader.blocks, reader.swapped, reader.cached_tokens) == (0, 0, False, 0)

    @rule(reader=readers)
    def swap(self, reader: SimReader) -> None:
        if not (reader.blocks):
            return
        blocks, length, room = reader.blocks, reader.length, self.tier.free_blocks
        assert self.tier.swap_out(reader) is (blocks <= room)
        assert reader.length == length
        assert (reader.blocks, reader.swapped) == ((0, True) if blocks <= room else (blocks, False))

    @rule(reader=readers)
    def match(self, reader: SimReader) -> None:
        if reader.swapped:
            return
        prompt, salt = self.live[reader]
        best = self.longest(prompt[:-1], salt) if self.cache.keep else 0
        before = reader.length
        assert reader.match() == max(0, best - before)
        assert reader.length == max(best, before)

    @rule(reader=readers, leader=readers, n=st.integers(1, 20))
    def follow(self, reader: SimReader, leader: SimReader, n: int) -> None:
        prompt, salt = self.live[reader]
        n = min(n, common(prompt, self.live[leader][0]), leader.length)
        if not (
            n > reader.length and not reader.swapped and not leader.swapped and salt == self.live[leader][1]
        ):
            return
        before = leader.length
        reader.follow(leader, n)
        assert (reader.length, reader.cached_tokens, leader.length) == (n, n, before)

    @rule(reader=readers)
    def save(self, reader: SimReader) -> None:
        if not (not reader.swapped and reader.length):
            return
        prompt, salt = self.live[reader]
        length, past = reader.length, reader.cached_tokens
        reader.save()
        assert (reader.length, reader.cached_tokens) == (length, past)
        if self.cache.keep:
            assert self.longest(prompt[:length], salt) == length

    @rule(reader=consumes(readers))
    def release(self, reader: SimReader) -> None:
        reader.release()
        del self.live[reader]

    @rule(prompt=PROMPTS, salt=st.sampled_from(SALTS))
    def watch(self, prompt: Segments, salt: str) -> None:
        self.keys += 1
        self.lengths[self.keys] = self.cache.watch(self.keys, prompt, salt)
        self.watched[self.keys] = list(prompt), salt

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if not (self.watched):
            return
        key = data.draw(st.sampled_from(sorted(self.watched)))
        self.cache.forget(key)
        del self.watched[key], self.lengths[key]

    @invariant()
    def blocks_add_up(self) -> None:
        nodes = list(self.nodes())
        held = {id(node) for reader in self.live for node in path(reader._node)}
        private = sum(reader.blocks for reader in self.live)
        in_use = private + sum(node.blocks for node in nodes if id(node) in held)
        assert self.memory.free_blocks == POOL - in_use
        assert self.cache.blocks == sum(node.blocks for node in nodes)
        assert self.memory._unused == POOL - private - self.cache.blocks >= 0
        assert self.tier.free_blocks == HOST - sum(reader._on_host for reader in self.live) >= 0
        for node in nodes:
            assert node.users == sum(node in path(reader._node) for reader in self.live)
            assert node.users or self.cache.keep, "without keep nothing outlives its readers"

    @invariant()
    def readers_read_their_prompt(self) -> None:
        for reader, (prompt, _) in self.live.items():
            shared = [token for node in reversed(path(reader._node)) for token in node.tokens]
            assert shared == prompt[: len(shared)]
            assert reader.cached_tokens <= reader.length
            assert len(shared) <= reader.length
            own = -(-(reader.length - len(shared)) // BLOCK)
            assert own in (reader.blocks, reader._on_host)

    @invariant()
    def watchers_know_the_exact_match(self) -> None:
        changed = self.cache.changes()
        assert len({key for key, _ in changed}) == len(changed)
        self.lengths.update(changed)
        assert self.lengths == {
            key: self.longest(prompt[:-1], salt) for key, (prompt, salt) in self.watched.items()
        }
        assert not self.cache.changes()

    def nodes(self, salts: tuple[str, ...] = SALTS) -> Iterator[Node]:
        stack = [node for salt in salts for node in self.cache._root(salt).children.values()]
        while stack:
            node = stack.pop()
            assert node.tokens
            assert all(
                child.parent is node and first == child.tokens[0] for first, child in node.children.items()
            )
            yield node
            stack += node.children.values()

    def longest(self, prompt: list[int], salt: str) -> int:
        """Brute force: the prompt against every path of the tree."""
        paths = [[t for each in reversed(path(node)) for t in each.tokens] for node in self.nodes((salt,))]
        return max((common(prompt, tokens) for tokens in paths), default=0)


def path(node: Node | None) -> list[Node]:
    """From the node up, the root left out."""
    found: list[Node] = []
    while node is not None and node.parent is not None:
        found.append(node)
        node = node.parent
    return found


Devices.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDevices = Devices.TestCase


def test_the_leaf_used_longest_ago_goes_first() -> None:
    cache = SimCache(BLOCK, keep=True)
    memory = SimMemory(4, BLOCK, cache)
    prompts = [Segments([range(start, start + 8)]) for start in (0, 100, 0, 200)]
    prompts[2] += Segments([range(8, 9)])
    for prompt in prompts:  # the third uses the first again, before the fourth needs room
        live(memory, cache, prompt)
    found = [cache.find(prompt, "", len(prompt))[1] for prompt in prompts]
    assert found == [8, 0, 8, 8]


def test_a_node_can_go_once_all_below_it_are_gone() -> None:
    cache = SimCache(BLOCK, keep=True)
    memory = SimMemory(4, BLOCK, cache)
    for prompt in (Segments([range(8)]), Segments([range(16)]), Segments([range(100, 116)])):
        live(memory, cache, prompt)
    assert cache.find(Segments([range(16)]), "", 16)[1] == 0
    assert (cache.blocks, memory.free_blocks) == (4, 4)


def test_who_waits_where_an_edge_is_split_hears_of_what_is_added_there() -> None:
    cache = SimCache(BLOCK, keep=True)
    memory = SimMemory(20, BLOCK, cache)
    forked = Segments([range(5), range(20, 26)])
    live(memory, cache, Segments([range(9)]))
    assert cache.watch(1, forked, "") == 5
    live(memory, cache, forked)
    assert cache.changes() == [(1, len(forked) - 1)]


def live(memory: SimMemory, cache: SimCache, prompt: Segments) -> None:
    """Match, compute, save and release."""
    reader = SimReader(memory, cache, SimTier(0, LinearCosts(), CopyStream(SimClock())))
    reader.update(prompt)
    reader.match()
    assert reader.acquire(len(prompt) - reader.length)
    reader.wrote(NOWHERE, range(len(prompt) - reader.length))
    reader.save()
    reader.release()


def test_a_pass_waits_for_the_transfers_that_were_begun_for_it() -> None:
    """Out at 40 a block, then in, one after the other; only then the pass of 100 + 10 a token."""
    clock, costs = SimClock(), LinearCosts()
    cache = SimCache(BLOCK)
    memory, copies = SimMemory(4, BLOCK, cache), CopyStream(clock)
    tier = SimTier(8, costs, copies)
    elapsed: list[int] = []

    def elapse(until: int) -> None:
        elapsed.append(until)
        clock.now = until

    executor = SimExecutor(costs, clock, copies, elapse)
    one, other = SimReader(memory, cache, tier), SimReader(memory, cache, tier)
    for reader, start in ((one, 0), (other, 100)):
        reader.update(Segments([range(start, start + 16)]))
    assert one.acquire(12)
    executor.execute([Chunk(one, range(12), sample=False)])
    assert elapsed == [100 + 120]
    assert not other.acquire(8)
    assert tier.swap_out(one)
    assert other.acquire(8)
    executor.execute([Chunk(other, range(100, 108), sample=False)])
    assert elapsed[-1] == 220 + 3 * 40 + 100 + 80
    assert executor.copying_ns == 3 * 40
    other.release()
    assert one.acquire(4)
    rows = executor.execute([Chunk(one, range(12, 16), sample=True, choices=(7, 9))])
    assert elapsed[-1] == 520 + 3 * 40 + 100 + 40
    assert rows[0] is not None
    assert rows[0].token in (7, 9)
    assert (executor.passes, executor.tokens, executor.busy_ns) == (3, 24, 220 + 180 + 140)


def test_an_idle_copy_stream_costs_nothing_later() -> None:
    clock = SimClock()
    copies = CopyStream(clock)
    copies.add(50)
    clock.now = 1000
    copies.add(50)
    assert copies.done_at == 1050


def test_writing_without_blocks_is_noticed() -> None:
    cache = SimCache(BLOCK)
    reader = SimReader(SimMemory(4, BLOCK, cache), cache, SimTier(0, LinearCosts(), CopyStream(SimClock())))
    reader.update(Segments([range(9)]))
    assert reader.acquire(4)
    with pytest.raises(AssertionError, match="without blocks"):
        reader.wrote(NOWHERE, range(5))
