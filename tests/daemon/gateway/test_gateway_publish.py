"""Publishing: order, acknowledgement before commit, refusals, stops, and the contents of an answer."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from daemon import protocol
from daemon.ages import Times
from daemon.config.schema import Config, QuestionConfig, RollupConfig
from daemon.config.standing import question_of
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.delivery import BACKLOG
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.standby import Standby
from daemon.progress import Position, Progress
from daemon.session_life import Event, State
from daemon.supervision import Tasks
from feeds.codec import decode_message
from feeds.connector import SinkRoute
from feeds.durations import Duration
from feeds.market_data import Answer, DataUpdated, DeadLetter, FlashReady, InputRange
from feeds.source import CommitPoint
from flash.question import PAPER_SIX, Question
from ingest.record import LowWatermarks, ReadRange, stream_number
from metrics.catalogue import FAILURES
from metrics.store import MetricStore
from tests.kit import SECOND, START, TOPIC, MemorySink, inproc_config, sessions, until
from tests.kit.engine_events import ANSWER, NUMBER, answered, inputs_below
from tests.kit.gateway import Broker, Member, make_checkpoint, make_publisher
from tests.kit.progress import stored

STREAM = (TOPIC, 0)
NAMES = [question.name for question in PAPER_SIX]


class Rig:
    """A publisher with everything around it except the engine."""

    def __init__(
        self, *routes: SinkRoute, config: Config | None = None, exactly_once: SinkRoute | None = None
    ) -> None:
        """``exactly_once``: a route of `Broker`, of which `Checkpoint.stop` commits what is complete."""
        self.config = config or inproc_config(["V:AAA", "V:BBB"])
        names = [session.name for session in self.config.sessions]
        sinks = [route.sink.name for route in routes]
        self.store = MetricStore.local({"session": names, "source": ["test"], "sink": sinks})
        self.tracker = OffsetTracker()
        self.sessions = Sessions(self.config, self.store)
        routes = routes if exactly_once is None else (*routes, exactly_once)
        self.standby = Standby(self.store)
        self.standby.engine_starts(names)
        self.publisher = make_publisher(
            self.config, self.tracker, self.sessions, self.store, *routes, standby=self.standby
        )
        if exactly_once is not None:
            self.checkpoint = make_checkpoint(
                Member(STREAM),
                self.tracker,
                self.publisher.outbox,
                self.store,
                sink=cast("Broker", exactly_once.sink),
            )
        self.publisher.outbox.delivery.start(Tasks())
        self.arrived = list[int]()

    def arrive(self, session: str, *offsets: int) -> None:
        self.arrived += offsets
        self.tracker.passed_on(session, STREAM, offsets)

    def below(self, place: int) -> int:
        """The offset of the record that arrived at this place, from 1 on, or the one behind the last."""
        if not self.arrived:
            return place
        return self.arrived[place - 1] if place <= len(self.arrived) else max(self.arrived) + 1

    def committed(
        self, session: str, version: int, low_watermark: int, *closed: int, written: LowWatermarks = ()
    ) -> None:
        event = protocol.Committed(
            *(session, version, 1, 20, version, Times(START, time.time_ns(), time.monotonic_ns())),
            inputs_below(self.below(low_watermark), closed, written),
        )
        self.sessions.committed(event)
        self.publisher.committed(event)

    def answer(
        self, session: str, version: int, low_watermark: int, names: list[str] = NAMES, **fields: object
    ) -> None:
        asked = len(self.sessions.states[session].questions)
        for name in names:
            self.publisher.answered(
                answered(
                    session, version, self.below(low_watermark), question=name, **{"asked": asked} | fields
                )
            )

    def fail(
        self,
        name: str,
        code: str,
        version: int = 1,
        last: int = 1,
        asked: int = 6,
        closed: tuple[int, ...] = (),
    ) -> None:
        """A question of a version that covers the records up to ``last`` has no answer."""
        inputs = inputs_below(self.below(last + 1), closed)
        self.publisher.failed(protocol.AnswerFailed("aaa", name, version, code, "because", inputs, asked))

    def count(self, name: str, **labels: str) -> float:
        return self.store.value(name, **labels)


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*routes: SinkRoute, **more: Any) -> Rig:
        made.append(Rig(*routes, **more))
        return made[-1]

    yield make
    for each in made:
        await each.publisher.outbox.delivery.stop(0.0)


@pytest.mark.parametrize("newer", [-1, 0, 1])
async def test_an_answer_that_is_repeated_is_ready_unless_one_as_new_is_known(rig, newer: int) -> None:
    """As after an engine's end: what was published of data as new as its, or newer, stays as it is."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", "updates.v1"))
    r.arrive("aaa", 7)
    r.answer("aaa", 3, 2, ["trend"])
    await until(lambda: sink.sent)
    (published,) = sink.messages("answers.v1")
    event = answered("aaa", 4, 2, question="trend", as_of=ANSWER.as_of + newer, text="again")
    r.publisher.repeated(protocol.Repeated(event.answer, event.inputs, event.times))
    ready = r.sessions.states["aaa"].answers[ANSWER.question_hash].answer
    if newer <= 0:
        assert ready == published
    else:
        assert (ready.text, ready.sequence, ready.published_at) == ("again", 0, 0)
        assert ready.answer_id
    assert len(sink.sent) == 1


