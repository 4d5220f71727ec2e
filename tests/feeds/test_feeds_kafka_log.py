"""What a Kafka source's log keeps for its reader: offsets with records, across starts and rebalances."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError

from feeds import kafka_member
from feeds.kafka_source import KafkaSource
from feeds.source import CommitFailed, CommitPoint, Incoming, LogSource, Partition, StartPosition
from tests.kit import until
from tests.kit.kafka import producing
from tests.kit.kafka_clients import KafkaClients
from tests.kit.records import TOPIC as T

two_partitions = pytest.mark.parametrize("broker", [2], indirect=True)


def record(text: str) -> dict[str, bytes]:
    """The records that a reader commits."""
    return {"writer/session": text.encode()}


class Notes:
    """A reader that notes what it learns, and commits what it has read, with a record."""

    def __init__(
        self,
        source: KafkaSource,
        text: str,
        begin: Mapping[Partition, StartPosition] | None = None,
        *,
        commits: bool = True,
    ) -> None:
        self.source, self.text, self.begin, self.commits = source, text, begin or {}, commits
        self.warm = True
        self.stored: dict[Partition, CommitPoint] = {}
        self.began: dict[Partition, int] = {}
        self.gone: list[Partition] = []
        self.made_anew: list[Partition] = []
        self.got: list[Incoming] = []
        self.followed: dict[Partition, CommitPoint] = {}
        self.came: dict[Partition, bool] = {}
        """Partitions that others had, and whether those handed them over."""
        source.set_rebalance_listener(self)

    def claims(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, CommitPoint]:
        return {}

    async def on_assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        self.stored.update(stored)
        return self.begin

    def truncated(self, partitions: Collection[Partition]) -> None:
        self.made_anew += partitions

    def answered_elsewhere(self, stored: Mapping[Partition, CommitPoint]) -> set[Partition]:
        return {
            partition for partition, point in stored.items() if point.state not in ({}, record(self.text))
        }

    def begins(self, partition: Partition, start: int) -> None:
        self.began[partition] = start

    async def commit(self) -> bool:
        read = {(m.topic, m.partition): CommitPoint(m.offset + 1, record(self.text)) for m in self.got}
        owned = {p: point for p, point in read.items() if p not in self.gone and self.commits}
        try:
            if owned:
                await self.source.commit(owned)
        except CommitFailed:
            return False
        return True

    def on_revoked(self, partitions: Collection[Partition]) -> None:
        self.gone += partitions

    async def follows(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        self.followed.update(stored)
        return self.begin

    def follows_no_longer(self, partitions: Collection[Partition]) -> None:
        for each in partitions:
            del self.followed[each]

    def is_level(self) -> bool:
        return True

    def is_warm(self) -> bool:
        return self.warm

    def costs(self) -> Mapping[Partition, float]:
        return {}

    def handed_over(self, partition: Partition, *, planned: bool, silent_ns: int) -> None:
        self.came[partition] = planned

    async def read(self) -> None:
        async for batch in self.source.batches():
            self.got += batch

    @classmethod
    async def open(cls, kafka: KafkaClients) -> Notes:
        """Of a started source of the group "g", which is read."""
        notes = cls(kafka.source("g"), "text")
        await notes.source.start()
        kafka.run(notes.read())
        return notes


async def produce(bootstrap: str, topic: str, count: int, partitions: int = 1) -> None:
    async with producing(bootstrap) as producer:
        for n in range(count):
            await producer.send_and_wait(topic, str(n).encode(), partition=n % partitions)


async def test_the_embedded_broker_keeps_texts_and_begins_again_before_what_is_committed(
    kafka: KafkaClients,
) -> None:
    """It knows no offsets by time, so a window reaches back to its first record."""
    await produce(kafka.bootstrap, T, 9)
    first = kafka.source("g")
    assert isinstance(first, LogSource)
    assert await first.stored() == {}
    first.set_retention(10**9, skips=True)
    notes = Notes(first, "text")
    await first.start()
    kafka.run(notes.read())
    await until(lambda: len(notes.got) == 9)
    assert (notes.stored, notes.began) == ({(T, 0): CommitPoint(0)}, {(T, 0): 0})
    notes.got = notes.got[:6]
    await notes.commit()
    await first.stop()
    wanted = (None, StartPosition(4), StartPosition(9), StartPosition(4, lookback_end=4))
    for begin, expected in zip(wanted, (0, 4, 6, 0), strict=True):
        again = kafka.source("g")
        again.set_retention(10**9, skips=False)
        assert await again.stored() == {(T, 0): CommitPoint(6, record("text"))}
        notes = Notes(again, "other", {(T, 0): begin} if begin else {}, commits=False)
        await again.start()
        kafka.run(notes.read())
        await until(lambda notes=notes, n=expected: len(notes.got) == 9 - n)
        assert notes.stored == {(T, 0): CommitPoint(6, record("text"))}
        assert notes.began == {(T, 0): expected}, "never behind what is committed"
        await again.stop()


async def test_a_member_reads_again_without_leaving_its_group(kafka: KafkaClients) -> None:
    """As after the end of an engine: from what is committed, in the same generation."""
    await produce(kafka.bootstrap, T, 9)
    source = kafka.source("g")
    assert not source.stays, "it has not joined"
    notes = Notes(source, "text")
    await source.start()
    reading = asyncio.ensure_future(notes.read())
    await until(lambda: len(notes.got) == 9)
    before = source.membership
    await source.commit({(T, 0): CommitPoint(6, record("text"))})
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert source.stays
    notes = Notes(source, "text")
    await source.start()
    kafka.run(notes.read())
    await until(lambda: len(notes.got) == 3)
    assert [message.offset for message in notes.got] == [6, 7, 8]
    assert (notes.stored, notes.began) == ({(T, 0): CommitPoint(6, record("text"))}, {(T, 0): 6})
    assert source.membership == before


@pytest.mark.parametrize("answered", [True, False])
async def test_a_partition_that_others_answered_before_it_came_back_is_begun_anew(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """aiokafka keeps the assignment until the next one: a loss in between is told by what is committed."""
    await produce(kafka.bootstrap, T, 9)
    notes = await Notes.open(kafka)
    source = notes.source
    await until(lambda: len(notes.got) == 9)
    await notes.commit()
    before, consumer = source.membership, source._consumer
    assert before is not None
    assert consumer is not None
    notes.began.clear()
    point = CommitPoint(7, record("others")) if answered else CommitPoint(5, record("text"))

    async def committed(*_: object) -> dict[TopicPartition, CommitPoint]:
        return {TopicPartition(T, 0): point}

    monkeypatch.setattr("feeds.kafka_member.KafkaMember.committed", committed)
    consumer._coordinator.request_rejoin()
    await until(lambda: getattr(source.membership, "generation", 0) > before.generation)
    await until(lambda: getattr(source.membership, "partitions", ()) == before.partitions)
    await produce(kafka.bootstrap, T, 1)
    await until(lambda: notes.got[-1].offset == 9)
    again = [7, 8, 9] if answered else [9]
    assert [message.offset for message in notes.got] == [*range(9), *again]
    assert notes.began == ({(T, 0): 7} if answered else {})


@two_partitions
async def test_a_partition_that_others_may_have_had_is_ours_once_it_is_known_what_they_answered(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with one assignment, comes back with the next, and only then do we read on."""
    source = await kafka.open_source("g")
    notes = Notes(source, "text")
    reading = asyncio.ensure_future(notes.read())
    both = frozenset({(T, 0), (T, 1)})
    await until(lambda: source.membership is not None and source.membership.partitions == both)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    notes.began.clear()
    consumer = source._consumer
    assert consumer is not None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(consumer, "assignment", lambda: {TopicPartition(T, 0)})
        await source._member.joined(consumer)
        assert source.membership is not None
        assert source.membership[-2:] == ({(T, 0)}, frozenset())
    await source._member.joined(consumer)
    assert source.membership[-2:] == ({(T, 0)}, {(T, 1)})
    kafka.run(notes.read())
    await until(lambda: source.membership is not None and source.membership.partitions == both)
    assert source.membership.placing == frozenset()
    assert notes.began == {(T, 1): 0}


