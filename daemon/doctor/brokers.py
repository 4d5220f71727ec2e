"""Kafka: topics with their partitions and settings, what this login may do, the group, and the clock."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from daemon.config.checks import connectors_of
from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, fine, of_outcome, skipped
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.kafka_client import BrokerError, why_closed
from feeds.kafka_range import KafkaRange

Role = Literal["input", "progress", "output"]
Connector = KafkaSourceConnector | KafkaSinkConnector
UNKNOWN_TOPIC = 3
MAX_AHEAD_S = 1.0
REFUSED = " is not described: "
_CONNECT_S = 10.0
_ERRORS = (KafkaError, OSError, TimeoutError, AttributeError, ValueError)
"""As in `feeds.kafka_progress`: also what aiokafka raises where a broker lacks a request."""
_GONE = "operations.md#when-the-broker-is-gone"
_ACL = "operations.md#keys-and-passwords"

OpenAdmin = Callable[..., Any]
"""Of settings, a client like `AIOKafkaAdminClient`."""


@dataclass(frozen=True)
class Topic:
    """``partitions``: 0 where it is not there. ``settings``: None where the broker does not say, with its
    error ``code``. ``newest_ns``: time of the newest record, 0 without one; ``unreadable``: why.
    """

    name: str
    role: Role
    partitions: int = 0
    leaderless: int = 0
    replicas: int = 0
    code: int = 0
    settings: Mapping[str, str] | None = None
    newest_ns: int = 0
    unreadable: str = ""


@dataclass(frozen=True)
class Cluster:
    """What brokers say to the connector of a ``table``; with an ``error``, nothing. ``group``: in words."""

    table: str
    bootstrap: str
    error: str = ""
    brokers: int = 0
    topics: tuple[Topic, ...] = ()
    group: str = ""


async def read_clusters(config: Config) -> tuple[Cluster, ...]:
    """What the brokers of each Kafka table say."""
    tables = connectors_of(config).items()
    return tuple([await read_cluster(table, each) for table, each in tables if isinstance(each, Connector)])


async def read_cluster(
    table: str, connector: Connector, open_admin: OpenAdmin = AIOKafkaAdminClient
) -> Cluster:
    """Ask the brokers; no topic is created, and nothing is written or committed."""
    bootstrap = connector.bootstrap
    try:
        settings = {"bootstrap_servers": bootstrap, **connector.security.client_options()}
    except SettingError as error:
        return Cluster(table, bootstrap, str(error))
    group = connector.group if isinstance(connector, KafkaSourceConnector) else ""
    admin = open_admin(**settings)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await admin.start()
            brokers = len((await admin.describe_cluster())["brokers"])
            # of all topics: one that is asked for by its name may be created
            known = {each["topic"]: each["partitions"] for each in await admin.describe_topics()}
            topics = [await _describe(admin, *each, known) for each in _wanted(connector).items()]
            shown = await _group(admin, group) if group else ""
    except _ERRORS as error:
        return Cluster(table, bootstrap, await why_closed(settings) or repr(error))
    finally:
        await admin.close()
    read = [await _newest(settings, each) if each.role == "input" else each for each in topics]
    return Cluster(table, bootstrap, "", brokers, tuple(read), shown)


def _wanted(connector: Connector) -> dict[str, Role]:
    if isinstance(connector, KafkaSinkConnector):
        return dict.fromkeys(filter(None, (connector.topic, connector.dlq, connector.events)), "output")
    return {**dict.fromkeys(connector.topics, "input"), connector.progress_topic: "progress"}


async def _describe(admin: Any, name: str, role: Role, known: Mapping[str, list[dict[str, Any]]]) -> Topic:
    partitions = known.get(name, [])
    leaderless = sum(each["leader"] < 0 for each in partitions)
    replicas = min((len(each["replicas"]) for each in partitions), default=0)
    topic = Topic(name, role, len(partitions), leaderless, replicas)
    try:
        (reply,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
        ((code, _, _, _, entries),) = reply.resources
    except _ERRORS:
        return topic
    return replace(topic, code=code, settings=None if code else {key: value for key, value, *_ in entries})


async def _group(admin: Any, name: str) -> str:
    try:
        (reply,) = await admin.describe_consumer_groups([name])
        code, _, state, _, _, members, *_ = reply.groups[0]
    except _ERRORS as error:
        return f"{name}{REFUSED}{type(error).__name__}"
    return f"{name}{REFUSED}{for_code(code).__name__}" if code else f"{name}: {state}, {len(members)} members"


async def _newest(settings: Mapping[str, Any], topic: Topic) -> Topic:
    """With the time of the newest record, which shows that it can be read."""
    options = {name: value for name, value in settings.items() if name != "bootstrap_servers"}
    times = [0]
    try:
        async with KafkaRange(settings["bootstrap_servers"], options=options) as reader:
            spans = await reader.spans([topic.name] if topic.partitions else [])
            for partition, span in spans.items():
                times += [each.ts_source_ns for each in await reader.newest(partition, span, 1)]
    except (BrokerError, KafkaError, OSError) as error:
        return replace(topic, unreadable=str(error))
    return replace(topic, newest_ns=max(times))


def judge_cluster(cluster: Cluster, held_ns: int, now: datetime) -> Iterator[Diagnosis]:
    """Whether the topics fit. ``held_ns``: event time that the longest window spans."""
    here = cluster.table
    if cluster.error:
        step = "start the broker, or correct bootstrap and security"
        yield Diagnosis(here, "problem", f"{cluster.bootstrap}: {cluster.error}", step, _GONE)
        return
    yield fine(here, f"{cluster.bootstrap} answers, {cluster.brokers} brokers")
    for topic in cluster.topics:
        yield from judge_topic(f"{here}[{topic.name}]", topic, held_ns, now)
    if "Authorization" in cluster.group:
        yield Diagnosis(
            f"{here}.group", "problem", cluster.group, "grant READ on the group (kafka-acls)", _ACL
        )
    elif cluster.group:
        yield (skipped if REFUSED in cluster.group else fine)(f"{here}.group", cluster.group)
    if any(topic.role == "output" for topic in cluster.topics):
        yield skipped(f"{here}.write", "whether this login may write is not tried: it would leave a record")


def judge_topic(check: str, topic: Topic, held_ns: int, now: datetime) -> Iterator[Diagnosis]:
    """Whether it is there, may be used, is kept for long enough, and has times like this machine's."""
    settings = topic.settings or {}
    error = for_code(topic.code).__name__ if topic.code and topic.code != UNKNOWN_TOPIC else ""
    seen, least = (
        f"{topic.partitions} partitions, {topic.replicas} replicas",
        settings.get("min.insync.replicas", "0"),
    )
    if not topic.partitions:
        if topic.role == "progress" and not error:
            yield fine(check, "is not there: it is created at the first start")
        else:
            step = "create it (kafka-topics), or let this login describe it (kafka-acls)"
            yield Diagnosis(
                check, "problem", error or "is not there, or this login may not see it", step, _ACL
            )
        return
    if topic.leaderless:
        seen = f"{seen}, {topic.leaderless} without a leader"
        yield Diagnosis(check, "problem", seen, "bring the brokers back that hold it", _GONE)
    elif topic.role == "output" and int(least) > topic.replicas:
        step = "add replicas, or lower min.insync.replicas: no write is acknowledged"
        yield Diagnosis(check, "problem", f"{seen}, min.insync.replicas {least}", step, _GONE)
    else:
        yield fine(check, seen)
    if topic.settings is None:
        step = "grant DESCRIBE_CONFIGS (kafka-acls)" if error else ""
        yield skipped(f"{check}.settings", error or "the broker does not say what they are", step)
    elif topic.role != "output":
        yield from _kept(check, topic.role, settings, held_ns)
    if topic.role == "input":
        yield _clock(f"{check}.newest", topic, now)


