"""A warm standby: it reads behind the daemon that answers, and goes on where that left off."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon import protocol
from daemon.api.client import AsyncQueryClient
from daemon.api.health import STANDBY
from daemon.api.messages import Answers, AnswersReply, ErrorReply
from daemon.audit.completeness import Audit
from daemon.config.schema import Config
from daemon.gateway.gateway import Gateway
from daemon.gateway.group_member import GroupMember
from daemon.progress import Progress
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from tests.chaos.checks import by_key, different, gaps, key_of, repeats
from tests.chaos.feed import TRADES, as_of, bar
from tests.chaos.reading import Published, read_to_end
from tests.chaos.rig import NAMES
from tests.e2e.test_e2e_group import Group, Market
from tests.kit import MemorySink, QueueSource, inproc_config, until, until_slowly
from tests.kit.daemon import Daemon
from tests.kit.fixtures import RealKafka
from tests.kit.inproc import Tape, running
from tests.kit.kafka import create_topics, free_ports

SYMBOLS = {"aaa": "V:AAA", "bbb": "V:BBB"}
"""One in each of two partitions."""


class Pair(Group):
    """Standby daemons for each other. A member that stops leaves the group at once."""

    def config(self, member: str, **query: object) -> Config:
        found = super().config(member, **query)
        source = replace(found.source, kafka=replace(found.source.kafka, instance=""))
        return replace(found, source=source, recovery=replace(found.recovery, standby=True))

    async def warm(self, gateway: Gateway) -> None:
        """Wait until a standby has read all that was answered."""
        names = [session.name for session in gateway.config.sessions]

        def level() -> bool:
            versions = [(self.gateways[0].sessions.states[n], gateway.sessions.states[n]) for n in names]
            return gateway.status.not_ready() == [STANDBY] and all(
                mine.times and theirs.times and theirs.times.as_of - mine.times.as_of <= 10**9
                for theirs, mine in versions
            )

        await until(level, 60.0, "a warm standby")


@pytest.fixture
async def pair(real_kafka: RealKafka, tmp_path: Path) -> AsyncIterator[Pair]:
    quiet_client_log()
    name = f"s{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {f"{name}.ticks": 2, f"{name}.answers": 1})
    made = Pair(real_kafka, name, tmp_path)
    reading = asyncio.create_task(made.read())
    yield made
    reading.cancel()
    for gateway in made.gateways:
        if not gateway.stopping:
            await gateway.stop()
    await asyncio.gather(reading, return_exceptions=True)


def http(gateway: Gateway, path: str = "/readyz", asked: object = None) -> tuple[int, dict[str, object]]:
    """Status and body of a reply; ``asked``: what is posted."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway.http.port}{path}",
        None if asked is None else json.dumps(asked).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.kafka
async def test_a_standby_keeps_warm_and_silent_and_takes_over(pair: Pair) -> None:
    market = Market(pair.kafka, f"{pair.name}.ticks")
    await market.sink.start()
    try:
        first = await pair.join("one")
        await until(lambda: first.status.not_ready() == [], 30.0, "partitions")
        assert await asyncio.to_thread(http, first) == (200, {"status": "ready", "reasons": []})
        await market.trade(5)
        await pair.answered(market)
        second = await pair.join("two", forward=False)
        await market.trade(3)
        await pair.answered(market)
        await pair.warm(second)
        assert await asyncio.to_thread(http, second) == (503, {"status": "standby", "reasons": [STANDBY]})
        status, body = await asyncio.to_thread(http, second, "/v1/health")
        assert (status, body["status"], body["ready"]) == (200, "standby", False)
        assert (first.store.value("foretick_standby"), second.store.value("foretick_standby")) == (0, 1)
        assert b"foretick_standby_lag_records{" in second.status.metrics()
        assert first.query is not None
        assert second.query is not None
        names = [session.name for session in first.config.sessions]
        async with AsyncQueryClient(second.query.endpoint) as client:
            refused = await client.request(Answers(1, names[0]))
            assert isinstance(refused, ErrorReply)
            assert (refused.code, refused.address) == ("moved", first.query.endpoint)
        chat = {"model": f"session:{names[0]}", "messages": [{"role": "user", "content": "up?"}]}
        status, body = await asyncio.to_thread(http, second, "/v1/chat/completions", chat)
        assert (status, first.query.endpoint in str(body)) == (404, True)
        # it has read windows, and asked nothing
        tokens = second.store.value("foretick_batch_tokens_total", **{"class": "flash"})
        assert (tokens, len(list(pair.snapshots.glob("*.snapshot")))) == (0, 2 * len(names))
        restored = [second.store.value("foretick_snapshots_restored_total", session=n) for n in names]
        versions = [second.store.value("foretick_versions_total", session=n) for n in names]
        await first.stop()
        await market.trade(3)
        await pair.answered(market)
        assert second.status.not_ready() == []
        assert second.store.value("foretick_standby") == 0
        assert second.store.value("foretick_promotion_seconds") > 0
        # its tapes went on as they were
        assert [second.store.value("foretick_snapshots_restored_total", session=n) for n in names] == restored
        assert all(
            second.store.value("foretick_versions_total", session=n) <= before + 5
            for n, before in zip(names, versions, strict=True)
        )
        async with AsyncQueryClient(second.query.endpoint) as client:
            reply = await client.request(Answers(2, names[0]))
            assert isinstance(reply, AnswersReply)
        audit = Audit(whole=True)
        for answer in pair.published:
            audit.take(answer)
            assert answer.basis is not None
            assert answer.basis.state  # also of the one that took over
        for each in audit.result():
            assert each.holds(exactly_once=True), each
            assert each.epochs == 2
        third = await pair.join("three")  # it finds one that answers, and does not take its place
        assert third.status.not_ready()[0] == STANDBY
        await market.trade(2)
        await pair.answered(market)
        assert (second.status.not_ready(), third.store.value("foretick_standby")) == ([], 1)
        second._on_engine_gone("the engine was killed")
        await market.trade(2)
        await pair.answered(market)
        await until(lambda: third.status.not_ready() == [], 30.0, "the third to answer")
        await until(lambda: second.status.not_ready()[:1] == [STANDBY], 60.0, "the second to stand by")
    finally:
        await market.sink.stop()


