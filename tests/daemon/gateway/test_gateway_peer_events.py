"""A daemon follows the events of the others of its group, over sockets, while clients of its own listen."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from daemon.api.client import AsyncQueryClient
from daemon.api.events import EventFilter, Events, Lost, Subscription
from daemon.api.messages import ErrorReply, LostMessage
from daemon.api.subscriptions import AsyncEventStream, SubscriptionUpdate
from daemon.api.zmq import QueryServer
from daemon.gateway import peer_events
from daemon.gateway.peer_events import PeerEvents
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from feeds.market_data import DataUpdated
from metrics.store import MetricStore
from tests.kit import until

ME, ALL = Client(LOCAL, "me"), EventFilter()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.01, "BEGIN_S": 0.5, "BEAT_S": 0.1, "LINGER_S": 0.1}.items():
        monkeypatch.setattr(peer_events, name, seconds)


class Daemon:
    """Events and the socket that others follow them by; ``peers``: the addresses that it knows."""

    def __init__(self, start: int, endpoint: str = "tcp://127.0.0.1:*", kept: int = 64) -> None:
        self.store, self.peers, self.tasks = MetricStore.local({}), set[str](), Tasks()
        self.events = Events(start, self.store, max_clients=9, kept=kept, in_group=True)
        self.server = QueryServer(self.refuse, endpoint, events=self.events)
        self.following = PeerEvents(self.events, lambda: self.peers, self.store)

    def refuse(self, request: object, client: Client, since: int) -> ErrorReply:
        return ErrorReply(1, "engine", "there is none")

    async def begin(self) -> None:
        await self.server.start(self.tasks)
        self.tasks.start("following", self.following.run)

    async def end(self) -> None:
        self.events.close()
        await self.server.stop()
        await self.tasks.stop()

    def publish(self, version: int, session: str = "a", epoch: int = 1) -> None:
        update = DataUpdated(session=session, data_version=version, as_of=version, bars=1, epoch=epoch)
        self.events.publish(update)

    def listen(self, after: str = "") -> Subscription:
        return self.events.subscribe(ME, ALL, "sse", after)

    @property
    def followed(self) -> float:
        return self.store.value("foretick_peers_followed")

    def passed(self, outcome: str = "passed") -> float:
        return self.store.value("foretick_peer_events_total", outcome=outcome)


@asynccontextmanager
async def group(*daemons: Daemon) -> AsyncIterator[None]:
    """Each knows all others."""
    for daemon in daemons:
        await daemon.begin()
    for daemon in daemons:
        daemon.peers |= {each.server.endpoint for each in daemons if each is not daemon}
    try:
        yield
    finally:
        for daemon in daemons:
            await daemon.end()


class Got:
    """What a client was sent."""

    def __init__(self, client: Subscription) -> None:
        self.client, self.lost, self.versions, self.last = client, list[Lost](), list[int](), ""

    def take(self) -> "Got":
        lost, events = self.client.take()
        self.lost += lost
        for event in events:
            self.versions.append(event.message.data_version)
            self.last = event.id
        return self

    def has(self, *versions: int) -> Callable[[], bool]:
        return lambda: self.take().versions == list(versions)


async def test_a_client_of_any_daemon_gets_the_events_of_all_by_one_subscription_each() -> None:
    one, two, three = daemons = [Daemon(n) for n in (1, 2, 3)]
    async with group(*daemons):
        clients = [Got(one.listen()), Got(one.listen())]
        await until(lambda: one.followed == 2)
        await until(lambda: all(each.events._clients["zeromq"] == 1 for each in (two, three)))
        for version, daemon in enumerate((two, three, one), 1):
            daemon.publish(version)
            for got in clients:
                await until(got.has(*range(1, version + 1)))
        assert (two.followed, three.followed, one.passed(), two.passed()) == (0, 0, 2, 0)
        assert clients[0].last == "1.1,2.1,3.1"
        # the last one leaves, and a while later nothing is followed
        for got in clients:
            one.events.unsubscribe(got.client)
        await until(lambda: one.followed == 0)
        two.publish(4)  # which finds no connection
        await until(lambda: not two.events._clients["zeromq"])
        assert one.events.newest == clients[0].last


async def test_a_zeromq_client_resumes_at_another_daemon() -> None:
    one, two = daemons = [Daemon(1), Daemon(2)]
    async with group(*daemons):
        two.publish(1)
        async with AsyncQueryClient(one.server.endpoint) as client, await client.subscribe() as stream:
            await until(lambda: one.followed == 1)
            await until(lambda: two.events._clients["zeromq"] == 1)
            two.publish(2)
            item = await asyncio.wait_for(anext(stream), 5)
            assert isinstance(item, SubscriptionUpdate)
            assert item.message.data_version == 2
            last = stream.last
        one.publish(3, "b")
        two.publish(3)
        client = AsyncQueryClient(two.server.endpoint)
        async with client, await client.subscribe(after=last) as stream:
            assert sorted([await told(stream), await told(stream)]) == ["a3", "b3"]


async def told(stream: AsyncEventStream) -> str:
    item = await asyncio.wait_for(anext(stream), 5)
    assert isinstance(item, SubscriptionUpdate)
    return f"{item.message.session}{item.message.data_version}"


async def test_a_daemon_that_restarts_is_followed_on_and_what_is_not_known_of_it_is_said() -> None:
    one, two = Daemon(1), Daemon(2)
    async with group(one, two):
        got = Got(one.listen())
        await until(lambda: two.events._clients["zeromq"] == 1)
        two.publish(1)
        await until(got.has(1))
        endpoint = two.server.endpoint
        await two.end()
        again = Daemon(3, endpoint)
        again.publish(2, epoch=2)
        await again.begin()
        await until(got.has(1, 2))
        assert got.lost == [Lost("unknown", False, "restarted")]
        again.publish(3, epoch=2)
        await until(got.has(1, 2, 3))
        await again.end()


async def test_what_a_daemon_no_longer_keeps_is_said_to_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is away for longer than it keeps events."""
    monkeypatch.setattr(peer_events, "BEAT_S", 0.05)
    one, two = Daemon(1), Daemon(2, kept=2)
    async with group(one, two):
        got = Got(one.listen())
        await until(lambda: two.events._clients["zeromq"] == 1)
        two.publish(1)
        await until(got.has(1))
        await two.server.stop()
        for version in range(2, 6):
            two.publish(version)
        two.server = QueryServer(two.refuse, two.server.endpoint, events=two.events)
        await two.server.start(Tasks())
        await until(got.has(1, 4, 5))
        assert got.lost == [Lost(2, False, "expired")]
        assert one.passed("lost") == 2
        # nor is it kept here
        late = Got(one.listen("1.0,2.1")).take()
        assert (late.lost[0].events, late.versions) == (2, [4, 5])


