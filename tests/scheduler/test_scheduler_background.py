"""Background prefills: adopted by exact sessions, compared with the state of the others."""

from collections.abc import Sequence

import pytest

from engine.divergence import Divergence
from engine.step import OutOfMemory
from regions.ephemeral import Fork
from regions.offload.host_tier import HostTier
from scheduler.interfaces import PriorityClass
from scheduler.request import State
from tests.scheduler.refreshing import FROZEN, LIMITS, QUESTIONS, RETENTION, World, carry, exact


def test_an_exact_session_is_the_dense_model_s_and_a_carrying_one_is_not() -> None:
    """After as many evictions as asked for, at the next data version; carried state has drifted by then."""
    world = World(exact("a"), carry("b"))
    a, b = world.tapes
    for tape in world.tapes:
        world.feed_one_by_one(14, tape)
        assert tape.evicted_records == 4
    assert world.total("refreshes", "a") == 0
    for tape in world.tapes:
        tape.make_room([6, 6])  # the last eviction but one and the last
        world.feed_one_by_one(1, tape)
        assert tape.evicted_records == 6
        assert world.off(tape) > 10  # a is refreshed, but its version is the same, and so is what is read
        world.feed_one_by_one(1, tape)
        assert tape.evicted_records == 6
    assert [world.total("refreshes", name) for name in "ab"] == [1, 0]
    assert world.off(a) <= 1
    assert world.off(b) > 10
    world.close()


@pytest.mark.parametrize("length", [12, 6])
def test_what_is_appended_meanwhile_is_caught_up_with(length: int) -> None:
    """Records come during the prefill and during the catching up; the window is the dense model's.

    What is no longer than a chunk is caught up with at once.
    """
    world = World(exact(every=0, idle_s=1))
    world.feed_one_by_one(13)
    world.tape.make_room([50])  # all that follows fits
    world.feed_one_by_one(1)
    world.clock.now += 10**9
    world.refresher.idle()
    begun = world.tape.live_records
    for _ in range(3):
        world.steps.step()
        world.feed(length=length)
    assert world.total("refreshes") == (length <= LIMITS.chunk_min)
    world.run()
    assert world.total("refreshes") == 1
    assert world.tape.live_records == begun + 3
    world.feed_one_by_one(1)
    assert world.off() <= 1
    world.close()


def test_a_refresh_ends_although_every_pass_appends() -> None:
    """Of a flood that leaves room for the chunks: the last tokens are caught up with between two batches."""
    world = World(exact(every=5))
    for _ in range(80):
        world.feed(1, length=2)
        world.steps.step()
    assert world.total("refreshes") >= 2
    assert world.total("refresh_restarts") == 0
    world.run()
    world.close()


def test_catching_up_that_finds_no_memory_goes_through_the_scheduler() -> None:
    world = World(exact(every=5))
    while world.tape.evicted_records < 5:
        world.feed(1, length=2)
        world.steps.step()
    world.catching_up.out_of_memory = 1
    for _ in range(16):
        world.feed(1, length=2)
        world.steps.step()
    assert not world.catching_up.out_of_memory
    world.run()
    assert world.total("refreshes") >= 1
    world.feed_one_by_one(1)
    world.close()


@pytest.mark.parametrize("cls", [PriorityClass.FLASH, PriorityClass.SESSION])
@pytest.mark.parametrize("replaced", [False, True])
def test_questions_never_share_a_pass_with_a_refresh_nor_wait_for_more_than_one(
    cls: PriorityClass, replaced: bool
) -> None:
    """Nor with one of another prefix that no record waits for."""
    world = World(carry() if replaced else exact(every=1))
    world.evict(1)
    if replaced:
        world.steps.refresh(world.tape, range(40, 60))
    world.steps.step()
    asked = 0
    while world.total("refreshes") == 0:
        request = world.ask(cls)
        passes = len(world.executor.passes)
        world.steps.step()
        assert request.state is State.FINISHED
        assert len(world.executor.passes) == passes + 1
        assert [n for _, n in world.executor.passes[-1]] == [3]
        asked += 1
        passes = len(world.executor.passes)
        world.steps.step()
        assert all(n <= LIMITS.chunk_min for batch in world.executor.passes[passes:] for _, n in batch)
    assert asked > RETENTION // LIMITS.chunk_min - 1
    world.close()


