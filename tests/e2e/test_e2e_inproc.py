"""Records in, answers out, through the whole daemon in this process: real engine, no broker."""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.api.messages import Ask, AskReply, QueryError
from daemon.cli.check import check_all
from daemon.config.schema import (
    Config,
    ModelConfig,
    PoolConfig,
    QuestionConfig,
    SchedulerConfig,
    SourceConfig,
)
from daemon.engine.build import build, limits_of
from daemon.engine.question_capacity import loads_of, questions_most
from daemon.supervision import TaskEnded
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import Answer, DataUpdated, DeadLetter, FlashReady
from feeds.source import Incoming
from flash.question import PAPER_SIX
from lab.plan.load import Load
from lab.plan.plan import simulate
from lab.plan.sources import sources_of
from scheduler.interfaces import PriorityClass
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tests.kit import SECOND, START, TOPIC, QueueSource, inproc_config, sessions, tolerance, trade, until
from tests.kit.inproc import DEAD, UPDATES, Recorder, RunningDaemon, running

NAMES = [question.name for question in PAPER_SIX]
UP = QuestionConfig(name="up", text="Up?", choices=("YES", "NO"))


async def test_every_version_answers_all_questions_in_two_stages_and_says_what_it_read():
    recorder = Recorder()
    config = inproc_config(sessions=sessions("V:AAA", warm_up_records=5), standing="paper_six")
    async with running(config, executor=recorder) as daemon:
        await daemon.advance(12)
        found = daemon.answers()
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
        updates = [m.data_version for m in daemon.sink.messages(UPDATES) if isinstance(m, DataUpdated)]
        assert updates == list(range(1, 13))
        # committed up to the open bar, and no further
        await until(lambda: daemon.source.committed == {(TOPIC, 0): 48}, what="commit of everything answered")
        assert daemon.count("versions", session="aaa") == 12
        assert daemon.count("answers", session="aaa") == 72
        assert await daemon.gateway.stop()
    assert daemon.source.committed == {(TOPIC, 0): 48}


async def test_asked_one_by_one_the_questions_get_the_answers_they_got_together():
    async with running(inproc_config()) as daemon:
        daemon.feed(12)
        await until(lambda: daemon.state().live_records == 11)
        version = daemon.state().version
        await until(lambda: Counter(a.data_version for a in daemon.answers())[version] == 6)
        together = {a.question: a for a in daemon.answers() if a.data_version == version}
        for question in PAPER_SIX:
            ask = Ask(1, "aaa", question.text, question.max_tokens, question.choices or ())
            alone = await daemon.ask_engine(ask)
            batched = together[question.name]
            assert (alone.data_version, alone.text, alone.choice) == (version, batched.text, batched.choice)
            assert alone.logit_gap == tolerance.near(batched.logit_gap, tolerance.of_embedded_gap())
        # over the socket the same question is served from the cache, reordered choices are computed
        trend = PAPER_SIX[0]
        assert trend.choices is not None
        cached = await daemon.call("ask", "aaa", trend.text, 1, trend.choices)
        computed = await daemon.call("ask", "aaa", trend.text, 1, trend.choices[::-1])
        assert (cached.cached, computed.cached) == (True, False)
        assert cached.choice == computed.choice == together["trend"].choice
        waited = await daemon.call("answers", "aaa", "", version)
        assert {a.question: a.text for a in waited.answers} == {q: a.text for q, a in together.items()}
        stats = await daemon.call("stats")
        assert stats.values['foretick_asks_total{outcome="cached"}'] == 1
        tiers = {tier: stats.stages[f"ask_{tier}"].count for tier in ("cached", "ready", "computed")}
        assert tiers == {"cached": 1, "ready": 0, "computed": 1}


async def test_an_ad_hoc_answer_has_the_times_of_the_version_that_it_read():
    """Newer versions arrive while it is computed."""
    async with running(inproc_config(standing="none"), executor=Recorder(pass_s=0.03)) as daemon:
        await daemon.advance(2)
        asking = asyncio.create_task(daemon.ask_engine(Ask(1, "aaa", "What comes next?", 60)))
        await until(lambda: daemon.count("batches") > 10)
        began = time.monotonic_ns()
        await daemon.advance(6)
        assert not asking.done(), "the answer must outlast the versions"
        reply = await asking
        assert reply.data_version == 2
        assert reply.as_of == START + SECOND + 3000
        assert reply.staleness_ns > time.monotonic_ns() - began


