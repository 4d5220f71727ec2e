"""The worker thread blocks when idle, drains on stop, and survives and logs exceptions."""

from __future__ import annotations

import threading
import time

import pytest

from scheduler.request import State
from scheduler.worker import Worker
from tests.scheduler.harness import Harness, eventually


def test_it_runs_what_other_threads_submit() -> None:
    h = Harness()
    worker = Worker(h.scheduler)
    worker.start()
    finished = threading.Event()
    request = h.ask(range(12), max_tokens=4, on_done=lambda _: finished.set())
    assert finished.wait(5)
    assert eventually(lambda: worker.idle)
    assert worker.stop(1.0)
    h.check(request)
    assert worker.progress >= len(h.executor.batches) == 5
    assert worker.failures == 0


def test_many_threads_may_submit_at_once() -> None:
    h = Harness()
    worker = Worker(h.scheduler)
    worker.start()

    def submit() -> None:
        for n in range(20):
            h.ask((n, n + 1), max_tokens=2)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: len(h.done) == 80)
    assert worker.stop(1.0)
    assert sorted(request.id for request in h.done) == list(range(1, 81))
    for request in h.done:
        h.check(request)


def test_an_idle_worker_blocks() -> None:
    """In half a second of idleness it never looks for work and uses almost no CPU time."""
    h = Harness()
    looks: list[int] = []
    step = h.scheduler.step

    def counted() -> bool:
        looks.append(1)
        return step()

    h.scheduler.step = counted  # type: ignore[method-assign] # counts the calls
    worker = Worker(h.scheduler)
    worker.start()
    assert eventually(lambda: worker.idle)
    before, cpu = len(looks), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu < 0.1
    assert len(looks) == before
    h.ask()
    assert eventually(lambda: len(h.done) == 1)
    assert worker.stop(1.0)


def test_stop_drains() -> None:
    h = Harness()
    tape = h.tape()
    worker = Worker(h.scheduler)
    requests = [h.ask(range(20), max_tokens=6) for _ in range(10)]
    h.feed(tape, (1, 2))
    worker.start()
    assert worker.stop(10.0)
    for request in requests:
        h.check(request)
    assert tape.version == 1


def test_what_does_not_drain_in_time_ends_as_stopping() -> None:
    h = Harness()
    h.executor.before = lambda: time.sleep(0.02)
    worker = Worker(h.scheduler)
    request = h.ask(max_tokens=100)
    worker.start()
    assert eventually(lambda: request.output)
    at = time.monotonic()
    assert worker.stop(0.1)
    assert time.monotonic() - at < 2.0
    assert request.state is State.FAILED
    assert request.error is not None
    assert request.error.code == "stopping"
    late = h.ask()
    assert late.error is not None
    assert late.error.code == "stopping"


def test_a_defect_is_logged_counted_and_not_hammered(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()
    step, broken = h.scheduler.step, True

    def faulty() -> bool:
        if broken:
            raise AssertionError("a defect")
        return step()

    h.scheduler.step = faulty  # type: ignore[method-assign] # the defect under test
    worker = Worker(h.scheduler)
    worker.start()
    request = h.ask()
    assert eventually(lambda: worker.failures >= 2)
    progress = worker.progress
    time.sleep(0.3)
    assert worker.failures <= 4
    assert (worker.progress, worker.idle) == (progress, False)
    assert "a defect" in caplog.text
    broken = False
    assert eventually(lambda: request.state is State.FINISHED)
    assert worker.stop(1.0)


def test_stop_during_a_hanging_pass_gives_up_and_says_so() -> None:
    h = Harness()
    release = threading.Event()
    h.executor.before = lambda: release.wait(30)
    worker = Worker(h.scheduler, join_grace_s=0.1)
    h.ask()
    worker.start()
    assert not worker.stop(0.05)
    release.set()
    assert eventually(lambda: len(h.done) == 1)
