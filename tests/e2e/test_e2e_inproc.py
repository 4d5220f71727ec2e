"""Records in, answers out, through the whole daemon in this process: real engine, no broker."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.api.client import QueryClient
from daemon.api.messages import Ask, AskReply, QueryError
from daemon.cli.check import check_all
from daemon.config.schema import (
    BarsConfig,
    ModelConfig,
    QuestionConfig,
    SchedulerConfig,
    SourceConfig,
)
from daemon.engine.build import build, limits_of
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.supervision import TaskEnded
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import Answer, DataUpdated, DeadLetter
from feeds.source import Incoming
from flash.question import PAPER_SIX
from scheduler.interfaces import PriorityClass
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler as Steps
from scheduler.tapes import TapeItem
from tests.kit import (
    SECOND,
    START,
    TOPIC,
    MemorySink,
    QueueSource,
    inproc_config,
    sessions,
    tolerance,
    trade,
    until,
)
from tests.kit.inproc import DEAD, UPDATES, Recorder, Tape, answers, ask_engine, count, running

NAMES = [question.name for question in PAPER_SIX]


async def test_every_version_answers_all_questions_in_two_stages_and_says_what_it_read():
    recorder = Recorder()
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(sessions=sessions("V:AAA", warm_up_records=5), standing="paper_six")
    async with running(config, source, sink, recorder) as gateway:
        for n in range(13):
            source.put(tape.second(n))
            await until(lambda n=n: len(answers(sink)) == 6 * n)  # second n closes the bar of n - 1
        found = answers(sink)
        assert [(a.data_version, a.question) for a in found if a.question != "exact_value"] == [
            (v, name) for v in range(1, 13) for name in NAMES[:5]
        ]
        exact = [a for a in found if a.question == "exact_value"]
        assert [a.data_version for a in exact] == list(range(1, 13))
        # one forward pass a version answers the one-token questions, a later one prefills the other
        prompts = defaultdict(list)
        for number, forks in enumerate(recorder.passes):
            for version, tokens in forks:
                if tokens > 1:
                    prompts[version].append(number)
        assert set(prompts) == set(range(1, 13))
        for *first, last in prompts.values():
            assert (len(first), len(set(first))) == (5, 1)
            assert last > first[0]
        # input: four trades per bar, each trade exactly once
        ranges = {a.data_version: [(i.first_offset, i.last_offset) for i in a.inputs] for a in found}
        assert ranges == {v: [(4 * v - 4, 4 * v - 1)] for v in range(1, 13)}
        assert {i.topic for a in found for i in a.inputs} == {TOPIC}
        assert {a.data_version: a.as_of for a in found} == {
            v: START + (v - 1) * SECOND + 3000 for v in range(1, 13)
        }
        # every answer carries its flags
        assert {a.data_version for a in found if "warm_up" in a.flags} == set(range(1, 6))
        assert all(a.untrained and "untrained" in a.flags and "gap" not in a.flags for a in found)
        for question in PAPER_SIX[:5]:
            assert {a.choice for a in found if a.question == question.name} <= set(question.choices or ())
        assert {a.choice for a in exact} == {None}
        assert all(a.logit_gap >= 0 and a.computed_tokens > 0 < a.latency.forward_ns for a in found)
        # the tape's KV is reused, and grows
        assert all(a.reused_tokens > b.reused_tokens for a, b in zip(found[6:], found, strict=False))
        assert [m.data_version for m in sink.messages(UPDATES) if isinstance(m, DataUpdated)] == list(
            range(1, 13)
        )
        # committed up to the open bar, and no further
        await until(lambda: source.committed == {(TOPIC, 0): 48}, what="commit of everything answered")
        assert count(gateway, "versions", session="aaa") == 12
        assert count(gateway, "answers", session="aaa") == 72
        assert await gateway.stop()
    assert source.committed == {(TOPIC, 0): 48}


async def test_asked_one_by_one_the_questions_get_the_answers_they_got_together():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(), source, sink) as gateway:
        source.put(*(tape.second(n) for n in range(12)))
        await until(
            lambda: [a for a in answers(sink) if a.data_version == gateway.sessions.states["aaa"].version]
        )
        await until(lambda: Counter(a.data_version for a in answers(sink))[_newest(gateway)] == 6)
        version = _newest(gateway)
        together = {a.question: a for a in answers(sink) if a.data_version == version}
        for question in PAPER_SIX:
            ask = Ask(1, "aaa", question.text, question.max_tokens, question.choices or ())
            alone = await ask_engine(gateway, ask)
            batched = together[question.name]
            assert (alone.data_version, alone.text, alone.choice) == (version, batched.text, batched.choice)
            assert alone.logit_gap == tolerance.near(batched.logit_gap, tolerance.of_embedded_gap())
        # Over the socket the same question is served from the cache, reordered choices are computed.
        assert gateway.query is not None
        trend = PAPER_SIX[0]
        with QueryClient(gateway.query.endpoint) as client:
            cached = await asyncio.to_thread(client.ask, "aaa", trend.text, 1, trend.choices)
            computed = await asyncio.to_thread(client.ask, "aaa", trend.text, 1, trend.choices[::-1])
            assert (cached.cached, computed.cached) == (True, False)
            assert cached.choice == computed.choice == together["trend"].choice
            waited = await asyncio.to_thread(client.answers, "aaa", "", version)
            assert {a.question: a.text for a in waited.answers} == {q: a.text for q, a in together.items()}
            stats = await asyncio.to_thread(client.stats)
            assert stats.values['foretick_asks_total{outcome="cached"}'] == 1
            assert {tier: stats.stages[f"ask_{tier}"].count for tier in ("cached", "ready", "computed")} == {
                "cached": 1,
                "ready": 0,
                "computed": 1,
            }


def _newest(gateway: Gateway) -> int:
    return gateway.sessions.states["aaa"].version


async def test_an_ad_hoc_answer_has_the_times_of_the_version_that_it_read():
    """Newer versions arrive while it is computed."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(standing="none"), source, sink, Recorder(pass_s=0.005)) as gateway:
        for n in range(3):
            source.put(tape.second(n))
            await until(lambda n=n: _newest(gateway) == n)
        asking = asyncio.create_task(ask_engine(gateway, Ask(1, "aaa", "What comes next?", 60)))
        await until(lambda: count(gateway, "batches") > 10)
        began = time.monotonic_ns()
        for n in range(3, 9):
            source.put(tape.second(n))
            await until(lambda n=n: _newest(gateway) == n)
        assert not asking.done(), "the answer must outlast the versions"
        reply = await asking
        assert reply.data_version == 2
        assert reply.as_of == START + SECOND + 3000
        assert reply.staleness_ns > time.monotonic_ns() - began


