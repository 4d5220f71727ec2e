"""Nothing is lost when processes are killed, and readers can prove it by the answers' numbers."""

import asyncio
import json
import os
import signal
import time
import uuid
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from daemon.config.schema import OFF, QuestionConfig, RecoveryConfig
from feeds.codec import encode
from feeds.kafka_client import quiet_client_log
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer
from tests.e2e.test_e2e_process import STOP_S, play, second
from tests.kit import SECOND, START, QueueSource, inproc_config, until, until_slowly
from tests.kit.config import sessions
from tests.kit.daemon import SYMBOLS, Daemon, Topics, command, kafka_toml
from tests.kit.fixtures import RealKafka
from tests.kit.inproc import ANSWERS, RunningDaemon, Tape, running
from tests.kit.kafka import create_topics, producing

RECORDS = 6
"""Of a second: three trades of each symbol in turn."""


@pytest.mark.kafka
async def test_a_killed_daemon_and_a_killed_engine_lose_nothing(
    tmp_path: Path, real_kafka: RealKafka
) -> None:
    """Each is killed with answers on their way."""
    quiet_client_log()
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(real_kafka.bootstrap, {trades: 1, answers: 1, f"dlq.v1{suffix}": 1})
    config = kafka_toml(real_kafka.bootstrap, suffix)
    async with Topics(real_kafka.bootstrap, trades, answers) as topics:
        with Daemon(tmp_path / "first", config) as daemon:
            await daemon.ready()
            reached = await play(topics, range(4))
            await topics.produce(second(4))
            daemon.signal(signal.SIGKILL)
            assert daemon.wait(10) == -signal.SIGKILL
        with Daemon(tmp_path / "second", config) as daemon:
            await daemon.ready()
            await asyncio.gather(*(topics.reached(name, reached + 1) for name in SYMBOLS))
            await topics.produce(second(5))
            engine = daemon.engine()
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
            await until_slowly(lambda: daemon.metric("foretick_engine_restarts_total") == 1)
            await daemon.ready()
            for n in (6, 7):
                await topics.produce(second(n))
            await until_slowly(
                lambda: all(covered(topics.answers(name), 6) for name in SYMBOLS), 60, "answers to second 6"
            )
            assert daemon.terminate(STOP_S) == 0
        for name in SYMBOLS:
            found = topics.answers(name)
            assert [epoch for epoch, _ in groupby(found, lambda a: a.epoch)] == [1, 2, 3]
            assert [n for n in range(7) if not covered(found, n)] == []
            for _, group in groupby(found, lambda a: a.epoch):
                assert all(a.sequence + 1 == b.sequence for a, b in pairwise(group))
        done = await asyncio.to_thread(
            command, "audit", answers, "--bootstrap", real_kafka.bootstrap, "--json"
        )
        report = json.loads(done.stdout)
        assert (done.returncode, report["complete"]) == (0, True), report
        assert [(each["session"], each["epochs"], each["first"]) for each in report["sessions"]] == [
            (name, 3, 1) for name in SYMBOLS
        ]
        assert report["groups"] == []
        await _one_missing(real_kafka.bootstrap, f"{answers}.copy", topics.answers("aaa"))
        (tmp_path / "foretick.toml").write_text(config)
        await _last_missing(real_kafka.bootstrap, suffix, tmp_path / "foretick.toml", topics.answers("aaa"))


@pytest.mark.kafka
async def test_without_a_snapshot_the_whole_window_is_read_again_however_old_it_is(
    real_kafka: RealKafka,
) -> None:
    """The broker had a bar an hour; windows span three seconds if no interval is empty."""
    topic, group = f"md.trades.v1.{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    await create_topics(real_kafka.bootstrap, {topic: 1})
    config, tape = inproc_config(recovery=RecoveryConfig(OFF)), Tape("V:AAA")
    began_ms = int(time.time() * 1000) - 24 * 3_600_000
    async with producing(real_kafka.bootstrap) as producer:
        found = []
        for seconds in (range(7), range(7, 9)):
            source = KafkaSource("kafka", real_kafka.bootstrap, [topic], group)
            source.set_retention(3 * SECOND, skips=False)
            async with running(config, source) as daemon:
                for n in seconds:
                    for each in tape.second(n):
                        await producer.send_and_wait(
                            topic, each.payload, key=b"V:AAA", timestamp_ms=began_ms + n * 3_600_000
                        )
                    at = START + (n - 1) * SECOND
                    await until(lambda d=daemon, at=at: at < START or any(a.as_of >= at for a in d.answers()))
                assert await daemon.gateway.stop()
            found.append(daemon.answers())
    before, after = found
    assert [a.basis.window_bars for a in before if a.basis][::6] == list(range(1, 7))
    assert [a.basis.window_bars for a in after if a.basis][::6] == [7, 8]


