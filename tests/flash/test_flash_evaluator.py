"""Standing questions at every version: exact, in one batch, newest first in overload, no input unreported.

Free text comes second and delays no one-token answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.evaluator import AskedState, Evaluated, FlashEvaluator
from flash.question import PAPER_SIX, Prepare, PreparedQuestion, Question
from flash.registry import Registry, Standing
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Failure, State
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import FakeClock, FakeTape, one_by_one
from tests.kit.scheduler.harness import Harness

WIDE = Limits(
    max_batch_tokens=200, max_batch_requests=16, chunk_min=8, chunk_max=64, cell_budget_fraction=1.0
)
STOP = frozenset({7, 8, 9})
LONG = Question("long", "Tell me more.", None, max_tokens=12)
YES_NO = Question("yes", "Is it?", ("YES", "NO"))
EIGHT = tuple(Question(f"q{n}", f"Is it {n}?", ("YES", "NO")) for n in range(8))
ONE_AT_A_TIME = replace(WIDE, cell_budget_fraction=1 / 64)
"""16 of the 1,024 cells of 256 blocks: one of `EIGHT` runs in a pass, so that evaluations last."""


MS = 1_000_000
"""Far longer than a test runs by its clock."""


def prepare(question: Question) -> PreparedQuestion:
    prompt = tuple(question.text.encode()[:10])
    choices = tuple(ord(choice[0]) for choice in question.choices) if question.choices else None
    return PreparedQuestion(prompt, choices, STOP if question is not LONG else frozenset())


class Flash:
    """A harness with an evaluator; payloads are serial numbers, negative after a gap."""

    def __init__(
        self,
        *questions: Question,
        blocks: int = 256,
        limits: Limits = WIDE,
        prepare: Prepare = prepare,
        may_ask: Callable[[Standing], bool] = lambda item: True,
    ) -> None:
        self.clock = FakeClock()
        self.h = Harness(blocks, limits, clock=self.clock)
        self.registry = Registry(prepare)
        self.questions = questions
        self.results: list[Evaluated] = []
        self.failures: list[Evaluated] = []
        self.not_due: list[tuple[int, tuple[int, ...]]] = []
        self.texts: list[tuple[int, tuple[int, ...], int]] = []
        self.age_ms = self.pass_ms = 0
        self.broken = False
        self.numbers = count(1)
        self.evaluator = FlashEvaluator(
            self.h.scheduler,
            self.registry,
            self.done,
            has_gap=lambda payload: isinstance(payload, int) and payload < 0,
            received_ns=lambda payload: self.clock.now - self.age_ms * MS,
            pass_ns=lambda rows: self.pass_ms * MS,
            on_not_due=lambda name, version, payloads: self.not_due.append((version, payloads)),
            on_texts=lambda name, version, payloads, asked: self.texts.append((version, payloads, asked)),
            may_ask=may_ask,
        )

    def done(self, evaluated: Evaluated) -> None:
        if self.broken:
            raise OSError("nobody there")
        finished = evaluated.request.state is State.FINISHED
        (self.results if finished else self.failures).append(evaluated)

    def session(self, name: str = "A", retention: int = 24) -> FakeTape:
        return self.session_of(name, *self.questions, retention=retention)

    def session_of(self, name: str, *questions: Question, retention: int = 24) -> FakeTape:
        """A session with only these questions."""
        for question in questions:
            self.registry.register(name, question)
        return self.h.tape(name, retention)

    def feed(self, tape: FakeTape, n: int = 1, *, gap: bool = False, at: int = 0) -> None:
        numbers = [next(self.numbers) for _ in range(n)]
        items = [TapeItem((each % 80, each % 7), -each if gap else each, at) for each in numbers]
        self.h.scheduler.append((tape, items))

    def play(self, tape: FakeTape, **how: Any) -> None:
        """Commit a version and evaluate it to the end."""
        self.feed(tape, **how)
        self.h.run()

    def begin(self, tape: FakeTape, *, gap: bool = False) -> None:
        """Commit a version and leave its evaluation running."""
        self.feed(tape, gap=gap)
        for _ in range(3):
            self.h.scheduler.step()

    def commit(self, tape: FakeTape, versions: int = 1) -> None:
        """Commit so many versions, a pass each."""
        for _ in range(versions):
            self.feed(tape)
            self.h.scheduler.step()

    def check(self, result: Evaluated, tape: FakeTape) -> None:
        """The result equals that of the question alone on exactly its version."""
        standing, request = result.standing, result.request
        question = standing.question
        assert question in self.questions
        prepared = prepare(question)
        rows = one_by_one(
            tape.history[result.version],
            prepared.prompt_tokens,
            question.max_tokens,
            prepared.stop_ids,
            prepared.choice_tokens,
        )
        tokens = [row.token for row in rows]
        if tokens[-1] in prepared.stop_ids and not question.choices:
            tokens.pop()
        assert list(request.answer) == tokens
        assert request.samples[0].gap == rows[0].gap
        assert request.cached_tokens == len(tape.history[result.version])
        assert (standing.session, standing.question_hash) == (tape.name, question.hash)
        choice = request.chosen(question.choices)
        assert (choice is None) == (question.choices is None)
        assert choice is None or ord(choice[0]) == rows[0].token


def test_all_six_are_answered_in_one_batch_per_version() -> None:
    flash = Flash(*(question for question in PAPER_SIX if question.choices))
    tape = flash.session()
    for version in (1, 2, 3):
        flash.feed(tape)
        assert flash.h.run() == 2
        assert [result.version for result in flash.results[-5:]] == [version] * 5
    assert [len(batch) for batch in flash.h.executor.batches] == [1, 5] * 3
    for result in flash.results:
        flash.check(result, tape)
    assert [result.standing.question.name for result in flash.results[:5]] == [
        question.name for question in PAPER_SIX[:5]
    ]


def test_while_an_evaluation_runs_only_the_newest_version_waits() -> None:
    flash = Flash(*EIGHT, limits=ONE_AT_A_TIME)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 3)
    assert tape.version == 4
    flash.h.run()
    for question in EIGHT:
        results = [each for each in flash.results if each.standing.question == question]
        assert [(each.version, each.payloads) for each in results] == [(1, (1,)), (4, (2, 3, 4))]
    assert flash.evaluator.coalesced["A"] == 2
    for result in flash.results:
        flash.check(result, tape)
    assert set(flash.h.memory.references.values()) == {1}, "skipped versions are not pinned"


def test_while_free_text_runs_only_the_newest_version_waits() -> None:
    flash = Flash(LONG)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 3)
    assert tape.version == 4
    flash.h.run()
    assert [(each.version, each.payloads) for each in flash.results] == [(1, (1,)), (4, (4,))]
    assert [(each.version, each.payloads, each.request.error.code) for each in flash.failures] == [
        (2, (2,), "superseded"),
        (3, (3,), "superseded"),
    ]
    assert flash.texts == [(version, (version,), 1) for version in (1, 2, 3, 4)]
    for result in flash.results:
        flash.check(result, tape)
    assert set(flash.h.memory.references.values()) == {1}, "superseded versions are not pinned"


def test_free_text_delays_no_one_token_answer_of_any_session() -> None:
    """While long answers run, every version's one-token answers take the pass after its commit."""
    flash = Flash(LONG, YES_NO)
    tapes = [flash.session("A"), flash.session("B")]
    for tape in tapes:
        flash.feed(tape)
    flash.h.scheduler.step()
    flash.h.scheduler.step()
    prompt = len(prepare(YES_NO).prompt_tokens)
    assert [len(chunk.tokens) for chunk in flash.h.executor.batches[-1]] == [prompt, prompt]
    assert [each.standing.question.name for each in flash.results] == ["yes", "yes"]
    flash.h.scheduler.step()
    assert [len(chunk.tokens) for chunk in flash.h.executor.batches[-1]] == [10, 10], "then the long answers"
    for version in (2, 3, 4):
        for tape in tapes:
            flash.feed(tape)
        while min(tape.version for tape in tapes) < version:
            flash.h.scheduler.step()
        flash.h.scheduler.step()
        newest = {(each.standing.session, each.version) for each in flash.results}
        assert {("A", version), ("B", version)} <= newest
        first, *_, last = flash.h.executor.batches[-1]
        assert (len(first.tokens), len(last.tokens)) == (prompt, 1), "the long ones come last, a token each"
    assert asked_at(flash, "long") == []
    flash.h.run()
    assert asked_at(flash, "long") == [1, 1, 4, 4]
    assert asked_at(flash, "yes") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [(each.version, each.asked) for each in flash.failures] == [(2, 2), (2, 2), (3, 2), (3, 2)]
    assert flash.texts == []
    for result in flash.results:
        flash.check(result, tapes["AB".index(result.standing.session)])


