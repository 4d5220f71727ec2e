"""Standing questions changed while the daemon runs, seen from the gateway."""

import asyncio
from typing import Any

import msgspec
import pytest

from daemon import protocol
from daemon.api.generation import Failed
from daemon.api.messages import ListQuestions, Pause, QueryError, RemoveQuestion, SetQuestion
from daemon.config.schema import QuestionConfig
from daemon.config.standing import questions_of
from daemon.gateway.question_requests import MOST, Questions
from flash.question import PAPER_SIX, Question
from tests.kit import inproc_config, until
from tests.kit.gateway import EngineRig

UP = Question("up", "Up?", ("YES", "NO"))
PRICE = Question(
    "price", "Price?", publish_when="crossed", level="0.5", ask_every_ns=5 * 10**9, answer_within_ns=10**9
)


class Rig(EngineRig):
    """Questions and the commands they send; `confirm` and `refuse` are the engine."""

    def __init__(self) -> None:
        config = inproc_config(["V:AAA", "V:BBB"], standing="none", questions=(ASKED,))
        super().__init__("aaa", "bbb", config=config)
        self.questions = Questions(self.sessions, self.pending)

    async def command(self, number: int = 1) -> protocol.SetQuestions:
        await until(lambda: len(self.sent) >= number)
        command = self.sent[number - 1]
        assert isinstance(command, protocol.SetQuestions)
        return command

    def confirm(self, command: protocol.SetQuestions) -> None:
        self.pending.on_event(protocol.QuestionsSet(command.id, command.session, 3, command.questions))

    def names(self, session: str = "aaa") -> list[str]:
        return [question.name for question in self.sessions.states[session].questions]


ASKED = QuestionConfig(name="trend", text="Which way?", choices=("UP", "DOWN"))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def setting(name: str = "up", text: str = "Up?", **changes: Any) -> SetQuestion:
    return SetQuestion(**({"id": 5, "session": "aaa", "name": name, "text": text} | changes))


async def test_a_question_is_there_when_the_engine_has_it(rig: Rig) -> None:
    changing = asyncio.create_task(rig.questions.set(setting(choices=("YES", "NO"))))
    command = await rig.command()
    assert [each.name for each in command.questions] == ["trend", "up"]
    assert command.questions[1] == UP
    assert rig.names() == ["trend"]
    rig.confirm(command)
    reply = await changing
    assert [(q.name, q.choices) for q in reply.questions] == [
        ("trend", ("UP", "DOWN")),
        ("up", ("YES", "NO")),
    ]
    assert rig.names("bbb") == ["trend"]
    assert await rig.questions.list(ListQuestions(5, "aaa")) == reply


async def test_the_same_name_changes_a_question_where_it_stands(rig: Rig) -> None:
    for number, (name, text) in enumerate([("up", "Up?"), ("trend", "Whither?")], 1):
        changing = asyncio.create_task(rig.questions.set(setting(name, text)))
        rig.confirm(await rig.command(number))
        reply = await changing
    assert [(q.name, q.text) for q in reply.questions] == [("trend", "Whither?"), ("up", "Up?")]


async def paused(rig: Rig, number: int, request: Pause) -> list[tuple[str, bool]]:
    """What the reply lists, once the engine has confirmed command ``number``."""
    changing = asyncio.create_task(rig.questions.pause(request))
    rig.confirm(await rig.command(number))
    return [(q.name, q.paused) for q in (await changing).questions]


async def test_a_paused_question_is_not_asked_until_it_is_resumed(rig: Rig) -> None:
    assert await paused(rig, 1, Pause(5, "aaa", "trend")) == [("trend", True)]
    assert (rig.names(), rig.sent[0].questions) == ([], ())
    again = await rig.questions.pause(Pause(5, "aaa", "trend"))  # is no change
    assert ([q.paused for q in again.questions], len(rig.sent)) == ([True], 1)
    # an engine that is started again is not asked to ask it
    assert [q.sessions for q in rig.questions.configured(rig.config).questions] == [("bbb",)]
    assert await paused(rig, 2, Pause(5, "aaa", paused=False)) == [("trend", False)]
    assert rig.names() == ["trend"]
    for request in (Pause(5, "aaa", "none"), Pause(5, "ccc")):
        with pytest.raises(QueryError):
            await rig.questions.pause(request)


async def test_a_paused_question_is_replaced_removed_and_forgotten_when_configured_anew(rig: Rig) -> None:
    await paused(rig, 1, Pause(5, "aaa"))
    changing = asyncio.create_task(rig.questions.set(setting("trend", "Whither?")))
    rig.confirm(await rig.command(2))
    assert [(q.text, q.paused) for q in (await changing).questions] == [("Whither?", False)]
    await paused(rig, 3, Pause(5, "aaa"))
    removed = await rig.questions.remove(RemoveQuestion(5, "aaa", "trend"))
    assert (removed.questions, len(rig.sent)) == ((), 3)
    await paused(rig, 4, Pause(5, "bbb"))
    reloading = asyncio.create_task(rig.questions.reload(rig.config))
    rig.confirm(await rig.command(5))
    rig.confirm(await rig.command(6))
    await reloading
    listed = await rig.questions.list(ListQuestions(5, "bbb"))
    assert [(q.name, q.paused) for q in listed.questions] == [("trend", False)]