@pytest.mark.kafka
@pytest.mark.timeout(900)
@pytest.mark.parametrize("many", [400, pytest.param(2000, marks=pytest.mark.long)])
async def test_many_sessions_of_one_partition_restart_without_a_repeat(
    real_kafka: RealKafka, many: int
) -> None:
    """Each goes on behind its own newest answer; no bar is answered twice."""
    topic, group = f"md.trades.v1.{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    await create_topics(real_kafka.bootstrap, {topic: 1})
    symbols = [f"V:S{n}" for n in range(many)]
    config = inproc_config(
        [],
        sessions=sessions(*symbols, retention_tokens=256),
        standing="none",
        questions=(QuestionConfig(name="up", text="Up?", choices=("YES", "NO")),),
        recovery=RecoveryConfig(OFF),
    )
    tape, found = Tape(*symbols), list[Answer]()

    def published(daemon: RunningDaemon) -> list[Answer]:
        return [each for each in daemon.sink.messages(ANSWERS) if isinstance(each, Answer)]

    async with producing(real_kafka.bootstrap) as producer:
        for seconds in (range(3), range(3, 5)):
            source = KafkaSource("kafka", real_kafka.bootstrap, [topic], group)
            async with running(config, source) as daemon:
                for n in seconds:
                    for each in tape.second(n, trades=1):
                        await producer.send(topic, each.payload)
                    await producer.flush()
                newest = START + (seconds[-1] - 1) * SECOND
                await until_slowly(
                    lambda d=daemon, newest=newest: (
                        len({a.session for a in published(d) if a.as_of >= newest}) == many
                    ),
                    300,
                )
                assert await daemon.gateway.stop()
            found += published(daemon)
    for name, each in groupby(sorted(found, key=lambda a: (a.session, a.sequence)), lambda a: a.session):
        answers = list(each)  # bars that came together make one version
        assert [a.sequence for a in answers] == list(range(1, len(answers) + 1)), name
        assert all(a.as_of < b.as_of for a, b in pairwise(answers)), name
        assert {a.epoch for a in answers} == {1, 2}, name


async def test_a_source_without_a_log_goes_on_from_the_file_of_progress(tmp_path: Path) -> None:
    """A damaged file is counted, and numbers begin again."""
    config = inproc_config(recovery=RecoveryConfig(directory=str(tmp_path / "state")))
    tape, published = Tape("V:AAA"), 0
    for run, epoch in enumerate((1, 2, 1)):
        if run == 2:
            (tmp_path / "state" / "progress").write_bytes(b"\xffdamaged")
            published = 0
        async with running(config, QueueSource("dropping"), tape) as daemon:
            for n in range(4):
                daemon.feed()
                await until(lambda n=6 * n, of=daemon: len(of.answers()) >= n, 60)
            refused = daemon.count("recovery_progress_refused")
            assert await daemon.gateway.stop()
        answers = daemon.answers()
        assert {a.epoch for a in answers} == {epoch}
        assert [a.sequence for a in answers] == [published + n for n in range(1, len(answers) + 1)]
        assert refused == (run == 2)
        published += len(answers)


def covered(answers: list[Answer], n: int) -> bool:
    """Whether the session's trades of second ``n`` are inputs of an answer to each question."""
    of = 0 if answers and answers[0].session == "aaa" else 1
    offsets = range(n * RECORDS + of, (n + 1) * RECORDS, len(SYMBOLS))
    asked = {
        a.question
        for a in answers
        if all(any(i.first_offset <= at <= i.last_offset for i in a.inputs) for at in offsets)
    }
    return len(asked) == 6


async def _last_missing(bootstrap: str, suffix: str, file: Path, answers: list[Answer]) -> None:
    """A copy of the topic without its last two answers, beside what the group has committed."""
    group, topic = f"foretick{suffix}", f"answers.v1{suffix}"
    done = await asyncio.to_thread(command, "audit", topic, "--config", str(file), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["complete"], report["groups"]) == (0, True, [group]), report
    assert [each["session"] for each in report["sessions"]] == list(SYMBOLS)
    copy = f"{topic}.short"
    await create_topics(bootstrap, {copy: 1})
    async with Topics(bootstrap, copy, copy) as topics:
        await topics.produce([("k", encode(each)) for each in answers[:-2]])
    done = await asyncio.to_thread(command, "audit", copy, "--bootstrap", bootstrap)
    assert (done.returncode, "what is missing at the end does not show" in done.stdout) == (0, True)
    done = await asyncio.to_thread(command, "audit", copy, "--config", str(file))
    assert done.returncode == 0  # another topic than the configuration's
    done = await asyncio.to_thread(command, "audit", copy, "--bootstrap", bootstrap, "--group", group)
    assert done.returncode == 1
    assert f"aaa lacks {answers[-2].sequence}-{answers[-1].sequence}\n" in done.stdout
    done = await asyncio.to_thread(command, "audit", copy, "--config", str(file), "--group", group)
    assert f"aaa lacks {answers[-2].sequence}-{answers[-1].sequence}\n" in done.stdout


async def _one_missing(bootstrap: str, topic: str, answers: list[Answer]) -> None:
    """A copy of the topic without one of the answers, and with another one twice."""
    await create_topics(bootstrap, {topic: 1})
    last = [a for a in answers if a.epoch == answers[-1].epoch]
    kept = [*answers[: -len(last)], *last[:2], *last[3:], last[-1]]
    async with Topics(bootstrap, topic, topic) as copy:
        await copy.produce([("k", encode(each)) for each in kept])
    done = await asyncio.to_thread(command, "audit", topic, "--bootstrap", bootstrap)
    assert done.returncode == 1
    assert f"aaa lacks {last[2].sequence}\n" in done.stdout
    assert "NOT complete" in done.stdout
    done = await asyncio.to_thread(command, "audit", topic, "--bootstrap", bootstrap, "--since", "1h")
    assert f"aaa lacks {last[2].sequence}\n" in done.stdout
    done = await asyncio.to_thread(command, "audit", f"{topic}.nowhere", "--bootstrap", bootstrap)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no topic '{topic}.nowhere'" in done.stderr
