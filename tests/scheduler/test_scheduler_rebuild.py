"""A request that the scheduler plans like any other prefills lost KV; other work continues."""

import pytest

from scheduler.interfaces import PriorityClass
from scheduler.observer import RESTORE
from scheduler.rebuild import Rebuilder
from scheduler.refresh_policy import RETRY_NS
from scheduler.request import State
from tests.kit.scheduler.fakes import FakeClock, FakeReader, FakeTape
from tests.kit.scheduler.harness import SMALL, Harness

FLASH, SESSION, POOL, STREAM = PriorityClass
WINDOW = list(range(40))


def with_window(*, blocks: int = 64, clock: FakeClock | None = None) -> tuple[Harness, FakeTape, Rebuilder]:
    """A harness with one full tape and its rebuilder."""
    clock = clock or FakeClock()
    h = Harness(blocks, clock=clock)
    tape = h.tape()
    for start in range(0, len(WINDOW), 20):
        h.feed(tape, WINDOW[start : start + 20])
    h.run()
    assert tape.window == WINDOW
    return h, tape, Rebuilder(h.scheduler, clock)


def rebuilds(h: Harness, tape: FakeTape) -> list[list[int]]:
    """Tokens of each chunk that was computed for the window, batch by batch."""
    mine = (chunk for batch in h.executor.batches for chunk in batch)
    return [
        list(chunk.tokens)
        for chunk in mine
        if isinstance(chunk.target, FakeReader) and not chunk.sample and chunk.tokens[0] in WINDOW
    ]


def test_the_window_is_prefilled_in_chunks_within_the_budgets_of_a_batch() -> None:
    h, tape, _ = with_window()
    tape.lose()
    h.feed(tape, [90, 91])
    h.run()
    chunks = rebuilds(h, tape)
    assert [token for chunk in chunks for token in chunk] == WINDOW
    assert len(chunks) == len(WINDOW) // SMALL.chunk_max
    assert tape.tokens[-2:] == [90, 91]
    assert not h.log.drops


def test_other_sessions_questions_and_appends_go_on_and_what_waited_runs_then() -> None:
    h, tape, _ = with_window()
    other = h.tape("other")
    tape.lose()
    h.feed(tape, [90])
    waiting = h.ask((1, 2), max_tokens=3, tape=tape)
    early = h.ask((3, 4), tape=other)
    h.feed(other, [80, 81])
    while tape.lost:
        h.scheduler.step()
    assert early.state is State.FINISHED
    assert other.version == 1
    assert waiting.state is State.QUEUED
    assert tape.version == 2
    h.run()
    h.check(waiting)
    h.check(early)
    assert h.contexts[waiting.id] in (tuple(WINDOW), tape.history[3])
    assert tape.version == 3
    assert waiting.waits[RESTORE] > 0
    assert RESTORE not in early.waits


def test_a_request_on_a_lost_session_does_not_stop_admission() -> None:
    """Without a rebuilder it waits; later requests of its class are admitted."""
    h = Harness()
    tape = h.tape()
    h.feed(tape, [1, 2, 3])
    h.run()
    tape.lose()
    lost: list[str] = []
    h.scheduler.on_lost(lambda found: lost.append(found.name))
    waiting, behind = h.ask(tape=tape), h.ask()
    h.feed(tape, [4])
    h.run()
    assert (waiting.state, behind.state) == (State.QUEUED, State.FINISHED)
    assert tape.version == 1
    assert set(lost) == {"T"}
    assert not h.log.drops


def test_a_tape_found_lost_during_allocation_preempts_no_request() -> None:
    """The append is the first of the order, and its window fits next to a running answer."""
    h, tape, _ = with_window(blocks=24)
    tape.lose(found=False)
    answer = h.ask(range(8), max_tokens=12, cls=POOL)
    h.scheduler.step()
    h.feed(tape, [90])
    question = h.ask((5,), tape=tape)
    h.scheduler.step()
    assert tape.lost
    assert question.state is State.QUEUED
    assert not answer.preempted_by
    assert not h.log.drops


def test_a_loss_that_shows_once_there_is_room_fails_nothing_and_preempts_nobody_else() -> None:
    """Stored KV is read into blocks, so in a full pool the last answer makes room before the loss shows."""
    h, tape, _ = with_window(blocks=12)
    tape.lose(found=False)
    answers = [h.ask(range(6), max_tokens=6, cls=POOL) for _ in range(2)]
    h.step(4)
    assert h.memory.free_blocks == 6
    tape.staleness_ns = 1  # due at once: before the answers
    h.feed(tape, [90, 91, 92, 93, 94])
    h.scheduler.step()
    assert tape.lost
    assert [bool(answer.preempted_by) for answer in answers] == [False, True]
    h.run()
    assert not h.log.drops
    assert all(answer.state is State.FINISHED for answer in answers)
    assert tape.tokens[-1] == 94


@pytest.mark.parametrize("found", [False, True])
def test_a_session_whose_whole_window_was_evicted_needs_no_prefill(found: bool) -> None:
    """Nothing is left to prefill: no further input is needed to wake the scheduler."""
    h, tape, _ = with_window()
    tape.lose(found=found)
    tape.records, tape.times = [], []
    h.feed(tape, [90])
    h.run()
    assert (tape.lost, tape.tokens) == (False, [90])
    assert rebuilds(h, tape) == []


def test_a_rebuild_gives_way_to_a_standing_question_and_goes_on() -> None:
    h, tape, _ = with_window(blocks=12)
    tape.lose()
    h.feed(tape, [90])
    h.step(5)
    assert tape.lost
    flash = h.ask(range(20), cls=FLASH)
    h.scheduler.step()
    assert flash.state is State.FINISHED
    h.run()
    assert not tape.lost
    assert tape.version == 3
    chunks = [token for chunk in rebuilds(h, tape) for token in chunk]
    assert len(chunks) > len(WINDOW), "what it lost was computed again"


def test_a_rebuild_that_failed_is_tried_again_a_second_later() -> None:
    clock = FakeClock()
    h, tape, rebuilder = with_window(clock=clock)
    tape.lose()
    waiting = h.ask((1,), tape=tape)
    h.scheduler.step()
    h.executor.fail_next = 1
    h.run()
    assert tape.lost
    assert waiting.state is State.QUEUED
    assert 0.9 < (rebuilder.idle() or 0) <= RETRY_NS * 1e-9
    clock.now += RETRY_NS
    assert rebuilder.idle() == 0
    assert rebuilder.idle() is None, "told once: the worker must not spin where no work waits any more"
    h.run()
    h.check(waiting)
