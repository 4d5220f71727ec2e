"""Prompts without a session over HTTP: the query socket's requests as JSON, from this machine only.

Nobody is authenticated, so a request must come from a loopback address and name this machine as its host,
and its body must be called JSON: a web page that is open in a browser here can then send none of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from daemon.api.zmq import PromptBackend
from feeds.decoding import Undecodable, decoded

log = logging.getLogger(__name__)

STATUS: dict[Code, int] = {
    "bad_request": 400,
    "unknown_session": 404,
    "unknown_prompt": 404,
    "finished": 409,
    "abandoned": 410,
    "too_long": 413,
    "busy": 429,
    "engine": 503,
    "shutting_down": 503,
    "timeout": 504,
}
_FORBIDDEN, _NO_JSON = 403, 415

R = TypeVar("R", Open, Append, Update, Finish, Close, Complete)
Answer = PromptReply | FinishReply | ClosedReply


class PromptRoutes:
    """The routes of one backend. A request may have ``max_bytes`` bytes and take ``max_wait_s`` seconds."""

    def __init__(self, prompts: PromptBackend, max_wait_s: float, max_bytes: int = 1 << 18) -> None:
        self._prompts, self._max_wait_s, self._max_bytes = prompts, max_wait_s, max_bytes

    @property
    def routes(self) -> list[Route]:
        """For a Starlette application."""
        one = "/v1/prompts/{prompt}"
        prompts = self._prompts
        return [
            self._route(
                "/v1/prompts", Open, lambda asked, request: prompts.open(asked, _client(request)), status=201
            ),
            self._route(f"{one}/append", Append, lambda asked, _: prompts.append(asked)),
            self._route(f"{one}/update", Update, lambda asked, _: prompts.update(asked)),
            self._route(f"{one}/finish", Finish, lambda asked, _: prompts.finish(asked), has_body=False),
            self._route(one, Close, lambda asked, _: prompts.close(asked), method="DELETE", has_body=False),
            self._route(
                "/v1/complete", Complete, lambda asked, request: prompts.complete(asked, _client(request))
            ),
        ]

    def _route(
        self,
        path: str,
        kind: type[R],
        serve: Callable[[R, Request], Awaitable[Answer]],
        *,
        method: str = "POST",
        status: int = 200,
        has_body: bool = True,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            since = time.monotonic_ns()
            if not _is_local(request):
                return _error(_FORBIDDEN, "forbidden", "prompts are taken from this machine only")
            if has_body and request.headers.get("content-type", "").partition(";")[0] != "application/json":
                return _error(_NO_JSON, "bad_request", "the body must be of type application/json")
            try:
                body = await self._body(request) if has_body else {}
                asked = decoded(partial(msgspec.convert, type=kind), {**body, "id": 0, **request.path_params})
                async with asyncio.timeout(self._max_wait_s):
                    return _json(_members(await serve(asked, request), since), status)
            except Undecodable as error:
                return _refused("bad_request", str(error))
            except QueryError as error:
                return _refused(error.code, error.message)
            except TimeoutError:
                return _refused("timeout", f"no answer within {self._max_wait_s:g} s")
            except Exception:
                log.exception("%s %s failed", method, request.url.path)
                return _refused("engine", "the daemon failed to answer; its log says why")

        return Route(path, endpoint, methods=[method])

    async def _body(self, request: Request) -> dict[str, Any]:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_bytes:
                raise QueryError("too_long", f"a request has at most {self._max_bytes} bytes")
        try:
            members = decoded(msgspec.json.decode, bytes(body))
        except Undecodable as error:
            raise QueryError("bad_request", f"the body is no JSON: {error}") from None
        if not isinstance(members, dict) or members.keys() & {"id", "type", *request.path_params}:
            raise QueryError("bad_request", "the body must be a JSON object of the request's own members")
        return members


def _client(request: Request) -> str:
    return "http" if request.client is None else f"http {request.client.host}"


def _is_local(request: Request) -> bool:
    """From this machine, and meant for it: a name that somebody's page resolves to loopback is not."""
    return request.client is not None and all(
        _is_loopback(name) for name in (request.client.host, (request.url.hostname or "").strip("[]"))
    )


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _members(reply: Answer, since: int) -> dict[str, Any]:
    if isinstance(reply, FinishReply):
        reply = msgspec.structs.replace(reply, latency_ns=time.monotonic_ns() - since)
    members: dict[str, Any] = msgspec.to_builtins(reply)
    return {key: value for key, value in members.items() if key not in ("id", "type")}


def _refused(code: Code, message: str) -> Response:
    return _error(STATUS[code], code, message)


def _error(status: int, code: str, message: str) -> Response:
    return _json({"code": code, "message": message}, status)


def _json(members: dict[str, Any], status: int) -> Response:
    return Response(msgspec.json.encode(members), status, media_type="application/json")