def test_free_text_is_answered_however_many_versions_come() -> None:
    flash = Flash(LONG, YES_NO)
    tape = flash.session()
    flash.commit(tape, 100)
    assert len(asked_at(flash, "long")) >= 100 // (2 * LONG.max_tokens)


def test_an_evaluation_that_has_not_started_is_replaced_by_the_newest_version() -> None:
    """The questions of another session take all cells, so the second session's question cannot start."""
    flash = Flash(*EIGHT, YES_NO, limits=ONE_AT_A_TIME)
    busy, calm = flash.session("busy"), flash.session_of("calm", YES_NO)
    flash.begin(busy)
    for _ in range(3):
        flash.feed(calm)
        flash.h.scheduler.step()
    assert calm.version == 3
    assert not any(each.standing.session == "calm" for each in flash.results)
    flash.h.run()
    *_, last = flash.results
    assert (last.standing.session, last.version, last.payloads) == ("calm", 3, (2, 3, 4))
    assert len(flash.results) == 10
    assert flash.evaluator.coalesced == {"busy": 0, "calm": 2}
    flash.check(last, calm)
    assert not flash.failures


def test_a_version_that_is_replaced_asks_no_free_text_though_its_other_question_is_gone() -> None:
    """What replaces it is all free text, and begins at once."""
    flash = Flash(*EIGHT, YES_NO, LONG, limits=ONE_AT_A_TIME)
    busy, calm = flash.session_of("busy", *EIGHT), flash.session_of("calm", YES_NO, LONG)
    flash.begin(busy)
    flash.commit(calm)
    flash.registry.replace("calm", flash.registry.made("calm", [replace(LONG, max_tokens=5)]))
    flash.commit(calm)
    flash.h.run()
    calm_results = [(r.version, r.payloads) for r in flash.results if r.standing.session == "calm"]
    assert (calm_results, flash.texts) == ([(2, (2, 3))], [(2, (2, 3), 1)])
    assert not flash.failures


