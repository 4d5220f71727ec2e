"""Who may use which routes: metrics and health are for everyone, all others for programs of this machine.

Clients are not authenticated yet. A request must therefore come from a loopback address and name this
machine as its host, which DNS rebinding cannot fake. A web page of another origin may neither read nor write:
browsers say where a request comes from in `Origin` and `Sec-Fetch-Site`, which pages cannot change.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.api.errors import problem

OPEN = frozenset(("/metrics", "/healthz", "/readyz"))
"""Routes for everyone who can connect."""
PAGES = frozenset(("/",))
"""Routes to which links of other pages may lead."""
_FORBIDDEN = 403
_POLICY_VIOLATION = 1008
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)


def client_of(connection: HTTPConnection) -> str:
    """The client's identity for limits: its address, until clients are authenticated."""
    return "http" if connection.client is None else f"http {connection.client.host}"


class Guard:
    """Refuses what may not use a route, and adds headers that keep answers from other origins' pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        refusal = refusal_of(scope)
        if scope["type"] == "websocket":
            if refusal:
                await receive()
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal})
                return
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if refusal:
            await problem(_FORBIDDEN, "forbidden", refusal)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


def refusal_of(scope: Scope) -> str:
    """Why a request is refused; empty if it is not."""
    headers, client = Headers(scope=scope), scope.get("client")
    hosts = headers.getlist("host")
    if client is None or not is_loopback(client[0]) or len(hosts) != 1 or not is_loopback(_name(hosts[0])):
        return "requests are accepted from this machine only"
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower() != f"{_scheme(scope)}://{hosts[0]}".lower():
        return "requests of web pages are accepted from this origin only"
    follows_link = (
        scope["path"] in PAGES
        and scope.get("method") in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    if site not in (None, "same-origin", "none") and not follows_link:
        return "requests of web pages are accepted from this origin only"
    return ""


def is_loopback(name: str) -> bool:
    """Whether a host is this machine. DNS names that resolve to loopback do not count."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _scheme(scope: Scope) -> str:
    scheme: str = scope["scheme"]
    return {"ws": "http", "wss": "https"}.get(scheme, scheme)