async def test_an_answer_says_everything_about_itself(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", "updates.v1"))
    r.arrive("aaa", 7, 8, 9)
    before, monotonic = time.time_ns(), time.monotonic_ns()
    times = Times(before - 3 * SECOND, before - 2 * SECOND, monotonic - SECOND)
    r.answer("aaa", 3, 4, ["trend"], inputs=inputs_below(10, first=7), flags=("gap", "warm_up"), times=times)
    await until(lambda: sink.sent)
    (answer,) = sink.messages("answers.v1")
    assert isinstance(answer, Answer)
    late = time.monotonic_ns() - monotonic
    ages = (answer.staleness_ns, answer.source_age_ns, answer.daemon_age_ns)
    assert all(n * SECOND <= age <= n * SECOND + late for n, age in zip((3, 2, 1), ages, strict=True))
    assert answer.latency.total_ns == answer.daemon_age_ns
    assert before <= answer.published_at <= time.time_ns()
    assert answer == replace(
        ANSWER,
        answer_id="aaa:h:md.trades.v1/0/9",
        sequence=1,
        data_version=3,
        inputs=[InputRange(TOPIC, 0, 7, 9)],
        staleness_ns=ages[0],
        source_age_ns=ages[1],
        daemon_age_ns=ages[2],
        latency=replace(ANSWER.latency, total_ns=answer.latency.total_ns),
        flags=("gap", "warm_up"),
        published_at=answer.published_at,
    )
    _, key, _, headers = sink.sent[0]
    assert key == b"V:AAA"
    assert headers["schema"] == b"answer.v1"
    assert headers["answer_id"] == f"aaa:h:{TOPIC}/0/9".encode()


async def test_an_answer_is_stale_by_the_age_of_its_event(rig):
    """Wherever the record waited; by a venue's clock that is ahead, too. A replay's event is its sending."""
    sink = MemorySink()
    r = rig(
        SinkRoute(sink, "answers.v1"),
        config=inproc_config(sessions=sessions("V:AAA", stale_after=Duration(SECOND))),
    )
    now, here = time.time_ns(), time.monotonic_ns()
    r.answer("aaa", 1, 1, ["trend"], times=Times(now - 2 * SECOND, now, here))
    r.answer("aaa", 2, 1, ["trend"], times=Times(now, now - 2 * SECOND, here - 2 * SECOND))
    r.answer("aaa", 3, 1, ["trend"], times=Times(now - 999 * SECOND, now, here, replay=True))
    r.sessions.states["aaa"].clock.observe(now + 2 * SECOND, now)
    r.answer("aaa", 4, 1, ["trend"], times=Times(now, now, here))
    await until(lambda: len(sink.sent) == 4)
    flags = [answer.flags for answer in sink.messages("answers.v1")]
    assert flags == [("stale",), (), (), ("stale",)]


async def test_messages_of_a_session_keep_their_order_and_sessions_do_not_wait_for_each_other(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", "updates.v1", "dlq.v1"))
    for version in range(1, 21):
        for session in ("aaa", "bbb"):
            r.committed(session, version, 1)
            r.answer(session, version, 1)
    await until(lambda: len(sink.sent) == 2 * 20 * 7)
    for session in ("aaa", "bbb"):
        mine = [m for _, _, p, _ in sink.sent if (m := decode_message(p)).session == session]
        versions = [m.data_version for m in mine]
        assert versions == sorted(versions)
        assert [type(m) for m in mine[:7]] == [DataUpdated, *[Answer] * 6]
        assert [m.question for m in mine[1:7]] == NAMES
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 120)


async def test_offsets_move_only_when_the_last_answer_of_a_version_is_acknowledged_by_every_sink(rig):
    quick, slow = MemorySink("quick"), MemorySink("slow")
    r = rig(SinkRoute(quick, "answers.v1"), SinkRoute(slow, "answers.v1"))
    slow.acknowledging.clear()
    r.arrive("aaa", 0, 1, 2)
    r.answer("aaa", 1, 3, NAMES[:5])
    await until(lambda: len(slow.sent) == 5)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}
    slow.acknowledging.set()
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 5)
    assert r.tracker.to_commit() == {}, "one question of the version is still open"
    r.answer("aaa", 1, 3, NAMES[5:])
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 6)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(2)}, "the third record is in no closed bar yet"
    assert r.store.count("foretick_stage_seconds", stage="end_to_end") == 6


