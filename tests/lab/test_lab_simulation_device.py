"""The simulated device: transfers, the host tier and the prefix cache, over the real block metadata."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from engine.step import Chunk
from lab.simulation.device import SimClock, SimDevice, SimTier
from lab.simulation.tokens import Segments
from regions.streaming_kv import StreamingPrompt
from tests.kit.prompts import next_tokens, remaining
from tests.kit.scheduler.simulated import LinearCosts

BLOCK, POOL, HOST = 4, 24, 10
# Documents that begin alike and differ later, so that matches end inside an edge as well as at its end.
DOCUMENTS = (range(0, 5), range(0, 9), range(20, 26), range(100, 101), range(40, 47))
PROMPTS = st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=4).map(Segments)


def device(
    *, blocks: int = POOL, host_blocks: int = HOST, keep: bool = False, elapse: Callable[[int], None] = print
) -> SimDevice:
    return SimDevice(
        LinearCosts(), elapse, blocks=blocks, block_size=BLOCK, host_blocks=host_blocks, keep_prefixes=keep
    )


def opened(on: SimDevice, prompt: Segments) -> StreamingPrompt:
    reader = on.open_prompt()
    assert reader.update(prompt) == 0
    return reader


def compute(reader: StreamingPrompt, n: int) -> bool:
    """The next `n` tokens of its prompt; False without blocks for them."""
    if not reader.acquire(n):
        return False
    reader.wrote(reader.next_slots(n), next_tokens(reader, n))
    return True


class HostMemory(RuleBasedStateMachine):
    """Random lives of prompts; host blocks are those of the swapped ones, however they are cut."""

    readers = Bundle("readers")

    @initialize(keep=st.booleans())
    def begin(self, keep: bool) -> None:
        self.device = device(keep=keep, elapse=lambda until: None)
        self.live: set[StreamingPrompt] = set()

    @rule(target=readers, prompt=PROMPTS)
    def open(self, prompt: Segments) -> StreamingPrompt:
        reader = opened(self.device, prompt)
        self.live.add(reader)
        return reader

    @rule(reader=readers, n=st.integers(1, 12))
    def compute(self, reader: StreamingPrompt, n: int) -> None:
        if n := min(n, remaining(reader)):
            compute(reader, n)

    @rule(reader=readers, prompt=PROMPTS)
    def update(self, reader: StreamingPrompt, prompt: Segments) -> None:
        reader.update(prompt)

    @rule(reader=readers)
    def swap_out(self, reader: StreamingPrompt) -> None:
        blocks, fits = reader.exclusive_tokens, self.device.tier.free_blocks * BLOCK
        was_swapped = reader.swapped
        if self.device.tier.swap_out(reader) and not was_swapped:
            assert 0 < blocks <= fits
            assert reader.swapped

    @rule(reader=readers)
    def match_and_save(self, reader: StreamingPrompt) -> None:
        if not reader.swapped:
            reader.match()
            reader.save()

    @rule(reader=consumes(readers))
    def release(self, reader: StreamingPrompt) -> None:
        reader.release()
        self.live.discard(reader)

    @invariant()
    def host_blocks_are_those_of_the_swapped(self) -> None:
        swapped = sum(-(-reader.exclusive_tokens // BLOCK) for reader in self.live if reader.swapped)
        assert self.device.tier.free_blocks == HOST - swapped
        self.device.pool.check_integrity()
        self.device.cache.check_integrity()


HostMemory.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestHostMemory = HostMemory.TestCase


def test_a_pass_waits_for_the_transfers_that_were_begun_for_it() -> None:
    """Out at 40 a block, then in, one after the other; only then the pass of 100 + 10 a token."""
    elapsed: list[int] = []

    def elapse(until: int) -> None:
        elapsed.append(until)
        on.clock.now = until

    on = device(blocks=4, host_blocks=8, elapse=elapse)
    one, other = (opened(on, Segments([range(start, start + 16)])) for start in (0, 100))
    assert one.acquire(12)
    on.execute([Chunk(one, range(12), sample=False)])
    assert elapsed == [100 + 120]
    assert not other.acquire(8)
    assert on.tier.swap_out(one)
    assert other.acquire(8)
    on.execute([Chunk(other, range(100, 108), sample=False)])
    assert elapsed[-1] == 220 + 3 * 40 + 100 + 80
    assert on.copying_ns == 3 * 40
    other.release()
    assert one.acquire(4)
    sampled = on.execute([Chunk(one, range(12, 16), sample=True, choices=(7, 9))])
    assert elapsed[-1] == 520 + 3 * 40 + 100 + 40
    assert sampled[0].token in (7, 9)
    assert (on.passes, on.tokens, on.busy_ns) == (3, 24, 220 + 180 + 140)
    assert on.peak_blocks == 4


def test_an_idle_copy_stream_costs_nothing_later() -> None:
    clock = SimClock()
    tier = SimTier(2, LinearCosts(block_ns=50), clock)
    tier.load(1)
    clock.now = 1000
    tier.load(1)
    assert tier.done_at == 1050


def test_a_prompt_that_does_not_fit_on_the_host_stays_in_the_pool() -> None:
    on = device(host_blocks=2)
    reader = opened(on, Segments([range(12)]))
    assert compute(reader, 12)
    assert not on.tier.swap_out(reader)
    assert (reader.swapped, reader.blocks, on.tier.free_blocks) == (False, 3, 2)


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_prompt_outlives_its_reader_only_with_a_prefix_cache(keep: bool) -> None:
    on, prompt = device(keep=keep), Segments([range(12)])
    first = opened(on, prompt)
    assert compute(first, 12)
    first.save()
    first.release()
    second = opened(on, prompt + Segments([range(50, 54)]))
    assert second.match() == (12 if keep else 0)
    assert on.pool.free_blocks == (POOL - 3 if keep else POOL)


def test_writing_without_blocks_is_an_error() -> None:
    reader = opened(device(), Segments([range(9)]))
    assert reader.acquire(4)
    with pytest.raises(RuntimeError, match="not acquired"):
        reader.next_slots(5)