async def test_the_broker_s_time_is_not_used_up_by_its_listener(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may bring many sessions back before a partition is read."""
    monkeypatch.setattr(kafka_member, "PLACE_S", 2.0)
    monkeypatch.setattr(kafka_member, "PLACE_EACH_S", 0.0)
    await produce(kafka.bootstrap, T, 3)
    calls = 0

    async def slowly(_: Notes, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(2.5)
        return {}

    monkeypatch.setattr(Notes, "on_assigned", slowly)
    notes = await Notes.open(kafka)
    await until(lambda: len(notes.got) == 3)
    assert (calls, notes.source.connection.retries) == (1, 0)


class Claiming(Notes):
    """It stores whose partitions are before it begins them."""

    def __init__(self, kafka: KafkaClients, text: str = "ours") -> None:
        super().__init__(kafka.source("g", poll_ms=50), text)
        self._kafka, self.claimed, self.found = kafka, 0, dict[Partition, CommitPoint]()

    def claims(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, CommitPoint]:
        self.claimed += 1
        return {
            p: CommitPoint(each.offset, {**each.state, **record(self.text)}) for p, each in stored.items()
        }

    async def on_assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        self.found.update(await self._kafka.source("g").stored())
        return await super().on_assigned(stored)


async def test_whose_a_partition_is_is_stored_before_anything_of_it_begins(kafka: KafkaClients) -> None:
    await produce(kafka.bootstrap, T, 3)
    notes = Claiming(kafka)
    await notes.source.start()
    kafka.run(notes.read())
    await until(lambda: len(notes.got) == 3)
    assert notes.found == {(T, 0): CommitPoint(0, record("ours"))}
    assert (notes.stored, notes.claimed) == ({(T, 0): CommitPoint(0)}, 1)


async def test_a_partition_does_not_begin_while_the_broker_refuses_to_store_whose_it_is(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to a member that was left behind, while another one has begun."""
    await produce(kafka.bootstrap, T, 3)
    notes = Claiming(kafka)
    refused = True
    commit = AIOKafkaConsumer.commit

    async def left_behind(self: AIOKafkaConsumer, offsets: object) -> None:
        if refused:
            raise CommitFailedError
        await commit(self, offsets)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", left_behind)
    await notes.source.start()
    kafka.run(notes.read())
    await until(lambda: notes.claimed > 2)
    assert (notes.stored, notes.began, notes.got) == ({}, {}, [])
    refused = False
    await until(lambda: len(notes.got) == 3)


async def test_a_new_generation_has_no_partitions_until_they_are_assigned(kafka: KafkaClients) -> None:
    source = (await Notes.open(kafka)).source
    await until(lambda: source.membership is not None and bool(source.membership.partitions))
    consumer = source._consumer
    assert consumer is not None
    consumer._coordinator.generation += 1  # what the coordinator does when it has joined
    assert source.membership is None
    consumer._coordinator.generation -= 1


@two_partitions
async def test_partitions_that_went_elsewhere_while_the_client_was_opened_again_are_told(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = await Notes.open(kafka)
    source = notes.source
    await until(lambda: len(notes.began) == 2)
    again = source._open

    async def opened() -> None:
        await again()
        monkeypatch.setattr(source._consumer, "assignment", lambda: {TopicPartition(T, 0)})

    def fails(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(source, "_open", opened)
        raise KafkaError("cannot go on")

    notes.began.clear()
    monkeypatch.setattr(source._reading, "next", fails)
    await until(lambda: bool(notes.began))
    assert (notes.gone, notes.began) == ([(T, 1)], {(T, 0): 0})


@pytest.mark.kafka
async def test_a_topic_of_transactions_is_committed_to_its_end(real: KafkaClients) -> None:
    """Its last offsets are marks, which are no records; a start looks for a record before them."""
    topic = real.topic
    async with producing(real.bootstrap, transactional_id=topic) as producer:
        for n in range(4):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, str(n).encode(), partition=0)
            await (producer.abort_transaction() if n == 1 else producer.commit_transaction())
        for _ in range(3):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"never", partition=0)
            await producer.abort_transaction()
    source = real.source(topic, poll_ms=50)
    notes = Notes(source, "")
    await source.start()
    real.run(notes.read())
    await until(lambda: len(notes.got) == 3)
    await until(lambda: source.reached[topic, 0] == (7, 14))
    await until(lambda: (topic, 0) in source.lags)
    assert source.lags[topic, 0].records == 0
    assert [m.offset for m in notes.got] == [0, 4, 6]
    await source.commit({(topic, 0): CommitPoint(14, record("all of it"))})
    await source.stop()
    again = real.source(topic, poll_ms=50)
    again.set_retention(3600 * 10**9, skips=False)
    notes = Notes(again, "")
    await again.start()
    real.run(notes.read())
    await until(lambda: len(notes.got) == 3)
    assert notes.stored == {(topic, 0): CommitPoint(14, record("all of it")), (topic, 1): CommitPoint(0)}
    assert notes.began[topic, 0] == 0


@pytest.mark.kafka
async def test_what_was_read_is_committed_before_another_member_takes_the_partition(
    real: KafkaClients,
) -> None:
    await produce(real.bootstrap, real.topic, 40, partitions=2)
    sources = [real.source(real.topic, name=name, poll_ms=50) for name in ("a", "b")]
    one, two = (Notes(source, source.name) for source in sources)
    await sources[0].start()
    real.run(one.read())
    await until(lambda: len(one.got) == 40)
    assert await sources[1].stored() == {}, "nothing is committed yet"
    await sources[1].start()
    real.run(two.read())
    await until(lambda: two.began)
    (taken,) = two.stored
    assert two.stored == {taken: CommitPoint(20, record("a"))}
    assert two.began == {taken: 20}
    await until(lambda: one.gone == [taken])
    await produce(real.bootstrap, real.topic, 2, partitions=2)
    await until(lambda: len(one.got) + len(two.got) >= 42)
    assert [(m.partition, m.offset) for m in two.got] == [(taken[1], 20)]