async def test_a_version_acknowledged_before_an_older_one_waits_for_it(rig):
    """Its offsets also cover the older one's records."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    sink.acknowledging.clear()
    sink.holds = lambda payload: b'"data_version":1,' in payload
    r.arrive("aaa", 0, 1, 2)
    r.answer("aaa", 1, 2)
    r.answer("aaa", 2, 3)
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 6)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}
    sink.acknowledging.set()
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 12)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(2)}


async def test_a_question_without_an_answer_does_not_hold_its_records_back(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    r.arrive("aaa", 0, 1)
    r.answer("aaa", 1, 2, NAMES[:5])
    r.fail(NAMES[5], "nan_logits")
    await until(lambda: r.tracker.outstanding() == 1)
    assert r.count("foretick_answers_failed_total", reason="nan_logits") == 1


@pytest.mark.parametrize("code", ["no_memory", "open_failed", "nan_logits", "whatever comes next"])
async def test_every_code_of_the_engine_is_counted(rig, code):
    r = rig()
    r.fail("trend", code)
    reason = code if code in FAILURES else "other"
    assert r.count("foretick_answers_failed_total", reason=reason) == 1


async def test_records_of_questions_interrupted_by_a_stop_stay_uncommitted(rig):
    """The engine stopped before it could answer: the next run reads the records again."""
    r = rig()
    r.arrive("aaa", 0, 1)
    for name in NAMES:
        r.fail(name, "stopping", last=2)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}


async def test_a_refused_answer_is_counted_and_holds_nothing_up(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    sink.refuses = lambda payload: b'"volume"' in payload
    r.arrive("aaa", 0, 1)
    r.answer("aaa", 1, 2)
    await until(lambda: r.tracker.outstanding() == 1)
    assert r.count("foretick_answers_failed_total", reason="publish") == 1
    assert r.count("foretick_answers_total", session="aaa") == 5, "a refused question is not answered"
    assert len(sink.sent) == 5


async def test_a_sink_that_breaks_in_its_own_way_does_not_end_the_queue(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))

    def explode(payload: bytes) -> bool:
        raise RuntimeError("a defect")

    sink.refuses = explode
    r.arrive("aaa", 0, 1)
    r.answer("aaa", 1, 2, ["trend"])
    await until(lambda: r.count("foretick_answers_failed_total", reason="publish") == 1)
    sink.refuses = lambda payload: False
    r.answer("aaa", 2, 2)
    await until(lambda: len(sink.sent) == 6)
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


async def test_inputs_stay_uncommitted_when_a_sink_stops_before_the_acknowledgement(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    sink.acknowledging.clear()
    r.arrive("aaa", 0, 1)
    r.answer("aaa", 1, 3)
    await until(lambda: len(sink.sent) == 6)
    await sink.stop()
    assert await r.publisher.outbox.delivery.stop(60.0) == 0
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}
    assert r.count("foretick_answers_total", session="aaa") == 0


async def test_stopping_publishes_what_waits_and_says_what_is_left(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    r.answer("aaa", 1, 1)
    assert await r.publisher.outbox.delivery.stop(60.0) == 0
    assert len(sink.sent) == 6
    slow = MemorySink()
    r = rig(SinkRoute(slow, "answers.v1"))
    slow.acknowledging.clear()
    r.answer("aaa", 1, 1)
    assert await r.publisher.outbox.delivery.stop(0.05) == 6


async def test_the_gate_closes_on_a_backlog_and_opens_when_half_of_it_is_gone(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    sink.acknowledging.clear()
    for version in range(BACKLOG - 1):
        r.answer("aaa", version, 1, ["trend"])
    assert r.publisher.outbox.delivery.gate.is_set()
    r.answer("aaa", BACKLOG, 1, ["trend"])
    assert not r.publisher.outbox.delivery.gate.is_set()
    await until(lambda: len(sink.sent) == BACKLOG)
    sink.acknowledging.set()
    await until(lambda: r.count("foretick_answers_total", session="aaa") == BACKLOG)
    assert r.publisher.outbox.delivery.gate.is_set()


async def test_a_session_without_questions_acknowledges_with_its_versions(rig):
    sink = MemorySink()
    r = rig(
        SinkRoute(sink, "answers.v1", "updates.v1"),
        config=inproc_config(standing="none"),
    )
    r.arrive("aaa", 0, 1)
    r.committed("aaa", 1, 2)
    await until(lambda: r.tracker.outstanding() == 1)
    (update,) = sink.messages("updates.v1")
    assert update == DataUpdated(session="aaa", data_version=1, as_of=START, bars=1)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(1)}


async def test_after_the_engine_is_gone_old_acknowledgements_move_nothing(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    sink.acknowledging.clear()
    r.arrive("aaa", 0, 1)
    r.answer("aaa", 1, 2)
    await until(lambda: len(sink.sent) == 6)
    r.publisher.forget()
    r.tracker.clear()
    r.arrive("aaa", 0, 1)  # read again
    sink.acknowledging.set()
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 6)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(0)}


async def test_dead_letters_go_to_their_topic_with_the_reason_in_the_headers(rig):
    sink, deaf = MemorySink(), MemorySink("deaf")
    r = rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"), SinkRoute(deaf, "answers.v1"))
    dead_letter = DeadLetter(
        error="json: no", reason="json", topic=TOPIC, partition=2, offset=9, payload=b"{\xff"
    )
    r.publisher.outbox.dead_letter(dead_letter)
    await until(lambda: sink.sent)
    assert sink.messages("dlq.v1") == [dead_letter]
    assert sink.sent[0][1] == f"{TOPIC}:2".encode()
    assert sink.sent[0][3]["reason"] == b"json"
    assert deaf.sent == []
    assert r.count("foretick_dead_letters_total", stage="read") == 1


async def test_versions_are_acknowledged_by_the_number_of_questions_they_were_asked(rig):
    """The questions change after version 1: its answers may come after the change."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers"))
    r.arrive("aaa", 10, 11, 12, 13)
    asked = PAPER_SIX[:2]
    r.publisher.questions_set(protocol.QuestionsSet(1, "aaa", 1, asked))
    r.answer("aaa", 1, 2, NAMES[:5])
    r.answer("aaa", 2, 3, NAMES[:2], asked=2)
    await until(lambda: len(sink.sent) == 7)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(10)}
    r.answer("aaa", 1, 2, NAMES[5:])
    await until(lambda: r.tracker.outstanding() == 2)
    r.publisher.questions_set(protocol.QuestionsSet(2, "aaa", 2, ()))
    r.committed("aaa", 3, 4)
    await until(lambda: r.tracker.outstanding() == 1)
    r.publisher.questions_set(protocol.QuestionsSet(3, "aaa", 3, asked))
    r.answer("aaa", 4, 5, NAMES[:1], asked=2)
    r.committed("aaa", 4, 5)
    await until(lambda: len(sink.sent) == 9)
    assert r.tracker.outstanding() == 1
    r.answer("aaa", 4, 5, NAMES[1:2], asked=2)
    await until(lambda: r.tracker.outstanding() == 0)