def test_a_window_that_turns_over_before_it_is_ready_is_begun_again_and_counted() -> None:
    """Questions give the refresh no pass; when they stop, the tape is refreshed as it is then."""
    world = World(exact(every=1))
    world.evict(1)
    world.steps.step()
    for _ in range(25):
        world.feed()
        world.ask()
        world.steps.step()
    assert world.total("refreshes") == 0
    restarts = world.total("refresh_restarts")
    assert 1 <= restarts <= 3  # ten records are a window
    world.run()
    assert world.total("refreshes") >= 1
    assert world.total("refresh_restarts") == restarts
    world.close()


def test_a_window_that_would_pass_the_frame_limit_is_begun_again() -> None:
    """Positions stay bounded by the frame limit, however many records come during a refresh."""
    limit = len(FROZEN) + RETENTION + 20
    world = World(exact(every=0, idle_s=1), frame_limit=limit)
    world.feed_one_by_one(13)
    world.clock.now += 10**9
    world.refresher.idle()
    # the first question has its pass to itself; the fourth record is one too many, the next step hears of it
    for _ in range(6):
        world.feed()
        world.ask()
        world.steps.step()
    assert world.total("refresh_restarts") == 1
    world.run()
    assert world.total("refreshes") == 1
    world.feed_one_by_one(1)
    assert max((each.max_position for each in world.tape.state.stretches), default=0) < limit
    world.close()


def test_an_idle_session_is_refreshed_once_when_something_was_evicted() -> None:
    world = World(exact("a", every=0, idle_s=10), carry("b"))
    world.feed_one_by_one(3)
    assert world.refresher.idle() is None  # nothing was evicted
    world.feed_one_by_one(12)
    assert world.refresher.idle() == 10.0
    world.clock.now += 4 * 10**9
    assert world.refresher.idle() == 6.0
    world.feed_one_by_one(1)
    world.clock.now += 6 * 10**9
    assert world.refresher.idle() == 4.0
    world.run()
    assert world.total("refreshes") == 0
    world.clock.now += 4 * 10**9
    assert world.refresher.idle() is None
    world.run()
    assert world.total("refreshes") == 1
    world.clock.now += 10**12
    assert world.refresher.idle() is None
    assert not world.steps.step()
    world.close()


def test_a_session_outside_the_pool_is_not_brought_back_to_be_refreshed() -> None:
    world = World(exact(every=0, idle_s=10))
    world.feed_one_by_one(15)
    assert world.tape.swap_out(HostTier(world.engine.pool, 40))
    world.clock.now += 10**12
    assert world.refresher.idle() is None
    assert not world.steps.step()
    world.close()


def test_a_carrying_session_is_compared_now_and_then_and_stays_as_it_is() -> None:
    """Not before something was evicted, then once in every period; exact sessions at every refresh."""
    world = World(carry("a", every_s=100), exact("b"))
    world.clock.now = 100 * 10**9
    world.feed_one_by_one(10)
    assert world.total("divergence_samples") == 0
    world.feed_one_by_one(1)
    assert world.total("divergence_samples") == len(QUESTIONS)
    assert world.total("refreshes") == 0
    assert 0 <= world.total("divergence_agreements") <= len(QUESTIONS)
    assert 0 < world.counts.kl["a"] < 1
    extents, free = world.tape.extents, world.engine.pool.free_blocks
    world.clock.now += 99 * 10**9
    world.feed_one_by_one(1)
    assert world.total("divergence_samples") == len(QUESTIONS)
    world.clock.now += 10**9
    world.feed_one_by_one(1)
    assert world.total("divergence_samples") == 2 * len(QUESTIONS)
    assert world.tape.extents[-1].origin == extents[-1].origin
    assert abs(world.engine.pool.free_blocks - free) <= 2
    assert world.off() > 10
    assert world.total("divergence_samples", "b") == 0
    world.feed_one_by_one(15, world.tapes[1])
    assert world.total("divergence_samples", "b") == len(QUESTIONS)
    world.close()


