"""The worker thread: it blocks when idle, drains on stop, survives defects, and calls its idle hook."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from scheduler.interfaces import PriorityClass
from scheduler.request import Request, State
from scheduler.worker import Worker
from tests.kit.scheduler.harness import Harness, eventually


@contextmanager
def working(h: Harness, when_idle: Callable[[], float | None] = lambda: None) -> Iterator[Worker]:
    worker = Worker(h.scheduler, when_idle=when_idle)
    worker.start()
    yield worker
    assert worker.stop(1.0)


def test_it_runs_what_other_threads_submit() -> None:
    h = Harness()

    def submit() -> None:
        for n in range(20):
            h.ask((n, n + 1), max_tokens=2)

    with working(h) as worker:
        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: len(h.done) == 80)
        assert eventually(lambda: worker.idle)
    assert sorted(request.id for request in h.done) == list(range(1, 81))
    for request in h.done:
        h.check(request)
    assert worker.progress >= len(h.executor.batches)
    assert worker.failures == 0


def test_an_idle_worker_blocks() -> None:
    """In half a second of idleness it never looks for work and uses almost no CPU time."""
    h = Harness()
    looks: list[int] = []
    step = h.scheduler.step

    def counted() -> bool:
        looks.append(1)
        return step()

    h.scheduler.step = counted
    with working(h) as worker:
        assert eventually(lambda: worker.idle)
        before, cpu = len(looks), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - cpu < 0.1
        assert len(looks) == before
        h.ask()
        assert eventually(lambda: len(h.done) == 1)


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
    for ended in (request, h.ask()):
        assert (ended.state, ended.error and ended.error.code) == (State.FAILED, "stopping")


def test_a_defect_is_logged_counted_and_not_hammered(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()
    step, broken = h.scheduler.step, True

    def faulty() -> bool:
        if broken:
            raise AssertionError("a defect")
        return step()

    h.scheduler.step = faulty
    with working(h) as worker:
        request = h.ask()
        assert eventually(lambda: worker.failures >= 2)
        progress = worker.progress
        time.sleep(0.3)
        assert worker.failures <= 4
        assert (worker.progress, worker.idle) == (progress, False)
        assert "a defect" in caplog.text
        broken = False
        assert eventually(lambda: request.state is State.FINISHED)


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


def test_what_runs_between_batches_wakes_the_worker_and_its_errors_are_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    h, ran = Harness(), threading.Event()

    def faulty() -> None:
        raise RuntimeError("not the scheduler's")

    with working(h) as worker:
        assert eventually(lambda: worker.idle)
        assert h.scheduler.run_between(faulty)
        assert h.scheduler.run_between(ran.set)
        assert ran.wait(5)
    assert worker.failures == 0
    assert "not the scheduler's" in caplog.text


# The idle hook.


def test_it_is_called_only_when_no_work_is_left() -> None:
    """Once each time the work runs out, because it asks for no more."""
    h = Harness()
    live: list[int] = []
    requests = [h.ask(range(12), max_tokens=6) for _ in range(5)]
    with working(h, lambda: live.append(h.scheduler.live)) as worker:
        assert eventually(lambda: live)
        assert len(h.done) == 5
        assert eventually(lambda: worker.idle)
        requests.append(h.ask())
        assert eventually(lambda: len(live) == 2)
    assert live == [0, 0]
    for request in requests:
        h.check(request)


def test_work_goes_before_the_next_piece() -> None:
    """A hook that always has more to do does not hold up a request, nor the end, for more than one piece."""
    h = Harness()
    pieces = 0
    pieces_when_done: list[int] = []

    def piece() -> float:
        nonlocal pieces
        pieces += 1
        if pieces == 10:
            h.ask(on_done=lambda _: pieces_when_done.append(pieces))
        return 0.0

    with working(h, piece):
        assert eventually(lambda: pieces_when_done)
    assert pieces_when_done == [10]
    assert pieces > 10


def test_it_is_called_again_when_it_asked_to_be() -> None:
    h = Harness()
    calls: list[float] = []

    def piece() -> float | None:
        calls.append(time.monotonic())
        return 0.05 if len(calls) < 3 else None

    with working(h, piece) as worker:
        assert eventually(lambda: len(calls) == 3)
        time.sleep(0.2)
        assert len(calls) == 3
        assert calls[2] - calls[0] >= 0.1
        assert worker.idle


def test_its_defects_are_logged_and_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()

    def faulty() -> float:
        raise RuntimeError("a defect")

    with working(h, faulty) as worker:
        assert eventually(lambda: worker.failures == 1)
        request = h.ask()
        assert eventually(lambda: len(h.done) == 1)
        h.check(request)
        assert eventually(lambda: worker.failures == 2)
    assert "a defect" in caplog.text


@pytest.mark.parametrize("cls", [PriorityClass.FLASH, PriorityClass.SESSION])
def test_spare_work_is_done_beside_prompts_and_tapes_but_never_while_a_question_waits(
    cls: PriorityClass,
) -> None:
    """Questions come during passes, also of other questions; a long prompt is answered all the while."""
    h = Harness()
    asked: list[Request] = []
    seen: list[tuple[int, bool]] = []
    """At each piece: questions without an answer, and whether the prompt was being answered."""

    def come() -> None:
        if len(asked) < 40 and len(h.executor.batches) % 3 == 0:
            asked.append(h.ask((len(asked), 7), max_tokens=2, cls=cls))

    def piece() -> bool:
        seen.append((len(asked) - sum(each.id != long.id for each in h.done), long not in h.done))
        return len(seen) < 60

    h.executor.before = come
    long = h.prompt(range(3), max_tokens=100)
    worker = Worker(h.scheduler, spare_work=piece)
    worker.start()
    assert eventually(lambda: len(seen) == 60)
    assert eventually(lambda: len(h.done) == len(asked) + 1)
    assert worker.stop(1.0)
    assert [waiting for waiting, _ in seen] == [0] * len(seen)
    assert any(beside for _, beside in seen)
    assert len(asked) > 10
    h.check(long)


def test_spare_work_that_fails_is_counted_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()

    def piece() -> bool:
        raise RuntimeError("not the scheduler's")

    worker = Worker(h.scheduler, spare_work=piece)
    worker.start()
    assert eventually(lambda: worker.failures and worker.idle)
    request = h.ask()
    assert eventually(lambda: request.state is State.FINISHED)
    assert worker.stop(1.0)
    assert "spare work raised" in caplog.text