def policy_rig(
    rig: Callable[..., Rig], sink: MemorySink, *, ready: bool = False, **policy: Any
) -> tuple[Rig, str]:
    """One session with one question; and the question's hash."""
    table = QuestionConfig(name="up", text="Up?", **policy)
    route = SinkRoute(sink, "answers.v1", ready="ready.v1" if ready else "")
    r = rig(route, config=inproc_config(["V:AAA"], standing="none", questions=(table,)))
    return r, question_of(table).hash


async def test_a_suppressed_answer_is_acknowledged_kept_for_asks_and_has_no_number(rig):
    sink = MemorySink()
    r, key = policy_rig(rig, sink, publish_when="changed")
    for number, text in enumerate(("UP", "UP", "DOWN"), 1):
        r.arrive("aaa", number)
        r.answer("aaa", number, number + 1, ["up"], question_hash=key, text=text)
        assert r.sessions.states["aaa"].answers[key].answer.data_version == number
    await until(lambda: not r.tracker.outstanding())
    told = [(a.data_version, a.text, a.sequence) for a in sink.messages("answers.v1")]
    assert told == [(1, "UP", 1), (3, "DOWN", 2)]
    assert r.tracker.to_commit() == {STREAM: CommitPoint(4)}
    assert (r.publisher.progress.of("aaa").version, r.publisher.progress.of("aaa").sequence) == (3, 2)
    assert r.count("foretick_answers_suppressed_total", reason="unchanged") == 1