def test_without_questions_nothing_is_computed_to_compare() -> None:
    world = World(carry("a", every_s=1), exact("b"))
    world.questions = []
    world.clock.now = 10**12
    for tape in world.tapes:
        world.feed_one_by_one(15, tape)
    assert not any(isinstance(target, Fork) for batch in world.executor.passes[:15] for target, _ in batch)
    assert world.total("refreshes", "b") == 1
    assert world.total("divergence_samples") == world.total("divergence_samples", "b") == 0
    world.close()


def test_as_many_questions_are_compared_as_fit_in_a_batch() -> None:
    world = World(exact())
    world.questions = [(tuple(range(3, 3 + n)), None) for n in (5, 10, 5, 1)]  # both states: 10, 30, 40, 42
    world.feed_one_by_one(15)
    assert world.total("divergence_samples") == 3
    world.close()


def test_a_probe_that_finds_no_memory_does_not_stop_the_refresh() -> None:
    def no_memory(*_: object) -> Sequence[Divergence]:
        raise OutOfMemory("none left")

    world = World(exact(), ask_both=no_memory)
    world.feed_one_by_one(15)
    assert world.total("refreshes") == 1
    assert world.total("divergence_samples") == 0
    world.close()


def test_a_pass_that_fails_ends_the_refresh_alone_until_it_is_due_again() -> None:
    world = World(exact())
    world.evict(5)
    world.steps.step()
    free = world.engine.pool.free_blocks
    world.executor.fail_next = 1
    world.run()
    assert world.engine.pool.free_blocks > free  # what was prefilled is given back
    world.feed_one_by_one(4)
    assert world.total("refreshes") == 0
    world.feed_one_by_one(1)
    assert world.total("refreshes") == 1
    world.close()


def test_a_pool_without_room_for_a_second_window_refuses_the_refresh_and_nothing_else() -> None:
    """The refresh releases its blocks to other work."""
    world = World(exact(every=2), blocks=3 + 16 + 6)
    world.feed_one_by_one(20)
    assert world.total("refreshes") == 0
    assert world.tape.live_records == 10
    request = world.ask()
    world.run()
    assert request.state is State.FINISHED
    world.close()


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("how", ["stop", "forget", "close"])
def test_whenever_it_is_ended_no_block_is_lost(how: str, steps: int) -> None:
    """Ended before, during and after the prefill, while catching up, and between prefill and adoption."""
    world = World(exact(every=3))
    world.evict(3)
    for step in range(steps):
        world.steps.step()
        if step == 5:
            world.feed()
    refreshed = world.total("refreshes")
    if how == "close":
        world.steps.close()
    elif how == "stop":
        world.refresher.stop()
    else:
        world.refresher.forget(world.tape)
    world.run()
    if how != "close":
        world.evict(6)
        world.run()
        assert world.total("refreshes") == refreshed
    assert world.total("refresh_restarts") == 0
    world.close()


def test_one_window_at_a_time_in_the_order_they_became_due() -> None:
    world = World(exact("a"), exact("b"))
    a, b = world.tapes
    world.evict(5, a)
    world.evict(5, b)
    world.run()
    assert [world.total("refreshes", name) for name in "ab"] == [1, 1]
    forks = [target for batch in world.executor.passes for target, _ in batch if isinstance(target, Fork)]
    order = list(dict.fromkeys(map(id, forks)))
    assert len(order) == 2
    assert [id(fork) for fork in forks] == sorted(map(id, forks), key=order.index)
    world.close()


def test_stopping_does_not_wait_for_a_refresh() -> None:
    world = World(exact(every=1), exact("b", every=1))
    for tape in world.tapes:
        world.evict(1, tape)
    world.steps.step()
    world.feed()
    request = world.ask()
    assert world.steps.run_between(world.refresher.stop)
    passes = len(world.executor.passes)
    world.run()
    assert len(world.executor.passes) == passes + 2  # what was asked for, then what was fed, no more
    assert request.state is State.FINISHED
    world.close()