def test_dropped_records_are_a_gap_in_the_next_answers() -> None:
    flash = Flash(YES_NO)
    tape = flash.session()
    flash.feed(tape)
    flash.h.executor.fail_next = 2
    flash.h.run()
    assert flash.results == []
    for _ in range(2):
        flash.play(tape)
    assert [(result.payloads, result.gap) for result in flash.results] == [((2,), True), ((3,), False)]


def test_a_failed_evaluation_is_reported_and_its_gap_passed_on() -> None:
    flash = Flash(YES_NO, PAPER_SIX[0])
    tape = flash.session()
    flash.feed(tape, gap=True)
    flash.h.scheduler.step()
    flash.h.executor.fail_next = 1
    flash.h.run()
    assert flash.results == []
    assert [
        (item.standing.question.name, item.version, item.request.error.code, item.payloads)
        for item in flash.failures
    ] == [
        ("yes", 1, "engine", (-1,)),
        ("trend", 1, "engine", (-1,)),
    ]
    for _ in range(2):
        flash.play(tape)
    assert [result.gap for result in flash.results] == [True, True, False, False]


def test_a_gap_lost_by_a_running_evaluation_reaches_the_version_that_waits() -> None:
    flash = Flash(LONG)
    tape = flash.session()
    flash.begin(tape, gap=True)
    flash.commit(tape)
    flash.h.executor.fail_next = 1
    flash.h.run()
    assert [item.version for item in flash.failures] == [1]
    assert [(result.version, result.gap) for result in flash.results] == [(2, True)]


