"""A daemon joins and takes partitions over warm, another one hands its own over as it stops, under load."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, Reply
from daemon.audit.completeness import Audit
from daemon.config.schema import Config
from daemon.gateway.gateway import Gateway
from tests.e2e.test_e2e_group import Group, grouped
from tests.kit import SECOND, until
from tests.kit.fixtures import RealKafka

pytestmark = pytest.mark.kafka


class DynamicGroup(Group):
    """Members without a name: one that stops leaves the group."""

    def config(self, member: str, **query: object) -> Config:
        found = super().config(member, **query)
        source = replace(found.source, kafka=replace(found.source.kafka, instance=""))
        return replace(found, source=source)

    @asynccontextmanager
    async def market(self) -> AsyncIterator[None]:
        """Trades a second of event time after the other."""

        async def play() -> None:
            while True:
                await self.trade(1)
                await asyncio.sleep(0.1)

        playing = asyncio.create_task(play())
        try:
            yield
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def silence(self, session: str) -> float:
        """Longest time between two versions' answers, s."""
        times = sorted({answer.published_at for answer in self.published if answer.session == session})
        return max((after - before for before, after in pairwise(times)), default=0) / SECOND


@pytest.fixture(params=["at_least_once", "exactly_once"])
async def group(
    request: pytest.FixtureRequest, real_kafka: RealKafka, tmp_path: Path
) -> AsyncIterator[DynamicGroup]:
    async with grouped(DynamicGroup(real_kafka, tmp_path, request.param)) as made:
        yield made


@asynccontextmanager
async def asking(*daemons: Gateway) -> AsyncIterator[Callable[[], int]]:
    """Each daemon is asked about each session, over and over; yields the number of replies. None may fail."""
    names = [session.name for session in daemons[0].config.sessions]
    replies: list[Reply] = []

    async def ask(daemon: Gateway) -> None:
        assert daemon.query is not None
        async with AsyncQueryClient(daemon.query.endpoint) as client:
            while True:
                for name in names:
                    replies.append(await client.request(Answers(len(replies) + 1, name)))
                await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(ask(each)) for each in daemons]
    try:
        yield lambda: len(replies)
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
    assert [each for each in replies if not isinstance(each, AnswersReply)] == []


@pytest.mark.sampled(1)
@pytest.mark.timeout(400)
async def test_partitions_move_warm_when_a_daemon_joins_and_when_one_stops(
    group: DynamicGroup,
) -> None:
    first = await group.join("one")
    await group.trade(5)
    await group.answered()
    names = [session.name for session in first.config.sessions]
    async with group.market():
        async with asking(first):
            second = await group.join("two")
            await group.shared()
        async with asking(first, second) as asked:
            assert second.store.value("foretick_hand_overs_total", kind="planned") == 1
            assert second.store.value("foretick_hand_overs_total", kind="unplanned") == 0
            theirs = next(name for name in names if second.input.owner(name) is None)
            assert second.store.value("foretick_snapshots_restored_total", session=theirs) >= 1
            before = asked()
            await until(lambda: asked() > before + 40, 60.0, "replies")
        async with asking(second):
            await first.stop()
            await until(lambda: all(second.input.reads(name) for name in names))
            assert second.store.value("foretick_hand_overs_total", kind="planned") == 2
    await group.trade(3)
    await group.answered()
    audit = Audit(whole=True)
    for answer in group.published:
        audit.take(answer)
    for name in names:  # a figure to look at, which depends on the machine
        print(f"{group.delivery} {name}: silent for {group.silence(name):.2f} s at most")
    assert {each.session for each in audit.result()} == set(names)
    for each in audit.result():
        assert each.holds(exactly_once=group.delivery == "exactly_once"), each
