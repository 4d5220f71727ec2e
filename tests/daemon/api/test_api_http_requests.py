"""Asks and prompts over HTTP: calls of the backend, every refusal, and which clients are admitted."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest

from daemon.api.http_errors import STATUS
from daemon.api.http_requests import Requests, request_routes
from daemon.api.http_server import HttpServer
from daemon.api.messages import (
    Append,
    Close,
    ClosedReply,
    Code,
    Complete,
    Finish,
    FinishReply,
    Open,
    PromptReply,
    QueryError,
    Update,
)
from daemon.gateway.queries import Queries
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client

JSON = {"content-type": "application/json"}


class Prompts:
    """Records its calls. A text that is an error code is refused with it; "slow" never ends."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.clients: list[Client] = []

    async def open(self, request: Open, client: Client) -> PromptReply:
        self.clients.append(client)
        return await self.append(request)

    async def append(self, request: Open | Append | Update, client: Client | None = None) -> PromptReply:
        self.asked.append(request)
        if request.text in get_args(Code):
            raise QueryError(request.text, "because")
        if request.text == "slow":
            await asyncio.Event().wait()
        if request.text == "broken":
            raise ZeroDivisionError("secret detail")
        return PromptReply(request.id, "p", len(request.text))

    async def finish(self, request: Finish, client: Client | None = None) -> FinishReply:
        self.asked.append(request)
        return FinishReply(request.id, "p", "YES", None, 0.5, True, 3, 1, 0, 0, 0, 0, 7, {"step": 5})

    async def complete(self, request: Complete, client: Client) -> FinishReply:
        self.clients.append(client)
        return await self.finish(Finish(request.id, "p"))

    async def close(self, request: Close, client: Client | None = None) -> ClosedReply:
        self.asked.append(request)
        return ClosedReply(request.id, request.prompt)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture
async def server(prompts) -> AsyncIterator[HttpServer]:
    routes = request_routes(Requests(Queries(None, None, None, None, None, prompts, 0.2, None).answer), 200)
    made = HttpServer(lambda: b"", list, more=routes)
    await made.start(Tasks())
    yield made
    await made.stop()


async def call(
    server: HttpServer,
    path: str,
    body: object = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()

    def use() -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.request(method, path, data, JSON if headers is None else headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(use)


async def test_each_request_reaches_the_backend_as_on_the_socket(server, prompts):
    assert await call(server, "/v1/prompts", {"text": "abc", "max_tokens": 3, "choices": ["A", "B"]}) == (
        201,
        {"prompt": "p", "prompt_tokens": 3},
    )
    assert (await call(server, "/v1/prompts/p/append", {"text": "de"}))[1]["prompt_tokens"] == 2
    assert (await call(server, "/v1/prompts/p/update", {"text": "f"}))[0] == 200
    status, answer = await call(server, "/v1/prompts/p/finish")
    assert (status, answer["text"], answer["waits"]) == (200, "YES", {"step": 5})
    assert 0 < answer["latency_ns"] < 10**9
    assert not answer.keys() & {"id", "type"}
    assert await call(server, "/v1/prompts/p", None, "DELETE") == (200, {"prompt": "p"})
    assert (await call(server, "/v1/complete", {"text": "all"}))[1]["text"] == "YES"
    assert prompts.asked == [
        Open(0, "abc", 3, ("A", "B")),
        Append(0, "p", "de"),
        Update(0, "p", "f"),
        Finish(0, "p"),
        Close(0, "p"),
        Finish(0, "p"),
    ]
    assert prompts.clients == [Client(LOCAL, "http 127.0.0.1")] * 2


@pytest.mark.parametrize("code", get_args(Code))
async def test_every_refusal_has_a_status(server, code):
    status, body = await call(server, "/v1/prompts/p/append", {"text": code})
    assert (status, body) == (STATUS[code], {"code": code, "message": "because"})
    assert status >= 400


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1]", "a JSON object"),
        (b'{"text": "\xff\xfe"}', "utf-8"),
        (b'{"text": "\\ud800"}', "is not JSON"),
        ({"text": 5}, "Expected `str`"),
        ({}, "missing required field `text`"),
        ({"text": "x", "txet": "y"}, "unknown field `txet`"),
        ({"text": "x", "prompt": "other"}, "own members"),
        ({"text": "x", "id": 3}, "own members"),
        ({"text": "x", "type": "update"}, "own members"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_with_the_reason(server, prompts, body, part):
    status, refused = await call(server, "/v1/prompts/p/append", body)
    assert (status, refused["code"], prompts.asked) == (400, "bad_request", [])
    assert part in refused["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/complete", {"text": "x", "max_tokens": 2**63}),
        ("/v1/complete", {"text": "x", "deadline_ms": 2**64}),
        ("/v1/prompts", {"text": "x", "max_tokens": 2**70}),
        ("/v1/ask", {"session": "a", "question": "x", "max_tokens": 2**63}),
        ("/v1/questions", {"session": "a", "name": "q", "text": "x", "ask_every_ns": 2**63}),
        ("/v1/sessions", {"name": "a", "symbol": "V:A", "retention_tokens": 2**63}),
    ],
)
async def test_a_number_that_no_message_holds_is_refused(server, prompts, path, body):
    status, refused = await call(server, path, body)
    assert (status, refused["code"], prompts.asked) == (400, "bad_request", [])


async def test_requests_that_are_too_long_too_slow_or_broken_get_an_error(server, caplog):
    assert (await call(server, "/v1/prompts", {"text": "x" * 300}))[0] == 413
    assert await call(server, "/v1/prompts", {"text": "slow"}) == (
        504,
        {"code": "timeout", "message": "no answer within 0.2 s"},
    )
    status, body = await call(server, "/v1/prompts", {"text": "broken"})
    assert (status, body["code"], "secret" in body["message"]) == (503, "engine", False)
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({**JSON, "host": "prices.example:7800"}, 403),
        ({**JSON, "host": "203.0.113.7"}, 403),
        ({**JSON, "host": "localhost:7800"}, 201),
        ({**JSON, "host": "[::1]:7800"}, 201),
        ({"content-type": "application/json; charset=utf-8"}, 201),
        ({"content-type": "text/plain"}, 415),
        ({}, 415),
    ],
    ids=str,
)
async def test_a_page_in_a_browser_here_cannot_send_one(server, prompts, headers, status):
    assert (await call(server, "/v1/prompts", {"text": "x"}, headers=headers))[0] == status
    assert bool(prompts.asked) == (status == 201)


async def test_another_machine_is_turned_away(prompts):
    scope = {"client": ("203.0.113.7", 5)}
    server = HttpServer(
        lambda: b"",
        list,
        more=request_routes(Requests(Queries(None, None, None, None, None, prompts, 1.0, None).answer)),
    )
    application = server._application()

    async def from_afar(inner: Any, receive: Any, send: Any) -> None:
        await application({**inner, **scope}, receive, send)

    server._application = lambda: from_afar  # type: ignore[assignment,return-value]  # an ASGI application
    await server.start(Tasks())
    try:
        assert (await call(server, "/v1/complete", {"text": "x"}))[0] == 403
        assert (await call(server, "/v1/prompts/p", None, "DELETE"))[0] == 403
    finally:
        await server.stop()
    assert prompts.asked == []


async def test_other_methods_are_not_served(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)

    def use() -> int:
        connection.request("GET", "/v1/prompts")
        return connection.getresponse().status

    assert await asyncio.to_thread(use) == 405
    connection.close()
