"""The routes of the HTTP API: requests, events, pushes, health, its description, and the live page."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from daemon.api.auth import Access
from daemon.api.auth_middleware import client_of, refuse
from daemon.api.events import Events
from daemon.api.health import Health
from daemon.api.http_errors import problem, refused, reply
from daemon.api.http_requests import Requests, request_routes
from daemon.api.live_page import page_routes
from daemon.api.messages import QueryError
from daemon.api.openapi import document
from daemon.api.pushes import Pushes
from daemon.api.request_body import read_query
from daemon.api.sse import EventsQuery, EventsReply, stream_head
from daemon.api.websocket import Socket, SocketLimits
from daemon.tenants import Client
from feeds.decoding import Undecodable

_UPGRADE = 426


def api_routes(
    requests: Requests,
    events: Events,
    pushes: Pushes,
    health: Callable[[Client], Health],
    access: Access,
    *,
    socket: SocketLimits | None = None,
) -> list[BaseRoute]:
    """All of them, for a Starlette application behind `daemon.api.auth_middleware`.

    ``socket``: limits of one WebSocket.
    """

    async def stream(request: Request) -> Response:
        try:
            query = read_query(request, EventsQuery)
            if request.method == "HEAD":
                return stream_head()
            # a browser that comes back names the last event that it knows in the header
            after = request.headers.get("last-event-id") or query.after
            newest = "" if after else events.newest
            listening = events.subscribe(client_of(request), query.filter, "sse", after)
        except Undecodable as error:
            return problem(400, "bad_request", str(error))
        except QueryError as error:
            return refused(error)
        return EventsReply(events, listening, newest=newest)

    async def converse(websocket: WebSocket) -> None:
        made = Socket(websocket, requests, events, access, socket or SocketLimits())
        try:
            events.connect(made)
        except QueryError as error:
            await refuse(refused(error), error.message, websocket.scope, websocket.receive, websocket.send)
            return
        try:
            await made.serve()
        finally:
            events.disconnect(made)

    async def say_health(request: Request) -> Response:
        return reply(health(client_of(request)))

    async def say_version(request: Request) -> Response:
        return reply(health(client_of(request)).version)

    return [
        *request_routes(requests),
        Route("/v1/data", pushes.serve, methods=["POST"]),
        Route("/v1/events", stream, methods=["GET"]),
        WebSocketRoute("/v1/ws", converse),
        Route("/v1/ws", _say_upgrade, methods=["GET"]),
        Route("/v1/health", say_health, methods=["GET"]),
        Route("/v1/version", say_version, methods=["GET"]),
        Route("/openapi.json", _describe, methods=["GET"]),
        *page_routes(),
    ]


async def _describe(_: Request) -> Response:
    return Response(document(), media_type="application/json")


async def _say_upgrade(_: Request) -> Response:
    response = problem(_UPGRADE, "bad_request", "this is a WebSocket")
    response.headers.update({"upgrade": "websocket", "connection": "upgrade"})
    return response
