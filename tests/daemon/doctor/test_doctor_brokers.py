"""`foretick doctor` on Kafka: the embedded broker, a real one, and what is made up."""

import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import NewTopic
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    IncompatibleBrokerVersion,
    TopicAuthorizationFailedError,
)

from daemon.config.schema import Config, SinkConfig, SourceConfig
from daemon.doctor.brokers import Topic, judge_cluster, judge_topic, read_cluster, read_clusters
from daemon.doctor.diagnosis import Verdict
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.kafka_security import KafkaSecurity
from feeds.kafka_sink import KafkaSink
from feeds.mock_broker import MockBroker
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import administering, free_ports

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
NOW_NS = int(NOW.timestamp()) * 10**9
HOUR_NS = 3600 * 10**9
KEPT = {"cleanup.policy": "delete", "retention.ms": "86400000", "message.timestamp.type": "CreateTime"}


def judged(topic: Topic, held_ns: int = HOUR_NS) -> dict[str, Verdict]:
    found = list(judge_topic("t", topic, held_ns, NOW))
    assert all(each.step for each in found if each.verdict in ("warning", "problem"))
    return {each.check: each.verdict for each in found}


def of_input(settings: dict[str, str] | None = None, **more: Any) -> Topic:
    known = None if settings is None else {**KEPT, **settings}
    usual = {"partitions": 3, "replicas": 2, "newest_ns": NOW_NS, "settings": known}
    return Topic("md", "input", **{**usual, **more})


def test_an_input_that_is_kept_for_long_enough_is_well() -> None:
    assert set(judged(of_input({})).values()) == {"ok"}


@pytest.mark.parametrize(
    ("topic", "check", "verdict"),
    [
        (of_input({}, partitions=0), "t", "problem"),
        (of_input(code=29, partitions=0), "t", "problem"),
        (of_input({}, leaderless=1), "t", "problem"),
        (of_input({"retention.ms": "60000"}), "t.retention", "warning"),
        (of_input({"retention.ms": "-1"}), "t.retention", "ok"),
        (of_input({"cleanup.policy": "compact"}), "t.cleanup", "warning"),
        (of_input({"cleanup.policy": "compact,delete"}), "t.cleanup", "warning"),
        (of_input(None), "t.settings", "skipped"),
        (of_input(None, code=29), "t.settings", "skipped"),
        (of_input({}, unreadable="TopicAuthorizationFailedError"), "t.newest", "problem"),
        (of_input({}, newest_ns=0), "t.newest", "skipped"),
        (of_input({}, newest_ns=NOW_NS + HOUR_NS), "t.newest", "warning"),
        (of_input({}, newest_ns=NOW_NS - HOUR_NS), "t.newest", "ok"),
        (Topic("p", "progress"), "t", "ok"),
        (Topic("p", "progress", code=29), "t", "problem"),
        (Topic("p", "progress", 1, settings={"cleanup.policy": "delete"}), "t.cleanup", "warning"),
        (Topic("p", "progress", 1, settings={"cleanup.policy": "compact"}), "t.cleanup", "ok"),
        (Topic("a", "output", 1, replicas=1, settings={"min.insync.replicas": "2"}), "t", "problem"),
        (Topic("a", "output", 1, replicas=2, settings={"min.insync.replicas": "2"}), "t", "ok"),
    ],
)  # fmt: skip
def test_each_fact_of_a_topic_has_its_verdict(topic: Topic, check: str, verdict: Verdict) -> None:
    found = judged(topic)
    assert found.pop(check) == verdict
    assert set(found.values()) <= {"ok"}


def test_whose_clock_is_ahead_depends_on_who_stamps_the_records() -> None:
    ahead = of_input({"message.timestamp.type": "LogAppendTime"}, newest_ns=NOW_NS + HOUR_NS)
    for topic, whose in ((ahead, "the broker's"), (of_input({}, newest_ns=NOW_NS + HOUR_NS), "a producer's")):
        newest = list(judge_topic("t", topic, 0, NOW))[-1]
        assert whose in newest.seen
        assert whose in newest.step


class FakeAdmin:
    """A client whose broker has one topic; ``refused``: codes or errors by request."""

    def __init__(self, refused: dict[str, Any]) -> None:
        self._refused = refused
        self.closed = 0

    async def start(self) -> None:
        if "start" in self._refused:
            raise self._refused["start"]

    async def close(self) -> None:
        self.closed += 1

    async def describe_cluster(self) -> dict[str, Any]:
        return {"brokers": [{}, {}, {}]}

    async def describe_topics(self) -> list[dict[str, Any]]:
        there = [{"leader": 1, "replicas": [1, 2]}, {"leader": -1, "replicas": [1]}]
        return [{"topic": "there", "partitions": there}]

    async def describe_configs(self, resources: list[Any]) -> list[Any]:
        found = self._refused.get("configs", 0)
        if isinstance(found, Exception):
            raise found
        entries = [("min.insync.replicas", "2", False, True, False)]
        return [SimpleNamespace(resources=[(found, "", 2, resources[0].name, entries)])]

    async def describe_consumer_groups(self, names: list[str]) -> list[Any]:
        code = self._refused.get("group", 0)
        if isinstance(code, Exception):
            raise code
        return [SimpleNamespace(groups=[(code, names[0], "Stable", "consumer", "range", [(), ()])])]


