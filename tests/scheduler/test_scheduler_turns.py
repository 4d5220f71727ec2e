"""Schedulers of several models take turns: who goes next, and how long work of each waits."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step import Chunk, SampledToken
from scheduler.inbox import Inbox
from scheduler.interfaces import PriorityClass
from scheduler.request import Request, State
from scheduler.scheduler import Scheduler
from scheduler.turns import FLASH_BATCHES, Turn, Turns, order_of
from tests.kit.scheduler.fakes import FakeClock, FakeExecutor
from tests.kit.scheduler.harness import SMALL, Harness

FLASH, SESSION, POOL, STREAM = PriorityClass
CLASSES = (None, *PriorityClass)


def first_by_rules(turns: Sequence[Turn]) -> set[int]:
    """Who may go first, rule by rule: nobody without work, then who waited out its patience, then FLASH, then
    the highest class; the longest wait decides between equals.
    """
    left = [n for n, turn in enumerate(turns) if turn.first is not None]
    has_flash = any(turn.first is FLASH for turn in turns)
    if late := [n for n in left if turns[n].passed >= (FLASH_BATCHES if has_flash else 1)]:
        left = late
    else:
        best = min((first for first, _ in turns if first is not None), default=None)
        left = [n for n in left if turns[n].first is best]
    longest = max((turns[n].passed for n in left), default=0)
    return {n for n in left if turns[n].passed == longest}


def test_the_order_is_that_of_the_rules_for_every_state_of_two_and_three_models() -> None:
    states = [Turn(first, passed) for first in CLASSES for passed in range(FLASH_BATCHES + 2)]
    for number in (1, 2, 3):
        for turns in product(states, repeat=number):
            order = order_of(turns)
            assert sorted(order) == [n for n, turn in enumerate(turns) if turn.first is not None]
            assert not order or order[0] in first_by_rules(turns)


@pytest.mark.parametrize("models", [2, 3])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flash_waits_for_one_batch_of_each_other_model_and_no_work_for_more_than_its_patience(
    models: int, data: st.DataObject
) -> None:
    """Any work may come before any batch; what has come stays until its model runs."""
    work: list[PriorityClass | None] = [None] * models
    passed, flash_waits = [0] * models, [[] for _ in range(models)]
    for coming in data.draw(st.lists(st.tuples(*[st.sampled_from(CLASSES)] * models), max_size=60)):
        for n, cls in enumerate(coming):
            if cls is not None:
                work[n] = cls if work[n] is None else min(cls, work[n])
        order = order_of([Turn(cls, n) for cls, n in zip(work, passed, strict=True)])
        if not order:
            continue
        runs = order[0]
        for n in range(models):
            passed[n] = 0 if n == runs or work[n] is None else passed[n] + 1
            flash_waits[n] = [*flash_waits[n], runs] if work[n] is FLASH and n != runs else []
            assert all(flash_waits[n].count(other) <= 1 for other in range(models))
            assert passed[n] <= FLASH_BATCHES + models - 2
        work[runs] = None


class Recording(FakeExecutor):
    """Notes which model each batch is of."""

    def __init__(self, name: str, ran: list[str]) -> None:
        super().__init__(SMALL.max_batch_tokens, SMALL.max_batch_requests)
        self._name, self._ran = name, ran

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        self._ran.append(self._name)
        return super().execute(batch)


class Two:
    """A tape model and a language model whose schedulers take turns."""

    def __init__(self) -> None:
        self.clock, self.ran = FakeClock(), list[str]()
        inbox = Inbox(self.clock)
        self.tape, self.chat = Harness(), Harness()
        for name, model in (("tape", self.tape), ("chat", self.chat)):
            executor = Recording(name, self.ran)
            model.executor = executor
            model.scheduler = Scheduler(executor, model.memory, SMALL, self.clock, inbox=inbox)
            model.scheduler.subscribe(model.log.on_commit, model.log.on_drop)
        self.turns = Turns([self.tape.scheduler, self.chat.scheduler], inbox, self.clock)

    def rest(self) -> None:
        for _ in range(10_000):
            if not self.turns.step():
                return
        raise AssertionError("not at rest")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 20))
def test_a_standing_question_waits_for_at_most_one_batch_of_a_chat(
    prompt: int, answers: int, before: int
) -> None:
    """A chat runs and chats wait; a bar closes, and its version's question is answered meanwhile."""
    two = Two()
    chats = [two.chat.prompt([*range(1, prompt + 1)], max_tokens=answers) for _ in range(4)]
    tape = two.tape.tape()
    asked: list[Request] = []
    two.tape.scheduler.subscribe(
        lambda *_: asked.append(two.tape.ask((7, 8), max_tokens=2, cls=FLASH, tape=tape))
    )
    for _ in range(before):
        two.turns.step()
    came = len(two.ran)
    two.tape.feed(tape, (1, 2, 3))
    two.rest()
    own = [n for n, name in enumerate(two.ran) if name == "tape"]
    # the bar behind one batch of the chat, then the question's two tokens at once
    assert own[0] - came <= 1
    assert own == list(range(own[0], own[0] + 3))
    assert asked[0].state is State.FINISHED
    for each in chats:
        two.chat.check(each)
    two.tape.check(asked[0])


