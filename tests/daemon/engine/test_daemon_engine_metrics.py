"""Metrics from the scheduler's calls, against the histories of the same requests."""

import logging
from collections import Counter
from random import Random
from typing import Any

import pytest

from daemon.engine.metrics import EngineObserver
from metrics.catalogue import ANSWERING, CLASSES, LOSSES, OTHER, WAIT_REASONS
from metrics.store import MetricStore
from regions.kv_tensors import KVPool, LayerShape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, Work
from tests.kit.scheduler.fakes import (
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

    def decoded(self, cls: PriorityClass, drafted: int, accepted: int) -> None:
        self.drafts.update(accepted=accepted, rejected=drafted - accepted)
        super().decoded(cls, drafted, accepted)

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
        name, tokens, longest = "" if cls is POOL else "T", prompt(), random.randint(1, 6)
        how: dict[str, Any] = {"tape": tape if tape.version else FakeTape(memory, "")}
        if cls is POOL:
            how = {"open_prompt": lambda: FakePrompt(memory), "complete": random.random() < 0.5}
        request = Request(RequestSpec(cls, name, tokens, longest, lambda _: None, **how))
        scheduler.submit(request)
        if not request.complete:
            open_prompts.append(request)

    for turn in range(220):
        busy = turn > 120  # calm at first: prompts progress so far that a change invalidates tokens
        act = random.random()
        if act < (0.6 if busy else 0.3):
            submit()
        elif act < 0.65:
            scheduler.append((tape, [TapeItem((1, 2, 3))]))
        elif act < 0.75 and open_prompts:
            scheduler.replace(random.choice(open_prompts).id, prompt())
        elif act < 0.85 and open_prompts:
            scheduler.finish(open_prompts.pop(random.randrange(len(open_prompts))).id)
        if not busy or random.random() < 0.5:
            scheduler.step()
    for request in open_prompts:
        scheduler.finish(request.id)
    run(scheduler)
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
        found = sum(store.value("foretick_draft_tokens_total", cls=cls, outcome=outcome) for cls in CLASSES)
        assert found == tokens
    for cls in CLASSES:
        after_first = sum(len(r.output[1:]) for r in witness.requests if r.cls.name.lower() == cls)
        saved = store.value("foretick_draft_tokens_total", cls=cls, outcome="accepted")
        assert store.value("foretick_decode_passes_total", cls=cls) == after_first - saved


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
    assert seen >= {"step", "tokens", "rows", "cells", "blocks", "high_water"}
    assert seen >= {"behind flash", "behind session"}


MEMORY = FakeMemory(40, 4)


def observed() -> tuple[MetricStore, EngineObserver]:
    store = MetricStore.local({"session": ["T"], "tenant": ["local", "desk", "other"]})
    return store, EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))


def asked(cls: PriorityClass = SESSION) -> Request:
    """A request of two tokens, about an empty tape."""
    return Request(RequestSpec(cls, "btc", [1, 2], 3, lambda _: None, tape=FakeTape(MEMORY, "")))


def prompted(**how: Any) -> Request:
    """A prompt of two tokens."""
    spec = RequestSpec(POOL, "", [1, 2], 3, lambda _: None, open_prompt=lambda: FakePrompt(MEMORY), **how)
    return Request(spec)


def run(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


def test_time_to_first_token_runs_from_the_end_of_the_input() -> None:
    (store, observer), now = observed(), 0
    scheduler = Scheduler(FakeExecutor(64, 4), MEMORY, Limits(), lambda: now, observer)
    request = prompted(complete=False)
    scheduler.submit(request)
    scheduler.step()
    now = 5_000_000_000
    scheduler.finish(request.id)
    now += 1_000_000
    scheduler.step()
    now += 7_000_000_000
    run(scheduler)
    assert request.state is State.FINISHED
    assert store.total_seconds("foretick_ttft_seconds", cls="pool") == pytest.approx(0.001)


def test_a_request_without_a_token_counts_no_time_to_first_token() -> None:
    store, observer = observed()
    scheduler = Scheduler(FakeExecutor(64, 4), MEMORY, Limits(), FakeClock(), observer)
    request = asked()
    prefill = Request(RequestSpec(STREAM, "", [1, 2], 0, lambda _: None, reader=FakeReader(MEMORY, (7, 7))))
    scheduler.submit(request)
    scheduler.submit(prefill)
    scheduler.cancel(request.id)
    run(scheduler)
    assert prefill.state is State.FINISHED
    assert store.count("foretick_ttft_seconds", cls="session") == 0
    assert store.value("foretick_reused_tokens_total", cls="stream") == 2
    assert store.value("foretick_reused_tokens_total", cls="session") == 0
    prefill.reader.release()  # type: ignore[union-attr] # it finished, so it has one


def test_what_no_answer_came_of_was_not_reused() -> None:
    (store, observer), request = observed(), asked()
    for state, reused in ((State.CANCELLED, 0), (State.FINISHED, 40)):
        request.cached_tokens, request.state = 40, state
        observer.ended(request)
        assert store.value("foretick_reused_tokens_total", cls="session") == reused


def test_an_unknown_reason_counts_as_other() -> None:
    (store, observer), request = observed(), asked(POOL)
    request.waits["full moon"] = 2_500_000_000
    observer.ended(request)
    assert store.value("foretick_wait_seconds_total", cls="pool", reason=OTHER) == 2.5


def test_the_debug_log_has_a_line_on_each_request(caplog: pytest.LogCaptureFixture) -> None:
    (_, observer), request = observed(), asked()
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
    store, observer = observed()
    scheduler = Scheduler(FakeExecutor(24, 6), MEMORY, LIMITS[0], FakeClock(), observer)
    for tenant in ("", "desk", "desk", "new", "newer"):
        scheduler.submit(prompted(tenant=tenant))
    run(scheduler)
    for tenant, count in {"local": 1, "desk": 2, "other": 2}.items():
        assert store.count("foretick_tenant_wait_seconds", tenant=tenant) == count
