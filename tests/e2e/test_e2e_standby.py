"""A warm standby: it reads behind the daemon that answers, and goes on where that left off."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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
from tests.e2e.test_e2e_group import Group, grouped
from tests.kit import inproc_config, until
from tests.kit.fixtures import RealKafka
from tests.kit.http import request
from tests.kit.inproc import running


class StandbyGroup(Group):
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
async def pair(real_kafka: RealKafka, tmp_path: Path) -> AsyncIterator[StandbyGroup]:
    async with grouped(StandbyGroup(real_kafka, tmp_path)) as made:
        yield made


async def http(gateway: Gateway, path: str = "/readyz", asked: object = None) -> tuple[int, Any]:
    """Status and body of a reply; ``asked``: what is posted."""
    reply = await request(gateway.http.port, "GET" if asked is None else "POST", path, asked)
    return reply.status, reply.json


@pytest.mark.kafka
async def test_a_standby_keeps_warm_and_silent_and_takes_over(pair: StandbyGroup) -> None:
    first = await pair.join("one")
    await until(lambda: first.status.not_ready() == [], 30.0, "partitions")
    assert await http(first) == (200, {"status": "ready", "reasons": []})
    await pair.trade(5)
    await pair.answered()
    second = await pair.join("two", forward=False)
    await pair.trade(3)
    await pair.answered()
    await pair.warm(second)
    assert await http(second) == (503, {"status": "standby", "reasons": [STANDBY]})
    status, body = await http(second, "/v1/health")
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
    status, body = await http(second, "/v1/chat/completions", chat)
    assert (status, first.query.endpoint in str(body)) == (404, True)
    # it has read windows, and asked nothing
    tokens = second.store.value("foretick_batch_tokens_total", **{"class": "flash"})
    assert (tokens, len(list(pair.snapshots.glob("*.snapshot")))) == (0, 2 * len(names))
    restored = [second.store.value("foretick_snapshots_restored_total", session=n) for n in names]
    versions = [second.store.value("foretick_versions_total", session=n) for n in names]
    await first.stop()
    await pair.trade(3)
    await pair.answered()
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
    await pair.trade(2)
    await pair.answered()
    assert (second.status.not_ready(), third.store.value("foretick_standby")) == ([], 1)
    second._on_engine_gone("the engine was killed")
    await pair.trade(2)
    await pair.answered()
    await until(lambda: third.status.not_ready() == [], 30.0, "the third to answer")
    await until(lambda: second.status.not_ready()[:1] == [STANDBY], 60.0, "the second to stand by")


@pytest.mark.kafka
async def test_snapshots_that_are_acknowledged_while_its_engine_loads_are_taken(
    pair: StandbyGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.join("one")
    await pair.trade(5)
    await pair.answered()
    await until(lambda: len(list(pair.snapshots.glob("*.snapshot"))) >= 2, 30.0)

    async def too_early(self: GroupMember) -> None:
        """Nothing is committed yet when it asks."""

    monkeypatch.setattr(GroupMember, "recover", too_early)
    second = await pair.join("two")
    names = [session.name for session in second.config.sessions]

    def count(metric: str) -> list[float]:
        return [second.store.value(metric, session=name) for name in names]

    assert second.store.value("foretick_snapshots_refused_total", reason="newer") >= len(names)
    await until(lambda: min(count("foretick_snapshots_restored_total")) > 0, 30.0, "snapshots")
    await pair.trade(3)
    await pair.answered()
    await pair.warm(second)
    assert count("foretick_snapshots_restored_total") == [1] * len(names)


async def test_versions_count_on_from_those_of_the_other_daemon() -> None:
    """A standby makes a version of as many bars as it finds, so that it may have fewer versions."""
    async with running(inproc_config(["V:AAA"])) as daemon:
        await daemon.advance()
        taken = {"aaa": Progress(7, 50, 300), "gone": Progress(7, 9, 9)}
        daemon.gateway.pending.send(protocol.TakeOver(1 << 40, taken))
        daemon.feed()
        await until(lambda: daemon.state().version > 1)
        assert daemon.state().version == 51
