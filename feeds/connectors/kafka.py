"""`[source.kafka]` and `[sink.kafka]`."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from feeds.codec import MAX_BYTES
from feeds.connector import (
    Finding,
    SettingError,
    SinkConnector,
    SinkRoute,
    about,
    settings_in,
)
from feeds.durations import Duration
from feeds.kafka_security import KafkaSecurity
from feeds.payloads.settings import MessageSource
from feeds.source import Sink, Source
from feeds.timestamps import parse_instant

if TYPE_CHECKING:
    from feeds.kafka_start import StartAt
    from feeds.topic_sample import TopicSample


class KafkaSourceConnector(MessageSource, frozen=True):
    """A member of a consumer group. Back-pressure pauses its partitions."""

    rereads: ClassVar[bool] = True
    bootstrap: Annotated[str, about("brokers, host:port, comma separated", min_length=1)]
    topics: Annotated[tuple[str, ...], about("topics read", min_length=1)] = ("md.trades.v1",)
    group: Annotated[str, about("consumer group", min_length=1)] = "foretick"
    progress_topic: Annotated[
        str,
        about(
            "compacted topic that keeps where each session stands; it is created where there is none",
            min_length=1,
        ),
    ] = "foretick.progress.v1"
    instance: Annotated[
        str,
        about(
            "name of this member of the group, one for each daemon: with it, one that died and is back "
            "within session_timeout has its partitions as before (static membership)"
        ),
    ] = ""
    session_timeout: Annotated[
        Duration, about("how long a daemon may be gone before others take its partitions")
    ] = Duration(10_000_000_000)
    client_id: Annotated[str, about("client name that the broker shows", min_length=1)] = "foretick"
    max_records: Annotated[int, about("most records to fetch at a time", ge=1)] = 2000
    security: KafkaSecurity = KafkaSecurity()
    on_unreadable: Annotated[
        Literal["skip", "stop"],
        about(
            "what to do at a batch that cannot be read, because it is damaged or packed by an unknown codec: "
            "skip (a DLQ record without a payload names its offsets) or stop (the daemon ends, and "
            "names them)"
        ),
    ] = "skip"
    start_at: Annotated[
        str,
        about(
            "where a start begins to read: committed (go on from the committed offset, with the windows that "
            "there were: their records are read again, unanswered; earliest if nothing is committed), "
            "latest, earliest, retention (just far enough back to fill the windows), or a time with a zone, "
            "such as 2026-03-02T14:30:00Z"
        ),
    ] = "committed"

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A consumer that commits only on request."""
        membership = {
            "group_instance_id": self.instance or None,
            "session_timeout_ms": self.session_timeout // 1_000_000,
            "heartbeat_interval_ms": max(1, self.session_timeout // 4_000_000),
        }
        return self._source(name, stop_timeout_s, self.group, self.start_at, membership)

    def listen(self, name: str, stop_timeout_s: float) -> Source:
        """A consumer of what comes from now on, which is a member of no group."""
        return self._source(name, stop_timeout_s, None, "latest", {})

    def _source(
        self, name: str, stop_timeout_s: float, group: str | None, start_at: str, options: dict[str, Any]
    ) -> Source:
        from feeds.kafka_source import KafkaSource

        return KafkaSource(
            name,
            self.bootstrap,
            list(self.topics),
            group,
            max_records=self.max_records,
            stop_timeout_s=stop_timeout_s,
            start_at=_start_at(start_at),
            on_unreadable=self.on_unreadable,
            options={"client_id": self.client_id, **options},
            security=_options(self.security),
            progress_topic=self.progress_topic,
        )

    def sample(self) -> "TopicSample":
        """The symbols of the topics' newest records, by partition. Raises BrokerError, SettingError."""
        from feeds.topic_sample import sample_topics

        options = _options(self.security)
        return asyncio.run(
            sample_topics(self.bootstrap, self.topics, self.payloads(MAX_BYTES), options=options)
        )

    def check(self) -> Iterator[Finding]:
        """The broker answers and has the topics; the start and packed batches can be read."""
        try:
            _start_at(self.start_at)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)
        from feeds.kafka_batches import broken_codecs

        for name, why in broken_codecs().items():
            yield Finding("codecs", f"batches packed by {name} cannot be read: {why}", ok=False)
        yield from self.check_formats()
        yield from _topics(self.bootstrap, self.topics, self.security)
        yield from _progress(self.bootstrap, self.progress_topic, self.security)


