"""Prefill-only requests, which use what all other work leaves."""

import threading
from collections.abc import Sequence

import pytest

from regions.sliding import Retention
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.request import LifecycleEvent, Request, State
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import FakeReader
from tests.kit.scheduler.harness import SMALL, Harness, events

STREAM = PriorityClass.STREAM


def prefill(
    h: Harness, prompt: Sequence[int], reader: FakeReader | None = None
) -> tuple[Request, FakeReader]:
    reader = reader or FakeReader(h.memory)
    return h.ask(prompt, 0, STREAM, reader=reader, session="s", background=True), reader


def test_it_ends_with_its_prompt_in_kv_and_leaves_the_reader_to_who_asked() -> None:
    h = Harness()
    request, reader = prefill(h, range(20))
    h.run()
    assert request.state is State.FINISHED
    assert (request.output, request.samples) == ([], [])
    assert h.done == [request]
    assert reader.kv == list(range(20))
    assert not reader.released
    assert events(request) == [
        LifecycleEvent.QUEUED,
        LifecycleEvent.SCHEDULED,
        LifecycleEvent.KV_ON_GPU,
        LifecycleEvent.FINISHED,
    ]
    assert not any(chunk.sample for batch in h.executor.batches for chunk in batch)


def test_a_longer_prompt_on_the_same_reader_computes_only_the_rest() -> None:
    h = Harness()
    _, reader = prefill(h, range(7))
    h.run()
    done = len(h.executor.batches)
    prefill(h, range(12), reader)
    h.run()
    assert [token for batch in h.executor.batches[done:] for token in batch[0].tokens] == list(range(7, 12))
    assert reader.kv == list(range(12))


def test_it_takes_the_smallest_chunks_and_no_pass_holds_both_it_and_a_question() -> None:
    """Questions of every class that come while it runs have their passes to themselves, in usual chunks."""
    h = Harness()
    request, reader = prefill(h, range(30))
    h.scheduler.step()
    for cls in (PriorityClass.FLASH, PriorityClass.SESSION, PriorityClass.POOL):
        question = h.ask(range(50, 58), max_tokens=3, cls=cls)
        h.scheduler.step()
        assert len(question.output) == 1  # the whole prompt at once: no request shares the chunk with it
        h.step(3)  # two of them the answer's
        h.check(question)
    assert request.state is not State.FINISHED
    h.run()
    assert reader.kv == list(range(30))
    for batch in h.executor.batches:
        if any(chunk.target is reader for chunk in batch):
            assert len(batch) == 1
            assert len(batch[0].tokens) == SMALL.chunk_min


def test_appends_go_before_it_whenever_they_came() -> None:
    h = Harness()
    tape = h.tape()
    _, reader = prefill(h, range(30))
    h.scheduler.step()
    h.feed(tape, range(60, 70), range(70, 82))
    h.scheduler.step()
    first, second = h.executor.batches[-1]
    assert (first.target, list(first.tokens)) == (tape, list(range(60, 82)))
    assert (second.target, len(second.tokens)) == (reader, 2)  # what was left of the batch's 24 tokens
    assert tape.version == 1


def test_no_limit_on_prompts_refuses_it_and_it_claims_no_cells() -> None:
    """The questions' share of the pool is untouched by background prefills."""
    limits = Limits(max_batch_tokens=24, chunk_min=3, chunk_max=8, max_prompt_tokens=20)
    h = Harness(blocks=20, limits=limits)  # 80 cells, 40 of them the questions'
    request, reader = prefill(h, range(30))
    h.step(4)
    question = h.ask(range(20), max_tokens=20)
    h.scheduler.step()
    assert question.state is State.RUNNING
    h.run()
    h.check(question)
    assert request.state is State.FINISHED
    assert reader.kv == list(range(30))