def test_a_model_with_questions_without_end_leaves_another_a_quarter() -> None:
    two = Two()
    tape = two.tape.tape()
    two.chat.prompt([1, 2, 3], max_tokens=8)
    for _ in range(30):
        two.tape.ask((1, 2, 3), max_tokens=8, cls=FLASH, tape=tape)
    two.rest()
    both = two.ran[: len(two.ran) - two.ran[::-1].index("chat")]
    assert both == [*["tape"] * 3, "chat"] * 8


def test_what_arrived_first_is_numbered_first_whichever_model_it_is_for() -> None:
    two = Two()
    first, second = two.chat.prompt([1, 2]), two.tape.prompt([3, 4])
    two.turns.step()
    assert first.seq < second.seq


def test_a_wait_counts_from_the_arrival_whichever_scheduler_takes_the_call() -> None:
    two = Two()
    two.chat.prompt([1, 2, 3], max_tokens=6)
    for _ in range(3):
        two.turns.step()
    late = two.chat.ask((4, 5), max_tokens=1)
    arrived = late.events[0][1]
    two.rest()
    assert 0 < sum(late.waits.values()) <= late.events[-1][1] - arrived


def test_the_end_ends_the_work_of_all_models() -> None:
    two = Two()
    left = [two.chat.prompt([1, 2]), two.tape.prompt([3, 4])]
    two.turns.close()
    assert [each.error.code for each in left if each.error is not None] == ["stopping", "stopping"]
    assert not two.turns.wait(0.0)
    assert two.turns.next_due() is None


@pytest.mark.parametrize("alone", ["tape", "chat"])
def test_one_model_s_batches_are_those_of_it_alone(alone: str) -> None:
    """The same work in the same order gives the same batches, with another model's between them."""

    def work(model: Harness) -> list[Request]:
        tape = model.tape()
        model.feed(tape, (1, 2, 3), (4, 5))
        return [model.prompt([n, n + 1, n + 2], max_tokens=3) for n in range(5)]

    by_itself = Harness(executor=FakeExecutor(SMALL.max_batch_tokens, SMALL.max_batch_requests))
    work(by_itself)
    by_itself.run()
    two = Two()
    mine = two.tape if alone == "tape" else two.chat
    done = work(mine)
    other = two.chat if alone == "tape" else two.tape
    other.prompt([9, 9, 9], max_tokens=4)
    two.rest()
    shapes = [
        [[(tuple(chunk.tokens), chunk.sample) for chunk in batch] for batch in each.executor.batches]
        for each in (mine, by_itself)
    ]
    assert shapes[0] == shapes[1]
    assert [each.output for each in done] == [each.output for each in by_itself.done]
