"""Asks and prompts over HTTP: the query socket's requests as JSON; `daemon.api.clients` says who may."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon.api import messages
from daemon.api.clients import FOREIGN, is_json, is_local
from daemon.api.zmq import AnswerQuery
from feeds.decoding import Undecodable, decoded

STATUS: dict[messages.Code, int] = {
    "bad_request": 400,
    "unknown_session": 404,
    "unknown_prompt": 404,
    "unknown_version": 404,
    "not_calibrated": 409,
    "repeated": 409,
    "finished": 409,
    "abandoned": 410,
    "moved": 421,
    "too_long": 413,
    "busy": 429,
    "late": 429,
    "engine": 503,
    "rebuilding": 503,
    "shutting_down": 503,
    "timeout": 504,
}
_FORBIDDEN, _NO_JSON, _TOO_MANY = 403, 415, 429


def request_routes(
    answer: AnswerQuery,
    max_bytes: int = 1 << 18,
    observe: Callable[[messages.ClientRequest, messages.Reply, int], None] = lambda request, reply, ns: None,
) -> list[Route]:
    """Routes for a Starlette application. ``answer`` replies to a request of at most ``max_bytes`` bytes.

    ``observe(request, reply, latency_ns)``, per readable request.
    """

    def route(
        path: str,
        kind: type[messages.Ask | messages.PromptRequest],
        *,
        method: str = "POST",
        status: int = 200,
        has_body: bool = True,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            since = time.monotonic_ns()
            if not is_local(request):
                return _error(_FORBIDDEN, "forbidden", FOREIGN)
            if has_body and not is_json(request):
                return _error(_NO_JSON, "bad_request", "the content type must be application/json")
            try:
                members = await _members(request, max_bytes) if has_body else {}
                asked: messages.Ask | messages.PromptRequest = decoded(
                    partial(msgspec.convert, type=kind), {**members, "id": 0, **request.path_params}
                )
            except Undecodable as error:
                return _error(STATUS["bad_request"], "bad_request", str(error))
            except messages.QueryError as error:
                return _error(STATUS[error.code], error.code, error.message)
            reply = await answer(asked, _client(request), since)
            observe(asked, reply, time.monotonic_ns() - since)
            if isinstance(reply, messages.ErrorReply):
                return _error(STATUS[reply.code], reply.code, reply.message)
            found: dict[str, Any] = msgspec.to_builtins(reply)
            return _json({key: value for key, value in found.items() if key not in ("id", "type")}, status)

        return Route(path, endpoint, methods=[method])

    one = "/v1/prompts/{prompt}"
    return [
        route("/v1/ask", messages.Ask),
        route("/v1/prompts", messages.Open, status=201),
        route(f"{one}/append", messages.Append),
        route(f"{one}/update", messages.Update),
        route(f"{one}/finish", messages.Finish, has_body=False),
        route(one, messages.Close, method="DELETE", has_body=False),
        route("/v1/complete", messages.Complete),
    ]


async def _members(request: Request, max_bytes: int) -> dict[str, Any]:
    """Members of the body's JSON object. Raises QueryError."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise messages.QueryError("too_long", f"a request has at most {max_bytes} bytes")
    try:
        members = decoded(msgspec.json.decode, bytes(body))
    except Undecodable as error:
        raise messages.QueryError("bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(members, dict) or members.keys() & {"id", "type", *request.path_params}:
        raise messages.QueryError(
            "bad_request", "the body must be a JSON object of the request's own members"
        )
    return members


def _client(request: Request) -> str:
    return "http" if request.client is None else f"http {request.client.host}"


def _error(status: int, code: str, message: str) -> Response:
    response = _json({"code": code, "message": message}, status)
    if status == _TOO_MANY:
        response.headers["retry-after"] = str(messages.RETRY_AFTER_S)
    return response


def _json(members: dict[str, Any], status: int) -> Response:
    return Response(msgspec.json.encode(members), status, media_type="application/json")