class KafkaSinkConnector(SinkConnector, frozen=True):
    """Publishes answers to Kafka with an idempotent producer."""

    bootstrap: Annotated[str, about("brokers, host:port, comma separated", min_length=1)]
    topic: Annotated[str, about("topic for answers", min_length=1)] = "answers.v1"
    dlq: Annotated[str, about("topic for records that could not be read", min_length=1)] = "dlq.v1"
    events: Annotated[str, about('topic for data_updated and flash_ready events; "" sends none')] = ""
    signals: Annotated[str, about('topic for signals (`[[signals]]`); "" sends none')] = ""
    security: KafkaSecurity = KafkaSecurity()
    delivery: Annotated[
        Literal["at_least_once", "exactly_once"],
        about(
            "at_least_once: after a failure answers may come twice, with the same `answer_id`. exactly_once: "
            "answers and the offsets they cover are committed in one transaction; needs one Kafka source, on "
            "the same brokers, and readers that read committed messages only"
        ),
    ] = "at_least_once"
    transactional_id: Annotated[
        str,
        about(
            "exactly_once: name of this daemon's transactions; the same after a restart, and for one that "
            "is a standby for it (recovery.standby); another one for every other daemon of a group",
            min_length=1,
        ),
    ] = "foretick"

    def open(self, name: str, stop_timeout_s: float) -> SinkRoute:
        """An idempotent producer, or a transactional one."""
        sink = (
            self._transactions(name) if self.delivery == "exactly_once" else self._sink(name, stop_timeout_s)
        )
        return SinkRoute(sink, self.topic, self.events, self.dlq, self.events, self.signals)

    def _sink(self, name: str, stop_timeout_s: float) -> Sink:
        from feeds.kafka_sink import KafkaSink

        return KafkaSink(name, self.bootstrap, stop_timeout_s=stop_timeout_s, options=_options(self.security))

    def _transactions(self, name: str) -> Sink:
        try:
            from feeds.librdkafka import LibrdkafkaProducer, StableOffsets, check_group_metadata
        except ImportError as error:
            needs = "exactly_once needs confluent-kafka: pip install 'foretick[exactly-once]'"
            raise SettingError("delivery", f"{needs} ({error})") from error
        from feeds.kafka_transactions import KafkaTransactions

        with settings_in("security"):
            options = self.security.librdkafka_options()
        try:
            check_group_metadata()
        except RuntimeError as error:
            raise SettingError("delivery", str(error)) from error
        return KafkaTransactions(
            name,
            self.bootstrap,
            self.transactional_id,
            (self.topic, 0),
            partial(LibrdkafkaProducer, self.bootstrap, self.transactional_id, options),
            StableOffsets(self.bootstrap, options),
        )

    def check(self) -> Iterator[Finding]:
        """The broker answers and has the topics."""
        topics = tuple(filter(None, (self.topic, self.dlq, self.events, self.signals)))
        return _topics(self.bootstrap, topics, self.security)


def _options(security: KafkaSecurity) -> dict[str, Any]:
    """Options of a client. Raises SettingError."""
    with settings_in("security"):
        return security.client_options()


def _start_at(text: str) -> "StartAt":
    """Raises SettingError."""
    if text in ("committed", "latest", "earliest", "retention"):
        return cast("StartAt", text)
    try:
        return int(parse_instant(text))
    except ValueError as error:
        names = "committed, latest, earliest, retention"
        raise SettingError("start_at", f"neither one of {names} nor a time with a zone: {error}") from None


def _topics(bootstrap: str, topics: tuple[str, ...], security: KafkaSecurity) -> Iterator[Finding]:
    from feeds.kafka_client import BrokerError, missing_topics

    secured = list(security.check())
    yield from secured
    if not all(finding.ok for finding in secured):
        return
    try:
        missing = asyncio.run(missing_topics(bootstrap, topics, options=security.client_options()))
    except BrokerError as error:
        yield Finding("bootstrap", str(error), ok=False)
        return
    yield Finding("bootstrap", f"{bootstrap} answers")
    for topic in topics:
        there = topic not in missing
        yield Finding("topic", f"{topic} {'exists' if there else 'does not exist'}", ok=there)


def _progress(bootstrap: str, topic: str, security: KafkaSecurity) -> Iterator[Finding]:
    """The topic of progress keeps the newest record of each session. Nothing where no broker answers."""
    from feeds.kafka_progress import is_compacted

    try:
        settings = {"bootstrap_servers": bootstrap, **security.client_options()}
        found = asyncio.run(is_compacted(settings, topic))
    except (OSError, RuntimeError, SettingError):  # reported already
        return
    if found is None:
        yield Finding("progress_topic", f"{topic} is not there: it is created at the first start")
    elif not found:
        why = "cleanup.policy is not compact: where quiet sessions stand is deleted by age"
        yield Finding("progress_topic", f"{topic}: {why}", ok=False)


SOURCE, SINK = KafkaSourceConnector, KafkaSinkConnector
