"""Sessions: answers from the cache, asks to the engine, and time limits."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon import protocol
from daemon.ages import Times
from daemon.api.auth import Access
from daemon.api.generation import CancelGeneration, Failed, Finished, Generate, GenerateAll, Turn
from daemon.api.messages import (
    Answers,
    Ask,
    AskReply,
    ErrorReply,
    ListSessions,
    QueryError,
    ReplyMetadata,
    Stats,
)
from daemon.config.tenants_file import TenantTable
from daemon.tenants import LOCAL, Client, Tenant, Tenants
from feeds.market_data import Answer
from flash.question import PAPER_SIX
from metrics.catalogue import STAGES
from tests.kit import START, until
from tests.kit.engine_events import ANSWER
from tests.kit.gateway import GenerationsRig

TREND = PAPER_SIX[0]
assert TREND.choices is not None
TREND_ASKED = (Turn("user", TREND.text),)
HERE = Client(LOCAL, "")
CACHED_ASK = partial(Ask, session="aaa", question=TREND.text, choices=TREND.choices)


class Rig(GenerationsRig):
    """Versions and their answers, and asks about them."""

    def __init__(self, access: Access | None = None) -> None:
        super().__init__("aaa", "bbb", access=access)

    async def ask(self, request: Ask, client: Client = HERE) -> AskReply:
        found = self.generations.ask(request, client)
        return await found() if callable(found) else found

    def committed(self, version: int, session: str = "aaa") -> None:
        times = times_of(version)
        inputs = protocol.VersionInputs()
        self.sessions.committed(protocol.Committed(session, version, 1, 40 * version, version, times, inputs))

    def answered(self, version: int, session: str = "aaa", **fields: object) -> Answer:
        answers = [answer(version, session, q.name, q.hash) for q in PAPER_SIX]
        for each in answers:
            self.sessions.answered(msgspec.structs.replace(each, **fields), times_of(version))
        return answers[0]

    def asks(self, outcome: str) -> float:
        return self.store.value("foretick_asks_total", outcome=outcome)

    async def computed(
        self,
        request: Ask,
        client: Client = HERE,
        reply: Callable[[Generate], Finished | Failed] | None = None,
    ) -> tuple[Generate, AskReply]:
        """What the engine is asked, and the client's answer from its ``reply``."""
        asking = asyncio.create_task(self.ask(request, client))
        sent = asked(await until(lambda: self.sent and self.sent[-1]))
        self.pending.on_event(reply_to(sent, "UP", "UP") if reply is None else reply(sent))
        return sent, await asking


@pytest.fixture
def rig() -> Rig:
    return Rig()


def times_of(version: int, seconds_ago: float = 0.0) -> Times:
    ago = int(seconds_ago * 1e9)
    return Times(START + version, time.time_ns() - ago, time.monotonic_ns() - ago, replay=seconds_ago > 0)


def asked(command: protocol.Command) -> Generate:
    """What the engine is asked: one answer, as an ask's."""
    assert isinstance(command, GenerateAll)
    (request,) = command.requests
    assert request.exact
    assert not request.stream
    return request


def reply_to(request: Generate, text: str, choice: str | None, tokens: int = 0) -> Finished:
    """As the engine sends it: with the times of the version it read."""
    return Finished(
        id=request.id,
        text=text,
        finish="stop",
        stop=None,
        prompt_tokens=100 + tokens,
        reused_tokens=100,
        answer_tokens=0,
        metadata=ReplyMetadata(
            session=request.session,
            data_version=4,
            choice=choice,
            logit_gap=0.25,
            untrained=True,
            flags=("untrained",),
        ),
        times=Times(START + 1, time.time_ns(), time.monotonic_ns()),
    )


def answer(version: int, session: str, name: str, question_hash: str) -> Answer:
    return msgspec.structs.replace(
        ANSWER,
        session=session,
        question=name,
        question_hash=question_hash,
        text=f"{name} {version}",
        logit_gap=0.5,
        data_version=version,
        as_of=START + version,
        flags=("gap", "untrained"),
    )


async def test_a_standing_question_of_the_current_version_never_reaches_the_engine(rig):
    rig.committed(3)
    rig.answered(3)
    reply = await rig.ask(CACHED_ASK(id=7))
    assert (reply.id, reply.cached, reply.data_version, reply.text) == (7, True, 3, "trend 3")
    assert (reply.choice, reply.logit_gap, reply.flags) == ("UP", 0.5, ("gap", "untrained"))
    assert (reply.as_of, reply.untrained) == (START + 3, True)
    assert 0 < reply.daemon_age_ns < 10**9
    assert 0 < reply.source_age_ns < 10**9
    assert reply.staleness_ns >= time.time_ns() - START - 10**9
    assert rig.sent == []


