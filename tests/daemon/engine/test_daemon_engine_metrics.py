"""Metrics from the scheduler's calls, against the histories of the same requests."""

from __future__ import annotations

import logging
from collections import Counter
from random import Random

import pytest

from daemon.engine.metrics import EngineObserver
from metrics.catalogue import ANSWERING, CLASSES, LOSSES, OTHER, WAIT_REASONS
from metrics.store import MetricStore
from regions.kv_tensors import KVPool, LayerShape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeAppend, TapeItem, Work
from tests.scheduler.fakes import (
    FakeClock,
    FakeExecutor,
    FakeMemory,
    FakePrompt,
    FakeReader,
    FakeTape,
    FakeTier,
)

FLASH, SESSION, POOL, STREAM = PriorityClass
LIMITS = [
    Limits(
        max_batch_tokens=tokens,
        max_batch_requests=rows,
        chunk_min=3,
        chunk_max=8,
        cell_budget_fraction=cells,
        eviction="swap",
    )
    for tokens, rows, cells in ((24, 4, 0.9), (12, 12, 0.9), (24, 12, 0.6), (16, 6, 1.0))
]


class Witness(EngineObserver):
    """The observer, and the calls it received."""

    def __init__(self, store: MetricStore) -> None:
        super().__init__(store, KVPool([LayerShape(1, 2, 2)], 4))
        self.requests: list[Request] = []
        self.drafts: Counter[str] = Counter()
        self.victims: Counter[tuple[str, str, str]] = Counter()

    def ended(self, request: Request) -> None:
        self.requests.append(request)
        super().ended(request)

    def speculated(self, drafted: int, accepted: int) -> None:
        self.drafts.update(accepted=accepted, rejected=drafted - accepted)
        super().speculated(drafted, accepted)

    def preempted(self, request: Request, how: LifecycleEvent, by: Work) -> None:
        kind = how.value.removeprefix("PREEMPTED_").lower()
        self.victims[kind, request.cls.name.lower(), by.cls.name.lower()] += 1
        super().preempted(request, how, by)


def play(seed: int) -> tuple[MetricStore, Witness]:
    """A load of every class on a pool that is too small, with changing prompts."""
    random, memory, clock, limits = Random(seed), FakeMemory(14, 4), FakeClock(), LIMITS[seed]
    store = MetricStore.local({"session": ["T"]})
    witness = Witness(store)
    executor = FakeExecutor(limits.max_batch_tokens, limits.max_batch_requests)
    scheduler = Scheduler(executor, memory, limits, clock, witness, tier=FakeTier(4))
    tape = FakeTape(memory, "T", 12)
    open_prompts: list[Request] = []

    def prompt() -> list[int]:
        return [random.randrange(3) for _ in range(random.randint(1, 14))]

    def submit() -> None:
        cls = random.choice((FLASH, SESSION, POOL))
        if cls is POOL:
            request = Request(
                RequestSpec(
                    *(POOL, "", prompt(), random.randint(1, 6), lambda _: None),
                    open_prompt=lambda: FakePrompt(memory),
                    complete=random.random() < 0.5,
                )
            )
        else:
            request = Request(
                RequestSpec(
                    *(cls, "T", prompt(), random.randint(1, 6), lambda _: None),
                    tape=tape if tape.version else FakeTape(memory, ""),
                )
            )
        scheduler.submit(request)
        if not request.complete:
            open_prompts.append(request)

    for turn in range(220):
        busy = (
            turn > 120
        )  # calm at first, so that prompts progress far enough for a change to invalidate tokens
        act = random.random()
        if act < (0.6 if busy else 0.3):
            submit()
        elif act < 0.65:
            scheduler.append(tape, [TapeItem((1, 2, 3))])
        elif act < 0.75 and open_prompts:
            scheduler.replace(random.choice(open_prompts).id, prompt())
        elif act < 0.85 and open_prompts:
            scheduler.finish(open_prompts.pop(random.randrange(len(open_prompts))).id)
        if not busy or random.random() < 0.5:
            scheduler.step()
    for request in open_prompts:
        scheduler.finish(request.id)
    while scheduler.step():
        pass
    return store, witness


