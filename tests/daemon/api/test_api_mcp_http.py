"""Agents over HTTP, without a daemon: each tries to use, or to use up, what is another tenant's."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.events import Events
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.mcp_http import McpHttp
from daemon.config.tenants_file import TenantTable
from daemon.tenants import Client, Tenants, hash_of, new_key
from feeds.market_data import FlashReady
from metrics.store import MetricStore
from tests.kit import until
from tests.kit.fakes import awaited
from tests.kit.http import Reply, connected, head, http_server, request

NAMES = ("alpha", "beta")
KEYS = {name: new_key() for name in (*NAMES, "second")}
TABLES = (
    TenantTable("alpha", api_keys=(hash_of(KEYS["alpha"]), hash_of(KEYS["second"])), sessions=("aaa",)),
    TenantTable("beta", api_keys=(hash_of(KEYS["beta"]),), sessions=("bbb",)),
)
FIELDS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
VERSION = "2025-06-18"
HELLO = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


@dataclass
class House:
    """Two tenants, each with a session of its own."""

    server: HttpServer
    events: Events

    async def send(
        self, key: str, method: str, session: str = "", verb: str = "POST", **params: object
    ) -> Reply:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params} if verb == "POST" else None
        own = {"mcp-session-id": session, "mcp-protocol-version": VERSION} if session else {}
        fields = FIELDS | own | {"x-api-key": KEYS[key]}
        return await request(self.server.port, verb, "/mcp", body, fields)

    async def opened(self, key: str) -> str:
        reply = await self.send(key, "initialize", **HELLO)
        assert reply.status == 200
        return reply.headers["mcp-session-id"]


async def answer(asked: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
    own = {"alpha": "aaa", "beta": "bbb"}[client.tenant.name]
    found = messages.SessionInfo(own, "X:A", 7, 100, 5, 1, 2, ("trend",))
    match asked:
        case messages.ListSessions():
            return messages.SessionsReply(asked.id, (found,))
        case messages.Describe(session=name) if name == own:
            return messages.DescribeReply(asked.id, found, (), ())
    error = messages.unknown_session(getattr(asked, "session", ""), [own])
    return error.reply(asked.id)


@pytest.fixture
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """A parameter of the test: limits."""
    events = Events(1, MetricStore.local({}), max_clients=50)
    agents = McpHttp(Requests(awaited(answer)), events, **getattr(request, "param", {}))
    serving = asyncio.ensure_future(agents.run())
    async with http_server(agents.route, access=Access(Tenants(TABLES))) as server:
        yield House(server, events)
        agents.close()
    await serving


async def test_a_stolen_session_id_is_unknown_and_the_session_stays_its_owners(house: House) -> None:
    stolen = await house.opened("beta")
    uri = "foretick://sessions/bbb"
    assert (await house.send("beta", "resources/subscribe", stolen, uri=uri)).status == 200
    unknown = await house.send("alpha", "resources/list", "0" * 32)
    for verb in ("POST", "GET", "DELETE"):
        reply = await house.send("alpha", "resources/list", stolen, verb)
        assert (reply.status, reply.body) == (404, unknown.body)
    assert "foretick://sessions/bbb" in (await house.send("beta", "resources/list", stolen)).body.decode()
    # the owner's stream still hears what it asked for
    async with connected(house.server.port) as (reader, writer):
        own = {"host": "x", "x-api-key": KEYS["beta"], "mcp-session-id": stolen}
        writer.write(head("GET", "/mcp", FIELDS | own))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: bool(house.events._clients["mcp"]))
        house.events.publish(FlashReady(session="bbb", data_version=8, as_of=0, answers=1))
        async with asyncio.timeout(10):
            assert b"bbb" in await reader.readuntil(b"bbb")
    assert (await house.send("beta", "", stolen, "DELETE")).status == 200
    assert (await house.send("beta", "resources/list", stolen)).status == 404


async def test_a_session_belongs_to_the_key_that_opened_it(house: House) -> None:
    session = await house.opened("alpha")
    assert (await house.send("second", "resources/list", session)).status == 404
    assert (await house.send("alpha", "resources/list", session)).status == 200


async def test_agents_get_what_their_tenant_sees(house: House) -> None:
    for key, own, other in (("alpha", "aaa", "bbb"), ("beta", "bbb", "aaa")):
        session = await house.opened(key)

        async def text(method: str, *, of: str = key, on: str = session, **params: object) -> str:
            return (await house.send(of, method, on, **params)).body.decode()

        listed = await text("resources/list") + await text("tools/call", name="list_sessions", arguments={})
        assert (own in listed, other in listed) == (True, False)
        for method in ("resources/read", "resources/subscribe"):
            assert "error" not in await text(method, uri=f"foretick://sessions/{own}")
            hidden, absent = [
                await text(method, uri=f"foretick://sessions/{each}") for each in (other, "zzz")
            ]
            assert "there is no session" in hidden
            assert hidden.replace(other, "zzz") == absent
        described = [
            await text("tools/call", name="describe_session", arguments={"session": each})
            for each in (other, "zzz")
        ]
        assert described[0].replace(other, "zzz") == described[1]


@pytest.mark.parametrize("house", [{"max_sessions": 4}], indirect=True)
async def test_a_tenant_has_half_of_the_sessions_and_is_told_when_to_retry(house: House) -> None:
    first, _ = await house.opened("alpha"), await house.opened("second")
    refusals = [await house.send(key, "initialize", **HELLO) for key in ("alpha", "second")]
    assert [(each.status, each.json["code"]) for each in refusals] == [(429, "busy")] * 2
    assert all(int(each.headers["retry-after"]) > 0 for each in refusals)
    await house.opened("beta")
    assert (await house.send("alpha", "", first, "DELETE")).status == 200
    await house.opened("alpha")
    # many at once take no more than one after the other
    again = await asyncio.gather(*(house.send("beta", "initialize", **HELLO) for _ in range(5)))
    assert Counter(each.status for each in again) == {200: 1, 429: 4}


@pytest.mark.parametrize("house", [{"max_subscriptions": 4}], indirect=True)
async def test_a_tenant_has_half_of_the_subscriptions(house: House) -> None:
    async def subscribed(key: str, on: str, own: str) -> bool:
        reply = await house.send(key, "resources/subscribe", on, uri=f"foretick://sessions/{own}")
        return b"2 subscriptions of this tenant" not in reply.body

    mine = [await house.opened("alpha") for _ in range(3)]
    assert [await subscribed("alpha", each, "aaa") for each in mine] == [True, True, False]
    assert await subscribed("alpha", mine[0], "aaa")  # it has it already
    assert await subscribed("beta", await house.opened("beta"), "bbb")
    await house.send("alpha", "resources/unsubscribe", mine[0], uri="foretick://sessions/aaa")
    assert await subscribed("alpha", mine[2], "aaa")
    for each in mine:
        await house.send("alpha", "", each, "DELETE")
    again = [await house.opened("alpha") for _ in range(2)]
    assert [await subscribed("alpha", each, "aaa") for each in again] == [True, True]


@pytest.mark.parametrize("house", [{"max_sessions": 2}], indirect=True)
async def test_what_opens_no_session_takes_no_place(house: House) -> None:
    for _ in range(3):
        assert (await house.send("alpha", "resources/list")).status == 400
    await house.opened("alpha")


async def test_ids_of_sessions_are_in_no_log(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    session = await house.opened("beta")
    await house.send("alpha", "resources/list", session)
    await house.send("beta", "", session, "DELETE")
    assert session not in caplog.text
