"""One scheduler over the hash model: answers, classes, failures, endings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.step import Chunk, SampledToken
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec, State
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import FakeExecutor, FakeReader, FakeTape, HeldClock, model, one_by_one
from tests.kit.scheduler.harness import SMALL, Harness, started

FLASH, SESSION, POOL, STREAM = PriorityClass


def test_long_prompts_are_chunked_and_sampled_once() -> None:
    h = Harness()
    h.ask(range(30), max_tokens=1)
    h.run()
    assert [[(len(c.tokens), c.sample) for c in batch] for batch in h.executor.batches] == [
        [(8, False)],
        [(8, False)],
        [(8, False)],
        [(6, True)],
    ]


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    tokens = [row.token for row in one_by_one((), (5, 6), 4)]
    stop = tokens[2]
    h = Harness()
    request = h.ask((5, 6), max_tokens=10, stop_ids=frozenset({stop}))
    h.run()
    cut = tokens.index(stop)
    assert request.output == tokens[: cut + 1]
    assert request.answer == tokens[:cut]


def test_choices_restrict_the_token_and_the_gap_and_end_after_one() -> None:
    h = Harness()
    request = h.ask((5, 6), max_tokens=10, choices=(11, 12))
    h.run()
    assert request.samples == [model((5, 6), (11, 12))]
    assert request.output[0] in (11, 12)
    assert request.samples[0].gap == request.samples[0].top1 - request.samples[0].top2 > 0


def test_one_batch_mixes_prefill_decode_and_stream() -> None:
    h = Harness()
    a, b = h.tape("A"), h.tape("B")
    first = h.ask((1, 2), max_tokens=5, tape=a)
    h.scheduler.step()
    h.ask((3, 4, 5), max_tokens=1, cls=POOL)
    h.feed(a, (7, 7), (8,))
    h.feed(b, (9,))
    h.scheduler.step()
    batch = h.executor.batches[1]
    # with a question a prompt below it only keeps moving: a token where chunk_min is 3
    assert [list(chunk.tokens) for chunk in batch] == [[first.output[0]], [3], [7, 7, 8], [9]]
    assert (a.version, b.version) == (1, 1)
    assert a.records == [[7, 7], [8]]


def test_classes_go_in_order_and_fifo_within() -> None:
    h = Harness(limits=Limits(max_batch_tokens=24, max_batch_requests=1, chunk_min=3, chunk_max=8))
    tape = h.tape()
    h.feed(tape, (1,))
    order = [h.ask(cls=cls) for cls in (POOL, SESSION, FLASH, POOL, SESSION, FLASH)]
    h.run()
    by_start = sorted(order, key=started)
    assert by_start == sorted(order, key=lambda r: (r.cls, r.id))
    assert h.executor.batches[-1][0].target is tape


def test_all_standing_questions_go_in_one_batch_unchunked() -> None:
    h = Harness(limits=Limits(max_batch_tokens=64, max_batch_requests=8, chunk_min=3, chunk_max=4))
    requests = [h.ask(range(10), cls=FLASH) for _ in range(6)]
    assert h.run() == 1
    assert len(h.executor.batches) == 1
    assert all(request.state is State.FINISHED for request in requests)


def test_lazy_readers_read_the_version_of_their_first_batch() -> None:
    h = Harness(limits=Limits(max_batch_tokens=24, max_batch_requests=1, chunk_min=3, chunk_max=8))
    tape = h.tape()
    h.feed(tape, (9, 9))
    h.run()
    early = h.ask(tape=tape, forked=True)
    late = h.ask(tape=tape, cls=POOL)
    h.ask(on_done=lambda _: h.feed(tape, (4, 4)))
    h.scheduler.step()
    h.feed(tape, (5, 5))
    h.run()
    assert early.version == 1
    assert late.version == 1  # POOL goes before STREAM
    for request in (early, late):
        h.check(request)


def test_a_backlog_on_one_tape_does_not_hold_up_another() -> None:
    h = Harness()
    busy, calm = h.tape("busy"), h.tape("calm")
    h.feed(busy, *[range(12)] * 4)
    h.feed(calm, range(12))
    h.feed(busy, *[range(12)] * 4)
    h.run()
    assert [name for name, _, _ in h.log.commits[:3]] == ["busy", "busy", "calm"]


def test_a_commit_callback_gets_its_questions_into_the_next_batch() -> None:
    h = Harness()
    tape = h.tape()
    asked: list[Request] = []

    h.scheduler.subscribe(lambda *_: asked.append(h.ask(cls=FLASH, tape=tape, forked=True)))
    h.feed(tape, range(20), range(20))
    h.step(2)
    assert asked[0].version == 1
    assert asked[0].state is State.FINISHED
    h.run()
    assert [request.version for request in asked] == [1, 2]
    assert h.log.drops == []
    for request in asked:
        assert h.contexts[request.id] == tape.history[request.version]
        h.check(request)


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        (11, 1, "the prompt has 11 tokens, the limit is 10"),
        (5, 9, "asks for 9 new tokens, the limit is 8"),
        (10, 8, "need 18 cells; requests may use 16 of the pool's 32"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, new: int, words: str) -> None:
    h = Harness(blocks=8, limits=Limits(max_batch_tokens=24, max_prompt_tokens=10, max_new_tokens=8))
    request = h.ask(range(prompt), max_tokens=new, forked=True)
    h.run()
    assert request.state is State.FAILED
    assert request.error.code == "too_long"
    assert words in request.error.message
    assert h.done == [request]
    assert request.reader is None
    assert not h.executor.batches


def test_a_record_no_batch_can_hold_is_dropped_and_the_rest_kept() -> None:
    h = Harness()
    tape = h.tape()
    h.feed(tape, (1,), range(25), (2,))
    h.run()
    assert tape.records == [[1], [2]]
    [(name, records, failure)] = h.log.drops
    assert (name, failure.code) == ("T", "too_long")
    assert [len(record.tokens) for record in records] == [25]
    with pytest.raises(ValueError, match="one token"):
        h.scheduler.append((tape, [TapeItem((1,)), TapeItem(())]))
    assert not h.scheduler.step()


def test_a_failed_batch_fails_its_requests_and_nothing_else() -> None:
    h = Harness()
    tape = h.tape()
    bad = [h.ask(max_tokens=3), h.ask(max_tokens=3, cls=FLASH)]
    h.feed(tape, (1, 2))
    h.executor.fail_next = 1
    h.scheduler.step()
    good = h.ask(max_tokens=3)
    h.run()
    for request in bad:
        assert request.state is State.FAILED
        assert request.error.code == "engine"
        assert "device lost" in request.error.message
    h.check(good)
    assert tape.records == [[1, 2]]
    assert not h.log.drops
    assert h.memory.free_blocks == 64 - len(tape.blocks)


def test_records_lost_twice_are_dropped_and_reported() -> None:
    h = Harness()
    tape = h.tape()
    h.feed(tape, (1, 2), (3,))
    h.executor.fail_next = 2
    h.run()
    [(_, records, failure)] = h.log.drops
    assert [list(record.tokens) for record in records] == [[1, 2], [3]]
    assert failure.code == "engine"
    h.feed(tape, (4,))
    h.run()
    assert tape.records == [[4]]
    assert h.log.commits == [("T", 1, [TapeItem((4,), (4,))])]


def test_a_success_resets_the_retry() -> None:
    h = Harness()
    tape = h.tape()
    for record in ((1,), (2,)):
        h.feed(tape, record)
        h.executor.fail_next = 1
        h.run()
    assert tape.records == [[1], [2]]
    assert not h.log.drops


def test_a_commit_that_raises_drops_its_records_only() -> None:
    h = Harness()
    bad, good = h.tape("bad"), h.tape("good")
    bad.fail_commit = True
    h.feed(bad, (1,))
    h.feed(good, (2,))
    h.run()
    assert [(name, failure.code) for name, _, failure in h.log.drops] == [("bad", "engine")]
    assert good.records == [[2]]


def test_unusable_logits_fail_that_request_alone() -> None:
    h = Harness()
    h.executor.nan_after = (66, 67)
    bad, good = h.ask((1, 66, 67)), h.ask((1, 67, 66))
    h.run()
    assert (bad.state, bad.error.code) == (State.FAILED, "nan_logits")
    assert bad.output == []
    h.check(good)


def test_a_session_that_cannot_be_opened_fails_its_request_alone() -> None:
    h = Harness()

    class Gone(FakeTape):
        def fork(self) -> FakeReader:
            raise KeyError("no such session")

    request, good = h.ask(tape=Gone(h.memory, "gone")), h.ask()
    h.run()
    assert request.error.code == "open_failed"
    assert "no such session" in request.error.message
    h.check(good)


class Mute(FakeExecutor):
    """Returns no rows."""

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        return []


def test_a_wrong_number_of_rows_is_an_engine_failure() -> None:
    h = Harness(executor=Mute(64, 64))
    failed = h.ask()
    h.run()
    assert (failed.error.code, failed.reader) == ("engine", None)
    assert "0 rows for 1 chunks" in failed.error.message


def test_cancel_queued_running_and_ended() -> None:
    h = Harness()
    tape = h.tape()
    running = h.ask(max_tokens=20, tape=tape)
    h.scheduler.step()
    queued = h.ask(tape=tape, forked=True)
    for request in (running, queued):
        h.scheduler.cancel(request.id)
        h.scheduler.cancel(request.id)
    h.scheduler.cancel(12345)
    h.run()
    assert [request.state for request in (running, queued)] == [State.CANCELLED] * 2
    assert [request.computed_tokens for request in (running, queued)] == [len(running.prompt), 0]
    assert h.done == [running, queued]
    assert len(h.executor.batches) == 1
    assert h.memory.free_blocks == 64


def test_a_callback_that_raises_affects_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()

    def angry(_: Request) -> None:
        raise RuntimeError("not my day")

    first, second = h.ask(on_done=angry), h.ask()
    h.run()
    h.check(first)
    h.check(second)
    assert "not my day" in caplog.text


def test_close_ends_everything_and_refuses_what_comes_later() -> None:
    h = Harness()
    tape = h.tape()
    running = h.ask(max_tokens=20, tape=tape)
    h.scheduler.step()
    h.feed(tape, (1,))
    h.scheduler.close()
    late = h.ask(forked=True)
    h.feed(tape, (2,))
    for request in (running, late):
        assert (request.state, request.error.code) == (State.FAILED, "stopping")
    assert [(records[0].tokens, failure.code) for _, records, failure in h.log.drops] == [
        ((1,), "stopping"),
        ((2,), "stopping"),
    ]
    assert not h.scheduler.step()
    assert h.memory.free_blocks == 64


def test_the_observer_hears_of_waits_and_batches() -> None:
    class Recorder(Observer):
        def __init__(self) -> None:
            self.waits: list[PriorityClass] = []
            self.batches: list[tuple[dict[PriorityClass, int], int]] = []
            self.counts: dict[PriorityClass, int] = {}
            self.waiting: dict[PriorityClass, int] = {}

        def queue_wait(self, cls: PriorityClass, ns: int) -> None:
            assert ns > 0
            self.waits.append(cls)

        def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
            assert forward_ns > 0
            self.batches.append((dict(tokens), rows))

        def depth(self, waiting: Mapping[PriorityClass, int], live: Mapping[PriorityClass, int]) -> None:
            self.counts = dict(live)
            self.waiting = dict(waiting)

    seen = Recorder()
    h = Harness(observer=seen)
    tape = h.tape(retention=4)
    h.ask((1, 2, 3), max_tokens=2)
    h.feed(tape, (1, 2), (3,))
    h.scheduler.step()
    assert seen.counts == {FLASH: 0, SESSION: 1, POOL: 0, STREAM: 1}
    assert seen.waiting == {FLASH: 0, SESSION: 0, POOL: 0, STREAM: 1}, "the ask runs"
    h.feed(tape, (5, 6))
    h.run()
    assert seen.waits == [SESSION, STREAM, STREAM, STREAM]
    assert seen.batches == [({SESSION: 3}, 1), ({SESSION: 1, STREAM: 3}, 2), ({STREAM: 2}, 1)]
    assert seen.counts == dict.fromkeys(PriorityClass, 0)


def test_a_tape_gives_way_to_a_question_once_then_takes_its_smallest_chunk_and_alone_all_that_fits() -> None:
    """A backlog must not make the pass long that a question waits for; a record is never cut for it."""
    h = Harness()  # chunk_min is 3
    tape = h.tape(retention=20)
    h.ask((1,), max_tokens=3)
    h.feed(tape, (1, 2), (3,), (4, 5, 6, 7), (8,), (9,))
    h.scheduler.step()
    assert tape.records == []
    h.scheduler.step()
    assert tape.records == [[1, 2], [3]]
    h.scheduler.step()
    assert tape.records == [[1, 2], [3], [4, 5, 6, 7]]
    h.scheduler.step()
    assert tape.records == [[1, 2], [3], [4, 5, 6, 7], [8], [9]]


def test_questions_without_end_take_all_of_the_first_batch_only() -> None:
    """Work that was delayed by one question is not delayed by the next."""
    h = Harness()
    tape = h.tape(retention=20)
    h.feed(tape, *((n,) for n in range(8)))
    prompt = h.ask(range(1, 7), cls=POOL)
    for n in range(5):
        h.ask((n,))
        h.scheduler.step()
        assert (len(tape.records), len(prompt.prompt) - prompt.remaining) == (min(3 * n, 8), n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tape": None}, "a request"),
        ({"prompt": ()}, "a request"),
        ({"max_tokens": -1}, "a request"),
        ({"complete": False}, "unfinished prompt"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_nonsense_requests_are_refused_by_their_constructor(arguments: dict[str, Any], message: str) -> None:
    good = {"cls": SESSION, "session": "s", "prompt": (1,), "max_tokens": 1, "on_done": print}
    good["tape"] = Harness().tape()
    RequestSpec(**good)
    with pytest.raises(ValueError, match=message):
        RequestSpec(**{**good, **arguments})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch_tokens", 0),
        ("chunk_max", 2),
        ("high_water", 0.0),
        ("cell_budget_fraction", 1.5),
        ("stream_share", -0.1),
        ("stream_share", 1.0),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})


def test_a_pass_is_its_requests_by_their_tokens() -> None:
    """The tape's own part belongs to no request; answers of several tokens add up."""
    clock = HeldClock()
    h = Harness(clock=clock)
    tape = h.tape()

    def take_a_second() -> None:
        clock.now += 1000

    h.executor.before = take_a_second
    h.feed(tape, (1, 2))
    first, second = h.ask((1, 2, 3, 4)), h.ask((5, 6), max_tokens=3)
    h.run()
    by_request = {4: 0.0, 2: 0.0}
    for batch in h.executor.batches:
        total = sum(len(chunk.tokens) for chunk in batch)
        for chunk in batch:
            tokens = tuple(chunk.tokens)
            owner = 4 if tokens == (1, 2, 3, 4) else 2 if tokens != (1, 2) else 0
            if owner:
                by_request[owner] += 1000 * len(tokens) / total
    assert first.engine_ns == pytest.approx(by_request[4], abs=3)
    assert second.engine_ns == pytest.approx(by_request[2], abs=3)
    assert 0 < first.engine_ns + second.engine_ns < 1000 * len(h.executor.batches)