async def test_a_standing_question_gets_its_ready_answer_over_every_transport_unless_it_must_be_younger():
    once = msgspec.structs.replace(UP, ask_every_bars=1000)
    async with running(inproc_config(standing="none", questions=(once,))) as daemon:
        daemon.feed(2)
        first = (await until(daemon.answers))[0]
        for version in range(2, 7):
            daemon.feed()
            await until(lambda v=version: daemon.state().version == v)

        async def asked(**more: Any) -> AskReply:
            reply: AskReply = await daemon.call("ask", "aaa", "Up?", choices=("YES", "NO"), **more)
            return reply

        ready, younger, old = await asked(), await asked(max_age_s=0.0), await asked(max_age_s=1e12)
        versions = [(reply.cached, reply.data_version) for reply in (ready, younger, old)]
        assert versions == [(True, 1), (False, 6), (True, 1)]
        assert (ready.text, ready.logit_gap, ready.as_of) == (first.text, first.logit_gap, first.as_of)
        assert ready.as_of < younger.as_of
        assert old.daemon_age_ns > younger.daemon_age_ns > 0
        ask = {"session": "aaa", "question": "Up?", "choices": ["YES", "NO"]}
        posted = [await daemon.http("POST", "/v1/ask", ask | more) for more in ({}, {"max_age_s": 0})]
        assert [(each.status, each.json["data_version"], each.json["cached"]) for each in posted] == [
            (200, 1, True),
            (200, 6, False),
        ]
        refused = await daemon.http("POST", "/v1/ask", ask | {"max_age_s": -1})
        assert (refused.status, refused.json["code"]) == (400, "bad_request")
        assert (daemon.count("asks", outcome="cached"), daemon.count("asks", outcome="computed")) == (3, 2)


