"""Daemons in one consumer group: each serves its partitions' sessions, and takes over the other's."""

import asyncio
import signal
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.partitioner import DefaultPartitioner
from msgspec.structs import replace

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, ErrorReply
from daemon.audit.completeness import Audit
from daemon.config.schema import UNTRAINED, Config, QueryConfig, RecoveryConfig, SinkConfig, SourceConfig
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.codec import decode_message
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.durations import Duration
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer
from tests.kit import SECOND, START, inproc_config, trade, until, until_slowly
from tests.kit.daemon import SYMBOLS, Daemon, Topics, kafka_toml
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics

pytestmark = pytest.mark.kafka
TRADES = 3
"""Of each symbol in a second, of those who trade for processes."""
Delivery = Literal["at_least_once", "exactly_once"]


class Group:
    """Daemons of one configuration, their market, and what they have published.

    Each has a transactional id of its own. The market trades both symbols, a second of event time after the
    other.
    """

    def __init__(self, kafka: RealKafka, snapshots: Path, delivery: Delivery = "at_least_once") -> None:
        self.kafka, self.snapshots, self.delivery = kafka, snapshots, delivery
        self.name = f"g{uuid.uuid4().hex[:8]}"
        self.gateways: list[Gateway] = []
        self.published: list[Answer] = []
        self.seconds = 0
        self.sink_of_market = KafkaSink("market", kafka.bootstrap)

    async def trade(self, seconds: int) -> None:
        for _ in range(seconds):
            for symbol in SYMBOLS.values():
                payload = trade(symbol, START + self.seconds * SECOND)
                await self.sink_of_market.publish(f"{self.name}.ticks", symbol.encode(), payload, {})
            self.seconds += 1

    def config(self, member: str, **query: object) -> Config:
        source = KafkaSourceConnector(
            self.kafka.bootstrap,
            (f"{self.name}.ticks",),
            f"{self.name}.group",
            instance=member,
            session_timeout=Duration(6 * SECOND),
        )
        return replace(
            inproc_config(SYMBOLS.values()),
            source=SourceConfig(kind="kafka", kafka=source, backlog_policy="wait"),
            sink=SinkConfig(kafka=self.sink(member)),
            recovery=RecoveryConfig(Duration(SECOND // 5), str(self.snapshots)),
            query=QueryConfig("tcp://127.0.0.1:*", **query),  # type: ignore[arg-type]  # a QueryConfig's
        )

    def sink(self, member: str) -> KafkaSinkConnector:
        found = KafkaSinkConnector(self.kafka.bootstrap, f"{self.name}.answers")
        if self.delivery == "at_least_once":
            return found
        return replace(found, delivery=self.delivery, transactional_id=f"{self.name}.{member}")

    async def join(self, member: str, **query: object) -> Gateway:
        gateway = make_gateway(self.config(member, **query), commit_every_s=0.1)
        self.gateways.append(gateway)
        await asyncio.wait_for(gateway.start(), 120)
        return gateway

    async def read(self) -> None:
        consumer = AIOKafkaConsumer(
            f"{self.name}.answers",
            bootstrap_servers=self.kafka.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            async for message in consumer:
                found = decode_message(message.value)
                if isinstance(found, Answer):
                    self.published.append(found)
        finally:
            await consumer.stop()

    def as_of(self, session: str) -> int:
        return max((answer.as_of for answer in self.published if answer.session == session), default=0)

    async def answered(self) -> None:
        """Wait until every session has all six answers about the newest closed bar."""
        newest = START + (self.seconds - 2) * SECOND

        def done() -> bool:
            found = {(a.session, a.question) for a in self.published if a.as_of >= newest}
            return len(found) == 6 * len(SYMBOLS)

        await until(done, 120.0)

    async def shared(self) -> None:
        """Wait until each daemon has one partition, and knows of the other's."""
        one, other = self.gateways[-2:]

        def split() -> bool:
            names = [session.name for session in one.config.sessions]
            known = [(one.input.owner(name), other.input.owner(name)) for name in names]
            return (
                all((a is None) != (b is None) for a, b in known) and len({a is None for a, _ in known}) == 2
            )

        await until(split, 120.0, "two owners")


@asynccontextmanager
async def grouped(made: Group) -> AsyncIterator[Group]:
    """The group with its topics and its market; its daemons are stopped at the end."""
    quiet_client_log()
    topics = {f"{made.name}.ticks": len(SYMBOLS), f"{made.name}.answers": 1}
    await create_topics(made.kafka.bootstrap, topics)
    await made.sink_of_market.start()
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        reading.cancel()
        for gateway in made.gateways:
            if not gateway.stopping:
                await gateway.stop()
        await made.sink_of_market.stop()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.fixture(params=["at_least_once", "exactly_once"])
async def group(
    request: pytest.FixtureRequest, real_kafka: RealKafka, tmp_path: Path
) -> AsyncIterator[Group]:
    async with grouped(Group(real_kafka, tmp_path, request.param)) as made:
        yield made


async def has_open(gateway: Gateway, *sessions: str) -> None:
    """Wait until these sessions, and no others, are open in a daemon: in gateway and engine."""

    def done() -> bool:
        names = {session.name for session in gateway.config.sessions}
        count = gateway.store.value("foretick_sessions_open")
        return names - gateway.live.closed(names) == set(sessions) and count == len(sessions)

    await until(done, 30.0, f"{sessions} open")


@pytest.mark.sampled(1)
async def test_sessions_move_between_daemons_and_questions_find_them(group: Group) -> None:
    first = await group.join("one")
    await has_open(first)
    await group.trade(5)
    await group.answered()
    await has_open(first, *SYMBOLS)
    second = await group.join("two", forward=False)
    await group.trade(3)
    await group.shared()
    await group.trade(3)
    await group.answered()
    names = [session.name for session in first.config.sessions]
    theirs = next(name for name in names if second.input.owner(name) is None)
    mine = next(name for name in names if name != theirs)
    await has_open(first, mine)
    await has_open(second, theirs)
    assert first.query is not None
    assert second.query is not None
    async with AsyncQueryClient(first.query.endpoint) as client:
        reply = await client.request(Answers(1, theirs))
        assert isinstance(reply, AnswersReply)
        assert {answer.as_of for answer in reply.answers} == {group.as_of(theirs)}
    async with AsyncQueryClient(second.query.endpoint) as client:
        refused = await client.request(Answers(2, mine))
        assert isinstance(refused, ErrorReply)
        assert (refused.code, refused.address) == ("moved", first.query.endpoint)
    await second.stop()
    await group.trade(3)
    await group.answered()  # the first one reads both again
    await until(lambda: first.input.owner(theirs) is None, 30.0)
    await has_open(first, *SYMBOLS)
    # not prefilled again: the other one left a snapshot where both keep theirs
    assert first.store.value("foretick_snapshots_restored_total", session=theirs) == 1
    assert first.store.value("foretick_snapshots_restored_total", session=mine) == 0
    audit = Audit(whole=True)
    for answer in group.published:
        audit.take(answer)
    assert not any(gateway.failed.done() for gateway in group.gateways), "none ends by itself"
    for each in audit.result():
        assert each.holds(exactly_once=group.delivery == "exactly_once"), each
        assert each.epochs > 1 or each.session == mine


def covered(answers: Iterable[Answer]) -> dict[str, list[int]]:
    """Offsets that a question's answers were read from, in the order of the answers."""
    found = defaultdict(list)
    for answer in answers:
        for each in answer.inputs:
            found[answer.question] += range(each.first_offset, each.last_offset + 1)
    return found


def seconds_answered(topics: Topics, name: str) -> int:
    return min((len(set(found)) for found in covered(topics.answers(name)).values()), default=0) // TRADES


def markets(partitions: int) -> dict[str, str]:
    """A symbol for each partition, by session."""
    found: dict[int, str] = {}
    for letter in "ABCDEFGHIJKLM":
        every = list(range(partitions))
        found.setdefault(DefaultPartitioner()(f"V:{letter * 3}".encode(), every, every), letter * 3)
    assert len(found) == partitions
    return {symbol.lower(): f"V:{symbol}" for symbol in found.values()}


async def trading(topics: Topics, symbols: Iterable[str], played: list[int], stop: asyncio.Event) -> None:
    """Whole seconds of trades, one every 400 ms or longer, until ``stop``; ``played`` holds their number."""
    while not stop.is_set():
        at = START + played[0] * SECOND
        trades = [trade(symbol, at + i * 1000, f"100.{i}5") for i in range(TRADES) for symbol in symbols]
        await topics.produce(zip([*symbols] * TRADES, trades, strict=True))
        played[0] += 1
        await asyncio.sleep(0.4)


@pytest.mark.timeout(900)
async def test_members_of_a_group_join_leave_and_are_killed(tmp_path: Path, real_kafka: RealKafka) -> None:
    """Each has a transactional id of its own. None ends by itself, and every answer is there once."""
    quiet_client_log()
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(real_kafka.bootstrap, {trades: 4, answers: 1, f"dlq.v1{suffix}": 1})
    sessions, played, stop = markets(4), [0], asyncio.Event()
    questions = ("up", "calm")

    def member(name: str) -> Daemon:
        more = {
            "model": f'path = "{UNTRAINED}"',
            "source": 'backlog_policy = "wait"',
            "source.kafka": 'session_timeout = "6s"',
            "sink.kafka": f'delivery = "exactly_once"\ntransactional_id = "daemon{suffix}.{name}"',
            "process": 'mode = "inproc"',
            "recovery": f'directory = "{tmp_path / "snapshots"}"\ninterval = "1s"',
        }
        config = kafka_toml(real_kafka.bootstrap, suffix, sessions, more, top='standing = "none"')
        for question in questions:  # a choice, for free text may be left out where the next bar is there
            config += f'\n[[questions]]\nname = "{question}"\ntext = "{question}?"\nchoices = ["Yes", "No"]'
        return Daemon(tmp_path / name, config)

    async with Topics(real_kafka.bootstrap, trades, answers) as topics:

        async def answered(running: Sequence[Daemon], seconds: int = 0) -> None:
            """Wait until all sessions have answers to what is played by now; so long none ends."""
            wanted = seconds or played[0]

            def look() -> bool:
                for each in running:
                    assert each.poll() is None, f"it ended with {each.poll()}:\n{each.log[-3000:]}"
                return all(seconds_answered(topics, name) >= wanted for name in sessions)

            await until_slowly(look, 180, f"{wanted} seconds of all sessions")

        async def shared(one: Daemon, other: Daemon) -> None:
            """Wait until both have partitions, which then move from the one to the other."""
            await until_slowly(lambda: all(holds(each) for each in (one, other)), 60, "two owners")

        with member("one") as one:
            await one.ready()
            market = asyncio.create_task(trading(topics, sessions.values(), played, stop))
            try:
                await answered([one])
                with member("two") as two:
                    await two.ready()
                    await shared(one, two)
                    await answered([one, two])
                    assert two.terminate(60) == 0, two.log[-3000:]
                await answered([one])
                with member("two") as two:
                    await two.ready()
                    await shared(one, two)
                    await answered([one, two])
                    one.signal(signal.SIGKILL)
                    one.wait(10)
                    await answered([two])
                    stop.set()
                    await market
                    await answered([two], played[0] - 1)
            finally:
                market.cancel()
        audit = Audit(whole=True)
        for message in topics.messages:
            if isinstance(message, Answer):
                audit.take(message)
        for name in sessions:
            asked = {each: [a for a in topics.answers(name) if a.question == each] for each in questions}
            for found in asked.values():
                times = [each.as_of for each in found]
                assert times == sorted(set(times)), f"{name}: a bar was answered twice, or late"
                # a version that begins with a bar of the daemon before has that one's records, too
                assert set(*covered(found).values()) == set(range((played[0] - 1) * TRADES))
        assert {each.session for each in audit.result()} == sessions.keys()
        for each in audit.result():
            assert each.holds(exactly_once=True), each


def holds(daemon: Daemon) -> bool:
    """Whether it has partitions."""
    return "foretick_consumer_lag_records{" in daemon.get("/metrics")[1]