async def test_a_standing_question_gets_its_ready_answer_over_every_transport_unless_it_must_be_younger():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    once = QuestionConfig(name="up", text="Up?", choices=("YES", "NO"), ask_every_bars=1000)
    config = inproc_config(standing="none", questions=(once,))
    async with running(config, source, sink) as gateway:
        source.put(tape.second(0), tape.second(1))
        first = (await until(lambda: answers(sink)))[0]
        for n in range(2, 7):
            source.put(tape.second(n))
            await until(lambda n=n: _newest(gateway) == n)
        ask = {"session": "aaa", "question": "Up?", "choices": ["YES", "NO"]}
        assert gateway.query is not None
        with QueryClient(gateway.query.endpoint) as client:

            async def asked(**more: Any) -> AskReply:
                return await asyncio.to_thread(client.ask, **ask | {"choices": ("YES", "NO")}, **more)

            ready, younger, old = await asked(), await asked(max_age_s=0.0), await asked(max_age_s=1e12)
        versions = [(reply.cached, reply.data_version) for reply in (ready, younger, old)]
        assert versions == [(True, 1), (False, 6), (True, 1)]
        assert (ready.text, ready.logit_gap, ready.as_of) == (first.text, first.logit_gap, first.as_of)
        assert ready.as_of < younger.as_of
        assert ready.daemon_age_ns > younger.daemon_age_ns > 0
        post = partial(asyncio.to_thread, _post, gateway.http.port, "/v1/ask")
        posted = [await post(ask | more) for more in ({}, {"max_age_s": 0})]
        assert [(status, body["data_version"], body["cached"]) for status, body in posted] == [
            (200, 1, True),
            (200, 6, False),
        ]
        status, body = await post(ask | {"max_age_s": -1})
        assert (status, body["code"]) == (400, "bad_request")
        assert gateway.store.value("foretick_asks_total", outcome="cached") == 3
        assert gateway.store.value("foretick_asks_total", outcome="computed") == 2


