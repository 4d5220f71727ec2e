"""Signals are delivered as answers are, and what is known for them is part of progress."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from daemon.config.schema import ClauseConfig, QuestionConfig, SignalConfig
from daemon.session_life import State
from feeds.connector import SinkRoute
from feeds.market_data import Signal
from feeds.source import CommitPoint
from tests.daemon.gateway.test_gateway_publish import STREAM, Rig
from tests.kit import MemorySink, inproc_config, until
from tests.kit.engine_events import answered, inputs_below
from tests.kit.gateway import Broker

QUESTIONS = tuple(QuestionConfig(name, f"{name}?", ("UP", "DOWN")) for name in ("trend", "other"))


def config(*clauses: ClauseConfig, **more: Any) -> Any:
    signal = SignalConfig("turn", clauses or (ClauseConfig("trend", answer=("UP",)),), **more)
    return inproc_config(["V:AAA", "V:BBB"], standing="none", questions=QUESTIONS, signals=(signal,))


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*routes: SinkRoute, **more: Any) -> Rig:
        made.append(Rig(*routes, **{"config": config()} | more))
        return made[-1]

    yield make
    for each in made:
        await each.publisher.outbox.delivery.stop(0.0)


def say(r: Rig, session: str, version: int, **texts: str) -> None:
    """A version of one record, and the answers to its questions."""
    r.arrive(session, version - 1)
    r.committed(session, version, version + 1, version * 10)
    for question, text in texts.items():
        inputs = inputs_below(r.below(version + 1), (version * 10,))
        event = answered(session, version, 0, question=question, question_hash=question, text=text,
                         choice=text, asked=2, inputs=inputs, as_of=version)  # fmt: skip
        r.publisher.answered(event)


def signals(sink: MemorySink) -> list[Signal]:
    return [each for each in sink.messages("signals.v1") if isinstance(each, Signal)]


async def test_a_signal_names_the_answer_that_caused_it(rig) -> None:
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN", other="UP")
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: signals(sink))
    (signal,) = signals(sink)
    assert (signal.session, signal.owner, signal.name, signal.data_version, signal.bar) == (
        "aaa",
        "aaa",
        "turn",
        2,
        20,
    )
    (cause,) = signal.answers
    assert (cause.answer_id, cause.text, cause.data_version) == ("aaa:trend:20", "UP", 2)
    assert signal.signal_id.startswith("turn:aaa:")
    headers = next(headers for topic, _, _, headers in sink.sent if topic == "signals.v1")
    assert (headers["signal_id"], headers["schema"]) == (signal.signal_id.encode(), b"signal.v1")
    assert r.count("foretick_signals_total", outcome="fired") == 1


async def test_inputs_are_committed_only_when_the_signal_is_acknowledged(rig) -> None:
    answers, slow = MemorySink("answers"), MemorySink("signals")
    r = rig(SinkRoute(answers, "answers.v1"), SinkRoute(slow, "", signals="signals.v1"))
    slow.acknowledging.clear()
    say(r, "aaa", 1, trend="DOWN", other="UP")
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: signals(slow) and r.count("foretick_answers_total", session="aaa") == 4)
    assert r.publisher.progress.of("aaa").version == 1
    assert r.tracker.to_commit() == {STREAM: CommitPoint(1)}
    slow.acknowledging.set()
    await until(lambda: r.publisher.progress.of("aaa").version == 2)
    assert r.tracker.to_commit() == {STREAM: CommitPoint(2)}


async def test_an_engine_that_starts_again_repeats_a_signal_with_its_id(rig) -> None:
    """What was acknowledged makes no signal again; what was not makes the same one."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN", other="UP")
    await until(lambda: r.publisher.progress.of("aaa").version == 1)
    sink.acknowledging.clear()
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: signals(sink))
    r.publisher.forget()
    sink.acknowledging.set()
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: len(signals(sink)) == 2 and r.publisher.progress.of("aaa").version == 2)
    assert len({each.signal_id for each in signals(sink)}) == 1
    r.publisher.forget()
    say(r, "aaa", 3, trend="UP", other="UP")
    await until(lambda: r.publisher.progress.of("aaa").version == 3)
    assert len(signals(sink)) == 2


async def test_another_daemon_goes_on_from_the_progress_of_this_one(rig) -> None:
    """By the stored record, as in a hand-over: what holds already is no news there, and the run goes on."""
    condition = config(ClauseConfig("trend", answer=("UP",), for_bars=2))
    first, second = MemorySink("one"), MemorySink("two")
    one = rig(SinkRoute(first, "answers.v1", signals="signals.v1"), config=condition)
    say(one, "aaa", 1, trend="DOWN", other="UP")
    say(one, "aaa", 2, trend="UP", other="UP")
    await until(lambda: one.publisher.progress.of("aaa").version == 2)
    records = one.publisher.progress.describe(["aaa", "bbb"])
    two = rig(SinkRoute(second, "answers.v1", signals="signals.v1"), config=condition)
    two.publisher.progress.read({STREAM: CommitPoint(0, records)})
    say(two, "aaa", 3, trend="UP", other="UP")
    say(two, "aaa", 4, trend="UP", other="UP")
    await until(lambda: two.publisher.progress.of("aaa").version == 4)
    assert [each.data_version for each in signals(second)] == [3]
    assert not signals(first)


