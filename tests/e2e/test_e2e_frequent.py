"""A question that comes often stands, whichever way it comes; what asks more than that is answered apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from daemon.config.schema import FlashConfig, SchedulerConfig
from feeds.durations import Duration
from flash.question import Question
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import RunningDaemon, running

TEXT = "Is the tape calm?"
MOST = 8
AAA = {"session": "aaa"}
Ask = Callable[[RunningDaemon], Awaitable[Any]]
"""Asks once; what the reply says of itself."""


async def posted(daemon: RunningDaemon, path: str, body: dict[str, Any]) -> Any:
    reply = await daemon.http("POST", path, body)
    assert reply.status == 200, reply
    return reply.json


async def ask(daemon: RunningDaemon) -> Any:
    return await posted(daemon, "/v1/ask", {"session": "aaa", "question": TEXT, "choices": ["YES", "NO"]})


async def systemone(daemon: RunningDaemon) -> Any:
    asked = {"model": "jev-latest", "state": AAA, "questions": {"a": {"type": "noul", "instructions": TEXT}}}
    answer = (await posted(daemon, "/v1/systemone", asked))["answers"]["a"]
    return {"cached": answer.get("x_cached", False)}


async def decision(daemon: RunningDaemon) -> Any:
    questions = [{"type": "predicate", "instructions": TEXT}]
    asked = {"model": "session:aaa", "input": "", "questions": questions}
    (answer,) = (await posted(daemon, "/v1/decisions", asked))["answers"]
    return answer["foretick"]


def chat(path: str = "/v1/chat/completions", **more: Any) -> Ask:
    async def work(daemon: RunningDaemon) -> Any:
        body = {"model": "session:aaa", "messages": [{"role": "user", "content": TEXT}], "max_tokens": MOST}
        return (await posted(daemon, path, body | more))["foretick"]

    return work


async def completion(daemon: RunningDaemon) -> Any:
    body = {"model": "session:aaa", "prompt": TEXT, "max_tokens": MOST}
    return (await posted(daemon, "/v1/completions", body))["foretick"]


async def response(daemon: RunningDaemon) -> Any:
    body = {"model": "session:aaa", "input": TEXT, "max_output_tokens": MOST}
    return (await posted(daemon, "/v1/responses", body))["foretick"]


CHOICES: list[Ask] = [ask, systemone, decision]
WORDS: list[Ask] = [chat(), completion, response, chat("/v1/messages")]


@pytest.fixture
async def daemon() -> AsyncIterator[RunningDaemon]:
    flash = FlashConfig(standing_after=3, standing_window=Duration(600 * SECOND))
    scheduler = SchedulerConfig(max_new_tokens=16)
    async with running(inproc_config(standing="none", flash=flash, scheduler=scheduler)) as made:
        made.feed(2)
        await until(lambda: made.state().version == 1, 60)
        yield made


def standing(daemon: RunningDaemon) -> list[Question]:
    return list(daemon.state().questions)


@pytest.mark.parametrize("ways", [CHOICES, WORDS], ids=["choices", "words"])
async def test_a_question_stands_by_its_words_whichever_way_they_come(
    daemon: RunningDaemon, ways: list[Ask]
) -> None:
    for way in ways[:3]:
        assert standing(daemon) == []
        await way(daemon)
    await until(lambda: len(standing(daemon)) == 1, 30)
    (question,) = standing(daemon)
    assert (question.text, question.publish_when) == (TEXT, "never")
    daemon.feed()
    await until(lambda: len(daemon.state().answers_of([question], 2)) == 1, 60)
    for way in ways:
        found = await way(daemon)
        assert (found["cached"], found.get("data_version", 2)) == (True, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]},
        {"temperature": 1.0},
        {"max_tokens": MOST - 1},
    ],
    ids=["other messages", "sampled", "shorter"],
)
async def test_what_is_asked_beside_it_is_answered_as_before(
    daemon: RunningDaemon, more: dict[str, Any]
) -> None:
    """A question that an operator lets stand means more, see `docs/clients.md`; this one nobody chose."""
    apart = chat(**more)
    for _ in range(3):
        await chat()(daemon)
    await until(lambda: len(standing(daemon)) == 1, 30)
    daemon.feed()
    await until(lambda: len(daemon.state().answers_of(standing(daemon), 2)) == 1, 60)
    assert (await chat()(daemon))["cached"]
    assert not (await apart(daemon))["cached"]


async def test_what_a_ready_answer_would_not_serve_is_not_counted(daemon: RunningDaemon) -> None:
    for _ in range(4):
        await chat(temperature=1.0)(daemon)
        await chat(messages=[{"role": "system", "content": "?"}, {"role": "user", "content": TEXT}])(daemon)
    described = {"type": "noul", "instructions": TEXT, "criteria": {"true": "few trades", "false": "many"}}
    for _ in range(4):
        asked = {"model": "jev-latest", "state": AAA, "questions": {"a": described}}
        await posted(daemon, "/v1/systemone", asked)
    assert standing(daemon) == []
    assert daemon.value("frequent_questions") == 0
