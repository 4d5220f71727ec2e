"""Who sends an HTTP request or opens a WebSocket, and whether it may.

With tenants every request has a key, but for health, the live page's files and the API's description; metrics
name all sessions and are for operators. A key is sent in a header, which a web page of another origin cannot
make a browser send, so the origin does not matter.

Without tenants a request must come from a loopback address and name this machine as its host, which DNS
rebinding cannot fake. A web page of another origin may neither read nor write: browsers say where a request
comes from in `Origin` and `Sec-Fetch-Site`, which pages cannot change. Exceptions: `http.allowed_origins`.
"""

import ipaddress
from collections.abc import Set
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from daemon.api import anthropic, systemone
from daemon.api.auth import Access, Transport
from daemon.api.compatible import api_error_of, error_response
from daemon.api.connections import HEADER_BYTES, TOO_LONG
from daemon.api.http_errors import refused
from daemon.api.limits import Connections
from daemon.api.messages import QueryError
from daemon.api.openai import common
from daemon.tenants import LOCAL, Client

METRICS = "/metrics"
OPEN = frozenset(("/healthz", "/readyz"))
"""Routes for everyone who can connect."""
_QUESTION_PAGES, _PAGE_FILES = "/live/questions/", "/live/"
PROTOCOL, KEY_PROTOCOL = "foretick", "foretick-key."
"""Subprotocols of a WebSocket: ours, and the one that brings the key of a page, which can send no headers."""
_CLIENT = "foretick.client"
_POLICY_VIOLATION = 1008
_DENIAL = "websocket.http.response"
HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
]
"""Of every response: they keep it from pages of other origins."""
_OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/decisions", "/v1/models")
_ANTHROPIC = "/v1/messages"


def client_of(connection: HTTPConnection) -> Client:
    """Who sends a request or has opened a WebSocket; limits count by its address."""
    client: Client = connection.scope[_CLIENT]
    return client


class Guard:
    """Refuses what may not use a route. Pages of ``allowed_origins`` may what those of this origin may."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        connections: Connections,
        allowed_origins: Set[str] = frozenset(),
    ) -> None:
        self._app, self._access, self._connections = app, access, connections
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        peer = scope.get("client")
        if scope["type"] == "websocket":
            self._connections.opened(peer)
        try:
            await self._serve(scope, receive, send)
        finally:
            if scope["type"] == "websocket":
                self._connections.closed(peer)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        closes = True
        try:
            if _size_of(scope) > HEADER_BYTES:
                raise QueryError("bad_request", TOO_LONG)
            if scope["path"] not in OPEN:
                closes = False
                scope[_CLIENT] = client = self._admitted(scope)
                closes = True
                self._connections.claim(scope.get("client"), client.tenant)
        except QueryError as error:
            response = refusal_to(scope, error)
            if closes:
                response.headers["connection"] = "close"
            await refuse(response, error.message, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admitted(self, scope: Scope) -> Client:
        """The client, if it may. Raises QueryError."""
        path, address = scope["path"], scope.get("client")
        name = "http" if address is None else f"http {address[0]}"
        if not self._access.required:
            client = _local(name)
            if path == METRICS:
                return client
            if refusal := refusal_of(scope, self._allowed_origins):
                raise QueryError("forbidden", refusal)
        elif is_keyless(path) and scope["type"] == "http":
            return _local(name)
        else:
            transport: Transport = "websocket" if scope["type"] == "websocket" else "http"
            client = self._access.by_key(key_of(scope), transport, name)
        self._access.request(client)
        return client


def is_page(path: str) -> bool:
    """Whether links of other pages may lead there."""
    return path == "/" or path.startswith(_QUESTION_PAGES)


def is_keyless(path: str) -> bool:
    """Whether it tells nothing of this daemon's data."""
    return path in ("/", "/openapi.json") or path.startswith(_PAGE_FILES)


@lru_cache(maxsize=64)
def _local(name: str) -> Client:
    """Whoever needs no key, at this address."""
    return Client(LOCAL, name)


def key_of(scope: Scope) -> str:
    """The key that a request brings; empty without one."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if "x-api-key" in headers:
        return headers["x-api-key"].strip()
    protocols: list[str] = scope.get("subprotocols", [])
    return next((each.removeprefix(KEY_PROTOCOL) for each in protocols if each.startswith(KEY_PROTOCOL)), "")


def refusal_to(scope: Scope, error: QueryError) -> Response:
    """The reply to a request that is refused, as the API of its path writes errors."""
    path = scope["path"]
    theirs = path == "/v1/models" or path.startswith("/v1/models/")
    if path.startswith(_ANTHROPIC) or (theirs and "anthropic-version" in Headers(scope=scope)):
        return error_response(api_error_of(error), anthropic.error_body)
    if path == systemone.PATH:
        return error_response(api_error_of(error), systemone.error_body)
    if theirs or path in _OPENAI:
        return error_response(api_error_of(error), common.error_body)
    return refused(error)


def refusal_of(scope: Scope, allowed_origins: Set[str] = frozenset()) -> str:
    """Why a request without a key is refused; empty if it is not."""
    # read as they are: every request without a key comes by here
    headers, client = dict[bytes, bytes](scope["headers"]), scope.get("client")
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if client is None or not is_loopback(client[0]) or len(hosts) != 1 or not is_loopback(_name(hosts[0])):
        return "requests are accepted from this machine only"
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if origin is not None and origin.decode("latin-1") in allowed_origins:
        return ""
    if origin is not None and origin.decode("latin-1").lower() != f"{_scheme(scope)}://{hosts[0]}".lower():
        return "requests of web pages are accepted from this origin only"
    follows_link = (
        is_page(scope["path"])
        and scope.get("method") in ("GET", "HEAD")
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest") == b"document"
    )
    if site not in (None, b"same-origin", b"none") and not follows_link:
        return "requests of web pages are accepted from this origin only"
    return ""


@lru_cache(maxsize=64)
def is_loopback(name: str) -> bool:
    """Whether a host is this machine. DNS names that resolve to loopback do not count."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


async def refuse(response: Response, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request, or a WebSocket before it is accepted."""
    if scope["type"] == "websocket":
        await receive()
        if _DENIAL not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why})
            return
    await response(scope, receive, send)


def _size_of(scope: Scope) -> int:
    """Bytes of a request's path, query and headers."""
    headers = sum([len(name) + len(value) for name, value in scope["headers"]])
    return len(scope["raw_path"]) + len(scope["query_string"]) + headers


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _scheme(scope: Scope) -> str:
    scheme: str = scope["scheme"]
    return {"ws": "http", "wss": "https"}.get(scheme, scheme)
