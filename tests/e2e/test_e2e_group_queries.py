"""A load balancer needs no knowledge: any daemon of a group serves all sessions, also while they move."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import ErrorReply, Label, LostMessage
from daemon.gateway.gateway import Gateway
from feeds.market_data import Answer
from tests.e2e.test_e2e_group import Group, grouped
from tests.kit import until
from tests.kit.fixtures import RealKafka
from tests.kit.http import Reply, listening, request

pytestmark = pytest.mark.kafka


class Shared:
    """Two daemons with a session each: the ``other``'s is ``theirs``, and clients ask ``here``."""

    def __init__(self, group: Group, here: Gateway, other: Gateway) -> None:
        self.group, self.here, self.other = group, here, other
        names = [session.name for session in here.config.sessions]
        self.theirs = next(name for name in names if other.input.owner(name) is None)
        self.ours = next(name for name in names if name != self.theirs)

    async def http(self, method: str, path: str, body: object = None) -> Reply:
        return await request(self.here.http.port, method, path, body)

    def published(self) -> Counter[str]:
        """Answers in the topic of both sessions, by their ids and questions."""
        return Counter(key(each) for each in self.group.published)


def key(answer: Answer) -> str:
    return f"{answer.answer_id} {answer.question}"


def endpoint(gateway: Gateway) -> str:
    assert gateway.query is not None
    return gateway.query.endpoint


@asynccontextmanager
async def shared(group: Group) -> AsyncIterator[Shared]:
    async with grouped(group):
        here = await group.join("one")
        await group.trade(5)
        await group.answered()
        other = await group.join("two")
        await group.trade(3)
        await group.shared()
        await group.trade(2)
        await group.answered()
        yield Shared(group, here, other)


class Follower:
    """Answers that a client gets, by ids; what it lost."""

    def __init__(self) -> None:
        self.got, self.lost, self.last, self.ready = Counter[str](), list[object](), "", asyncio.Event()

    async def by_sse(self, port: int, query: str) -> None:
        """Until the stream ends; the next call goes on there, as a browser does."""
        headers = {"last_event_id": self.last} if self.last else {}
        async with listening(port, query, **headers) as stream:
            self.ready.set()
            while True:
                try:
                    event = await stream.next("answer", "lost")
                except TimeoutError:  # none for a while
                    continue
                except (EOFError, asyncio.IncompleteReadError, ValueError):
                    return
                self.last = event.id or self.last
                if event.kind == "lost":
                    self.lost.append(event.data)
                else:
                    self.got[f"{event.data['answer_id']} {event.data['question']}"] += 1

    async def by_zeromq(self, address: str) -> None:
        async with AsyncQueryClient(address) as client, await client.subscribe(events=["answer"]) as stream:
            self.ready.set()
            async for item in stream:
                if isinstance(item, LostMessage):
                    self.lost.append(item)
                elif isinstance(item.message, Answer):
                    self.got[key(item.message)] += 1


async def test_any_daemon_serves_the_sessions_of_all(real_kafka: RealKafka, tmp_path: Path) -> None:
    async with shared(Group(real_kafka, tmp_path)) as both:
        theirs, state = both.theirs, both.other.sessions.states[both.theirs]
        listed = (await both.http("GET", "/v1/sessions")).json["sessions"]
        owners = {each["name"]: (each["owner"], each["owner_failure"]) for each in listed}
        assert owners == {theirs: (endpoint(both.other), ""), both.ours: (endpoint(both.here), "")}
        versions = {each["name"]: each["data_version"] for each in listed}
        assert versions[theirs] == state.version > both.here.sessions.states[theirs].version
        one = (await both.http("GET", f"/v1/sessions/{theirs}")).json
        assert (one["owner"], one["data_version"]) == (endpoint(both.other), state.version)

        answers = (await both.http("GET", "/v1/answers")).json["answers"]
        assert {each["as_of"] for each in answers if each["session"] == theirs} == {both.group.as_of(theirs)}
        name = state.questions[0].name
        asked = await both.http("POST", "/v1/ask", {"session": theirs, "question": name})
        assert (asked.json["cached"], asked.json["data_version"]) == (True, state.version)
        mine = {"session": theirs, "name": "mine", "text": "Up?", "choices": ["YES", "NO"]}
        assert (await both.http("POST", "/v1/questions", mine)).status == 200
        assert "mine" in [each.name for each in state.questions]
        assert "mine" not in [each.name for each in both.here.sessions.states[theirs].questions]
        asked = await both.http("GET", f"/v1/questions?session={theirs}")
        assert "mine" in [each["name"] for each in asked.json["sessions"][0]["questions"]]
        async with AsyncQueryClient(endpoint(both.here)) as client:
            refused = await client.request(Label(1, theirs, name, state.version, "YES"))
        assert isinstance(refused, ErrorReply)
        assert refused.code == "bad_request"  # UP and DOWN are its choices
        assert both.other.store.value("foretick_labels_total", outcome="other") == 1

        for path, body in (
            ("/v1/chat/completions", {"stream": True}),
            ("/v1/messages", {"max_tokens": 8}),
            ("/v1/messages/count_tokens", {}),
        ):
            turns = {"model": f"session:{theirs}", "messages": [{"role": "user", "content": "Will it rise?"}]}
            reply = await both.http("POST", path, turns | body)
            assert reply.status == 200, reply.body
        assert both.here.store.value("foretick_peer_requests_total", outcome="failed") == 0
        assert both.other.store.value("foretick_peer_requests_total", outcome="answered") == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
async def test_a_client_misses_nothing_and_sees_nothing_twice_while_its_session_moves(
    real_kafka: RealKafka, tmp_path: Path, delivery: str
) -> None:
    """One by server-sent events, one by ZeroMQ, and one whose own daemon is the one that stops."""
    group = Group(real_kafka, tmp_path, delivery)  # type: ignore[arg-type]  # one of them
    async with shared(group) as both:
        one, all_, moving = Follower(), Follower(), Follower()
        before = both.published()
        follow = [
            asyncio.create_task(one.by_sse(both.here.http.port, f"?session={both.theirs}&event=answer")),
            asyncio.create_task(all_.by_zeromq(endpoint(both.here))),
            asyncio.create_task(moving.by_sse(both.other.http.port, "?event=answer")),
        ]
        try:
            await asyncio.gather(*(each.ready.wait() for each in (one, all_, moving)))
            for gateway in (both.here, both.other):
                await until(lambda at=gateway: at.store.value("foretick_peers_followed") == 1)
            await until(lambda: all(g.events._clients["zeromq"] >= 1 for g in group.gateways))
            await group.trade(3)
            await group.answered()
            await both.other.stop()
            await follow[2]
            follow[2] = asyncio.create_task(moving.by_sse(both.here.http.port, "?event=answer"))
            await group.trade(3)
            await group.answered()

            def told(follower: Follower, session: str = "") -> bool:
                new = both.published() - before
                wanted = {each for each in new if each.startswith(session)}
                return wanted <= follower.got.keys()

            await until(lambda: told(one, f"{both.theirs}:"), 30.0)
            await until(lambda: told(all_), 30.0)
            await until(lambda: told(moving), 30.0)
        finally:
            for task in follow:
                task.cancel()
            await asyncio.gather(*follow, return_exceptions=True)
        for follower in (one, all_, moving):
            assert (follower.lost, set(follower.got.values())) == ([], {1})
        assert {each.split(":")[0] for each in one.got} == {both.theirs}