@pytest.mark.parametrize(
    "change",
    [
        {"question": TREND.text + " Or neither?"},
        {"choices": ("DOWN", "UP")},
        {"session": "bbb"},
    ],
)
async def test_anything_else_goes_to_the_engine(rig, change):
    rig.committed(3)
    rig.answered(3)
    request = msgspec.structs.replace(CACHED_ASK(id=7), **change)
    command, reply = await rig.computed(request, reply=lambda sent: reply_to(sent, "sideways", None))
    assert (command.session, command.choices) == (request.session, request.choices)
    assert command.turns == (Turn("user", request.question),)
    assert (reply.as_of, reply.source_age_ns > 0, 0 < reply.daemon_age_ns < 10**9) == (START + 1, True, True)
    assert (reply.id, reply.text, reply.data_version, reply.flags) == (7, "sideways", 4, ("untrained",))
    assert (reply.logit_gap, reply.cached, reply.untrained) == (0.25, False, True)
    await asyncio.sleep(0)
    assert command.question == (TREND if request.session == "bbb" else None)
    assert len(rig.sent) == 1, "an answered ask is not cancelled"


@pytest.mark.parametrize("asked", ["  " + TREND.text.replace(" ", "\n "), TREND.text, TREND.name, " trend "])
@pytest.mark.parametrize("choices", [(), TREND.choices])
@pytest.mark.parametrize("max_tokens", [1, 8, 99])
async def test_a_standing_question_is_known_by_its_name_and_its_text(rig, asked, choices, max_tokens):
    rig.committed(1)
    request = CACHED_ASK(id=1, question=asked, choices=choices, max_tokens=max_tokens)
    sent, _ = await rig.computed(request)
    assert (sent.turns, sent.choices, sent.question) == (TREND_ASKED, TREND.choices, TREND)
    rig.answered(1)
    assert (await rig.ask(request)).cached


async def test_a_name_with_other_choices_is_its_text_and_they_are_the_clients(rig):
    sent, _ = await rig.computed(CACHED_ASK(id=1, question="trend", choices=("A", "B")))
    assert (sent.turns, sent.choices, sent.question) == (TREND_ASKED, ("A", "B"), None)


async def test_a_paused_question_keeps_its_text_and_choices(rig):
    state = rig.sessions.states["aaa"]
    state.ask_these((), state.questions)
    sent, _ = await rig.computed(CACHED_ASK(id=1, question="trend", choices=()))
    assert (sent.turns, sent.choices) == (TREND_ASKED, TREND.choices)


async def test_a_question_that_reads_open_bars_has_ready_answers_only(rig):
    state = rig.sessions.states["aaa"]
    now = replace(TREND, name="now", provisional=True)
    state.ask_these((*state.questions, now), ())
    with pytest.raises(QueryError, match="now reads open bars") as refused:
        await rig.ask(CACHED_ASK(id=1, question="now", choices=()))
    assert (refused.value.code, rig.sent) == ("bad_request", [])
    rig.committed(1)
    rig.sessions.answered(answer(1, "aaa", "now", now.hash), times_of(1))
    rig.answered(1)
    assert (await rig.ask(CACHED_ASK(id=1, question="now", choices=()))).text == "now 1"
    assert (await rig.ask(CACHED_ASK(id=1))).text == "trend 1", "by its text, of closed bars"