def test_a_gap_of_a_version_that_waited_and_was_replaced_is_reported() -> None:
    flash = Flash(*EIGHT, limits=ONE_AT_A_TIME)
    tape = flash.session()
    flash.begin(tape)
    flash.feed(tape, gap=True)
    flash.h.scheduler.step()
    flash.commit(tape)
    flash.h.run()
    assert [(r.version, r.payloads, r.gap) for r in flash.results[8:]] == [(3, (-2, 3), True)] * 8


def test_a_gap_before_the_first_question_is_reported_with_its_answer() -> None:
    flash = Flash(YES_NO)
    tape = flash.h.tape("A")
    flash.play(tape, gap=True)
    flash.session("A")
    flash.play(tape)
    assert [(result.version, result.payloads, result.gap) for result in flash.results] == [(2, (2,), True)]
    assert flash.evaluator.coalesced["A"] == 0


def test_one_unusable_answer_does_not_fail_the_others() -> None:
    flash = Flash(YES_NO, PAPER_SIX[0])
    tape = flash.session()
    flash.h.executor.nan_after = prepare(YES_NO).prompt_tokens
    flash.play(tape)
    assert [item.request.error.code for item in flash.failures] == ["nan_logits"]
    assert [result.standing.question.name for result in flash.results] == ["trend"]


def test_timings_come_from_the_requests_events() -> None:
    flash = Flash(LONG)
    tape = flash.session()
    flash.play(tape)
    [result] = flash.results
    assert result.queue_ns > 0
    assert result.forward_ns > 0
    events = result.request.events
    assert events[-1][1] - events[0][1] == result.queue_ns + result.forward_ns


def test_a_receiver_that_raises_does_not_stop_the_session(caplog: pytest.LogCaptureFixture) -> None:
    flash = Flash(YES_NO)
    tape = flash.session()
    flash.broken = True
    flash.play(tape)
    flash.broken = False
    assert "nobody there" in caplog.text
    flash.play(tape)
    assert [result.version for result in flash.results] == [2]


def test_closing_the_scheduler_ends_running_and_waiting_evaluations() -> None:
    flash = Flash(LONG, YES_NO)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape)
    flash.h.scheduler.close()
    assert [
        (item.standing.question.name, item.version, item.request.error.code) for item in flash.failures
    ] == [
        ("long", 1, "stopping"),
        ("yes", 2, "stopping"),
        ("long", 2, "stopping"),
    ]
    assert set(flash.h.memory.references) == set(tape.blocks)


