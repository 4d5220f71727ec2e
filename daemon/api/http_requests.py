"""The query socket's requests over HTTP, as JSON: routes for each of `daemon.api.operations`.

`daemon.api.auth_middleware` decides who may send them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon.api import messages
from daemon.api.auth_middleware import client_of
from daemon.api.disconnect import unless_gone
from daemon.api.http_errors import NO_SUCH_TYPE, problem, refused, reply
from daemon.api.limits import REQUESTS, Quota
from daemon.api.messages import QueryError
from daemon.api.operations import OPERATIONS, UNSAID, Operation
from daemon.api.request_body import media_type_of, members_of
from daemon.api.zmq import Answering, AnswerQuery
from daemon.tenants import Client
from feeds.decoding import Undecodable, decoded

JSON = "application/json"
Observe = Callable[[messages.ClientRequest, messages.Reply, int], None]


class Requests:
    """Requests of all HTTP clients to the daemon: a bounded number at a time, each observed."""

    def __init__(
        self,
        answer: AnswerQuery,
        observe: Observe = lambda request, reply, latency_ns: None,
        max_in_flight: int = 256,
    ) -> None:
        """``observe(request, reply, latency_ns)``, per readable request."""
        self._answer, self._observe = answer, observe
        self._in_flight = Quota(max_in_flight, *REQUESTS)

    def begin(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """The reply, or what to await for it. ``client``: who asks; ``since``: its arrival, monotonic ns."""
        found = self._answer(request, client, since)
        if callable(found):
            return partial(self._wait, request, client, since, found)
        self._observe(request, found, time.monotonic_ns() - since)
        return found

    async def ask(
        self, request: messages.ClientRequest, client: Client, since: int | None = None
    ) -> messages.Reply:
        """As `begin`, to its end; ``since``: by default now."""
        found = self.begin(request, client, time.monotonic_ns() if since is None else since)
        return await found() if callable(found) else found

    async def _wait(
        self,
        request: messages.ClientRequest,
        client: Client,
        since: int,
        work: Callable[[], Awaitable[messages.Reply]],
    ) -> messages.Reply:
        try:
            self._in_flight.enter(client.tenant.name)
        except QueryError as error:
            found: messages.Reply = error.reply(request.id)
        else:
            try:
                found = await work()
            except asyncio.CancelledError:
                given_up = messages.ErrorReply(request.id, "cancelled", "the client gave the request up")
                self._observe(request, given_up, time.monotonic_ns() - since)
                raise
            finally:
                self._in_flight.leave(client.tenant.name)
        self._observe(request, found, time.monotonic_ns() - since)
        return found


def request_routes(requests: Requests, max_bytes: int = 1 << 18) -> list[Route]:
    """Routes for a Starlette application, one for each path, for bodies of at most ``max_bytes`` bytes."""
    paths: dict[str, dict[str, Operation]] = {}
    for each in sorted(OPERATIONS, key=lambda each: each.request is not messages.Ask):
        # routes are tried in order, and no request is as frequent as that one
        paths.setdefault(each.path, {})[each.method] = each
    return [
        Route(path, partial(_serve, requests, methods, max_bytes), methods=list(methods))
        for path, methods in paths.items()
    ]


async def _serve(
    requests: Requests, methods: Mapping[str, Operation], max_bytes: int, request: Request
) -> Response:
    since = time.monotonic_ns()
    operation = methods["GET" if request.method == "HEAD" else request.method]
    if operation.body != "none" and media_type_of(request) != JSON:
        return problem(NO_SUCH_TYPE, "bad_request", f"the content type must be {JSON}")
    try:
        asked = await _read(request, operation, max_bytes)
    except Undecodable as error:
        return problem(400, "bad_request", str(error))
    except QueryError as error:
        return refused(error)
    client = client_of(request)
    begun: msgspec.Struct | Callable[[], Awaitable[msgspec.Struct]]
    if operation.perform is None:
        begun = requests.begin(asked, client, since)
    else:
        begun = partial(operation.perform, partial(requests.ask, client=client, since=since), asked)
    found = await unless_gone(request, begun()) if callable(begun) else begun
    if isinstance(found, messages.ErrorReply):
        return refused(QueryError.of(found))
    members = {name: getattr(found, name) for name in _said(type(found))}
    return reply(members, operation.status)


@cache
def _said(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Members of a reply that HTTP says in its body."""
    return tuple(name for name in kind.__struct_fields__ if name not in UNSAID)


async def _read(request: Request, operation: Operation, max_bytes: int) -> Any:
    """The operation's request. Raises QueryError, Undecodable."""
    members: dict[str, Any] = {**_query_of(request, operation), **request.path_params}
    if operation.body != "none":
        given = await members_of(request, max_bytes)
        if operation.body == "settings":
            given = {"settings": given}
        elif given.keys() & {*UNSAID, *members}:
            raise QueryError("bad_request", "the body must be a JSON object of the request's own members")
        members |= given
    return decoded(partial(msgspec.convert, type=operation.request), {**members, "id": 0})


def _query_of(request: Request, operation: Operation) -> dict[str, Any]:
    """Members in the query, as their types. Raises QueryError, Undecodable."""
    given: dict[str, str] = {}
    query = request.scope["query_string"].decode("latin-1")
    if not query:
        return given
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise QueryError("bad_request", f"the query cannot be read: {error}") from None
    for name, value in pairs:
        if name not in operation.query:
            known = ", ".join(operation.query) or "none"
            raise QueryError("bad_request", f"{name[:64]}: is no parameter of this request; it has: {known}")
        if name in given:
            raise QueryError("bad_request", f"{name}: is given twice")
        given[name] = value
    types = {field.name: field.type for field in msgspec.structs.fields(operation.request)}
    return {
        name: decoded(partial(msgspec.convert, type=types[name], strict=False), value)
        for name, value in given.items()
    }
