"""What `Checkpoint.commit` takes with either delivery, beside a bare client that stores the same."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter_ns
from typing import Literal, NamedTuple

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from bench.data.broker import TOPIC, embedded_broker
from bench.figures import Figure
from bench.run import SuiteRun
from daemon.gateway.checkpoint.checkpoint import Checkpoint
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from feeds.codec import encode
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.kafka_progress import TOPIC as PROGRESS
from feeds.kafka_source import KafkaSource
from feeds.kafka_transactions import KafkaTransactions
from feeds.market_data import Answer, Latency
from feeds.source import OutgoingMessage
from metrics.store import MetricStore

Delivery = Literal["at_least_once", "exactly_once"]
STREAM, ANSWERS = (TOPIC, 0), "answers.v1"
_WAIT_S = 30.0


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A version of one session of a partition, or of all, was answered: until the embedded broker has where
    they stand and the offset, and with exactly once the answers in the same transaction. Median of the
    repeats. The reference is a bare client that stores the same: aiokafka's producer and its consumer's
    commit, or its transaction.
    """
    repeats = run.sized(20, 2)
    for delivery in ("at_least_once", "exactly_once"):
        for sessions in run.sized((30, 300, 2000), (3,)):
            for changed in (1, sessions):
                ours, bare, size = uvloop.run(_measured(delivery, sessions, changed, repeats))
                at = {"delivery": delivery, "sessions": sessions, "of these answered": changed, "bytes": size}
                yield Figure("checkpoint", ours, "ms", "", {**at}, "bare client", bare, n=repeats)


class Answering(NamedTuple):
    """The parts of a gateway that store what is answered of `STREAM`."""

    checkpoint: Checkpoint
    source: KafkaSource
    tracker: OffsetTracker
    progress: ProgressStore
    outbox: Outbox

    def answer(self, names: Sequence[str], version: int) -> list[OutgoingMessage]:
        """A version of these sessions is answered, whose newest record is of this offset. Its messages."""
        self.tracker.passed_on(names[-1], STREAM, [version])
        messages = []
        for name in names:
            answer = _answer(name, version, sequence := self.progress.number(name))
            messages.append(OutgoingMessage(ANSWERS, name.encode(), encode(answer)))
            self.outbox.put(name, answer, name, {})
            self.outbox.complete(name, version)
            self.progress.acknowledge(name, version, [sequence], (version * 10**9,))
        self.tracker.acknowledge(names[-1], STREAM, version + 1)
        return messages


def _answer(session: str, version: int, sequence: int) -> Answer:
    return Answer(
        session=session, data_version=version, as_of=version * 10**9, symbol="V:AAA", question="trend",
        question_hash="4f2d", sequence=sequence, text="UP", model="m", model_revision="r", latency=Latency(),
        reused_tokens=400, computed_tokens=1,
    )  # fmt: skip


async def _measured(
    delivery: Delivery, sessions: int, changed: int, repeats: int
) -> tuple[float, float, int]:
    names, took, size = [f"session-{n}" for n in range(sessions)], list[tuple[int, int]](), 0
    with embedded_broker(1, ANSWERS, PROGRESS) as broker:
        async with _answering(broker, delivery, names) as ours, _bare(broker, delivery) as store:
            for version in range(1, repeats + 2):  # the first connects
                answers = ours.answer(names[:changed], version)
                points = ours.tracker.to_commit()
                messages = ours.source.records_of(points) + answers * (delivery == "exactly_once")
                ours.tracker.not_committed(points)
                began = perf_counter_ns()
                assert await ours.checkpoint.commit(_WAIT_S)
                committed = perf_counter_ns()
                await store(messages, version + 1)
                took.append((committed - began, perf_counter_ns() - committed))
                size = sum(len(each.key or b"") + len(each.payload or b"") for each in messages)
    ours_ms, bare_ms = (median(each) / 1e6 for each in zip(*took[1:], strict=True))
    return ours_ms, bare_ms, size


@asynccontextmanager
async def _answering(broker: str, delivery: Delivery, names: Sequence[str]) -> AsyncIterator[Answering]:
    store = MetricStore.local({"session": [*names], "source": ["kafka"], "sink": ["kafka"]})
    progress = ProgressStore(store)
    progress.start(names)
    tracker = OffsetTracker(progress.describe)
    source = KafkaSourceConnector(bootstrap=broker, topics=(TOPIC,)).open("kafka", 5.0)
    assert isinstance(source, KafkaSource)
    route = KafkaSinkConnector(bootstrap=broker, topic=ANSWERS, delivery="exactly_once").open("kafka", 5.0)
    sink = route.sink if delivery == "exactly_once" else None
    assert sink is None or isinstance(sink, KafkaTransactions)
    outbox = Outbox([route] if sink else [], names, store, lambda session: STREAM)
    checkpoint = Checkpoint(
        source, tracker, progress, outbox, Standby(store), store, lambda command: None,
        sink=sink, on_revoked=lambda partitions: None, is_held=lambda: False,
    )  # fmt: skip
    await source.start()
    reading = asyncio.create_task(_read(source))
    if sink is not None:
        await sink.start()
    while not source.membership or not source.membership.partitions:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.05)
    tracker.begin(STREAM, 0, 0, names)
    yield Answering(checkpoint, source, tracker, progress, outbox)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await source.stop()
    if sink is not None:
        await sink.stop()


async def _read(source: KafkaSource) -> None:
    async for _ in source.batches():
        pass


Store = Callable[[Sequence[OutgoingMessage], int], Awaitable[None]]
"""Stores messages, and the offset of `STREAM`."""


@asynccontextmanager
async def _bare(broker: str, delivery: Delivery) -> AsyncIterator[Store]:
    settings, partition = {"bootstrap_servers": broker}, TopicPartition(*STREAM)
    more = {"transactional_id": "bare"} if delivery == "exactly_once" else {"enable_idempotence": True}
    consumer = AIOKafkaConsumer(**settings, group_id="bare", enable_auto_commit=False)
    consumer.assign([partition])
    async with consumer, AIOKafkaProducer(**settings, **more, linger_ms=5) as producer:

        async def send(messages: Sequence[OutgoingMessage]) -> None:
            await asyncio.gather(*[await producer.send(m.topic, m.payload, m.key) for m in messages])

        async def one_after_the_other(messages: Sequence[OutgoingMessage], offset: int) -> None:
            await send(messages)
            await consumer.commit({partition: offset})

        async def in_one_transaction(messages: Sequence[OutgoingMessage], offset: int) -> None:
            async with producer.transaction():
                await send(messages)
                await producer.send_offsets_to_transaction({partition: offset}, "bare")

        yield in_one_transaction if delivery == "exactly_once" else one_after_the_other