@pytest.mark.parametrize("questions", [(YES_NO,), (LONG,), (LONG, YES_NO)])
def test_what_was_asked_before_a_reset_has_no_result_after_it(
    questions: tuple[Question, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the scheduler receives the reset before the questions that the last version was asked."""
    flash = Flash(*questions)
    tape = flash.session()
    execute, resets = flash.h.executor.execute, count()

    def reset() -> None:
        flash.evaluator.forget("A")
        flash.h.scheduler.remove(tape, Failure("reset", "the session was reset"))
        flash.evaluator.restore("A", AskedState())

    def execute_and_reset(batch: Any) -> Any:
        if not next(resets):
            flash.h.scheduler.run_between(reset)
        return execute(batch)

    monkeypatch.setattr(flash.h.executor, "execute", execute_and_reset)
    flash.play(tape)
    assert tape.version == 1
    assert (flash.results, flash.failures) == ([], [])
    flash.play(tape)
    assert {result.version for result in flash.results} == {2}
    assert not flash.failures


def asked_at(flash: Flash, name: str) -> list[int]:
    return [result.version for result in flash.results if result.standing.question.name == name]


def test_a_question_that_is_not_due_costs_no_rows() -> None:
    third = replace(YES_NO, name="third", ask_every_bars=3)
    flash = Flash(YES_NO, third)
    tape = flash.session()
    for _ in range(8):
        flash.play(tape)
    assert asked_at(flash, "third") == [1, 4, 7]
    assert asked_at(flash, "yes") == list(range(1, 9))
    assert [len(batch) for batch in flash.h.executor.batches if len(batch) > 1] == [2, 2, 2]
    assert {result.version: result.asked for result in flash.results} == {
        version: 2 if version in (1, 4, 7) else 1 for version in range(1, 9)
    }
    assert flash.not_due == []


def test_a_question_over_its_budget_skips_versions_and_is_due_at_the_next() -> None:
    third = replace(YES_NO, name="third", ask_every_bars=3)
    refused: set[str] = set()
    flash = Flash(YES_NO, third, may_ask=lambda item: item.question.name not in refused)
    tape = flash.session()
    for version in range(1, 9):
        refused |= {"third"} if version == 3 else set()
        refused -= {"third"} if version == 6 else set()
        flash.play(tape)
    assert asked_at(flash, "third") == [1, 6]
    assert asked_at(flash, "yes") == list(range(1, 9))
    refused |= {"yes", "third"}
    flash.play(tape)
    assert [version for version, _ in flash.not_due] == [9], "its inputs are reported all the same"


def test_event_time_makes_a_question_due_once_in_each_period() -> None:
    flash = Flash(replace(YES_NO, ask_every_ns=10))
    tape = flash.session()
    for at in (8, 9, 10, 19, 19, 35, 34, 40):
        flash.play(tape, at=at)
    assert asked_at(flash, "yes") == [1, 3, 6, 8]
    assert [version for version, _ in flash.not_due] == [2, 4, 5, 7]


def test_versions_that_are_not_due_are_reported_after_those_before_them_and_are_not_coalesced() -> None:
    flash = Flash(*(replace(each, ask_every_bars=4) for each in EIGHT), limits=ONE_AT_A_TIME)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 2)
    assert flash.not_due == []
    flash.h.run()
    assert asked_at(flash, "q7") == [1]
    assert flash.not_due == [(3, (2, 3))]
    flash.play(tape)
    flash.play(tape)
    results = [each for each in flash.results if each.standing.question.name == "q7"]
    assert [(result.version, result.payloads) for result in results] == [(1, (1,)), (5, (5,))]
    assert flash.not_due[1:] == [(4, (4,))]
    assert flash.evaluator.coalesced["A"] == 0


def test_versions_that_are_not_due_do_not_wait_for_free_text() -> None:
    flash = Flash(replace(LONG, ask_every_bars=4))
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 2)
    assert (flash.results, flash.not_due) == ([], [(2, (2,)), (3, (3,))])
    flash.h.run()
    assert asked_at(flash, "long") == [1]


def test_records_that_were_not_due_go_with_the_evaluation_that_waits_behind_them() -> None:
    flash = Flash(*(replace(each, ask_every_bars=2) for each in EIGHT), limits=ONE_AT_A_TIME)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 2)
    flash.h.run()
    results = [each for each in flash.results if each.standing.question.name == "q7"]
    assert [(result.version, result.payloads) for result in results] == [(1, (1,)), (3, (2, 3))]
    assert flash.not_due == []


def test_a_question_of_a_skipped_version_is_asked_of_the_version_that_replaces_it() -> None:
    rare = replace(YES_NO, name="rare", ask_every_bars=2)
    flash = Flash(*EIGHT, rare, limits=ONE_AT_A_TIME)
    tape = flash.session()
    flash.begin(tape)
    flash.commit(tape, 3)  # versions 2 to 4 wait, each in place of the one before; 3 has the rare question
    flash.h.run()
    assert (asked_at(flash, "q7"), asked_at(flash, "rare")) == ([1, 4], [1, 4])
    flash.play(tape)
    assert asked_at(flash, "rare") == [1, 4], "it counts from when it was asked"


def test_a_gap_is_reported_to_every_question_at_its_next_answer() -> None:
    rare = replace(YES_NO, name="rare", ask_every_bars=3)
    flash = Flash(YES_NO, rare)
    tape = flash.session()
    for number in range(1, 8):
        flash.play(tape, gap=number == 2)
    gaps = {(r.standing.question.name, r.version) for r in flash.results if r.gap}
    assert gaps == {("yes", 2), ("rare", 4)}


@pytest.mark.parametrize(("pass_ms", "in_time", "too_late"), [(0, 4, 6), (3, 1, 3)])
def test_a_question_that_cannot_be_answered_in_time_is_not_computed(
    pass_ms: int, in_time: int, too_late: int
) -> None:
    soon = replace(YES_NO, name="soon", answer_within_ns=5 * MS)
    flash = Flash(soon, YES_NO)
    flash.pass_ms = pass_ms
    tape = flash.session()
    for flash.age_ms in (in_time, too_late):
        flash.play(tape)
    assert (asked_at(flash, "soon"), asked_at(flash, "yes")) == ([1], [1, 2])
    [late] = flash.failures
    assert (late.version, late.request.error.code, late.asked) == (2, "late", 2)
    assert [len(batch) for batch in flash.h.executor.batches] == [1, 2, 1, 1]
    assert flash.h.memory.references == dict.fromkeys(tape.blocks, 1)


def test_a_question_whose_deadline_passes_while_it_waits_is_not_computed() -> None:
    """The questions of another session take all cells."""
    soon = replace(YES_NO, name="soon", answer_within_ns=5 * MS)
    flash = Flash(*EIGHT, soon, limits=ONE_AT_A_TIME)
    busy, calm = flash.session_of("busy", *EIGHT), flash.session_of("calm", soon)
    flash.begin(busy)
    flash.commit(calm)
    flash.clock.now += 6 * MS
    flash.h.run()
    assert [(r.standing.session, r.version) for r in flash.results] == [("busy", 1)] * 8
    assert [(item.standing.session, item.request.error.code) for item in flash.failures] == [("calm", "late")]
    assert flash.failures[0].request.samples == []
    flash.play(calm)
    assert (flash.results[-1].standing.session, flash.results[-1].version) == ("calm", 2)
    assert set(flash.h.memory.references.values()) == {1}, "what was skipped is not pinned"


def test_text_whose_deadline_passes_while_it_is_generated_ends() -> None:
    flash = Flash(replace(LONG, answer_within_ns=5 * MS))
    tape = flash.session()
    flash.begin(tape, gap=True)
    flash.commit(tape)
    flash.clock.now += 6 * MS
    flash.h.run()
    [late] = flash.failures
    assert (late.version, late.request.error.code) == (1, "late")
    assert 0 < len(late.request.output) < LONG.max_tokens
    assert [(result.version, result.gap) for result in flash.results] == [(2, True)]
    assert set(flash.h.memory.references.values()) == {1}


def test_where_every_question_is_late_the_session_goes_on() -> None:
    flash = Flash(replace(LONG, answer_within_ns=5 * MS))
    tape = flash.session()
    flash.begin(tape, gap=True)
    flash.commit(tape)
    flash.age_ms = 6  # when the first answer ends, the second version is too late
    flash.h.run()
    flash.age_ms = 0
    flash.play(tape)
    assert [item.version for item in flash.failures] == [2]
    assert [result.version for result in flash.results] == [1, 3]


def test_a_version_with_a_late_question_is_not_replaced() -> None:
    """A version that has a result gets all of them: it is acknowledged by their number."""
    soon = replace(YES_NO, name="soon", answer_within_ns=5 * MS)
    flash = Flash(LONG, soon, blocks=10)
    busy = flash.session_of("busy", LONG, retention=4)
    calm = flash.session_of("calm", soon, LONG, retention=4)
    flash.feed(busy)
    flash.h.scheduler.step()
    flash.h.scheduler.step()
    flash.age_ms = 6
    for _ in range(2):
        flash.feed(calm)
        flash.h.scheduler.step()
    flash.h.run()
    calm_results = [(r.version, r.payloads) for r in flash.results if r.standing.session == "calm"]
    assert calm_results == [(1, (2,)), (2, (3,))]
    assert [item.version for item in flash.failures] == [1, 2]


def test_a_grammar_decides_what_may_follow_each_token() -> None:
    asked: list[tuple[int, int]] = []

    def grammar(output: Sequence[int], left: int) -> tuple[int, ...]:
        asked.append((len(output), left))
        return (7, 8) if left == 1 else (20 + len(output), 40)

    flash = Flash(prepare=lambda question: replace(prepare(question), grammar=grammar))
    flash.play(flash.session_of("A", replace(LONG, max_tokens=4)))
    [result] = flash.results
    assert len(result.request.output) == 4
    assert all(token in (20 + n, 40) for n, token in enumerate(result.request.output[:3]))
    assert result.request.output[3] in (7, 8)
    assert list(dict.fromkeys(asked)) == [(0, 4), (1, 3), (2, 2), (3, 1)]


def test_answers_are_exact_while_the_tape_moves_on_under_them() -> None:
    flash = Flash(*PAPER_SIX, LONG)
    tape = flash.session(retention=6)
    flash.commit(tape, 40)
    flash.h.run()
    assert len(flash.results) >= 2 * len(flash.questions)
    assert tape.live_tokens == 6
    for result in flash.results:
        flash.check(result, tape)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 1), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("ask"), st.integers(0, 1), st.integers(1, 20), st.booleans()),
        st.just(("step", 0, 0, False)),
        st.just(("step", 0, 0, False)),
    ),
    max_size=40,
)


@settings(max_examples=75)
@given(actions, st.integers(40, 90), st.integers(3, 12))
def test_every_record_is_answered_for_exactly_once_and_every_answer_is_exact(
    load: list[tuple[str, int, int, bool]], blocks: int, rows: int
) -> None:
    limits = Limits(max_batch_tokens=48, max_batch_requests=rows, chunk_min=4, chunk_max=16)
    flash = Flash(YES_NO, LONG, PAPER_SIX[5], blocks=blocks, limits=limits)
    tapes = [flash.session("A", retention=12), flash.session("B", retention=12)]
    for what, which, n, gap in load:
        if what == "feed":
            flash.feed(tapes[which], n, gap=gap)
        elif what == "ask":
            flash.h.ask(range(n), 4, PriorityClass.SESSION, tapes[which])
        else:
            flash.h.scheduler.step()
    flash.h.run()
    assert {each.request.error.code for each in flash.failures} <= {"superseded"}
    assert not any(each.standing.question is YES_NO for each in flash.failures)
    for tape in tapes:
        committed = [
            r.payload for name, _, records in flash.h.log.commits if name == tape.name for r in records
        ]
        for question in flash.questions:
            results = [
                r
                for r in sorted(flash.results + flash.failures, key=lambda each: each.version)
                if (r.standing.session, r.standing.question.name) == (tape.name, question.name)
            ]
            assert [payload for result in results for payload in result.payloads] == committed
            assert [result.version for result in results] == sorted({result.version for result in results})
            assert sum(len(result.payloads) - 1 for result in results) == flash.evaluator.coalesced[tape.name]
            assert sum(len(result.payloads) - 1 for result in results) == len(committed) - len(results)
            lost = False
            for result in results:
                lost |= any(isinstance(p, int) and p < 0 for p in result.payloads)
                assert result.gap == lost
                if result.request.state is State.FINISHED:
                    flash.check(result, tape)
                    lost = False
            if results:
                assert results[-1] in flash.results
                assert results[-1].version == tape.version
    assert flash.h.memory.references == {block: 1 for tape in tapes for block in tape.blocks}