async def test_a_suppressed_answer_does_not_overtake_the_acknowledgement_of_a_published_one(rig):
    sink = MemorySink()
    sink.acknowledging.clear()
    r, key = policy_rig(rig, sink, publish_when="changed")
    r.arrive("aaa", 1, 2)
    for version in (1, 2):
        r.answer("aaa", version, version + 1, ["up"], question_hash=key)
    assert r.tracker.outstanding() == 2
    sink.acknowledging.set()
    await until(lambda: not r.tracker.outstanding())


async def test_a_changed_policy_goes_on_from_the_last_published_answer(rig):
    sink = MemorySink()
    r, key = policy_rig(rig, sink)
    r.answer("aaa", 1, 1, ["up"], question_hash=key)
    changed = (Question("up", "Up?", publish_when="changed"),)
    r.publisher.questions_set(protocol.QuestionsSet(1, "aaa", 1, changed))
    r.answer("aaa", 2, 1, ["up"], question_hash=key)
    r.publisher.questions_set(protocol.QuestionsSet(2, "aaa", 2, ()))
    r.publisher.questions_set(protocol.QuestionsSet(3, "aaa", 2, changed))
    r.answer("aaa", 3, 1, ["up"], question_hash=key)
    await until(lambda: len(sink.sent) == 2)
    assert [answer.data_version for answer in sink.messages("answers.v1")] == [1, 3]


async def test_an_answer_that_the_sink_refused_was_not_published(rig):
    sink = MemorySink()
    sink.refuses = lambda payload: True
    r, key = policy_rig(rig, sink, publish_when="changed")
    r.answer("aaa", 1, 1, ["up"], question_hash=key)
    await until(lambda: r.count("foretick_answers_failed_total", reason="publish"))
    sink.refuses = lambda payload: False
    r.answer("aaa", 2, 1, ["up"], question_hash=key)
    await until(lambda: sink.sent)
    assert [answer.data_version for answer in sink.messages("answers.v1")] == [2]


async def test_a_version_without_due_questions_is_acknowledged_after_those_before_it(rig):
    sink = MemorySink()
    r, key = policy_rig(rig, sink, ask_every_bars=2)
    r.arrive("aaa", 1, 2)
    sink.acknowledging.clear()
    r.answer("aaa", 1, 2, ["up"], question_hash=key)
    r.publisher.not_due(protocol.NotDue("aaa", 2, inputs_below(3)))
    assert r.tracker.outstanding() == 2
    sink.acknowledging.set()
    await until(lambda: not r.tracker.outstanding())
    assert r.tracker.to_commit() == {STREAM: CommitPoint(3)}


async def test_free_text_that_comes_after_later_versions_holds_their_inputs_back(rig):
    """Version 1 is asked free text only: version 2 is answered first, but must not acknowledge its record."""
    sink = MemorySink()
    r, key = policy_rig(rig, sink)
    r.arrive("aaa", 1, 2)
    r.publisher.texts_asked(protocol.TextsAsked("aaa", 1, inputs_below(2), 1))
    r.answer("aaa", 2, 3, ["up"], question_hash=key)
    await until(lambda: sink.messages("answers.v1"))
    assert r.tracker.outstanding() == 2
    r.publisher.failed(protocol.AnswerFailed("aaa", "why", 1, "superseded", "newer", inputs_below(2), 1))
    await until(lambda: not r.tracker.outstanding())
    assert r.tracker.to_commit() == {STREAM: CommitPoint(3)}
    assert r.count("foretick_answers_suppressed_total", reason="superseded") == 1
    assert all(r.count("foretick_answers_failed_total", reason=reason) == 0 for reason in FAILURES)


async def test_late_answers_are_acknowledged_but_not_published(rig):
    sink = MemorySink()
    r, key = policy_rig(rig, sink, answer_within=Duration(SECOND))
    r.arrive("aaa", 1, 2, 3)
    r.answer("aaa", 1, 2, ["up"], question_hash=key, times=Times(START, 0, time.monotonic_ns() - 2 * SECOND))
    r.fail("up", "late", version=2, last=2, asked=1)
    r.answer("aaa", 3, 4, ["up"], question_hash=key)
    await until(lambda: not r.tracker.outstanding())
    assert [answer.data_version for answer in sink.messages("answers.v1")] == [3]
    for reason in ("late", "skipped"):
        assert r.count("foretick_answers_suppressed_total", reason=reason) == 1
    assert all(r.count("foretick_answers_failed_total", reason=reason) == 0 for reason in FAILURES)