def _kept(check: str, role: Role, settings: Mapping[str, str], held_ns: int) -> Iterator[Diagnosis]:
    """Whether what a restart reads again is still there then."""
    policy, kept_ms = settings.get("cleanup.policy", ""), int(settings.get("retention.ms", "-1"))
    if role == "progress":
        step = "set compact: where quiet sessions stand is deleted by age"
        guide = "operations.md#where-sessions-stand"
    else:
        step, guide = "set delete: compaction removes records that windows need", "operations.md#recovery"
        limited = "delete" in policy and kept_ms >= 0
        kept = f"keeps {kept_ms / 1e3:,.0f} s" if limited else "keeps all records"
        seen = f"{kept}; the longest window spans up to {held_ns / 1e9:,.0f} s"
        longer = "raise retention.ms: without a snapshot, a window is read again from here"
        yield of_outcome(f"{check}.retention", not limited or kept_ms >= held_ns / 1e6, seen, longer, guide)
    good = ("compact" in policy) == (role == "progress")
    yield of_outcome(f"{check}.cleanup", good, f"cleanup.policy {policy}", step, guide)


def _clock(check: str, topic: Topic, now: datetime) -> Diagnosis:
    if topic.unreadable:
        return Diagnosis(check, "problem", topic.unreadable, "grant READ on it (kafka-acls)", _ACL)
    if not topic.newest_ns:
        return skipped(check, "there is no record yet, so no clock to compare with")
    of_broker = (topic.settings or {}).get("message.timestamp.type") == "LogAppendTime"
    whose, age_s = "the broker's" if of_broker else "a producer's", now.timestamp() - topic.newest_ns / 1e9
    seen = f"the newest record is {age_s:,.1f} s old by {whose} clock"
    step = f"synchronise {whose} clock, which is ahead, or this machine's"
    return of_outcome(check, age_s >= -MAX_AHEAD_S, f"{seen} (one that is behind cannot be seen so)", step)
