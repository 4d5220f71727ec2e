"""Asks and prompts over HTTP: calls of the backend, every refusal, and which clients are admitted."""

from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest

from daemon.api.http_errors import STATUS
from daemon.api.http_requests import Requests, request_routes
from daemon.api.http_server import HttpServer
from daemon.api.messages import Append, Close, Code, Finish, Open, Update
from daemon.gateway.services import Services
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from tests.daemon.api.prompts import FakePrompts
from tests.kit.gateway import queries
from tests.kit.http import JSON, http_server, request


@pytest.fixture
def prompts() -> FakePrompts:
    return FakePrompts()


@pytest.fixture
async def server(prompts) -> AsyncIterator[HttpServer]:
    answer = queries(
        Services(None, None, None, None, None, prompts, None, None, None, None).begin, 0.2
    ).answer
    async with http_server(*request_routes(Requests(answer), 200)) as made:
        yield made


async def call(
    server: HttpServer,
    path: str,
    body: object = None,
    method: str = "POST",
    headers: dict[str, str] = JSON,
) -> tuple[int, Any]:
    reply = await request(server.port, method, path, body, headers)
    return reply.status, reply.json


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
    assert (await call(server, "/v1/prompts", b'{"text": "x"}', headers=headers))[0] == status
    assert bool(prompts.asked) == (status == 201)


async def test_another_machine_is_turned_away(prompts):
    scope = {"client": ("203.0.113.7", 5)}
    answer = queries(
        Services(None, None, None, None, None, prompts, None, None, None, None).begin, 1.0
    ).answer
    server = HttpServer(lambda names: b"", list, more=request_routes(Requests(answer)))
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
    assert (await call(server, "/v1/prompts", method="GET"))[0] == 405