async def test_a_question_that_cannot_be_answered_in_time_is_skipped_counted_and_holds_nothing_up():
    """The pass of its bar takes longer than its deadline allows."""
    recorder = Recorder(pass_s=0.005)
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    up = QuestionConfig(name="up", text="Up?", choices=("YES", "NO"))
    soon = msgspec.structs.replace(up, name="soon", text="Soon?", answer_within=Duration(SECOND // 1000))
    config = inproc_config(standing="none", questions=(up, soon))
    async with running(config, source, sink, recorder) as gateway:
        source.put(*(tape.second(n) for n in range(6)))
        await until(lambda: source.committed == {(TOPIC, 0): 20}, what="commit of everything answered")
        answered = [a.data_version for a in answers(sink) if a.question == "up"]
        assert answered == sorted(set(answered)) == [a.data_version for a in answers(sink)]
        assert count(gateway, "answers_suppressed", reason="skipped") == len(answered)
        assert count(gateway, "answers_suppressed", reason="late") == 0
    asked = [version for rows in recorder.passes for version, _ in rows]
    assert sorted(asked) == answered, "no pass computed it"


def _post(port: int, path: str, body: object) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


async def test_a_flood_is_coalesced_counted_and_answered_for_to_the_last_record():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    superseded = 0
    async with running(inproc_config(["V:AAA", "V:BBB"]), source, sink) as gateway:
        batches = [tape.second(n, trades=2) for n in range(200)]
        last = batches[-1][0].offset - 1
        source.put(*batches)
        await until(lambda: source.committed.get((TOPIC, 0)) == last + 1, 60, "everything committed")
        for session in ("aaa", "bbb"):
            versions = count(gateway, "versions", session=session)
            assert count(gateway, "bars", session=session) == 199
            found = answers(sink, session)
            evaluated = Counter(a.data_version for a in found if a.choice)
            assert set(evaluated.values()) == {5}
            exact = [a.data_version for a in found if a.question == "exact_value"]
            superseded += len(evaluated) - len(exact)
            assert exact[-1] == max(evaluated)
            assert count(gateway, "flash_coalesced", session=session) == 199 - len(evaluated) > 0
            # Skipped versions pass their inputs on: the answers' ranges have no hole and no overlap.
            trend = [a for a in answers(sink, session) if a.question == "trend"]
            read = [(i.first_offset, i.last_offset) for a in trend for i in a.inputs]
            mine = [m.offset for b in batches[:-1] for m in b if f'"{session.upper()}"'.encode() in m.payload]
            assert [o for o in mine if not any(first <= o <= to for first, to in read)] == []
            assert all(to < first for (_, to), (first, _) in pairwise(read))
            assert max(evaluated) == versions
        assert count(gateway, "answers_suppressed", reason="superseded") == superseded
        assert count(gateway, "ring_dropped", source="test") == 0


def of_bar(sink: MemorySink, n: int) -> list[Answer]:
    """Answers from the bar of second ``n`` on."""
    return [each for each in answers(sink) if each.as_of >= START + n * SECOND]


async def test_what_a_dropping_ring_loses_is_counted_and_flagged():
    source, sink, tape = QueueSource("dropping"), MemorySink(), Tape("V:AAA")
    config = inproc_config(source=SourceConfig(ring_capacity=64))
    async with running(config, source, sink) as gateway:
        source.put(tape.second(0), tape.second(1))
        await until(lambda: len(answers(sink)) == 6)
        assert "gap" not in answers(sink)[0].flags
        source.put([m for n in range(2, 4) for m in tape.second(n, trades=2000)])  # one push of 4000
        source.put(tape.second(4))
        await until(
            lambda: count(gateway, "ring_dropped", source="test") and answers(sink)[-1].data_version > 1
        )
        source.put(tape.second(5), tape.second(6))
        await until(lambda: answers(sink)[-1].as_of >= START + 5 * SECOND)
        flagged = {a.data_version for a in answers(sink) if "gap" in a.flags}
        assert flagged
        assert 1 not in flagged
        for n in range(7, 10):
            source.put(tape.second(n))
            await until(lambda n=n: len(of_bar(sink, n - 1)) == 6)
        assert all("gap" not in each.flags for each in of_bar(sink, 8)), "one loss is reported once"
        assert source.pauses == 0


async def test_late_and_out_of_order_ticks():
    source, sink = QueueSource(), MemorySink()
    config = inproc_config(bars=BarsConfig(interval=Duration(SECOND), lateness=Duration(SECOND)))
    tape = Tape("V:AAA")
    async with running(config, source, sink) as gateway:

        def tick(at_s: float) -> Incoming:
            return tape.message(trade("V:AAA", START + int(at_s * SECOND)))

        # 0.9 arrives after 1.1, in time for its bar; 0.5 arrives when that bar is closed: late
        source.put([tick(0.1), tick(1.1), tick(0.9), tick(2.2), tick(0.5), tick(3.3)])
        await until(lambda: len([a for a in answers(sink) if a.question == "trend"]) >= 1)
        await until(lambda: count(gateway, "bars", session="aaa") == 2)
        await until(lambda: answers(sink)[-1].data_version == gateway.sessions.states["aaa"].version > 0)
        assert count(gateway, "records_late", session="aaa") == 1
        await until(lambda: answers(sink)[-1].as_of == START + int(1.1 * SECOND))


async def test_bad_messages_between_good_ones_change_nothing_but_the_counters():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(), source, sink) as gateway:
        for n in range(4):
            good = tape.second(n)
            bad = [tape.message(p) for p in (b"{", b"x" * 10_000_000, trade("V:ZZZ", START))]
            source.put(good[:2] + bad + good[2:])
        await until(lambda: source.committed.get((TOPIC, 0)) == 21, what="commit up to the open bar")
        assert count(gateway, "bars", session="aaa") == 3
        dead_letters = [m for m in sink.messages(DEAD) if isinstance(m, DeadLetter)]
        assert Counter(dead_letter.reason for dead_letter in dead_letters) == {"json": 4, "oversize": 4}
        assert count(gateway, "records_malformed", reason="json") == 4
        assert count(gateway, "records_malformed", reason="oversize") == 4
        assert count(gateway, "records_unknown_symbol") == 4
        assert count(gateway, "dead_letters", stage="read") == 8


async def test_a_question_longer_than_the_budget_fails_alone():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    long = "is the trend up or down " * 40
    config = inproc_config(
        questions=(QuestionConfig(name="long", text=long), QuestionConfig(name="short", text="Up or down?")),
        scheduler=SchedulerConfig(max_prompt_tokens=100, max_new_tokens=64),
        standing="none",
    )
    async with running(config, source, sink) as gateway:
        source.put(tape.second(0), tape.second(1))
        await until(lambda: answers(sink))
        assert [a.question for a in answers(sink)] == ["short"]
        assert count(gateway, "answers_failed", reason="too_long") == 1
        await until(lambda: source.committed.get((TOPIC, 0)) == 4, what="its records count as done with")
        assert gateway.query is not None
        with QueryClient(gateway.query.endpoint) as client:
            with pytest.raises(QueryError, match="the limit is 100") as raised:
                await asyncio.to_thread(client.ask, "aaa", long)
            assert raised.value.code == "too_long"
            with pytest.raises(QueryError, match="new tokens") as raised:
                await asyncio.to_thread(client.ask, "aaa", "Up?", 65)
            assert raised.value.code == "too_long"


async def test_a_commit_that_fails_is_made_up_for():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    source.refuse_commits = True
    async with running(inproc_config(), source, sink):
        source.put(tape.second(0), tape.second(1))
        await until(lambda: len(answers(sink)) == 6)
        await until(lambda: source.refused)
        assert source.committed == {}
        source.refuse_commits = False
        await until(lambda: source.committed == {(TOPIC, 0): 4})


async def test_a_clean_stop_drains_and_leaves_nothing_behind():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(), source, sink) as gateway:
        names = [gateway.store.blocks[0].name, gateway.engine.ring.name if gateway.engine.ring else ""]
        assert all((Path("/dev/shm") / name.lstrip("/")).exists() for name in names)
        source.put(*(tape.second(n) for n in range(30)))
        await until(lambda: gateway.sessions.states["aaa"].version)
        assert await gateway.stop(), "stopped in the middle of the work, nothing is lost"
        found = answers(sink)
        assert gateway.publisher.delivery.waiting == 0
        assert found[-1].data_version == gateway.sessions.states["aaa"].version
        assert source.committed[TOPIC, 0] == max(i.last_offset for a in found for i in a.inputs) + 1
    assert not any((Path("/dev/shm") / name.lstrip("/")).exists() for name in names)
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]  # we are one
    alive = {thread.name for thread in threading.enumerate()}
    assert not alive & {"device-worker", "data-plane", "heartbeat"}


