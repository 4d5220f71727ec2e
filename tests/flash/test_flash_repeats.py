"""Answers at a version of history: asked once, when nothing else is to do, and never behind a newer one."""

from dataclasses import dataclass
from typing import Any

import pytest

from flash.evaluator import AskedState, Evaluated, FlashEvaluator
from flash.question import PreparedQuestion, Question
from flash.registry import Registry
from flash.repeats import AGAIN_S, Repeats
from flash.schedules import DataVersion
from regions.offload.kv_store import NotResident
from scheduler.interfaces import Limits
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import one_by_one
from tests.kit.scheduler.harness import Harness

LIMITS = Limits(
    max_batch_tokens=200, max_batch_requests=16, chunk_min=8, chunk_max=64, cell_budget_fraction=1.0
)
UP = Question("up", "Is it up?", ("YES", "NO"))
TEXT = Question("text", "Tell me more.", None, max_tokens=5)
RARE = Question("rare", "And now?", ("YES", "NO"), ask_every_bars=3)
STOP = frozenset({7, 8, 9})


@dataclass(frozen=True)
class Bar:
    number: int
    history: bool = False


def prepare(question: Question) -> PreparedQuestion:
    choices = tuple(ord(choice[0]) for choice in question.choices) if question.choices else None
    return PreparedQuestion(tuple(question.text.encode()[:8]), choices, STOP)


class Rig:
    """An evaluator and its repeats; sessions in ``waiting`` still have history to come."""

    def __init__(self, *questions: Question) -> None:
        self.h = Harness(256, LIMITS)
        registry = Registry(prepare)
        for question in questions:
            registry.register("A", question)
        self.evaluated: list[Evaluated[Bar]] = []
        self.repeated: list[Evaluated[Bar]] = []
        self.waiting: set[str] = set()
        self.evaluator = FlashEvaluator(
            self.h.scheduler,
            registry,
            self.evaluated.append,
            has_gap=lambda bar: False,
            on_not_due=lambda name, version, bars: None,
            on_texts=lambda name, version, bars, asked: None,
            is_history=lambda bar: bar.history,
        )
        self.repeats = Repeats(
            self.h.scheduler,
            registry,
            self.repeated.append,
            lambda item, reader: item.prepared.prompt_tokens,
            self.evaluator.asked,
            lambda bar: bar.history,
            lambda name, bar: name not in self.waiting,
        )
        self.tape = self.h.tape("A", 24)

    def feed(self, number: int, *, history: bool = False) -> None:
        """One bar, to the end."""
        self.h.scheduler.append(
            (self.tape, [TapeItem((number % 80, number % 7), Bar(number, history), number)])
        )
        self.h.run()

    def idle(self) -> float | None:
        """As the worker does: until the hook says when it is to be called next."""
        while (wait := self.repeats.idle()) == 0.0:
            self.h.run()
        return wait

    def said(self) -> list[tuple[str, int]]:
        """The questions that were repeated, and of which versions; each is right."""
        for done in self.repeated:
            choices = done.standing.prepared.choice_tokens
            prompt, limit = done.standing.prepared.prompt_tokens, done.standing.question.max_tokens
            expected = one_by_one(self.tape.history[done.version], prompt, limit, STOP, choices)
            tokens = [row.token for row in expected]
            if tokens[-1] in STOP and not choices:
                tokens.pop()
            assert list(done.request.answer) == tokens
        return [(done.standing.question.name, done.version) for done in self.repeated]


def test_the_newest_version_of_history_is_asked_once() -> None:
    rig = Rig(UP, TEXT)
    for number in (1, 2, 3):
        rig.feed(number, history=True)
    assert rig.evaluated == []
    assert rig.idle() is None
    assert sorted(rig.said()) == [("text", 3), ("up", 3)]
    assert [done.payloads for done in rig.repeated] == [(Bar(3, True),)] * 2
    assert rig.idle() is None
    assert len(rig.repeated) == 2
    rig.feed(4)
    assert rig.idle() is None
    assert [(done.standing.question.name, done.version) for done in rig.evaluated] == [("up", 4), ("text", 4)]
    assert len(rig.repeated) == 2


def test_nothing_is_asked_while_history_is_still_to_come() -> None:
    rig = Rig(UP)
    rig.waiting.add("A")
    rig.feed(1, history=True)
    assert rig.idle() == AGAIN_S
    rig.feed(2, history=True)
    rig.waiting.clear()
    assert rig.idle() is None
    assert rig.said() == [("up", 2)]


def test_a_newer_version_makes_it_needless() -> None:
    rig = Rig(UP)
    rig.feed(1, history=True)
    rig.feed(2)
    assert rig.idle() is None
    assert rig.repeated == []
    assert [done.version for done in rig.evaluated] == [2]


def test_only_questions_that_were_asked_of_that_version_are_repeated() -> None:
    rig = Rig(UP, RARE)
    rig.feed(1, history=True)  # RARE is due at the first version and at every third one
    rig.feed(2, history=True)
    assert rig.idle() is None
    assert rig.said() == [("up", 2)]


def test_a_session_goes_on_from_a_snapshot_with_its_answers() -> None:
    rig = Rig(UP, RARE)
    rig.feed(1)
    rig.repeats.forget("A")
    asked = dict(rig.evaluator.cut("A").asked)
    assert set(asked.values()) == {DataVersion(1, 1)}
    rig.evaluator.restore("A", AskedState(1, tuple(asked.items())))
    rig.repeats.restore(rig.tape, Bar(1))
    assert rig.idle() is None
    assert sorted(rig.said()) == [("rare", 1), ("up", 1)]


def test_a_tape_outside_of_a_full_pool_is_asked_later_and_leaves_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(UP, TEXT)
    rig.feed(1, history=True)
    fork, readers = rig.tape.fork, []

    def without_room() -> Any:
        if readers:
            raise NotResident("no room")
        readers.append(fork())
        return readers[-1]

    monkeypatch.setattr(rig.tape, "fork", without_room)
    free = rig.h.memory.free_blocks
    assert rig.idle() == AGAIN_S
    assert rig.h.memory.free_blocks == free
    monkeypatch.undo()
    assert rig.idle() is None
    assert sorted(rig.said()) == [("text", 1), ("up", 1)]


@pytest.mark.parametrize("submitted", [False, True])
def test_what_is_forgotten_has_no_result(submitted: bool) -> None:
    """As a session that is removed, or has a newer version; its blocks are free again."""
    rig = Rig(UP)
    rig.feed(1, history=True)
    if submitted:
        assert rig.repeats.idle() == 0.0
    rig.repeats.forget("A")
    rig.h.run()
    assert rig.idle() is None
    assert rig.repeated == []
    rig.h.scheduler.append((rig.tape, [TapeItem((1,) * 24, Bar(2), 2)]))  # the window moves on
    rig.h.run()
    assert rig.h.memory.free_blocks == 256 - len(rig.tape.blocks)
