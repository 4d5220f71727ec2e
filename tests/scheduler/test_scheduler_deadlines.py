"""Deadlines of requests: by a plain list, and what the scheduler does when one passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.deadlines import Deadline, Deadlines
from scheduler.interfaces import PriorityClass
from scheduler.request import State
from tests.kit.scheduler.fakes import FakeClock
from tests.kit.scheduler.harness import Harness

MS = 1_000_000

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 20), st.integers(0, 5)),
        st.tuples(st.just("forget"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 4), st.just(0)),
    ),
    max_size=40,
)


@given(actions)
def test_what_passed_is_told_once_as_a_list_would_tell_it(load: list[tuple[str, int, int]]) -> None:
    deadlines, times, now = Deadlines(), list[tuple[int, int]](), 0
    for number, (what, n, span) in enumerate(load):
        if what == "add":
            deadlines.watch(number, n, n + span)
            times += [(time, number) for time in sorted({n, n + span})]
        elif what == "forget":
            deadlines.forget(n)
            times = [each for each in times if each[1] != n]
        else:
            now += n
            passed = sorted(each for each in times if each[0] < now)
            times = [each for each in times if each[0] >= now]
            assert deadlines.passed(now) == list(dict.fromkeys(number for _, number in passed))
            expected = max(0, min(times)[0] + 1 - now) * 1e-9 if times else None
            assert deadlines.next_due(now) == (None if expected is None else pytest.approx(expected))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(2, 6),
)
def test_every_request_is_answered_by_its_deadline_or_ends_as_late(
    asked: list[tuple[int, int, int]], rows: int
) -> None:
    """A pass takes 5 ms; what is begun in time may end one pass late."""
    clock = FakeClock()
    h = Harness(clock=clock)
    tape = h.tape()
    h.feed(tape, (1, 2, 3))
    h.run()
    for tokens, start, span in asked:
        deadline = Deadline(start * MS, (start + span) * MS)
        h.ask((1, 2), tokens, tape=tape, forked=True, deadline=deadline)
    while h.scheduler.live or h.scheduler.step():
        before = len(h.executor.batches)
        h.scheduler.step()
        clock.now += 5 * MS * (len(h.executor.batches) - before)
    requests = h.done[-len(asked) :]
    assert len(requests) == len(asked)
    for request in requests:
        deadline = request.spec.deadline
        ended, late = request.events[-1][1], request.state is not State.FINISHED
        begun = [at for event, at in request.events if event.value == "SCHEDULED"]
        assert all(at <= deadline.start + 1000 for at in begun[:1])
        assert late or ended <= deadline.end + 5 * MS + 1000
        assert not late or (request.error is not None and request.error.code == "late")
        assert not late or ended > (deadline.end if begun else deadline.start)
    assert h.scheduler.next_due() is None
    assert set(h.memory.references) == set(tape.blocks)


def test_a_request_without_room_to_wait_for_ends_when_its_deadline_passes() -> None:
    """The worker sleeps no longer than that."""
    clock = FakeClock()
    h = Harness(clock=clock)
    h.ask((1,), cls=PriorityClass.FLASH, tape=h.tape(), forked=True, deadline=Deadline(3 * MS, 5 * MS))
    clock.now += 4 * MS
    h.run()
    assert [request.error.code for request in h.done if request.error] == ["late"]
    assert h.executor.batches == []
