"""The scheduler's prompts over the real engine: in every case the answer is the dense model's."""

import random
from functools import cache
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.model.loaded import LoadedModel
from regions.offload.host_tier import HostTier
from regions.prefix_index import PrefixIndex
from scheduler.interfaces import Eviction, Limits, PriorityClass
from scheduler.policies import NAMES, Ordering
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from tests.engine.oracle import VOCABULARY, tiny
from tests.kit import tolerance

ANSWER = 6
SWAPPING = Limits(
    max_batch_tokens=64, chunk_min=32, chunk_max=64, cell_budget_fraction=1.0, eviction="swap", high_water=1.0
)


@cache
def model() -> LoadedModel:
    return tiny("llama", layers=2)


@cache
def dense_answer(prompt: tuple[int, ...]) -> tuple[list[int], bool]:
    """Greedy tokens of the unmodified model, and whether two logits were ever too close to tell apart."""
    text, close = list(prompt), False
    for _ in range(ANSWER):
        logits = dense_logits(model(), text)[-1]
        best = logits.topk(2)
        lead = float(best.values[0] - best.values[1])
        close |= lead <= tolerance.of_gap(model(), tolerance.largest(logits))
        text.append(int(best.indices[0]))
    return text[len(prompt) :], close


class World:
    """A scheduler over a real engine with a small pool and a host tier."""

    def __init__(self, blocks: int, limits: Limits, policy: str = "fcfs", host_blocks: int = 30) -> None:
        self.engine = Engine(model(), blocks=blocks, block_size=4, eager=True)
        self.host = HostTier(self.engine.pool, host_blocks)
        self.done: list[Request] = []
        ticks = count()
        self.scheduler = Scheduler(
            self.engine,
            self.engine.pool,
            limits,
            lambda: next(ticks),
            None,
            Ordering(policy, k=2),
            tier=self.host,
            index=PrefixIndex(self.engine.cache),
            rng=random.Random(0),
        )

    def open(self, prompt: list[int], *, complete: bool = False) -> Request:
        request = Request(
            RequestSpec(
                PriorityClass.POOL,
                "",
                prompt,
                ANSWER,
                self.done.append,
                open_prompt=self.engine.open_prompt,
                complete=complete,
            )
        )
        self.scheduler.submit(request)
        return request

    def rest(self) -> None:
        for _ in range(2000):
            if not self.scheduler.step():
                return
        raise AssertionError("the scheduler does not become idle")

    def check(self) -> None:
        """Every answer is the dense one, and only cached blocks are left in the pool."""
        for request in self.done:
            if not request.prompt:
                assert request.error is not None
                assert request.error.code == "bad_prompt"
                continue
            assert request.state is State.FINISHED, request.error
            expected, close = dense_answer(tuple(request.prompt))
            assert request.output == expected or close
        pool = self.engine.pool
        pool.check_integrity()
        self.engine.cache.check_integrity()
        assert pool.free_blocks == pool.total_blocks, "every used block is cached and can be reclaimed"
        assert self.host.pool.free_blocks == self.host.pool.total_blocks


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "whole", "extend", "replace", "finish", "step", "step", "step"]),
        st.integers(0, 5),
        st.integers(0, 1000),
    ),
    max_size=40,
)


@given(
    OPERATIONS,
    st.sampled_from(NAMES),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=20)
def test_streamed_prompts_are_answered_as_the_dense_model_answers_them(
    operations: list[tuple[str, int, int]], policy: str, eviction: Eviction, grouping: bool, drafts: int
) -> None:
    """Under every policy, in a pool that holds two or three of them: preempted, grouped, drafted."""
    limits = Limits(
        max_batch_tokens=24,
        max_batch_requests=5,
        chunk_min=3,
        chunk_max=9,
        cell_budget_fraction=1.0,
        eviction=eviction,
        grouping=grouping,
        max_drafts=drafts,
    )
    world = World(24, limits, policy)
    rng = random.Random(7)
    source = [rng.randrange(3, VOCABULARY) for _ in range(60)]
    requests: list[Request] = []
    for name, which, n in operations:
        if name == "open":
            requests.append(world.open(source[: n % 20]))
        elif name == "whole":
            requests.append(world.open([*source[: n % 30], 3 + n % 7], complete=True))
        elif name == "step":
            world.scheduler.step()
        elif requests:
            request = requests[which % len(requests)]
            if name == "extend" and len(request.prompt) < 40:
                at = len(request.prompt)
                world.scheduler.extend(request.id, source[at : at + n % 12])
            elif name == "replace":
                world.scheduler.replace(request.id, [*source[: n % 25], *source[30 : 30 + n % 7], 5])
            elif name == "finish":
                world.scheduler.finish(request.id)
    for request in requests:
        world.scheduler.extend(request.id, [4])
        world.scheduler.finish(request.id)
    world.rest()
    assert len(world.done) == len(requests)
    world.check()


def test_an_unfinished_prompt_that_is_cached_as_a_whole_waits_for_its_end() -> None:
    """Alone in its batch it has nothing to compute, and it is still admitted."""
    limits = Limits(max_batch_tokens=64, chunk_min=32, chunk_max=64, cell_budget_fraction=1.0)
    world = World(24, limits)
    world.open(list(range(3, 20)), complete=True)
    world.rest()
    again = world.open(list(range(3, 20)))
    world.rest()
    assert (again.state, again.cached_tokens, again.output) == (State.RUNNING, 16, [])
    world.scheduler.extend(again.id, [20, 21])
    world.scheduler.finish(again.id)
    world.rest()
    world.check()


def test_a_victim_comes_back_from_the_host_without_computing_anything_again() -> None:
    world = World(12, SWAPPING)
    partial = world.open(list(range(3, 35)))
    world.rest()
    assert partial.computed == 31
    whole = world.open(list(range(40, 65)), complete=True)
    while whole.state is not State.FINISHED:
        world.scheduler.step()
    assert LifecycleEvent.PREEMPTED_SWAP in [event for event, _ in partial.events]
    assert partial.preempted_by == [whole.id]
    world.scheduler.finish(partial.id)
    world.rest()
    assert (partial.swapped_tokens, partial.recomputed_tokens) == (31, 0)
    world.check()


def test_a_full_host_tier_means_recompute() -> None:
    world = World(12, SWAPPING, host_blocks=3)
    partial = world.open(list(range(3, 35)))
    world.rest()
    world.open(list(range(40, 65)), complete=True)
    world.rest()
    world.scheduler.finish(partial.id)
    world.rest()
    assert (partial.swapped_tokens, partial.recomputed_tokens) == (0, 31)
    world.check()


def test_an_update_of_a_prompt_on_the_host_keeps_its_common_prefix() -> None:
    world = World(12, SWAPPING)
    partial = world.open(list(range(3, 35)))
    world.rest()
    whole = world.open(list(range(40, 65)), complete=True)
    while whole.state is not State.FINISHED:
        world.scheduler.step()
    world.scheduler.replace(partial.id, [*range(3, 20), 50, 51])
    world.scheduler.finish(partial.id)
    world.rest()
    assert partial.total_tokens_invalidated == 31 - 17
    world.check()
