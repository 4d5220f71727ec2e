"""The routes of the HTTP API: requests, events, pushes, health, its description, and the live page."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from daemon.api.auth import Access
from daemon.api.auth_middleware import client_of, refuse
from daemon.api.events import KINDS, EventFilter, Events
from daemon.api.health import Health
from daemon.api.http_errors import problem, refused, reply
from daemon.api.http_requests import Requests, request_routes
from daemon.api.live_page import page
from daemon.api.messages import QueryError
from daemon.api.openapi import document
from daemon.api.pushes import Pushes
from daemon.api.sse import EventsReply, last_id, stream_head
from daemon.api.websocket import Socket
from daemon.tenants import Client

_UPGRADE = 426


def api_routes(
    requests: Requests,
    events: Events,
    pushes: Pushes,
    health: Callable[[Client], Health],
    access: Access,
) -> list[BaseRoute]:
    """All of them, for a Starlette application behind `daemon.api.auth_middleware`."""

    async def stream(request: Request) -> Response:
        try:
            chosen = _filter(request)
            if request.method == "HEAD":
                return stream_head()
            listening = events.subscribe(client_of(request), chosen, "sse", last_id(request))
        except QueryError as error:
            return refused(error)
        return EventsReply(events, listening)

    async def converse(websocket: WebSocket) -> None:
        made = Socket(websocket, requests, events, access)
        try:
            events.connect(made)
        except QueryError as error:
            scope, receive, send = websocket.scope, websocket.receive, websocket.send
            await refuse(refused(error), error.message, scope, receive, send)
            return
        try:
            await made.serve()
        finally:
            events.disconnect(made)

    async def say_upgrade(_: Request) -> Response:
        response = problem(_UPGRADE, "bad_request", "this is a WebSocket")
        response.headers.update({"upgrade": "websocket", "connection": "upgrade"})
        return response

    async def say_health(request: Request) -> Response:
        return reply(health(client_of(request)))

    async def say_version(request: Request) -> Response:
        return reply(health(client_of(request)).version)

    return [
        *request_routes(requests),
        Route("/v1/data", pushes.serve, methods=["POST"]),
        Route("/v1/events", stream, methods=["GET"]),
        WebSocketRoute("/v1/ws", converse),
        Route("/v1/ws", say_upgrade, methods=["GET"]),
        Route("/v1/health", say_health, methods=["GET"]),
        Route("/v1/version", say_version, methods=["GET"]),
        Route("/openapi.json", _describe, methods=["GET"]),
        Route("/", page, methods=["GET"]),
    ]


@lru_cache(maxsize=1)
def _description() -> bytes:
    return document()


async def _describe(_: Request) -> Response:
    return Response(_description(), media_type="application/json")


def _filter(request: Request) -> EventFilter:
    """From the parameters `session`, `question` and `event`, each any number of times. Raises QueryError."""
    given = request.query_params
    for name in given:
        if name not in ("session", "question", "event", "after"):
            why = f"{name[:64]}: is no parameter; there are session, question, event, after"
            raise QueryError("bad_request", why)
    kinds = frozenset(given.getlist("event"))
    if not kinds <= set(KINDS):
        raise QueryError("bad_request", f"event: must be one of {', '.join(KINDS)}")
    return EventFilter(frozenset(given.getlist("session")), frozenset(given.getlist("question")), kinds)