async def test_an_address_where_no_daemon_answers_keeps_no_client_waiting() -> None:
    one, two = Daemon(1), Daemon(2)
    async with group(one, two):
        one.peers |= {"tcp://127.0.0.1:9", "nowhere"}
        got = Got(one.listen("1.0,7.3"))
        await until(lambda: got.take().lost == [Lost("unknown", False, "restarted")])
        two.publish(1)
        await until(got.has(1))


async def test_a_session_moves_while_a_client_of_a_third_daemon_follows_it() -> None:
    """Its new owner publishes again what was not stored, and is not known at first."""
    one, two, three = Daemon(1), Daemon(2), Daemon(3)
    async with group(one, two):
        await three.begin()
        three.publish(1)
        three.publish(2)  # it was here before
        got = Got(one.listen())
        await until(lambda: two.events._clients["zeromq"] == 1)
        for version in (3, 4):
            two.publish(version, epoch=2)
        await until(got.has(3, 4))
        for version in (4, 5):
            three.publish(version, epoch=3)
        one.peers.add(three.server.endpoint)
        await until(got.has(3, 4, 5))
        assert (got.lost, one.passed("repeated")) == ([], 1)
        await three.end()


async def test_a_client_that_is_told_what_it_lost_goes_on() -> None:
    one, two = Daemon(1), Daemon(2)
    async with group(one, two):
        client = AsyncQueryClient(one.server.endpoint)
        async with client, await client.subscribe(after="1.0,9.9") as stream:
            item = await asyncio.wait_for(anext(stream), 5)
            assert isinstance(item, LostMessage)
            assert (item.events, item.reason) == ("unknown", "restarted")
            two.publish(1)
            assert await told(stream) == "a1"
