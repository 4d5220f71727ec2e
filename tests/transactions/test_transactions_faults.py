"""Each record once and in order, whatever happens to a transaction's requests."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from aiokafka import TopicPartition

from feeds.kafka_client import quiet_client_log
from feeds.kafka_source import KafkaSource
from feeds.kafka_transactions import (
    Fenced,
    GroupOffsets,
    MessagesRefused,
    OutgoingMessage,
    PartitionsMoved,
    TransactionFailed,
)
from feeds.librdkafka import check_group_metadata
from feeds.source import CommitPoint, Membership, PublishRefused
from tests.kit import until
from tests.kit.kafka import KafkaServer, create_topics, producing
from tests.kit.kafka_proxy import Act, Api, Fault, KafkaProxy
from tests.transactions.copying import RIGHT, TIMEOUT_S, Copy, Verdict, hanging, librdkafka

pytestmark = pytest.mark.kafka

EXPIRY_S = 4.0


APIS = (
    Api.END_TXN,
    Api.TXN_OFFSET_COMMIT,
    Api.ADD_OFFSETS,
    Api.ADD_PARTITIONS,
    Api.PRODUCE,
    Api.INIT_PRODUCER_ID,
)
SHARE = 0.3
ACTS: tuple[Act, ...] = ("delay", "drop", "drop_reply", "duplicate", "cut", "cut_after")


class Requests:
    """Faults of requests, in a share of the transactions."""

    def __init__(self, proxy: KafkaProxy, seed: int) -> None:
        self._faults, self._random = proxy.faults, random.Random(seed)

    def __call__(self, _number: int) -> None:
        if self._random.random() < SHARE:
            seconds = self._random.choice((0.2, 1.0, TIMEOUT_S + 1.0))
            self._faults.append(Fault(self._random.choice(APIS), self._random.choice(ACTS), seconds))


async def killed_now_and_then(copy: Copy, seed: int, kills: int, before: Requests) -> None:
    """Run it to the end; ``kills`` times the process is killed at some moment and started again."""
    choice = random.Random(seed)
    for _ in range(kills):
        task = asyncio.create_task(copy.run(before))
        await asyncio.wait([task], timeout=choice.uniform(0.2, 2.0))
        copy.outcomes["killed"] += not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError, Fenced, PartitionsMoved):
            await task
    await copy.run_to_the_end(before)


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    """Several offsets partitions: each group may have another coordinator's partition."""
    quiet_client_log()
    more = {
        "offsets.topic.num.partitions": 8,
        "transactional.id.expiration.ms": int(EXPIRY_S * 1000),
        "transaction.remove.expired.transaction.cleanup.interval.ms": 1000,
    }
    with KafkaServer(more=more) as running:
        yield running


@pytest.fixture
async def proxy(server: KafkaServer) -> AsyncIterator[KafkaProxy]:
    proxy = KafkaProxy(server.proxy_port, server.behind_port)
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def copy(server: KafkaServer, proxy: KafkaProxy) -> Copy:
    copy = Copy(server, uuid.uuid4().hex[:8], records=120)
    await copy.prepare()
    return copy


def test_our_group_metadata_is_the_library_s() -> None:
    check_group_metadata()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("api", "act", "seconds"),
    [
        (Api.END_TXN, "delay", TIMEOUT_S + 1),
        (Api.END_TXN, "drop", 0),
        (Api.END_TXN, "drop_reply", 0),
        (Api.END_TXN, "duplicate", 0),
        (Api.END_TXN, "cut_after", 0),
        (Api.TXN_OFFSET_COMMIT, "drop", 0),
        (Api.TXN_OFFSET_COMMIT, "delay", TIMEOUT_S + 1),
        (Api.ADD_OFFSETS, "drop_reply", 0),
        (Api.PRODUCE, "duplicate", 0),
        (Api.PRODUCE, "delay", TIMEOUT_S + 1),
    ],
)
async def test_a_fault_of_one_request(
    copy: Copy, proxy: KafkaProxy, api: Api, act: Act, seconds: float
) -> None:
    def before(number: int) -> None:
        if number == 3:
            proxy.faults.append(Fault(api, act, seconds))

    await copy.run_to_the_end(before)
    assert sum(proxy.applied.values()) == 1
    assert Verdict.of(await copy.read(), copy.records) == RIGHT
    assert copy.outcomes["committed"] == 6
    if (api, act) == (Api.END_TXN, "drop_reply"):  # it took effect, and was not sent again
        assert copy.outcomes["unknown"] == 1
        assert copy.outcomes["aborted"] == 0
    if api is Api.TXN_OFFSET_COMMIT:
        assert copy.outcomes["aborted"] >= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(60))
async def test_random_faults_and_kills(server: KafkaServer, proxy: KafkaProxy, copy: Copy, seed: int) -> None:
    await killed_now_and_then(copy, seed, kills=2, before=Requests(proxy, seed))
    assert not copy.outcomes["hung"]
    assert Verdict.of(await copy.read(), copy.records) == RIGHT
    if seed % 12 == 0:
        assert hanging(server) == []