async def test_a_version_is_ready_behind_its_last_answer_failures_included(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", ready="ready.v1"))
    r.fail(NAMES[0], "nan_logits")
    r.answer("aaa", 1, 2, NAMES[1:5])
    await until(lambda: len(sink.sent) == 4)
    r.answer("aaa", 1, 2, NAMES[5:])
    await until(lambda: len(sink.sent) == 6)
    ready = FlashReady(session="aaa", data_version=1, as_of=START, answers=5)
    assert sink.messages("ready.v1") == [ready]
    assert sink.sent[-1][0] == "ready.v1"


async def test_suppressed_answers_make_a_version_ready_too(rig):
    sink = MemorySink()
    r, key = policy_rig(rig, sink, ready=True, publish_when="changed")
    for version in (1, 2):
        r.answer("aaa", version, 2, ["up"], question_hash=key)
    r.publisher.not_due(protocol.NotDue("aaa", 3, inputs_below(3)))
    await until(lambda: len(sink.messages("ready.v1")) == 2)
    assert len(sink.messages("answers.v1")) == 1


async def test_a_session_that_lost_its_questions_waits_for_the_answers_that_are_still_to_come(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers", "updates"))
    r.arrive("aaa", 10, 11, 12)
    r.committed("aaa", 1, 2)
    r.publisher.questions_set(protocol.QuestionsSet(1, "aaa", 1, ()))
    r.committed("aaa", 2, 3)
    await until(lambda: len(sink.sent) == 2)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(10)}
    r.answer("aaa", 1, 2)
    await until(lambda: r.tracker.outstanding() == 1)


async def test_a_version_whose_evaluation_was_skipped_for_a_newer_one_holds_nothing_up(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers"))
    r.arrive("aaa", 10, 11, 12)
    r.committed("aaa", 1, 2)
    r.publisher.questions_set(protocol.QuestionsSet(1, "aaa", 1, ()))
    r.committed("aaa", 2, 3)
    r.publisher.questions_set(protocol.QuestionsSet(2, "aaa", 2, PAPER_SIX[:1]))
    r.committed("aaa", 3, 4)
    r.answer("aaa", 3, 4, NAMES[:1], asked=1)
    await until(lambda: r.tracker.outstanding() == 0)


async def test_what_was_answered_for_before_is_acknowledged_at_once_and_not_published(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", "updates.v1"))
    r.arrive("aaa", 0, 1)
    times = Times(START, time.time_ns(), time.monotonic_ns())
    inputs = inputs_below(2, (START,))
    r.publisher.committed(protocol.Committed("aaa", 1, 1, 20, 1, times, inputs, history=True))
    r.answer("aaa", 1, 3)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(2)}
    assert r.publisher.progress.of("aaa") == Progress(0, 1, 0, (START,))
    r.arrive("aaa", 2)
    r.committed("aaa", 2, 4)
    r.answer("aaa", 2, 4)
    await until(lambda: len(sink.sent) == 7)
    await until(lambda: r.tracker.to_commit())
    assert {a.sequence for a in sink.messages("answers.v1")} == set(range(1, 7))
    assert [u.data_version for u in sink.messages("updates.v1")] == [2]


async def test_corrections_behind_the_newest_answered_bar_are_answered_once(rig):
    """Two were answered before this engine, and are read again; the third is new."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    r.publisher.progress.read(
        {("t", 0): CommitPoint(0, stored(1, {"aaa": Progress(1, 5, 18, (START,), written=((NUMBER, 7),))}))}
    )
    r.publisher.progress.start(["aaa"])
    for number, version in enumerate((6, 7, 8), 1):
        r.arrive("aaa", version)
        r.committed("aaa", version, number + 1, START, written=((NUMBER, version),))
        r.answer("aaa", version, number + 1)
    await until(lambda: r.publisher.progress.of("aaa").version == 8)
    assert {a.data_version for a in sink.messages("answers.v1")} == {8}


async def test_records_below_the_committed_offset_are_history_though_the_engine_does_not_say_so(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    r.tracker.begin(STREAM, 0, 2)
    r.arrive("aaa", 0, 1, 2)
    r.committed("aaa", 1, 3)
    r.answer("aaa", 1, 3)
    r.committed("aaa", 2, 4)
    r.answer("aaa", 2, 4)
    await until(lambda: len(sink.sent) == 6)
    assert {a.data_version for a in sink.messages("answers.v1")} == {2}


async def test_a_bar_of_several_streams_is_history_where_all_of_them_are_committed_behind_it(rig):
    r = rig(config=inproc_config(["V:AAA"], standing="none"))
    r.publisher.streams.name(protocol.NameStream("test", "ticks", 2, True))
    r.tracker.begin(STREAM, 0, 2)
    r.tracker.begin(("ticks", 2), 0, 6)
    other = stream_number("test", "ticks", 2)
    times = Times(START, time.time_ns(), time.monotonic_ns())
    for version, (here, there) in enumerate([(1, 5), (2, 5), (1, 6)], 1):
        reads = ReadRange(NUMBER, 0, here), ReadRange(other, 0, there)
        inputs = protocol.VersionInputs(reads)
        r.publisher.committed(protocol.Committed("aaa", version, 1, 20, 1, times, inputs))
    assert r.publisher._published["aaa"].history == {1}


@pytest.mark.parametrize("rollup", [(), (RollupConfig(Duration(60 * SECOND), 60),)])
async def test_where_a_window_begins_is_acknowledged_with_its_version(rig, rollup):
    """A rollup's sums are of bars before the window: of those nothing is known.

    Of another window it may not be known; it begins nowhere before the last one of which it was.
    """
    made = inproc_config()
    sessions = tuple(replace(each, rollup=rollup) for each in made.sessions)
    r = rig(SinkRoute(MemorySink(), "answers.v1"), config=replace(made, sessions=sessions))
    r.publisher.streams.name(protocol.NameStream("kafka", "ticks", 2, True))
    number = stream_number("kafka", "ticks", 2)
    for version, (known, first) in enumerate([(True, 5), (True, 9), (False, 0)], 1):
        r.arrive("aaa", version)
        window = protocol.Provenance(window=(ReadRange(number, first, 20),), known=known)
        times = Times(START, time.time_ns(), time.monotonic_ns())
        inputs = inputs_below(version + 1, (version,))
        r.publisher.committed(protocol.Committed("aaa", version, 1, 20, 1, times, inputs, made=window))
        r.answer("aaa", version, version + 1)
        await until(lambda version=version: r.publisher.progress.of("aaa").version == version)
        begins = (Position("", "ticks", 2, first if known else 9),) if not rollup else ()
        assert r.publisher.progress.of("aaa").window.firsts == begins


async def test_a_session_that_is_removed_to_begin_anew_acknowledges_nothing(rig):
    """Its questions end without answers; the bars will be asked about again."""
    r = rig(SinkRoute(MemorySink(), "answers.v1"))
    r.arrive("aaa", 10)
    for name in NAMES:
        r.fail(name, "unknown_session", closed=(7,))
    assert r.publisher.progress.resumed("aaa") == Progress()
    assert r.tracker.outstanding() == 1


@pytest.mark.parametrize("follows", [False, True])
async def test_nothing_is_published_of_a_session_until_it_is_opened_again(rig, follows):
    """Another daemon has answered: the numbers behind its own are for what is made from there."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", "updates.v1"), config=inproc_config(["V:AAA"]))
    sink.acknowledging.clear()
    r.arrive("aaa", 10, 11)
    r.answer("aaa", 1, 2)
    await until(lambda: len(sink.sent) == 6)
    r.committed("aaa", 2, 3)
    progress = r.publisher.progress
    progress.promote({("t", 0): CommitPoint(0, stored(6, {"aaa": Progress(6, 30, 180, (5,))}))})
    progress.begin_epoch()
    r.standby.lives.on(Event.VOIDED, ["aaa"])
    r.publisher.drop(["aaa"], complete=True)
    if follows:
        r.standby.lives.on(Event.FOLLOWED, ["aaa"])
        assert r.standby.lives.state("aaa") is State.COLD
    sink.acknowledging.set()
    r.answer("aaa", 2, 3, NAMES[:5])
    r.fail(NAMES[5], "unknown_session", version=2, last=2, closed=(7,))
    await until(lambda: r.publisher.outbox.delivery.waiting == 0)
    assert len(sink.messages("answers.v1")) == 6
    assert progress.resumed("aaa") == Progress(7, 30, 180, (5,))
    assert r.tracker.outstanding() == 2
    r.publisher.remove("aaa")
    r.publisher.add(r.config.sessions[0])
    r.standby.lives.on(Event.RESET, ["aaa"])
    r.standby.lives.on(Event.OPENED, ["aaa"])
    r.arrive("aaa", 12)
    r.answer("aaa", 31, 4)
    await until(lambda: len(sink.messages("answers.v1")) == 12)
    assert [each.sequence for each in sink.messages("answers.v1")[6:]] == [*range(181, 187)]


