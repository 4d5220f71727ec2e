"""Two models in one daemon: each answers as alone, and a question goes to the one that can answer it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from daemon import protocol
from daemon.api.messages import QueryError
from daemon.cli.ask import shown
from daemon.config.by_model import by_model
from daemon.config.schema import (
    UNTRAINED,
    Config,
    ModelConfig,
    NamedModel,
    ProcessConfig,
    QuestionConfig,
    SessionConfig,
)
from daemon.progress import Progress
from feeds.durations import Duration
from tests.e2e.test_e2e_supervision import engines
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import RunningDaemon, running

WORDS = "Is the market calm or wild?"
TAPE, CHAT = "foretick-tape", "chat"


pytestmark = pytest.mark.asyncio(loop_scope="module")


def config(**changes: Any) -> Config:
    """The tape model and one that takes any question, over one symbol."""
    return inproc_config(
        model=ModelConfig(layers="torch", threads=1),
        models=(NamedModel(name=CHAT, path=UNTRAINED, layers="torch", aliases=("gpt-x",)),),
        sessions=(
            SessionConfig(name="tape", symbol="V:AAA", retention_records=8),
            SessionConfig(name="words", symbol="V:AAA", model=CHAT, retention_tokens=256),
        ),
        standing="none",
        questions=(
            QuestionConfig(name="trend", text="trend", choices=("UP", "DOWN")),
            QuestionConfig(name="calm", text=WORDS, choices=("calm", "wild")),
        ),
        **changes,
    )


def said(daemon: RunningDaemon, session: str) -> list[tuple[object, ...]]:
    """All that the model decides of each answer, in order."""
    return [
        (a.data_version, a.question, a.text, a.choice, a.logit_gap, a.probability, a.choice_set, a.model,
         a.model_revision, a.basis and a.basis.config)
        for a in daemon.answers(session)
    ]  # fmt: skip


async def test_each_model_answers_bit_for_bit_as_it_does_alone() -> None:
    both, bars = config(), 14  # either window holds 8 or fewer
    found, alone = dict[str, list[tuple[object, ...]]](), dict[str, list[tuple[object, ...]]]()
    async with running(both) as daemon:
        await daemon.advance(bars)
        for name in ("tape", "words"):
            found[name] = said(daemon, name)
    for part in by_model(both):
        async with running(part) as daemon:
            await daemon.advance(bars)
            (session,) = part.sessions
            alone[session.name] = said(daemon, session.name)
    assert found == alone
    asked = {name: {row[1] for row in rows} for name, rows in found.items()}
    assert asked == {"tape": {"trend"}, "words": {"trend", "calm"}}
    assert {name: len(rows) for name, rows in found.items()} == {"tape": bars, "words": 2 * bars}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon() -> AsyncIterator[RunningDaemon]:
    async with running(config()) as started:
        await started.advance(3)
        yield started


async def test_a_question_goes_to_the_session_whose_model_can_answer_it(daemon: RunningDaemon) -> None:
    ready = await daemon.call("ask", "tape", "trend")
    assert (ready.session, ready.model, ready.cached) == ("tape", TAPE, True)
    computed = await daemon.call("ask", "tape", "breakout", 8, ("YES", "NO"))
    assert (computed.session, computed.model, computed.cached) == ("tape", TAPE, False)
    foreign = await daemon.call("ask", "tape", "What is a drawdown?", 4)
    assert (foreign.session, foreign.model) == ("words", name_of(daemon))
    assert foreign.data_version == daemon.state("words").version == 3
    standing = await daemon.call("ask", "tape", "calm")
    assert (standing.session, standing.cached) == ("words", True)
    other = await daemon.call("ask", "tape", "trend", 8, ("HIGH", "LOW"))
    assert (other.session, other.choice in ("HIGH", "LOW")) == ("words", True)
    assert (
        shown(foreign, "tape")
        .splitlines()[-1]
        .startswith(f"  words answered, by {name_of(daemon)}: version 3")
    )
    assert shown(ready, "tape").splitlines()[-1].startswith("  version 3")


async def test_compatible_apis_list_both_models_and_route_by_name(daemon: RunningDaemon) -> None:
    listed = (await daemon.http("GET", "/v1/models")).json["data"]
    chat = name_of(daemon)
    assert [each["id"] for each in listed] == [TAPE, chat, CHAT, "gpt-x", "session:tape", "session:words"]
    for name in (chat, CHAT, "gpt-x"):
        found = await said_by(daemon, name, "Hello")
        assert found["foretick"]["model"] == chat
    refused = await daemon.http("POST", "/v1/chat/completions", chat_of(TAPE, "Hello"))
    assert (refused.status, "ask session:NAME" in refused.body.decode()) == (400, True)
    own = await said_by(daemon, "session:tape", "trend")
    foreign = await said_by(daemon, "session:tape", "Why is it calm?")
    places = [(each["foretick"]["session"], each["foretick"]["model"]) for each in (own, foreign)]
    assert places == [("tape", TAPE), ("words", chat)]
    assert own["system_fingerprint"] != (await said_by(daemon, CHAT, "Hello"))["system_fingerprint"]


async def test_prompts_and_decisions_without_a_session_go_to_the_model_that_reads(
    daemon: RunningDaemon,
) -> None:
    questions = {"calm": {"type": "noul", "instructions": "Is it calm?"}}
    body = {"model": "jev-latest", "state": "All is calm.", "questions": questions}
    reply = await daemon.http("POST", "/v1/systemone", body)
    assert (reply.status, reply.json["model"]) == (200, name_of(daemon))
    assert "unread" not in reply.json["answers"]["calm"]["x_flags"]
    completed = await daemon.call("complete", "The market is", 4)
    assert completed.answer_tokens


async def test_a_session_is_told_with_its_model(daemon: RunningDaemon) -> None:
    listed = await daemon.call("sessions")
    assert {each.name: each.model for each in listed.sessions} == {"tape": "", "words": CHAT}


async def test_sessions_of_either_model_come_and_go_and_another_model_needs_a_restart(
    daemon: RunningDaemon,
) -> None:
    await daemon.call("add_session", "more", "V:AAA", model=CHAT, retention_tokens=256)
    daemon.feed(2)  # the first bar of a new session begins with the first of these
    await until(lambda: daemon.state("more").version)
    reply = await daemon.call("ask", "more", "Is it calm?", 4)
    assert (reply.session, reply.model) == ("more", name_of(daemon))
    await daemon.call("change_session", "more", model="")  # it begins again, with the other model
    earlier = daemon.state("more").version
    daemon.feed(2)
    await until(lambda: daemon.state("more").version > earlier)
    reply = await daemon.call("ask", "more", "breakout", 8, ("YES", "NO"))
    assert (reply.session, reply.model) == ("more", TAPE)
    await daemon.call("remove_session", "more")
    with pytest.raises(QueryError, match=f"there is no model named 'x'; there are: {CHAT}"):
        await daemon.call("add_session", "more", "V:AAA", model="x")


async def test_where_no_session_of_the_symbol_can_answer_it_is_said_what_can_be_asked() -> None:
    both = config()
    only = structs.replace(both, sessions=both.sessions[:1], questions=both.questions[:1])
    async with running(only) as daemon:
        await daemon.advance()
        with pytest.raises(QueryError, match=r"no session.*trend \(Is"):
            await daemon.call("ask", "tape", "What is a drawdown?")
        refused = await daemon.http("POST", "/v1/chat/completions", chat_of("session:tape", "Why?"))
        assert (refused.status, "it answers these questions" in refused.body.decode()) == (400, True)
        assert (await said_by(daemon, CHAT, "Hello"))["foretick"]["model"] == name_of(daemon)


def name_of(daemon: RunningDaemon) -> str:
    """The second model's own name."""
    ready = daemon.gateway.engine.model
    assert ready is not None
    return str(ready.models[1].name)