async def test_a_model_that_is_not_there_is_a_setting_s_fault(tmp_path):
    config = inproc_config(model=ModelConfig(path=str(tmp_path / "nowhere")))
    gateway = make_gateway(config, source=QueueSource(), routes=[])
    try:
        with pytest.raises(SettingError, match=r"no config\.json") as raised:
            await asyncio.wait_for(gateway.start(), 180)
        assert raised.value.key == "model.path"
        assert gateway.status.not_ready() == ["the engine is not up", "the source is not connected"]
    finally:
        await gateway.stop()


async def test_a_source_that_fails_ends_the_daemon_with_its_error():
    class Broken(QueueSource):
        async def batches(self) -> AsyncIterator[list[Incoming]]:
            raise ConnectionError("the feed is gone for good")
            yield []

    async with running(inproc_config(), Broken(), MemorySink()) as gateway:
        with pytest.raises(TaskEnded, match="gone for good"):
            await asyncio.wait_for(gateway.run(asyncio.Event()), 10)


def test_an_answer_under_way_does_not_notice_that_the_tape_moves_on():
    """Scheduler and engine alone, so that the test controls every step: a question with and without bars."""
    question = "What comes next on this tape?"
    still = _answer_while(question, new_bars=0)
    moving = _answer_while(question, new_bars=24)
    assert len(still) == 24
    assert len(set(still)) > 3, "an answer of one repeated token would prove little"
    assert moving == still