async def test_the_first_bar_behind_a_take_over_is_answered_though_the_gateway_has_not_noted_it_yet(rig):
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"), config=inproc_config(["V:AAA"]))
    r.standby.lives.on(Event.STANDBY, ["aaa"])
    r.standby.lives.on(Event.TAKEN_OVER, ["aaa"])
    r.arrive("aaa", 10, 11)
    r.committed("aaa", 1, 2)
    r.answer("aaa", 1, 2)
    await until(lambda: len(sink.messages("answers.v1")) == 6)


async def test_a_version_below_one_that_is_acknowledged_holds_back_what_a_restart_goes_on_from(rig):
    sink = MemorySink()
    sink.holds = lambda payload: b'"data_version":1' in payload
    sink.acknowledging.clear()
    r = rig(SinkRoute(sink, "answers.v1"))
    for version in (1, 2):
        r.arrive("aaa", version)
        r.answer("aaa", version, version + 1)
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 6)
    assert r.publisher.progress.of("aaa") == Progress()
    sink.acknowledging.set()
    await until(lambda: r.publisher.progress.of("aaa") == Progress(0, 2, 12))
    r.publisher.forget()
    assert r.publisher.progress.number("aaa") == 13


async def test_an_answer_that_was_dropped_with_its_engine_was_not_published(rig):
    """Exactly once: the next engine says the same of the same records, and nothing has changed since."""
    sink = Broker()
    question = QuestionConfig(name="calm", text="Calm?", publish_when="changed")
    r = rig(
        config=inproc_config(["V:AAA"], standing="none", questions=(question,)),
        exactly_once=SinkRoute(sink, "answers.v1"),
    )
    key = question_of(question).hash
    r.arrive("aaa", 10)
    r.answer("aaa", 1, 2, ["calm"], question_hash=key, asked=2)
    r.publisher.forget()
    r.answer("aaa", 1, 2, ["calm", "late"], question_hash=key, asked=2)
    await r.checkpoint.stop(1.0)
    ((written, _),) = sink.got
    assert len(written) == 2