async def test_a_client_s_replies_become_facts() -> None:
    sink = KafkaSinkConnector("127.0.0.1:1", topic="there", dlq="lost")
    admin = FakeAdmin({})
    found = await read_cluster("sink.kafka", sink, lambda **settings: admin)
    there, lost = found.topics
    assert (there.partitions, there.leaderless, there.replicas) == (2, 1, 1)
    assert there.settings == {"min.insync.replicas": "2"}
    assert lost.partitions == 0
    assert (found.brokers, found.group, admin.closed) == (3, "", 1)
    verdicts = {each.check: each.verdict for each in judge_cluster(found, 0, NOW)}
    assert verdicts == {
        "sink.kafka": "ok",
        "sink.kafka[there]": "problem",
        "sink.kafka[lost]": "problem",
        "sink.kafka.write": "skipped",
    }


@pytest.mark.parametrize("refused", [29, IncompatibleBrokerVersion("old")])
async def test_settings_that_may_not_be_seen_are_skipped_and_named(refused: Any) -> None:
    sink = KafkaSinkConnector("127.0.0.1:1", topic="there", dlq="there")
    found = await read_cluster("sink.kafka", sink, lambda **settings: FakeAdmin({"configs": refused}))
    (settings,) = (each for each in judge_cluster(found, 0, NOW) if each.check.endswith(".settings"))
    assert settings.verdict == "skipped"
    assert (TopicAuthorizationFailedError.__name__ in settings.seen) == (refused == 29)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (0, "ok"),
        (30, "problem"),
        (GroupAuthorizationFailedError(), "problem"),
        (GroupCoordinatorNotAvailableError(), "skipped"),
    ],
)
async def test_a_group_that_this_login_may_not_see_is_a_problem(code: Any, verdict: Verdict) -> None:
    source = KafkaSourceConnector("127.0.0.1:1", topics=("lost",))
    found = await read_cluster("source.kafka", source, lambda **settings: FakeAdmin({"group": code}))
    (group,) = (each for each in judge_cluster(found, 0, NOW) if each.check == "source.kafka.group")
    assert group.verdict == verdict
    assert ("Stable, 2 members" in group.seen) == (code == 0)
    assert ("GroupAuthorizationFailedError" in group.seen) == (verdict == "problem")


async def test_a_broker_that_is_away_and_a_login_without_its_file_are_problems() -> None:
    (port,) = free_ports(1)
    away = KafkaSinkConnector(f"127.0.0.1:{port}")
    lost = KafkaSinkConnector(
        "127.0.0.1:1", security=KafkaSecurity(sasl="scram-sha-256", credentials_file="/no/file")
    )
    for connector, word in ((away, "Kafka"), (lost, "/no/file")):
        (found,) = judge_cluster(await read_cluster("sink.kafka", connector), 0, NOW)
        assert (found.check, found.verdict) == ("sink.kafka", "problem")
        assert word in found.seen


async def test_the_embedded_broker_is_described_as_far_as_it_can_and_gets_no_topic() -> None:
    with MockBroker() as broker:
        broker.create_topic("md.trades.v1", 3)
        sink = KafkaSink("fill", broker.bootstrap)
        await sink.start()
        await sink.publish("md.trades.v1", b"k", b"{}", {})
        await sink.stop()
        config = Config(
            source=SourceConfig(kind="kafka", kafka=KafkaSourceConnector(broker.bootstrap)),
            sink=SinkConfig(kafka=KafkaSinkConnector(broker.bootstrap, dlq="never.made")),
        )
        away, read = await read_clusters(config)
        assert [topic.partitions for topic in (*away.topics, *read.topics)] == [0, 0, 3, 0]
        newest = datetime.fromtimestamp(read.topics[0].newest_ns / 1e9, UTC)
        assert abs(newest - datetime.now(UTC)) < timedelta(minutes=1)
        assert [each.topics for each in await read_clusters(config)] == [away.topics, read.topics]
        verdicts = {each.check: each.verdict for each in judge_cluster(read, 0, datetime.now(UTC))}
        assert verdicts["source.kafka[md.trades.v1].settings"] == "skipped"
        assert verdicts["source.kafka[md.trades.v1].newest"] == "ok"


@pytest.mark.kafka
async def test_a_real_broker_shows_retention_compaction_and_its_clock(real_kafka: RealKafka) -> None:
    name = f"md.{uuid.uuid4().hex[:8]}"
    settings = {"retention.ms": "60000", "message.timestamp.type": "LogAppendTime"}
    progress = NewTopic(f"{name}.p", 1, 1, topic_configs={"cleanup.policy": "compact"})
    async with administering(real_kafka.bootstrap) as admin:
        await admin.create_topics([NewTopic(name, 2, 1, topic_configs=settings), progress])
    sink = KafkaSink("fill", real_kafka.bootstrap)
    await sink.start()
    await sink.publish(name, b"k", b"{}", {})
    await sink.stop()
    source = KafkaSourceConnector(
        real_kafka.bootstrap, topics=(name,), group=name, progress_topic=f"{name}.p"
    )
    async with AIOKafkaConsumer(name, bootstrap_servers=real_kafka.bootstrap, group_id=name):
        found = list(judge_cluster(await read_cluster("source.kafka", source), HOUR_NS, datetime.now(UTC)))
    here = f"source.kafka[{name}]"
    assert {each.check: each.verdict for each in found} == {
        "source.kafka": "ok",
        here: "ok",
        f"{here}.retention": "warning",
        f"{here}.cleanup": "ok",
        f"{here}.newest": "ok",
        f"source.kafka[{name}.p]": "ok",
        f"source.kafka[{name}.p].cleanup": "ok",
        "source.kafka.group": "ok",
    }
    assert any("the broker's clock" in each.seen for each in found)
    assert found[-1].seen == f"{name}: Stable, 1 members"