async def test_the_newest_ready_answer_is_served_with_its_own_version_and_ages(rig):
    rig.sessions.answered(answer(3, "aaa", TREND.name, TREND.hash), times_of(3, seconds_ago=20))
    rig.committed(4)
    reply = await rig.ask(CACHED_ASK(id=1))
    assert (reply.cached, reply.data_version, reply.text, reply.as_of) == (True, 3, "trend 3", START + 3)
    ages = (reply.staleness_ns, reply.source_age_ns, reply.daemon_age_ns)
    assert [age // 10**9 for age in ages] == [20, 20, 20]
    assert rig.sent == []


@given(
    version=st.integers(0, 3),
    age_s=st.sampled_from([0.0, 5.0, 50.0]),
    max_age_s=st.none() | st.sampled_from([0.0, 1.0, 10.0, 1e9]),
)
@settings(max_examples=40)
def test_an_ask_is_computed_only_where_the_ready_answer_is_older_than_it_may_be(version, age_s, max_age_s):
    """``version``: what was answered; the session is at version 3. 0: nothing is ready."""

    async def ask() -> AskReply:
        rig = Rig()
        if version:
            rig.sessions.answered(
                answer(version, "aaa", TREND.name, TREND.hash), times_of(version, age_s + 0.01)
            )
        rig.committed(3)
        asking = asyncio.create_task(rig.ask(CACHED_ASK(id=1, max_age_s=max_age_s)))
        await asyncio.sleep(0)
        for command in rig.sent:
            rig.pending.on_event(reply_to(asked(command), "UP", "UP"))
        return await asking

    young = version == 3 or max_age_s is None or age_s < max_age_s
    reply = asyncio.run(ask())
    assert (reply.cached, reply.data_version) == ((True, version) if version and young else (False, 4))


async def test_a_ready_answer_is_stale_by_its_age_at_the_reply(rig):
    rig.sessions.states["aaa"].stale_after_ns = 10 * 10**9
    for age, flags in ((1, ["gap"]), (20, ["gap"]), (1, ["stale", "gap"])):
        ready = msgspec.structs.replace(answer(3, "aaa", TREND.name, TREND.hash), flags=flags)
        rig.sessions.answered(ready, times_of(3, age))
        expected = ("gap", "stale") if age > 10 else ("gap",)
        assert (await rig.ask(CACHED_ASK(id=1))).flags == expected


async def test_an_engine_without_input_since_its_restart_gets_the_times_from_here(rig):
    rig.committed(3)
    _, reply = await rig.computed(
        CACHED_ASK(id=1), reply=lambda sent: msgspec.structs.replace(reply_to(sent, "UP", "UP"), times=None)
    )
    assert (reply.as_of, 0 < reply.daemon_age_ns < 10**9) == (START + 3, True)


async def test_what_the_engine_refuses_is_an_error_with_its_message(rig):
    why = "the prompt has 900 tokens, the limit is 10"
    with pytest.raises(QueryError, match=r"900 tokens.*too_long"):
        await rig.computed(CACHED_ASK(id=1), reply=lambda sent: Failed(sent.id, "too_long", why))


async def test_an_ask_says_whose_it_is(rig):
    ask, _ = await rig.computed(CACHED_ASK(id=1), Client(Tenant("desk", weight=2.0), ""))
    assert (ask.tenant, ask.weight, ask.question) == ("desk", 2.0, TREND)


def of_desk() -> tuple[Rig, Client]:
    """A rig with a tenant that has 60 tokens a minute."""
    tenants = Tenants([TenantTable("desk", tokens_per_minute=60)])
    tenant = tenants.named("desk")
    assert tenant is not None
    return Rig(Access(tenants, clock=lambda: 0.0)), Client(tenant, "desk")


async def test_tokens_of_an_ask_are_charged_and_ready_answers_are_free() -> None:
    rig, desk = of_desk()
    await rig.computed(CACHED_ASK(id=1), desk, lambda sent: reply_to(sent, "UP", "UP", tokens=80))
    with pytest.raises(QueryError, match="60 tokens a minute") as refused:
        await rig.ask(CACHED_ASK(id=2), desk)
    assert (refused.value.code, refused.value.retry_after_s) == ("busy", 21.0)
    assert len(rig.sent) == 1
    rig.committed(3)
    rig.answered(3)
    assert (await rig.ask(CACHED_ASK(id=3), desk)).cached


async def test_an_abandoned_ask_is_cancelled_and_its_answer_ignored(rig):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await rig.ask(CACHED_ASK(id=1))
    command = asked(rig.sent[0])
    assert rig.sent[1:] == [CancelGeneration(command.id)]
    rig.pending.on_event(reply_to(command, "late", None))


async def test_an_abandoned_ask_costs_what_was_computed() -> None:
    rig, desk = of_desk()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await rig.ask(CACHED_ASK(id=1), desk)
        number = asked(rig.sent[-2]).id
        rig.pending.on_event(Failed(number, "cancelled", "the request was cancelled", 40))
    with pytest.raises(QueryError, match="60 tokens a minute"):
        await rig.ask(CACHED_ASK(id=2), desk)


async def test_when_the_engine_ends_every_ask_in_flight_fails(rig):
    asking = [asyncio.create_task(rig.ask(CACHED_ASK(id=n, session="bbb"))) for n in range(3)]
    await until(lambda: len(rig.sent) == 3)
    rig.pending.engine_gone("the engine process ended with status -9")
    for task in asking:
        with pytest.raises(QueryError, match="status -9") as raised:
            await task
        assert raised.value.code == "engine"
    assert len(rig.sent) == 3, "there is no engine to send a cancellation to"


async def test_an_unknown_session_is_refused_with_those_there_are(rig):
    for request in (CACHED_ASK(id=1, session="zzz"), Answers(1, "zzz")):
        with pytest.raises(QueryError, match="aaa, bbb") as raised:
            await (rig.ask if isinstance(request, Ask) else rig.sessions.answers)(request)
        assert raised.value.code == "unknown_session"


@pytest.mark.parametrize("change", [{"choices": ("UP",)}, {"choices": ("UP", "UP")}, {"question": "   "}])
async def test_a_question_that_makes_no_sense_is_refused_without_the_engine(rig, change):
    with pytest.raises(QueryError) as raised:
        await rig.ask(msgspec.structs.replace(CACHED_ASK(id=1), **change))
    assert (raised.value.code, rig.sent) == ("bad_request", [])


async def test_latest_answers_of_all_questions_or_of_one(rig):
    assert (await rig.sessions.answers(Answers(1, "aaa"))).answers == ()
    rig.answered(1)
    rig.answered(2)
    every = await rig.sessions.answers(Answers(1, "aaa"))
    assert [(a.question, a.data_version) for a in every.answers] == [(q.name, 2) for q in PAPER_SIX]
    for name in ("trend", TREND.text):
        one = await rig.sessions.answers(Answers(1, "aaa", name))
        assert [a.text for a in one.answers] == ["trend 2"]
    with pytest.raises(QueryError, match="no standing question"):
        await rig.sessions.answers(Answers(1, "aaa", "weather"))


async def test_the_newest_answer_is_the_last_one_of_the_highest_version(rig):
    for version, text in [(2, "two"), (3, "three"), (1, "one"), (3, "three again"), (2, "two again")]:
        rig.answered(version, text=text)
    found = await rig.sessions.answers(Answers(1, "aaa"))
    assert {(a.data_version, a.text) for a in found.answers} == {(3, "three again")}
    assert (await rig.sessions.answers(Answers(1, "bbb"))).answers == ()


async def test_waiting_for_a_version_ends_when_all_answers_are_of_it_or_newer(rig):
    rig.committed(1)
    rig.answered(1)
    waiting = asyncio.create_task(rig.sessions.answers(Answers(1, "aaa", min_version=3, timeout_s=10)))
    rig.answered(2)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    rig.answered(4)
    assert {a.data_version for a in (await waiting).answers} == {4}
    fast_path = await rig.sessions.answers(Answers(1, "aaa", min_version=4, timeout_s=0))
    assert len(fast_path.answers) == 6


async def test_waiting_for_a_version_is_given_up_in_time_and_says_where_the_session_is(rig):
    rig.committed(2)
    with pytest.raises(QueryError, match="version 9") as raised:
        await rig.sessions.answers(Answers(1, "aaa", min_version=9, timeout_s=0.02))
    assert raised.value.code == "timeout"
    rig.answered(9)  # no waiting request is left


async def test_sessions_say_where_they_are(rig):
    rig.committed(5)
    first, second = (await rig.sessions.sessions(ListSessions(1))).sessions
    assert (first.name, first.symbol, first.data_version, first.live_tokens) == ("aaa", "V:AAA", 5, 200)
    assert (first.live_records, first.as_of) == (5, START + 5)
    assert first.questions == tuple(q.name for q in PAPER_SIX)
    assert 0 < first.daemon_age_ns < 10**9
    assert (second.name, second.data_version, second.staleness_ns) == ("bbb", 0, 0)


def test_each_answered_ask_counts_in_its_tier_and_each_refused_one_by_its_error(rig):
    """*Attention Once* section 3.9.7: a standing answer, the ready position's, or a forward pass."""
    request = CACHED_ASK(id=7)
    computed = AskReply(id=7, session="aaa", data_version=4, text="UP", flags=("untrained",))
    replies = {
        "cached": msgspec.structs.replace(computed, cached=True),
        "ready": msgspec.structs.replace(computed, flags=("untrained", "ready_exit")),
        "computed": computed,
    }
    for n, reply in enumerate(replies.values(), 1):
        for _ in range(n):
            rig.sessions.observe(request, reply, n * 1_000_000)
    rig.sessions.observe(request, ErrorReply(7, "busy", "busy"), 9_000_000)
    rig.sessions.observe(Stats(8), ErrorReply(8, "busy", "busy"), 9_000_000)
    assert [rig.asks(outcome) for outcome in (*replies, "busy")] == [1, 2, 3, 1]
    for n, tier in enumerate(replies, 1):
        assert rig.store.count("foretick_stage_seconds", stage=f"ask_{tier}") == n
        assert rig.store.total_seconds("foretick_stage_seconds", stage=f"ask_{tier}") == n * n / 1000


async def test_stats_hold_every_series_and_every_stage(rig):
    rig.store.inc("foretick_bars_total", 3, session="aaa")
    rig.store.observe("foretick_stage_seconds", 2_000_000, stage="forward")
    stats = await rig.sessions.stats(Stats(1), LOCAL)
    assert stats.values['foretick_bars_total{session="aaa"}'] == 3
    assert stats.values["foretick_engine_restarts_total"] == 0
    assert set(stats.stages) == set(STAGES)
    assert stats.stages["forward"].count == 1
    assert stats.stages["forward"].p50_s == pytest.approx(0.002, rel=1 / 16)
    assert stats.stages["ask_ready"].count == 0