def _answer_while(question: str, new_bars: int) -> list[int]:
    """Tokens of a 24-token answer; after each step one more bar is appended, until older ones are evicted."""
    config = inproc_config(sessions=sessions("V:AAA", retention_tokens=300))
    built = build(config, {})
    tape = built.tapes["aaa"]
    scheduler = Steps(built.engine, built.engine.pool, limits_of(config), lambda: 0)

    def bar(n: int) -> TapeItem:
        return TapeItem(
            built.prompt.encode(f"10{n:02d}00,{100 + n}.25,{101 + n}.50,{99 + n}.75,101.25,{n}.500\n")
        )

    scheduler.append(tape, [bar(n) for n in range(12)])
    while scheduler.step():
        pass
    version, evicted = tape.version, tape.evicted_tokens
    done: list[Request] = []
    scheduler.submit(
        Request(
            RequestSpec(
                cls=PriorityClass.SESSION,
                session="aaa",
                prompt=built.prompt.question(question),
                max_tokens=24,
                on_done=done.append,
                tape=tape,
            )
        )
    )
    for n in range(100):
        scheduler.step()
        if done:
            break
        if n < new_bars:
            scheduler.append(tape, [bar(12 + n)])
    (request,) = done
    assert (request.state, request.version) == (State.FINISHED, version)
    if new_bars:
        assert tape.version > version + 10
        assert tape.evicted_tokens > evicted + 300, "the tape has evicted everything that the answer reads"
    return request.output


@pytest.mark.parametrize(
    ("question", "key"),
    [
        (QuestionConfig(name="odd", text="Which?", choices=("YES", "YES indeed")), "questions[1].choices"),
        (QuestionConfig(name="even", text="Or which?"), "questions[1].name"),
    ],
)
async def test_an_unusable_standing_question_is_a_setting_error(question, key):
    """Choices with the same first token; a name that is taken."""
    config = inproc_config(questions=(QuestionConfig(name="even", text="Which one?"), question))
    gateway = make_gateway(config, source=QueueSource(), routes=[])
    try:
        with pytest.raises(SettingError) as raised:
            await asyncio.wait_for(gateway.start(), 180)
        assert raised.value.key == key
        findings = [each for each in check_all(config) if not each.ok]
        assert [each.key for each in findings] == [key]
    finally:
        await gateway.stop()