async def test_a_question_that_cannot_be_answered_in_time_is_skipped_counted_and_holds_nothing_up():
    """The pass of its bar takes longer than its deadline allows."""
    recorder = Recorder(pass_s=0.005)
    soon = msgspec.structs.replace(UP, name="soon", text="Soon?", answer_within=Duration(SECOND // 1000))
    async with running(inproc_config(standing="none", questions=(UP, soon)), executor=recorder) as daemon:
        daemon.feed(6)
        await until(lambda: daemon.source.committed == {(TOPIC, 0): 20}, what="commit of everything answered")
        answered = [a.data_version for a in daemon.answers() if a.question == "up"]
        assert answered == sorted(set(answered)) == [a.data_version for a in daemon.answers()]
        assert daemon.count("answers_suppressed", reason="skipped") == len(answered)
        assert daemon.count("answers_suppressed", reason="late") == 0
    asked = [version for rows in recorder.passes for version, _ in rows]
    assert sorted(asked) == answered, "no pass computed it"


async def test_numbers_schedules_and_policies_together() -> None:
    questions = (
        QuestionConfig(name="number", text="What is the price?", answer="number", max_tokens=5),
        msgspec.structs.replace(UP, name="once", publish_when="every", publish_every=99),
        msgspec.structs.replace(UP, name="rare", text="Is it quiet?", ask_every_bars=3),
    )
    scheduler = SchedulerConfig(max_new_tokens=64, chunk_min=64)
    config = inproc_config(standing="none", questions=questions, scheduler=scheduler)
    async with running(config, ready="flash_ready.v1") as daemon:
        daemon.feed()
        for bars in range(1, 7):
            daemon.feed()
            await until(lambda n=bars: len(daemon.sink.messages("flash_ready.v1")) == n)
        asked = defaultdict(set)
        for answer in daemon.answers():
            asked[answer.question].add(answer.data_version)
            if answer.question == "number":
                assert answer.value is not None
                assert Decimal(answer.value) == Decimal(answer.text)
            else:
                assert answer.value is None
        assert asked == {"number": set(range(1, 7)), "once": {1}, "rare": {1, 4}}
        ready = [each for each in daemon.sink.messages("flash_ready.v1") if isinstance(each, FlashReady)]
        assert [(event.data_version, event.answers) for event in ready] == [
            (version, 3 if version in (1, 4) else 2) for version in range(1, 7)
        ]
        assert sum(each.answer.data_version == 6 for each in daemon.state().answers.values()) == 2
        await until(lambda: daemon.count("answers_suppressed", reason="not_due") == 5)


async def test_a_flood_is_coalesced_counted_and_answered_for_to_the_last_record():
    superseded = 0
    async with running(inproc_config(["V:AAA", "V:BBB"])) as daemon:
        batches = [daemon.tape.next(trades=2) for _ in range(200)]
        last = batches[-1][0].offset - 1
        daemon.source.put(*batches)
        await until(lambda: daemon.source.committed.get((TOPIC, 0)) == last + 1, 60, "everything committed")
        for session in ("aaa", "bbb"):
            assert daemon.count("bars", session=session) == 199
            found = daemon.answers(session)
            evaluated = Counter(a.data_version for a in found if a.choice)
            assert set(evaluated.values()) == {5}
            exact = [a.data_version for a in found if a.question == "exact_value"]
            superseded += len(evaluated) - len(exact)
            assert exact[-1] == max(evaluated) == daemon.count("versions", session=session)
            assert daemon.count("flash_coalesced", session=session) == 199 - len(evaluated) > 0
            # Skipped versions pass their inputs on: the answers' ranges have no hole and no overlap.
            read = [(i.first_offset, i.last_offset) for a in found if a.question == "trend" for i in a.inputs]
            mine = [m.offset for b in batches[:-1] for m in b if f'"{session.upper()}"'.encode() in m.payload]
            assert [o for o in mine if not any(first <= o <= to for first, to in read)] == []
            assert all(to < first for (_, to), (first, _) in pairwise(read))
        assert daemon.count("answers_suppressed", reason="superseded") == superseded
        assert daemon.count("ring_dropped", source="test") == 0


def answer_while(new_bars: int) -> list[int]:
    """Tokens of a 24-token answer; each step appends one of ``new_bars`` bars, and old ones are evicted."""
    config = inproc_config(sessions=sessions("V:AAA", retention_tokens=300))
    built = build(config, {})
    tape = built.tapes["aaa"]
    scheduler = Scheduler(built.engine, built.engine.pool, limits_of(config), lambda: 0)

    def bar(n: int) -> TapeItem:
        line = f"10{n:02d}00,{100 + n}.25,{101 + n}.50,{99 + n}.75,101.25,{n}.500\n"
        return TapeItem(built.prompt.encode(line))

    scheduler.append((tape, [bar(n) for n in range(12)]))
    while scheduler.step():
        pass
    version, evicted = tape.version, tape.evicted_tokens
    prompt = built.prompt.question("What comes next on this tape?")
    spec = RequestSpec(PriorityClass.SESSION, "aaa", prompt, 24, lambda _: None, tape=tape)
    scheduler.submit(request := Request(spec))
    for n in range(100):
        scheduler.step()
        if request.state is State.FINISHED:
            break
        if n < new_bars:
            scheduler.append((tape, [bar(12 + n)]))
    assert (request.state, request.version) == (State.FINISHED, version)
    if new_bars:
        assert tape.version > version + 10
        assert tape.evicted_tokens > evicted + 300, "the tape has evicted everything that the answer reads"
    return request.output


def test_an_answer_under_way_does_not_notice_that_the_tape_moves_on() -> None:
    """Scheduler and engine alone, so that the test controls every step: a question with and without bars."""
    still = answer_while(new_bars=0)
    assert len(still) == 24
    assert len(set(still)) > 3, "an answer of one repeated token would prove little"
    assert answer_while(new_bars=24) == still


async def test_what_a_dropping_ring_loses_is_counted_and_flagged():
    config = inproc_config(source=SourceConfig(ring_capacity=64))

    def of_bar(daemon: RunningDaemon, n: int) -> list[Answer]:
        """Answers from the bar of second ``n`` on."""
        return [each for each in daemon.answers() if each.as_of >= START + n * SECOND]

    async with running(config, QueueSource("dropping")) as daemon:
        await daemon.advance()
        assert "gap" not in daemon.answers()[0].flags
        daemon.source.put([m for _ in range(2) for m in daemon.tape.next(trades=2000)])  # one push of 4000
        daemon.feed()
        await until(
            lambda: daemon.count("ring_dropped", source="test") and daemon.answers()[-1].data_version > 1
        )
        daemon.feed(2)
        await until(lambda: of_bar(daemon, 5))
        flagged = {a.data_version for a in daemon.answers() if "gap" in a.flags}
        assert flagged
        assert 1 not in flagged
        for n in range(6, 9):
            daemon.feed()
            await until(lambda n=n: len(of_bar(daemon, n)) == 6)
        assert all("gap" not in each.flags for each in of_bar(daemon, 8)), "one loss is reported once"
        assert daemon.source.pauses == 0


async def test_bad_messages_between_good_ones_change_nothing_but_the_counters():
    async with running(inproc_config()) as daemon:
        for _ in range(4):
            good = daemon.tape.next()
            bad = [daemon.tape.message(p) for p in (b"{", b"x" * 10_000_000, trade("V:ZZZ", START))]
            daemon.source.put(good[:2] + bad + good[2:])
        await until(lambda: daemon.source.committed.get((TOPIC, 0)) == 21, what="commit up to the open bar")
        assert daemon.count("bars", session="aaa") == 3
        reasons = [m.reason for m in daemon.sink.messages(DEAD) if isinstance(m, DeadLetter)]
        assert Counter(reasons) == {"json": 4, "oversize": 4}
        assert [daemon.count("records_malformed", reason=each) for each in ("json", "oversize")] == [4, 4]
        assert daemon.count("records_unknown_symbol") == 4
        assert daemon.count("dead_letters", stage="read") == 8


async def test_a_question_longer_than_the_budget_fails_alone():
    long = QuestionConfig(name="long", text="is the trend up or down " * 40)
    short = QuestionConfig(name="short", text="Up or down?")
    scheduler = SchedulerConfig(max_prompt_tokens=100, max_new_tokens=64)
    config = inproc_config(questions=(long, short), scheduler=scheduler, standing="none")
    async with running(config) as daemon:
        daemon.feed(2)
        await until(daemon.answers)
        assert [a.question for a in daemon.answers()] == ["short"]
        assert daemon.count("answers_failed", reason="too_long") == 1
        await until(
            lambda: daemon.source.committed.get((TOPIC, 0)) == 4, what="its records count as done with"
        )
        for question, tokens, why in ((long.text, 64, "the limit is 100"), ("Up?", 65, "new tokens")):
            with pytest.raises(QueryError, match=why) as raised:
                await daemon.call("ask", "aaa", question, tokens)
            assert raised.value.code == "too_long"


async def test_a_commit_that_fails_is_made_up_for():
    async with running(inproc_config()) as daemon:
        daemon.source.refuse_commits = True
        await daemon.advance()
        await until(lambda: daemon.source.refused)
        assert daemon.source.committed == {}
        daemon.source.refuse_commits = False
        await until(lambda: daemon.source.committed == {(TOPIC, 0): 4})


async def test_a_clean_stop_drains_and_leaves_nothing_behind():
    async with running(inproc_config()) as daemon:
        gateway = daemon.gateway
        names = [gateway.store.blocks[0].name, gateway.engine.ring.name if gateway.engine.ring else ""]
        assert all((Path("/dev/shm") / name.lstrip("/")).exists() for name in names)
        daemon.feed(30)
        await until(lambda: daemon.state().version)
        assert await gateway.stop(), "stopped in the middle of the work, nothing is lost"
        found = daemon.answers()
        assert gateway.publisher.outbox.delivery.waiting == 0
        assert found[-1].data_version == daemon.state().version
        assert daemon.source.committed[TOPIC, 0] == max(i.last_offset for a in found for i in a.inputs) + 1
    assert not any((Path("/dev/shm") / name.lstrip("/")).exists() for name in names)
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]  # we are one
    alive = {thread.name for thread in threading.enumerate()}
    assert not alive & {"device-worker", "data-plane", "heartbeat"}


async def test_a_running_daemon_shows_its_capacity() -> None:
    """What `foretick plan` predicts, under the same names."""
    config = inproc_config(sessions=sessions("V:AAA", "V:BBB", retention_tokens=1024))
    stage = "foretick_stage_seconds"
    async with running(config) as daemon:
        store = daemon.gateway.store
        daemon.feed(6)
        closed = await until(lambda: store.count(stage, stage="close_to_answer"), what="a stage of an answer")
        assert closed <= store.count(stage, stage="end_to_end")
        await until(lambda: daemon.value("utilisation_ratio"), what="a utilisation")
        for limit in ("compute", "kv_memory"):
            assert daemon.value("sessions_capacity", limit=limit) >= 2
        took = store.quantile(stage, 0.5, stage="close_to_answer")
        assert 0 < took <= 1.1 * store.quantile(stage, 1.0, stage="end_to_end")
    predicted = simulate(sources_of(config), Load(ticks=8, seconds=6))
    assert predicted.sessions_by_pool >= 2
    assert predicted.close_to_answer_s is not None


async def test_the_questions_that_fit_are_those_of_equation_16() -> None:
    """By hand for two sessions with one question each, whose rows share a pass."""
    config = inproc_config(sessions=sessions("V:AAA", "V:BBB"), standing="none", questions=(UP,))
    async with running(config) as daemon:
        await daemon.advance(3)
        await until(lambda: daemon.value("k_max"), what="questions that fit")
        models = daemon.host.models
        found, built = questions_most(loads_of(models), 0.25), models[0].built
        tapes = built.tapes.values()
        context = round(sum(len(tape.prefix) + tape.live_tokens for tape in tapes) / 2)
        bar = round(sum(tape.live_tokens / tape.live_records for tape in tapes) / 2)
        (asked,) = models[0].parts.registry.standing("aaa")
        ingest, question = (
            built.costs.batch_ns([(context, tokens)] * 2)
            for tokens in (bar, len(asked.prepared.prompt_tokens))
        )
        assert found == (SECOND - SECOND // 4 - ingest) // question > 1


async def test_an_idle_session_is_offloaded_to_disk_and_restored_with_the_next_bar(tmp_path: Path) -> None:
    """Nothing is computed again: the answers reuse the whole tape; a clean stop loses nothing."""
    pool = PoolConfig(idle_spill=Duration(100_000_000), spill_dir=str(tmp_path))
    async with running(inproc_config(pool=pool)) as daemon:
        await daemon.advance(4)
        await until(lambda: [file.name for file in tmp_path.glob("*/*")] == ["aaa.kv"], what="the spill")
        await daemon.advance()
        await until(lambda: daemon.count("restores", outcome="disk") > 0)
        found = [a for a in daemon.answers() if a.question == "trend"]
        assert [a.data_version for a in found] == [1, 2, 3, 4, 5]
        reused = [a.reused_tokens for a in found]
        assert reused == sorted(set(reused))  # grows with every bar
        assert daemon.count("integrity_failures") == 0
        assert await daemon.gateway.stop()
    assert daemon.source.committed == {(TOPIC, 0): 20}


async def test_an_ask_is_computed_once_for_a_version_and_again_for_a_rebuilt_window(tmp_path: Path) -> None:
    """A window on disk is not brought back for it."""
    pool = PoolConfig(idle_spill=Duration(100_000_000), spill_dir=str(tmp_path))
    async with running(inproc_config(pool=pool)) as daemon:
        await daemon.advance(4)
        ask = partial(daemon.call, "ask", "aaa", choices=("YES", "NO"))
        first, again = await ask("Up?"), await ask("Up?")
        assert (first.cached, again.cached) == (False, True)
        assert (again.text, again.logit_gap, again.data_version) == (first.text, first.logit_gap, 4)
        tape = daemon.host.models[0].built.tapes["aaa"]
        (file,) = await until(lambda: not tape.resident and list(tmp_path.glob("*/*.kv")), what="the spill")
        assert (await ask("Up?")).cached
        assert not tape.resident
        file.unlink()
        assert not (await ask("Down?")).cached
        await until(lambda: daemon.count("restores", outcome="rebuilt") == 1)
        assert [(await ask("Up?")).cached for _ in range(2)] == [False, True]
        await daemon.advance()
        assert (await ask("Up?")).cached is False
        assert await daemon.gateway.stop()


async def fails_to_start(config: Config) -> str:
    """The key that is wrong."""
    with pytest.raises(SettingError) as raised:
        async with running(config):
            pass
    return raised.value.key


async def test_a_model_that_is_not_there_is_a_setting_s_fault(tmp_path):
    assert (
        await fails_to_start(inproc_config(model=ModelConfig(path=str(tmp_path / "nowhere")))) == "model.path"
    )


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
    assert await fails_to_start(config) == key
    assert [each.key for each in check_all(config) if not each.ok] == [key]


async def test_a_source_that_fails_ends_the_daemon_with_its_error():
    class Broken(QueueSource):
        async def batches(self) -> AsyncIterator[list[Incoming]]:
            raise ConnectionError("the feed is gone for good")
            yield []

    async with running(inproc_config(), Broken()) as daemon:
        with pytest.raises(TaskEnded, match="gone for good"):
            await asyncio.wait_for(daemon.gateway.run(asyncio.Event()), 60)
