"""Ad hoc questions that come often are given to their session, answered ahead, and taken away again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from daemon import protocol
from daemon.api.generation import Failed
from daemon.config.schema import FlashConfig, QuestionConfig
from daemon.gateway import frequent_asks
from daemon.gateway.frequent_asks import FrequentAsks
from daemon.gateway.question_requests import Questions
from feeds.durations import Duration
from flash.question import Question
from tests.kit import inproc_config, until
from tests.kit.gateway import EngineRig

S = 10**9
UP = Question("ask", "Up?", ("YES", "NO"), max_tokens=4)
NAME = f"asked-{UP.hash[:12]}"
TREND = QuestionConfig(name="trend", text="Which way?", choices=("UP", "DOWN"))


class Rig(EngineRig):
    """The gateway's part; the test is the engine, and holds the clock."""

    def __init__(self) -> None:
        super().__init__("aaa", config=inproc_config(["V:AAA"], standing="none", questions=(TREND,)))
        self.now = 0
        questions = Questions(self.sessions, self.pending)
        settings = FlashConfig(standing_after=2, standing_window=Duration(60 * S), standing_most=1)
        self.frequent = FrequentAsks(settings, self.sessions, questions, self.store, lambda: self.now)

    async def command(self, number: int) -> protocol.SetQuestions:
        await until(lambda: len(self.sent) >= number)
        command = self.sent[number - 1]
        assert isinstance(command, protocol.SetQuestions)
        return command

    async def confirm(self, number: int) -> list[str]:
        """The engine has the questions of this command; their names."""
        command = await self.command(number)
        self.pending.on_event(protocol.QuestionsSet(command.id, "aaa", 3, command.questions))
        return [each.name for each in command.questions]

    def changes(self, outcome: str) -> float:
        return self.store.value("foretick_frequent_changes_total", outcome=outcome)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(frequent_asks, "CHECK_S", 0.01)
    made = Rig()
    running = asyncio.create_task(made.frequent.run())
    yield made
    running.cancel()
    await asyncio.wait([running])


async def test_a_question_stands_while_it_comes_often(rig: Rig) -> None:
    rig.frequent.asked("aaa", UP)
    assert not rig.sent
    rig.frequent.asked("aaa", UP)
    assert await rig.confirm(1) == ["trend", NAME]
    await until(lambda: rig.changes("standing") == 1)
    (_, stands) = rig.sessions.states["aaa"].questions
    assert (stands.text, stands.choices, stands.publish_when) == ("Up?", ("YES", "NO"), "never")
    known = rig.sessions.states["aaa"].lookup.find("Up?", ("YES", "NO"))
    assert known is not None
    assert known.hash == UP.hash, "asks get its ready answer"
    await until(lambda: rig.store.value("foretick_frequent_questions") == 1)
    rig.now = 100 * S
    rig.frequent.asked("aaa", known.question)
    rig.now = 121 * S
    assert await rig.confirm(2) == ["trend"]
    await until(lambda: rig.changes("ended") == 1)
    await until(lambda: rig.store.value("foretick_frequent_questions") == 0)


async def test_one_that_the_engine_refuses_is_dropped_and_may_come_again(rig: Rig) -> None:
    for _ in range(2):
        rig.frequent.asked("aaa", UP)
    command = await rig.command(1)
    rig.pending.on_event(Failed(command.id, "bad_request", "this model does not answer it"))
    await until(lambda: rig.changes("refused") == 1)
    assert [each.name for each in rig.sessions.states["aaa"].questions] == ["trend"]
    for _ in range(2):
        rig.frequent.asked("aaa", UP)
    assert await rig.confirm(2) == ["trend", NAME]


async def test_a_session_has_no_more_of_them_than_it_may(rig: Rig) -> None:
    for text in ("Up?", "Down?"):
        for _ in range(2):
            rig.frequent.asked("aaa", Question("ask", text, ("YES", "NO")))
    assert await rig.confirm(1) == ["trend", NAME]
    await until(lambda: rig.changes("standing") == 1)
    await asyncio.sleep(0.05)
    assert len(rig.sent) == 1


async def test_one_that_was_removed_may_come_again(rig: Rig) -> None:
    """By an operator, or because the configuration was read again."""
    for _ in range(2):
        rig.frequent.asked("aaa", UP)
    assert await rig.confirm(1) == ["trend", NAME]
    await until(lambda: rig.changes("standing") == 1)
    state = rig.sessions.states["aaa"]
    state.questions_set(state.questions[:1])
    await until(lambda: rig.store.value("foretick_frequent_questions") == 0)
    for _ in range(2):
        rig.frequent.asked("aaa", UP)
    assert await rig.confirm(2) == ["trend", NAME]