async def test_an_answer_that_a_transaction_must_leave_out_becomes_a_dead_letter_of_it(rig):
    sink = Broker()
    sink.refuses = frozenset({b"V:AAA"})
    r = rig(
        config=inproc_config(["V:AAA"], standing="none", questions=(QuestionConfig("calm", "Calm?"),)),
        exactly_once=SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"),
    )
    r.arrive("aaa", 10)
    r.answer("aaa", 1, 2, ["calm"], asked=1)
    await r.checkpoint.stop(1.0)
    assert sink.got[0][1] == {STREAM: 11}
    ((dead_letter, topic),) = [(decode_message(each.payload), each.topic) for each in sink.messages]
    assert topic == "dlq.v1"
    assert isinstance(dead_letter, DeadLetter)
    assert (dead_letter.stage, dead_letter.reason, dead_letter.topic) == (
        "produce",
        "too_large",
        "answers.v1",
    )
    assert (dead_letter.key, dead_letter.headers["answer_id"][:4]) == (b"V:AAA", b"aaa:")
    answer = decode_message(dead_letter.payload)
    assert isinstance(answer, Answer)
    assert (answer.question, answer.sequence) == ("calm", 1)
    assert r.count("foretick_answers_failed_total", reason="publish") == 1
    assert r.count("foretick_dead_letters_total", stage="produce") == 1
    assert r.publisher.outbox.delivery.waiting == 0


async def test_the_first_answer_of_another_engine_tells_its_own_inputs(rig):
    """Its versions have the numbers that those of the engine before had."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1"))
    for last in (11, 15):
        r.tracker.clear()
        r.arrive("aaa", *range(last - 1, last + 1))
        r.answer("aaa", 1, last + 1, inputs=inputs_below(last + 1, first=last - 1))
        r.publisher.forget()
    await until(lambda: len(sink.sent) == 12)
    told = [each.inputs for each in sink.messages("answers.v1")]
    assert [ranges[0].last_offset for ranges in told] == [11] * 6 + [15] * 6