@pytest.mark.parametrize("seed", range(len(LIMITS)))
def test_the_metrics_are_the_sums_of_what_the_requests_carry(seed: int) -> None:
    store, witness = play(seed)
    waits: Counter[tuple[str, str]] = Counter()
    reused: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for request in witness.requests:
        cls = request.cls.name.lower()
        waits.update({(cls, reason): ns for reason, ns in request.waits.items()})
        if request.state is State.FINISHED:
            reused[cls] += request.cached_tokens
            answered[cls] += 1
    for cls in CLASSES:
        for reason in WAIT_REASONS:
            seconds = store.value("foretick_wait_seconds_total", cls=cls, reason=reason)
            assert seconds == waits[cls, reason] / 1e9
        assert store.value("foretick_reused_tokens_total", cls=cls) == reused[cls]
    for cls in ANSWERING:
        assert store.count("foretick_ttft_seconds", cls=cls) == answered[cls] > 0
    for cls in CLASSES:
        for by in CLASSES:
            found = store.value("foretick_preemptions_total", cls=cls, by_class=by)
            assert found == sum(witness.victims[kind, cls, by] for kind in ("recompute", "swap"))
    for kind, field in (
        ("recomputed", "recomputed_tokens"),
        ("swapped", "swapped_tokens"),
        ("invalidated", "total_tokens_invalidated"),
    ):
        lost = sum(getattr(request, field) for request in witness.requests)
        assert store.value("foretick_lost_tokens_total", kind=kind) == lost
    for outcome, tokens in witness.drafts.items():
        assert store.value("foretick_draft_tokens_total", outcome=outcome) == tokens


def test_the_loads_give_nearly_every_reason_and_the_catalogue_lists_them() -> None:
    """A reason missing from the catalogue would count as `other`."""
    seen: set[str] = set()
    lost: Counter[str] = Counter()
    victims: set[str] = set()
    for seed in range(len(LIMITS)):
        store, witness = play(seed)
        seen |= {reason for request in witness.requests for reason in request.waits}
        assert not any(store.value("foretick_wait_seconds_total", cls=c, reason=OTHER) for c in CLASSES)
        lost.update({k: int(store.value("foretick_lost_tokens_total", kind=k)) for k in LOSSES})
        victims |= {kind for kind, _, _ in witness.victims}
    assert all(lost[kind] for kind in LOSSES)
    assert victims == {"recompute", "swap"}
    assert seen >= {
        "step",
        "tokens",
        "rows",
        "cells",
        "blocks",
        "high_water",
        "behind flash",
        "behind session",
    }


def test_time_to_first_token_runs_from_the_end_of_the_input() -> None:
    store = MetricStore.local({})
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    memory, now = FakeMemory(16, 4), 0
    done: list[Request] = []
    scheduler = Scheduler(FakeExecutor(64, 4), memory, Limits(), lambda: now, observer)
    request = Request(
        RequestSpec(
            *(POOL, "", [1, 2], 3, done.append), open_prompt=lambda: FakePrompt(memory), complete=False
        )
    )
    scheduler.submit(request)
    scheduler.step()
    now = 5_000_000_000
    scheduler.finish(request.id)
    now += 1_000_000
    scheduler.step()
    now += 7_000_000_000
    while scheduler.step():
        pass
    assert [each.state for each in done] == [State.FINISHED]
    assert store.total_seconds("foretick_ttft_seconds", cls="pool") == pytest.approx(0.001)


def test_a_request_without_a_token_counts_no_time_to_first_token() -> None:
    store, memory = MetricStore.local({}), FakeMemory(16, 4)
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    scheduler = Scheduler(FakeExecutor(64, 4), memory, Limits(), FakeClock(), observer)
    request = Request(RequestSpec(SESSION, "", [1, 2], 3, lambda _: None, tape=FakeTape(memory, "")))
    prefill = Request(RequestSpec(STREAM, "", [1, 2], 0, lambda _: None, reader=FakeReader(memory, (7, 7))))
    scheduler.submit(request)
    scheduler.submit(prefill)
    scheduler.cancel(request.id)
    while scheduler.step():
        pass
    assert prefill.state is State.FINISHED
    assert store.count("foretick_ttft_seconds", cls="session") == 0
    assert store.value("foretick_reused_tokens_total", cls="stream") == 2
    assert store.value("foretick_reused_tokens_total", cls="session") == 0
    prefill.reader.release()  # type: ignore[union-attr] # it finished, so it has one