async def test_a_second_process_with_this_id_ends_the_first_one(copy: Copy) -> None:
    first, second = copy.sink(), copy.sink()
    await first.start()
    await second.start()
    with pytest.raises(Fenced, match="transactional id"):
        await first.commit([OutgoingMessage(copy.output, None, b"0")], {}, copy.member)
    await second.commit([OutgoingMessage(copy.output, None, b"1")], {}, copy.member)
    await first.stop()
    await second.stop()
    assert await copy.read() == [1]


async def test_a_member_that_lost_its_partitions_commits_nothing(server: KafkaServer, copy: Copy) -> None:
    """Its process was stopped past the session's time; another one reads its partition since."""
    topic, group = copy.input[0], copy.member().group

    async def read(source: KafkaSource) -> None:
        async for _ in source.batches():
            pass

    def member(source: KafkaSource) -> Membership:
        found = source.membership
        assert found is not None
        return found

    def source() -> KafkaSource:
        return KafkaSource("in", server.bootstrap, [topic], group, poll_ms=50)

    first, second = source(), source()
    await first.start()
    reading = [asyncio.create_task(read(first))]
    await until(lambda: first.membership is not None and bool(first.membership.partitions))
    zombie = member(first)
    assert zombie.partitions == {copy.input}
    await first.stop()
    await second.start()
    reading.append(asyncio.create_task(read(second)))
    await until(lambda: second.membership is not None and bool(second.membership.partitions))
    producer = librdkafka(server.bootstrap, "zombie")
    await producer.open()
    with pytest.raises(TransactionFailed, match=r"UNKNOWN_MEMBER_ID|ILLEGAL_GENERATION"):
        await producer.transact(
            [OutgoingMessage(copy.output, None, b"0")], [GroupOffsets(zombie, {copy.input: CommitPoint(5)})]
        )
    await producer.close()
    again = librdkafka(server.bootstrap, "zombie")
    await again.open()  # ends what the first one left open, for which readers would wait
    await again.close()
    sink = copy.sink()
    await sink.start()
    await sink.commit(
        [OutgoingMessage(copy.output, None, b"1")], {copy.input: CommitPoint(7)}, lambda: member(second)
    )
    assert await copy.committed(sink) == 7
    elsewhere = ("elsewhere", 0)
    with pytest.raises(PartitionsMoved, match="elsewhere/0"):
        await sink.commit([], {elsewhere: CommitPoint(1)}, lambda: member(second))
    await sink.stop()
    await second.stop()
    await asyncio.gather(*reading)
    assert await copy.read() == [1]


async def test_a_refused_message_is_named_and_the_rest_can_be_committed(copy: Copy) -> None:
    sink = copy.sink()
    await sink.start()
    messages = [
        OutgoingMessage(copy.output, None, b"0"),
        OutgoingMessage("nowhere.v1", None, b"1"),
        OutgoingMessage(copy.output, None, b"2"),
    ]
    with pytest.raises(MessagesRefused) as refused:
        await sink.commit(messages, {copy.input: CommitPoint(3)}, copy.member)
    assert refused.value.reasons == {1: "no_topic"}
    assert await copy.committed(sink) == 0
    await sink.commit([messages[0], messages[2]], {copy.input: CommitPoint(3)}, copy.member)
    assert await copy.committed(sink) == 3
    with pytest.raises(PublishRefused, match="nknown topic"):
        await sink.publish("nowhere.v1", None, b"1", {})
    await sink.stop()
    assert await copy.read() == [0, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("taken", [False, True])
async def test_idle_past_the_expiry_of_the_id(server: KafkaServer, copy: Copy, taken: bool) -> None:
    """The broker forgets the id, as after a power loss: the process goes on, unless another one has."""
    sink = copy.sink()
    await sink.start()
    await sink.commit([OutgoingMessage(copy.output, None, b"0")], {copy.input: CommitPoint(1)}, copy.member)
    await asyncio.sleep(EXPIRY_S + 3)
    messages, points = [OutgoingMessage(copy.output, None, b"1")], {copy.input: CommitPoint(2)}
    if taken:
        other = copy.sink()
        await other.start()
        await other.commit(messages, points, copy.member)
        with pytest.raises(Fenced, match="another process has"):
            await sink.commit([OutgoingMessage(copy.output, None, b"2")], points, copy.member)
        await other.stop()
    else:
        await sink.commit(messages, points, copy.member)
        assert sink.outcomes["aborted"] == 1
        assert await copy.committed(sink) == 2
    await sink.stop()
    assert await copy.read() == [0, 1]
    assert hanging(server) == []


async def test_a_transaction_that_hangs_is_found() -> None:
    """No coordinator knows of it, as where a late request reaches a broker that does not verify it."""
    with KafkaServer(more={"transaction.partition.verification.enable": "false"}) as server:
        topic = "hanging"
        await create_topics(server.bootstrap, {topic: 1})
        async with producing(server.bootstrap, transactional_id="hanging") as producer:
            await producer.begin_transaction()
            # as if the coordinator had been told
            producer._txn_manager._txn_partitions.add(TopicPartition(topic, 0))
            await producer.send_and_wait(topic, b"0", partition=0)
        assert [each.split()[:2] for each in hanging(server)] == [[topic, "0"]]