def test_it_loses_its_blocks_to_anybody_and_begins_again() -> None:
    h = Harness(blocks=10)
    tape = h.tape()
    _, reader = prefill(h, range(30))
    h.step(9)
    assert reader.length == 27
    question = h.ask(range(16), max_tokens=1)
    h.feed(tape, range(60, 68))
    h.run()
    h.check(question)
    assert tape.version == 1
    assert reader.kv == list(range(30))
    assert h.done[-1].recomputed_tokens == 27


def test_a_prefill_that_does_not_fit_the_free_blocks_fails_and_is_released() -> None:
    h = Harness(blocks=6)
    request, reader = prefill(h, range(30))
    h.run()
    assert request.error.code == "no_memory"
    assert reader.released
    assert h.memory.free_blocks == 6


@pytest.mark.parametrize("how", ["cancel", "error", "close"])
def test_whatever_ends_it_early_releases_the_reader(how: str) -> None:
    h = Harness()
    request, reader = prefill(h, range(30))
    h.scheduler.step()
    assert not reader.released
    if how == "cancel":
        h.scheduler.cancel(request.id)
    elif how == "error":
        h.executor.fail_next = 1
    else:
        h.scheduler.close()
    h.run()
    assert request.state is (State.CANCELLED if how == "cancel" else State.FAILED)
    assert h.done == [request]
    assert reader.released
    assert h.memory.free_blocks == 64


def test_its_wait_counts_as_no_queueing_time() -> None:
    waits: list[PriorityClass] = []

    class Waits(Observer):
        def queue_wait(self, cls: PriorityClass, ns: int) -> None:
            waits.append(cls)

    h = Harness(observer=Waits())
    prefill(h, range(5))
    h.run()
    assert waits == []
    h.feed(h.tape(), (1, 2))
    h.run()
    assert waits == [STREAM]


def test_a_record_s_event_time_reaches_its_tape() -> None:
    """Records older than the span before the newest of an append go; each keeps the time it came with."""
    h = Harness()
    tape = h.tape()
    tape.retention = Retention(40, span_ns=10)
    for times in ((1, 2), (5,), (12, 11), (30,)):
        h.scheduler.append((tape, [TapeItem((at, at), ts_event=at) for at in times]))
        h.scheduler.step()
        newest = max(times)
        assert tape.times == [record[0] for record in tape.records]
        assert all(at >= newest - 10 for at in tape.times)
    assert tape.times == [30]
    assert tape.version == 4


def test_a_backlog_longer_than_the_span_is_appended_in_pieces_that_fit_it() -> None:
    """No version shows a record older than the span before that version's newest."""
    h = Harness()
    tape = h.tape()
    tape.retention = Retention(40, span_ns=10)
    h.scheduler.append((tape, [TapeItem((at,), ts_event=at) for at in (1, 4, 9, 12, 13, 40, 41)]))
    windows = []
    while h.scheduler.step():
        windows.append(list(tape.times))
    assert windows == [[1, 4, 9], [4, 9, 12, 13], [40, 41]]


# Between batches.


def test_a_callable_runs_before_the_next_batch_on_the_stepping_thread() -> None:
    h = Harness()
    seen: list[tuple[int, int]] = []
    tape = h.tape()

    def look() -> None:
        seen.append((len(h.executor.batches), threading.get_ident()))
        assert tape.written is None  # no append is half done

    h.feed(tape, (1, 2))
    h.executor.before = lambda: h.scheduler.run_between(look)
    h.scheduler.step()
    assert seen == []
    h.executor.before = lambda: None
    assert h.scheduler.step()
    assert seen == [(1, threading.get_ident())]


def test_after_closing_nothing_is_called_and_the_caller_knows() -> None:
    h = Harness()
    called: list[int] = []
    assert h.scheduler.run_between(lambda: called.append(1))
    h.scheduler.close()
    assert called == [1]
    assert not h.scheduler.run_between(lambda: called.append(2))
    h.run()
    assert called == [1]