def test_what_no_answer_came_of_was_not_reused() -> None:
    store, memory = MetricStore.local({}), FakeMemory(16, 4)
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    request = Request(RequestSpec(SESSION, "", [1, 2], 3, lambda _: None, tape=FakeTape(memory, "")))
    request.cached_tokens, request.state = 40, State.CANCELLED
    observer.ended(request)
    assert store.value("foretick_reused_tokens_total", cls="session") == 0
    request.state = State.FINISHED
    observer.ended(request)
    assert store.value("foretick_reused_tokens_total", cls="session") == 40


def test_drafts_are_split_into_right_and_wrong() -> None:
    store = MetricStore.local({})
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    observer.speculated(4, 3)
    observer.speculated(2, 0)
    assert store.value("foretick_draft_tokens_total", outcome="accepted") == 3
    assert store.value("foretick_draft_tokens_total", outcome="rejected") == 3


def test_a_pass_without_memory_counts_by_how_it_ended() -> None:
    store = MetricStore.local({})
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    for retried in (True, True, False):
        observer.out_of_memory(retried=retried)
    assert store.value("foretick_oom_total", outcome="retried") == 2
    assert store.value("foretick_oom_total", outcome="failed") == 1


def test_a_preemption_names_both_classes() -> None:
    store, memory = MetricStore.local({}), FakeMemory(16, 4)
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    victim = Request(RequestSpec(SESSION, "", [1], 1, lambda _: None, tape=FakeTape(memory, "")))
    observer.preempted(victim, LifecycleEvent.PREEMPTED_SWAP, TapeAppend(FakeTape(memory, "T")))
    assert store.value("foretick_preemptions_total", cls="session", by_class="stream") == 1
    assert store.value("foretick_preemptions_total", cls="stream", by_class="session") == 0


def test_an_unknown_reason_counts_as_other() -> None:
    store, memory = MetricStore.local({}), FakeMemory(16, 4)
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    request = Request(RequestSpec(POOL, "", [1], 1, lambda _: None, tape=FakeTape(memory, "")))
    request.waits["full moon"] = 2_500_000_000
    observer.ended(request)
    assert store.value("foretick_wait_seconds_total", cls="pool", reason=OTHER) == 2.5


def test_the_debug_log_has_a_line_on_each_request(caplog: pytest.LogCaptureFixture) -> None:
    store, memory = MetricStore.local({}), FakeMemory(16, 4)
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    request = Request(RequestSpec(SESSION, "btc", [1, 2], 1, lambda _: None, tape=FakeTape(memory, "")))
    request.id, request.cached_tokens, request.state = 9, 40, State.FINISHED
    request.waits |= {"cells": 2_000_000, "behind flash": 500_000}
    request.preempted_by, request.recomputed_tokens = [11], 2
    caplog.set_level(logging.INFO, "daemon.engine.metrics")
    observer.ended(request)
    assert not caplog.messages
    caplog.set_level(logging.DEBUG, "daemon.engine.metrics")
    observer.ended(request)
    assert caplog.messages == [
        "request 9 (session, btc) finished: waited cells 2.0 ms, behind flash 0.5 ms; preempted by 11; "
        "2 + 0 tokens, reused 40, recomputed 2, swapped 0, invalidated 0, drafts 0/0"
    ]


def test_waits_are_counted_by_tenant_and_later_ones_together() -> None:
    memory = FakeMemory(40, 4)
    store = MetricStore.local({"session": ["T"], "tenant": ["local", "desk", "other"]})
    scheduler = Scheduler(FakeExecutor(24, 6), memory, LIMITS[0], FakeClock(), Witness(store))
    for tenant in ("", "desk", "desk", "new", "newer"):
        scheduler.submit(
            Request(
                RequestSpec(
                    *(POOL, "", [1, 2], 1, lambda _: None),
                    open_prompt=lambda: FakePrompt(memory),
                    tenant=tenant,
                )
            )
        )
    while scheduler.step():
        pass
    waits = {
        name: store.count("foretick_tenant_wait_seconds", tenant=name) for name in ("local", "desk", "other")
    }
    assert waits == {"local": 1, "desk": 2, "other": 2}
