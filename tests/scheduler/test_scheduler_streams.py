"""Streaming prompts: open, append, update, finish, and clients that vanish (*Stream2LLM* section 4.2)."""

from collections.abc import Sequence

import pytest

from scheduler.interfaces import Limits
from scheduler.request import LifecycleEvent, Request, State
from tests.kit.scheduler.fakes import HeldClock
from tests.kit.scheduler.harness import Harness, events


def opened(h: Harness, prompt: Sequence[int] = (), max_tokens: int = 3) -> Request:
    """An unfinished prompt."""
    return h.prompt(prompt, max_tokens, complete=False)


def test_what_is_there_is_computed_but_for_the_last_token_and_nothing_is_generated() -> None:
    h = Harness()
    request = opened(h, range(10))
    h.run()
    assert (request.computed, request.state, request.output) == (9, State.RUNNING, [])
    h.scheduler.extend(request.id, range(10, 14))
    h.run()
    assert request.computed == 13
    before = len(h.executor.batches)
    h.scheduler.finish(request.id)
    h.run()
    h.check(request)
    assert sum(len(chunk.tokens) for chunk in h.executor.batches[before]) == 1, (
        "one token to the first answer"
    )
    assert events(request) == [
        LifecycleEvent.QUEUED,
        LifecycleEvent.SCHEDULED,
        LifecycleEvent.KV_ON_GPU,
        LifecycleEvent.FINISHED,
    ]
    assert h.memory.free_blocks == h.memory.total_blocks


def test_an_update_keeps_the_common_prefix_and_counts_the_rest() -> None:
    h = Harness()
    request = opened(h, range(16))
    h.run()
    h.scheduler.replace(request.id, [*range(6), *range(50, 60)])
    h.run()
    assert request.total_tokens_invalidated == 15 - 6
    assert request.survival < 1
    computed = sum(len(chunk.tokens) for batch in h.executor.batches for chunk in batch)
    assert computed == 15 + (16 - 6 - 1)
    h.scheduler.finish(request.id)
    h.run()
    h.check(request)


def test_a_prompt_cut_back_to_what_is_in_kv_leaves_a_token_to_compute() -> None:
    h = Harness()
    request = opened(h, range(16))
    h.run()
    h.scheduler.replace(request.id, range(7))
    h.scheduler.finish(request.id)
    h.run()
    h.check(request)


def test_input_before_the_first_batch_counts_and_behind_the_end_changes_nothing() -> None:
    h = Harness()
    request = opened(h)
    h.run()
    assert request.computed == 0
    h.scheduler.extend(request.id, [1])
    h.scheduler.extend(request.id, [2, 3])
    h.scheduler.finish(request.id)
    h.scheduler.extend(request.id, [4])
    h.scheduler.replace(request.id, [9])
    h.run()
    h.scheduler.finish(request.id)
    h.run()
    assert list(request.prompt) == [1, 2, 3]
    h.check(request)


def test_an_empty_prompt_cannot_be_finished() -> None:
    h = Harness()
    request = opened(h)
    h.scheduler.finish(request.id)
    h.run()
    assert request.error.code == "bad_prompt"


def test_a_prompt_that_grows_too_long_ends_with_the_numbers() -> None:
    h = Harness(limits=Limits(max_batch_tokens=24, chunk_min=3, chunk_max=8, max_prompt_tokens=20))
    request = opened(h, range(15))
    h.run()
    h.scheduler.extend(request.id, range(6))
    h.run()
    assert request.error.code == "too_long"
    assert "21 tokens, the limit is 20" in request.error.message
    assert h.memory.free_blocks == h.memory.total_blocks


def test_a_client_that_vanishes_is_given_up_after_the_timeout_and_not_before() -> None:
    limits = Limits(max_batch_tokens=24, chunk_min=3, chunk_max=8, stream_timeout_ns=1000)
    clock = HeldClock()
    h = Harness(limits=limits, clock=clock)
    first, second = opened(h, range(9)), opened(h, range(20, 30))
    h.run()
    clock.now = 600
    h.scheduler.extend(second.id, [1])
    h.run()
    assert h.scheduler.next_due() == pytest.approx(400e-9)
    clock.now = 999
    h.run()
    assert not h.done
    clock.now = 1000
    h.run()
    assert h.done == [first]
    assert first.error.code == "abandoned"
    clock.now = 1599
    h.scheduler.finish(second.id)
    clock.now = 5000
    h.run()
    h.check(second)
    assert h.scheduler.next_due() is None
    assert h.memory.free_blocks == h.memory.total_blocks


def test_finished_prompts_go_before_those_still_coming_in() -> None:
    """fcfs, the default, in two tiers (section 4.4.2): one row a batch, the later but finished one has it."""
    limits = Limits(max_batch_tokens=24, max_batch_requests=1, chunk_min=4, chunk_max=4)
    h = Harness(limits=limits)
    partial = opened(h, range(30))
    h.scheduler.step()
    done = opened(h, range(40, 46))
    h.scheduler.finish(done.id)
    while done.state is not State.FINISHED:
        h.scheduler.step()
    assert partial.computed == 4, "it got one chunk before the other came, and none since"


def test_prompts_that_begin_alike_read_what_one_computes() -> None:
    """Three prompts with 24 tokens in common: those are computed once; each answer is its own."""
    h = Harness()
    common = list(range(24))
    requests = [opened(h, [*common, 50 + n], max_tokens=4) for n in range(3)]
    for request in requests:
        h.scheduler.finish(request.id)
    h.run()
    for request in requests:
        h.check(request)
    prefilled = sum(len(c.tokens) for batch in h.executor.batches for c in batch if len(c.tokens) > 1)
    assert prefilled == len(common), "not three times the beginning"
    assert [request.cached_tokens for request in requests] == [0, 24, 24]