async def test_a_removed_question_and_its_answer_are_gone(rig: Rig) -> None:
    changing = asyncio.create_task(rig.questions.remove(RemoveQuestion(5, "aaa", "trend")))
    rig.confirm(await rig.command())
    assert (await changing).questions == ()
    with pytest.raises(QueryError, match="no standing question 'trend'"):
        await rig.questions.remove(RemoveQuestion(6, "aaa", "trend"))


async def test_what_the_engine_refuses_changes_nothing(rig: Rig) -> None:
    changing = asyncio.create_task(rig.questions.set(setting()))
    command = await rig.command()
    rig.pending.on_event(Failed(command.id, "too_long", "4000 frozen tokens"))
    with pytest.raises(QueryError, match="4000 frozen") as raised:
        await changing
    assert raised.value.code == "too_long"
    assert rig.names() == ["trend"]


async def test_when_the_engine_ends_a_change_fails(rig: Rig) -> None:
    changing = asyncio.create_task(rig.questions.set(setting()))
    await rig.command()
    rig.pending.engine_gone("the engine ended")
    with pytest.raises(QueryError, match="the engine ended"):
        await changing


async def test_changes_of_one_session_are_made_one_after_the_other(rig: Rig) -> None:
    """So none is lost: each builds on what the engine has confirmed."""
    changing = [asyncio.create_task(rig.questions.set(setting(name))) for name in ("up", "down")]
    first = await rig.command()
    await asyncio.sleep(0.01)
    assert len(rig.sent) == 1
    rig.confirm(first)
    rig.confirm(await rig.command(2))
    await asyncio.gather(*changing)
    assert rig.names() == ["trend", "up", "down"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session": "ccc"}, "there is no session"),
        ({"choices": ("YES",)}, "at least two choices"),
        ({"choices": ("YES", "YES")}, "repeat"),
        ({"text": "  "}, "a name and a text"),
        ({"level": "high"}, "not a plain decimal"),
    ],
)
async def test_what_is_wrong_at_sight_never_reaches_the_engine(
    rig: Rig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        await rig.questions.set(setting(**changes))
    assert rig.sent == []


async def test_a_session_has_a_limited_number_of_questions(rig: Rig) -> None:
    rig.sessions.states["aaa"].ask_these([Question(f"q{n}", "Up?") for n in range(MOST)], ())
    with pytest.raises(QueryError, match="at most 999"):
        await rig.questions.set(setting())


async def test_a_configuration_read_again_replaces_what_clients_changed(rig: Rig) -> None:
    changing = asyncio.create_task(rig.questions.set(setting()))
    rig.confirm(await rig.command())
    await changing
    only_b = QuestionConfig(name="new", text="New?", sessions=("bbb",))
    config = msgspec.structs.replace(rig.config, questions=(ASKED, only_b))
    reading = asyncio.create_task(rig.questions.reload(config))
    rig.confirm(await rig.command(2))
    rig.confirm(await rig.command(3))
    await reading
    assert (rig.names(), rig.names("bbb")) == (["trend"], ["trend", "new"])
    await rig.questions.reload(config)
    assert len(rig.sent) == 3, "what is as configured is not changed"


async def test_an_engine_that_is_started_again_gets_the_questions_as_they_are(rig: Rig) -> None:
    assert rig.questions.configured(rig.config) is rig.config
    rig.sessions.questions_set("bbb", [*PAPER_SIX, UP, PRICE])
    config = rig.questions.configured(rig.config)
    asked = {name: [a.question for a in questions_of(config) if a.session == name] for name in ("aaa", "bbb")}
    assert asked["bbb"] == [*PAPER_SIX, UP, PRICE]
    assert [question.name for question in asked["aaa"]] == ["trend"]


async def test_an_engine_that_is_started_again_labels_by_the_same_rules(rig: Rig) -> None:
    asked = msgspec.structs.replace(ASKED, rule="trend.toml")
    ruled = msgspec.structs.replace(rig.config, questions=(asked,))
    rig.sessions.questions_set("bbb", [*rig.sessions.states["bbb"].questions, UP])
    found = {(q.name, *q.sessions): q.rule for q in rig.questions.configured(ruled).questions}
    assert found == {("trend", "aaa"): "trend.toml", ("trend", "bbb"): "trend.toml", ("up", "bbb"): ""}


async def test_a_reply_after_the_client_gave_up_is_still_true(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await rig.questions.set(setting())
    rig.confirm(rig.sent[0])
    assert rig.names() == ["trend", "up"]


async def test_a_pause_that_the_client_gave_up_loses_no_question(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await rig.questions.pause(Pause(5, "aaa", "trend"))
    rig.confirm(rig.sent[0])
    assert rig.names() == []
    assert await paused(rig, 2, Pause(5, "aaa", "trend", paused=False)) == [("trend", False)]
    assert rig.names() == ["trend"]