@pytest.mark.kafka
async def test_snapshots_that_are_acknowledged_while_its_engine_loads_are_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = Market(pair.kafka, f"{pair.name}.ticks")
    await market.sink.start()
    try:
        await pair.join("one")
        await market.trade(5)
        await pair.answered(market)
        await until(lambda: len(list(pair.snapshots.glob("*.snapshot"))) >= len(SYMBOLS), 30.0)

        async def too_early(self: GroupMember) -> None:
            """Nothing is committed yet when it asks."""

        monkeypatch.setattr(GroupMember, "recover", too_early)
        second = await pair.join("two")
        names = [session.name for session in second.config.sessions]

        def count(metric: str) -> list[float]:
            return [second.store.value(metric, session=name) for name in names]

        assert second.store.value("foretick_snapshots_refused_total", reason="newer") >= len(names)
        await until(lambda: min(count("foretick_snapshots_restored_total")) > 0, 30.0, "snapshots")
        await market.trade(3)
        await pair.answered(market)
        await pair.warm(second)
        assert count("foretick_snapshots_restored_total") == [1] * len(names)
    finally:
        await market.sink.stop()


async def test_versions_count_on_from_those_of_the_other_daemon() -> None:
    """A standby makes a version of as many bars as it finds, so that it may have fewer versions."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(["V:AAA"]), source, sink) as gateway:
        state = gateway.sessions.states["aaa"]
        source.put(tape.second(0), tape.second(1))
        await until(lambda: state.version == 1)
        gateway.pending.send(
            protocol.TakeOver(1 << 40, {"aaa": Progress(7, 50, 300), "gone": Progress(7, 9, 9)})
        )
        source.put(tape.second(2))
        await until(lambda: state.version > 1)
        assert state.version == 51


class Processes:
    """Daemons in processes of their own, which stand by for each other, and one that nobody disturbs."""

    def __init__(self, bootstrap: str, folder: Path, *, exactly_once: bool) -> None:
        self.bootstrap, self._folder, self.exactly_once = bootstrap, folder, exactly_once
        self.suffix = f".{uuid.uuid4().hex[:8]}"
        self.trades, self.answers = f"md.trades.v1{self.suffix}", f"answers.v1{self.suffix}"
        self.reference = f"undisturbed.v1{self.suffix}"
        self._sink = KafkaSink("test-trades", bootstrap)
        self.bars = 0

    async def start(self) -> None:
        topics = {self.trades: 2, self.answers: 1, self.reference: 1, f"dlq.v1{self.suffix}": 1}
        await create_topics(self.bootstrap, topics)
        await self._sink.start()

    async def stop(self) -> None:
        await self._sink.stop()

    def daemon(self, name: str) -> Daemon:
        return Daemon(self._folder / name, self._config(name))

    def _config(self, name: str) -> str:
        (query,) = free_ports(1)
        undisturbed = name == "undisturbed"
        tables = [f'[[sessions]]\nname = "{each}"\nsymbol = "{symbol}"' for each, symbol in SYMBOLS.items()]
        transactions = f'delivery = "exactly_once"\ntransactional_id = "pair{self.suffix}"'
        return "\n".join(
            [
                *tables,
                f'[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "{self.bootstrap}"',
                f'topics = ["{self.trades}"]\nsession_timeout = "6s"',
                f'group = "{"undisturbed" if undisturbed else "pair"}{self.suffix}"',
                f'[sink.kafka]\nbootstrap = "{self.bootstrap}"\ndlq = "dlq.v1{self.suffix}"',
                f'topic = "{self.reference if undisturbed else self.answers}"',
                transactions if self.exactly_once and not undisturbed else "",
                f'[recovery]\ninterval = "0s"\nstandby = {str(not undisturbed).lower()}',
                f'[query]\nendpoint = "tcp://127.0.0.1:{query}"',
                '[process]\nmode = "inproc"\ndrain = "3s"',
            ]
        )

    async def produce(self, bars: int) -> None:
        for _ in range(bars):
            records = [(key, value) for key, value in bar(self.bars) if key in SYMBOLS.values()]
            sent = [self._sink.publish(self.trades, k.encode(), value, {}) for k, value in records]
            await asyncio.wait_for(asyncio.gather(*sent), 60)
            self.bars += 1
            await asyncio.sleep(0.1)

    async def answered(self, topic: str = "") -> list[Published]:
        """Wait until every question has an answer about the newest closed bar."""
        found: list[Published] = []
        wanted = {(session, name, as_of(self.bars - 2)) for session in SYMBOLS for name in NAMES}

        async with asyncio.timeout(90):
            while not wanted <= set(by_key(found)):
                await asyncio.sleep(0.3)
                found = await read_to_end(self.bootstrap, topic or self.answers)
        return found


def covered(found: Sequence[Published]) -> dict[tuple[str, str], list[int]]:
    """Offsets that the answers were read from, in their order, by session and question; repeats left out."""
    offsets, seen = defaultdict(list), set()
    for each in found:
        if each.answer_id in seen:
            continue
        seen.add(each.answer_id)
        for of in each.answer.inputs:
            offsets[each.answer.session, each.answer.question] += range(of.first_offset, of.last_offset + 1)
    return offsets


def is_standby(daemon: Daemon) -> bool:
    return json.loads(daemon.get("/readyz")[1] or "{}").get("status") == "standby"


@pytest.mark.kafka
@pytest.mark.parametrize("exactly_once", [False, True], ids=["at_least_once", "exactly_once"])
async def test_one_that_is_killed_and_one_that_hangs_are_replaced(
    real_kafka: RealKafka, tmp_path: Path, exactly_once: bool
) -> None:
    quiet_client_log()
    made = Processes(real_kafka.bootstrap, tmp_path, exactly_once=exactly_once)
    await made.start()
    try:
        with made.daemon("undisturbed") as undisturbed, made.daemon("first") as first:
            await undisturbed.ready()
            await first.ready()
            await made.produce(4)
            with made.daemon("second") as second:
                await until_slowly(lambda: is_standby(second), what="a standby")
                await made.answered()
                await made.produce(2)
                first.signal(signal.SIGKILL)
                await made.produce(3)
                await second.ready(30)
                await made.answered()
                with made.daemon("third") as third:
                    await until_slowly(lambda: is_standby(third), what="another standby")
                    await made.produce(1)
                    second.signal(signal.SIGSTOP)
                    await made.produce(3)
                    await third.ready(30)
                    await made.answered()
                    second.signal(signal.SIGCONT)
                    await made.produce(2)
                    assert await asyncio.to_thread(second.wait, 60) == 1, second.log[-3000:]
                    await asyncio.sleep(1)
                    found = await made.answered()
                    assert third.metric("foretick_standby") == 0
            reference = await made.answered(made.reference)
    finally:
        await made.stop()
    for key, offsets in covered(found).items():
        if exactly_once:
            assert offsets == list(range((made.bars - 1) * TRADES)), key
        else:
            assert set(offsets) == set(range((made.bars - 1) * TRADES)), key
    undisturbed_ones = {key: each[0] for key, each in by_key(reference).items()}
    common = [each for each in found if key_of(each.answer) in undisturbed_ones]
    assert len(common) > len(found) / 2
    problems = [
        *repeats(found, allowed=not exactly_once),
        *gaps(found),
        *different(common, undisturbed_ones),
    ]
    assert not problems, "\n".join(problems[:20])
    assert len({each.answer.epoch for each in found}) == 3