def chat_of(model: str, text: str) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
    }


async def said_by(daemon: RunningDaemon, model: str, text: str) -> Any:
    reply = await daemon.http("POST", "/v1/chat/completions", chat_of(model, text))
    assert reply.status == 200, reply
    found = reply.json
    return found | {"foretick": found["choices"][0].get("foretick") or found.get("foretick")}


async def test_a_killed_engine_is_replaced_by_a_spare_with_both_models() -> None:
    process = ProcessConfig(mode="two", spare_engine=True, drain=Duration(5 * SECOND))
    async with running(config(process=process), restart_after_s=(0.0,)) as daemon:
        (spare,) = engines()
        (first,) = engines(str(spare))
        await daemon.advance(2)
        os.kill(first, signal.SIGKILL)
        await until(lambda: daemon.count("engine_restarts") == 1, 30.0)
        await until(lambda: not daemon.gateway.status.not_ready(), 180.0)
        before = {name: len(daemon.answers(name)) for name in ("tape", "words")}
        daemon.feed(8)
        await until(lambda: all(len(daemon.answers(name)) > before[name] for name in before))
        reply = await daemon.call("ask", "tape", "What is a drawdown?", 4)
        assert (reply.session, reply.model) == ("words", name_of(daemon))


async def test_versions_of_both_models_count_on_from_those_of_the_daemon_before() -> None:
    async with running(config()) as daemon:
        known = {"tape": Progress(version=50), "words": Progress(version=70)}
        daemon.host.handle(protocol.TakeOver(10**6, known))
        daemon.feed(3)
        await until(lambda: daemon.state("tape").version and daemon.state("words").version)
        assert (daemon.state("tape").version, daemon.state("words").version) >= (51, 71)
