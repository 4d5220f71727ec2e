"""A session without a bar is not asked: each API says so, and nothing is published before the first one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from daemon.api.messages import QueryError
from daemon.config.schema import QuestionConfig
from tests.kit import inproc_config
from tests.kit.inproc import RunningDaemon, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
WHY = "session aaa has read no bar yet"
UP = QuestionConfig("up", text="Up?", choices=("YES", "NO"))
SAID = [{"role": "user", "content": "Is it quiet?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/ask": {"session": "aaa", "question": "Is it quiet?"},
    "/v1/chat/completions": {"model": "session:aaa", "messages": SAID},
    "/v1/completions": {"model": "session:aaa", "prompt": "Is it quiet?"},
    "/v1/responses": {"model": "session:aaa", "input": "Is it quiet?"},
    "/v1/messages": {"model": "session:aaa", "messages": SAID, "max_tokens": 4},
    "/v1/systemone": {
        "model": "jev-latest",
        "state": {"session": "aaa"},
        "questions": {"q": {"type": "noul", "instructions": "Is it quiet?"}},
    },
    "/v1/decisions": {
        "model": "session:aaa",
        "input": "",
        "questions": [{"type": "predicate", "instructions": "Is it quiet?"}],
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon() -> AsyncIterator[RunningDaemon]:
    """Nothing was read yet."""
    async with running(inproc_config(standing="none", questions=(UP,))) as made:
        yield made


@pytest.mark.parametrize("path", BODIES)
async def test_each_api_refuses_to_ask_it(daemon: RunningDaemon, path: str) -> None:
    reply = await daemon.http("POST", path, BODIES[path])
    assert reply.status == 409, reply
    assert WHY in str(reply.json)


async def test_the_query_socket_says_no_data_of_any_question(daemon: RunningDaemon) -> None:
    for question in ("Is it quiet?", "up"):
        with pytest.raises(QueryError, match=WHY) as refused:
            await daemon.call("ask", "aaa", question)
        assert refused.value.code == "no_data"
    assert daemon.count("asks", outcome="no_data") >= 2


async def test_its_prompt_has_an_empty_window_and_other_answers_come_as_before(daemon: RunningDaemon) -> None:
    shown = await daemon.call("show_prompt", "aaa")
    assert (shown.data_version, shown.sliding.text, shown.sliding.tokens) == (0, "", 0)
    assert shown.frozen.tokens
    assert (await daemon.call("answers", "aaa")).answers == ()
    assert (await daemon.call("complete", "one two", 2)).answer_tokens


async def test_it_is_asked_from_its_first_bar_on(daemon: RunningDaemon) -> None:
    """The last test: it feeds the session."""
    assert not daemon.answers()
    await daemon.advance(1)
    assert {answer.data_version for answer in daemon.answers()} == {1}
    assert (await daemon.call("ask", "aaa", "Is it quiet?")).data_version == 1
    for path, body in BODIES.items():
        reply = await daemon.http("POST", path, body)
        assert reply.status == 200, (path, reply)
