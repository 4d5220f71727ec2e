"""The worker's idle hook: in bounded pieces, only without work, never delaying any."""

from __future__ import annotations

import threading
import time

import pytest

from scheduler.worker import Worker
from tests.scheduler.harness import Harness, eventually


def test_it_is_called_only_when_no_work_is_left() -> None:
    """Once each time the work runs out, because it asks for no more."""
    h = Harness()
    live: list[int] = []
    worker = Worker(h.scheduler, when_idle=lambda: live.append(h.scheduler.live))
    requests = [h.ask(range(12), max_tokens=6) for _ in range(5)]
    worker.start()
    assert eventually(lambda: live)
    assert len(h.done) == 5
    assert eventually(lambda: worker.idle)
    requests.append(h.ask())
    assert eventually(lambda: len(live) == 2)
    assert worker.stop(1.0)
    assert live == [0, 0]
    for request in requests:
        h.check(request)


def test_work_goes_before_the_next_piece() -> None:
    """A hook that always has more to do does not hold up a request for more than one piece."""
    h = Harness()
    pieces = 0
    asked = threading.Event()
    pieces_when_done: list[int] = []

    def piece() -> float:
        nonlocal pieces
        pieces += 1
        if pieces == 10:
            h.ask(on_done=lambda _: pieces_when_done.append(pieces))
            asked.set()
        return 0.0

    worker = Worker(h.scheduler, when_idle=piece)
    worker.start()
    assert asked.wait(5)
    assert eventually(lambda: pieces_when_done)
    assert worker.stop(1.0)
    assert pieces_when_done == [10]
    assert pieces > 10


def test_it_is_called_again_when_it_asked_to_be() -> None:
    h = Harness()
    calls: list[float] = []

    def piece() -> float | None:
        calls.append(time.monotonic())
        return 0.05 if len(calls) < 3 else None

    worker = Worker(h.scheduler, when_idle=piece)
    worker.start()
    assert eventually(lambda: len(calls) == 3)
    time.sleep(0.2)
    assert len(calls) == 3
    assert calls[2] - calls[0] >= 0.1
    assert worker.idle
    assert worker.stop(1.0)


def test_its_defects_are_logged_and_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()

    def faulty() -> float:
        raise RuntimeError("a defect")

    worker = Worker(h.scheduler, when_idle=faulty)
    worker.start()
    assert eventually(lambda: worker.failures == 1)
    request = h.ask()
    assert eventually(lambda: len(h.done) == 1)
    h.check(request)
    assert eventually(lambda: worker.failures == 2)
    assert "a defect" in caplog.text
    assert worker.stop(1.0)


def test_stopping_does_not_wait_for_more_of_it() -> None:
    h = Harness()
    worker = Worker(h.scheduler, when_idle=lambda: 0.0)
    worker.start()
    assert worker.stop(1.0)