async def test_exactly_once_a_signal_is_in_the_transaction_of_its_answer(rig) -> None:
    broker = Broker()
    r = rig(exactly_once=SinkRoute(broker, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN", other="UP")
    await r.checkpoint.commit()
    say(r, "aaa", 2, trend="UP", other="UP")
    assert r.publisher.progress.of("aaa").version == 2
    await r.checkpoint.commit()
    topics = [message.topic for message in broker.messages]
    assert topics == ["answers.v1"] * 4 + ["signals.v1"]
    assert [len(keys) for keys, _ in broker.got] == [2, 3]
    assert [points for _, points in broker.got] == [{STREAM: 1}, {STREAM: 2}]


async def test_exactly_once_what_is_dropped_is_made_again_from_what_is_committed(rig) -> None:
    broker = Broker()
    r = rig(exactly_once=SinkRoute(broker, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN", other="UP")
    await r.checkpoint.commit()
    r.publisher.progress.stored([CommitPoint(1, r.publisher.progress.describe(["aaa"]))])
    say(r, "aaa", 2, trend="UP", other="UP")
    r.publisher.progress.take_back(["aaa"])
    r.publisher.drop(["aaa"], complete=True)
    say(r, "aaa", 2, trend="UP", other="UP")
    await r.checkpoint.commit()
    assert [message.topic for message in broker.messages].count("signals.v1") == 1


async def test_versions_make_signals_in_order_once_they_are_whole(rig) -> None:
    """An answer that comes late keeps those of later versions back; one that fails says nothing."""
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN")
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 3)
    assert not signals(sink)
    r.fail("other", "no_memory", 1, 1, 2, (10,))
    await until(lambda: signals(sink))
    assert [each.data_version for each in signals(sink)] == [2]


async def test_a_version_that_is_ended_from_outside_makes_no_signal(rig) -> None:
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"))
    say(r, "aaa", 1, trend="DOWN", other="UP")
    say(r, "aaa", 2, trend="UP")
    r.fail("other", "stopping", 2, 2, 2, (20,))
    await until(lambda: r.count("foretick_answers_total", session="aaa") == 3)
    assert not signals(sink)
    assert r.publisher.progress.of("aaa").version == 1


async def test_answers_of_two_sessions_make_one_signal(rig) -> None:
    sink = MemorySink()
    clauses = (ClauseConfig("trend", "aaa", ("UP",)), ClauseConfig("trend", "bbb", ("DOWN",)))
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"), config=config(*clauses))
    for version, (a, b) in enumerate([("DOWN", "UP"), ("UP", "UP"), ("UP", "DOWN"), ("UP", "DOWN")], 1):
        r.arrived.clear()
        say(r, "aaa", version, trend=a, other="UP")
        r.arrived.clear()
        say(r, "bbb", version, trend=b, other="UP")
    await until(lambda: signals(sink) and r.publisher.progress.of("bbb").version == 4)
    (signal,) = signals(sink)
    assert (signal.session, signal.owner, signal.data_version) == ("bbb", "aaa", 3)
    assert [(each.session, each.text, each.data_version) for each in signal.answers] == [
        ("aaa", "UP", 3),
        ("bbb", "DOWN", 3),
    ]


async def test_of_a_session_that_another_daemon_answers_nothing_is_known(rig) -> None:
    sink = MemorySink()
    clauses = (ClauseConfig("trend", "aaa", ("UP",)), ClauseConfig("trend", "bbb", ("UP",)))
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"), config=config(*clauses))
    say(r, "bbb", 1, trend="DOWN", other="UP")
    say(r, "bbb", 2, trend="UP", other="UP")
    r.standby.lives.of("bbb").state = State.COLD
    r.arrived.clear()
    say(r, "aaa", 1, trend="DOWN", other="UP")
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: r.publisher.progress.of("aaa").version == 2)
    assert not signals(sink)


async def test_a_suppressed_answer_makes_signals_and_a_cooldown_is_counted(rig) -> None:
    """What `publish_when` keeps from the topic is still an answer."""
    sink, more = MemorySink(), {"cooldown_bars": 9}
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"), config=config(**more))
    for version, text in enumerate(["DOWN", "UP", "DOWN", "UP"], 1):
        say(r, "aaa", version, trend=text, other="UP")
    await until(lambda: r.publisher.progress.of("aaa").version == 4)
    assert [each.data_version for each in signals(sink)] == [2]
    assert r.count("foretick_signals_total", outcome="suppressed") == 1


async def test_what_cannot_be_read_of_stored_progress_is_not_used(rig, caplog) -> None:
    sink = MemorySink()
    r = rig(SinkRoute(sink, "answers.v1", signals="signals.v1"))
    r.publisher.progress.acknowledge("aaa", 1, (), (10,), signals=b"damaged")
    say(r, "aaa", 2, trend="UP", other="UP")
    await until(lambda: r.publisher.progress.of("aaa").version == 2)
    assert "what was known for signals of aaa is not used" in caplog.text
    assert not signals(sink)
