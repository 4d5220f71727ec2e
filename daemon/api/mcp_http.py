"""`/mcp`: agents over streamable HTTP, behind the same guard as all other routes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import HTTPConnection, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from daemon.api import messages
from daemon.api.auth_middleware import client_of
from daemon.api.events import EventFilter, Events
from daemon.api.http_errors import refused
from daemon.api.http_requests import Requests
from daemon.api.limits import Quota
from daemon.api.mcp_server import Context, McpServer
from daemon.api.messages import QueryError
from daemon.tenants import LOCAL, Client

PATH = "/mcp"
MAX_BYTES = 1 << 18
IDLE_S = 300.0
"""Such a session ends when it has had no request and no open stream for so long."""

# they name the ids of sessions
for _name in ("streamable_http", "streamable_http_manager"):
    logging.getLogger(f"mcp.server.{_name}").setLevel(logging.ERROR)


class _Sessions(StreamableHTTPSessionManager):
    """The SDK's sessions, of the protocol's earlier revision; a tenant has at most half of them."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> Any:
        """Open one. Raises QueryError."""
        owners = [owner["client_id"] for owner in self._session_owners.values()]
        assert requestor is not None  # `_Agents` names one
        Quota(self.max_sessions or 0, "sessions of agents", "open", owners).check(requestor["client_id"])
        return super()._admit_session(requestor)


class _Agents:
    """Tells the SDK who sends a request: only who opened a session may use it."""

    def __init__(self, sessions: _Sessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = client_of(HTTPConnection(scope))
        token = AccessToken(
            token="", client_id=client.tenant.name, scopes=[], subject=client.credential or None
        )
        try:
            user = AuthenticatedUser(token)
            await self._sessions.handle_request({**scope, "user": user}, receive, send)
        except QueryError as error:
            await refused(error)(scope, receive, send)


def _tenant_of(context: Context) -> str:
    """Who asks; "" for `LOCAL`."""
    assert isinstance(context.request, Request)  # the transport puts it there
    return client_of(context.request).tenant.name


class McpHttp:
    """The route, and the work behind it. ``max_sessions``, ``max_subscriptions``: of all agents."""

    def __init__(
        self, requests: Requests, events: Events, max_sessions: int = 256, max_subscriptions: int = 1024
    ) -> None:
        self._requests, self._events = requests, events
        self._server = McpServer(self._ask, self._flashes, _tenant_of, max_subscriptions)
        self._sessions = _Sessions(
            self._server.sdk,
            # `daemon.api.auth_middleware` has checked host and origin
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=MAX_BYTES,
            max_sessions=max_sessions,
            session_idle_timeout=IDLE_S,
        )
        self._closing = asyncio.Event()
        self.route = Route(PATH, _Agents(self._sessions))

    async def run(self) -> None:
        """Serve until `close`."""
        async with self._sessions.run():
            await self._closing.wait()

    def close(self) -> None:
        """End all connections."""
        self._server.close()
        self._closing.set()

    async def _ask(self, request: messages.ClientRequest, context: Context) -> messages.Reply:
        assert isinstance(context.request, Request)  # the transport puts it there
        return await self._requests.ask(request, client_of(context.request))

    async def _flashes(self) -> AsyncIterator[str]:
        # of all sessions; whether an agent may see one was asked when it subscribed
        chosen = EventFilter(kinds=frozenset(("flash_ready",)))
        subscription = self._events.subscribe(Client(LOCAL, "mcp"), chosen, "mcp")
        try:
            while not subscription.closed:
                await subscription.news.wait()
                lost, waiting = subscription.take()
                if lost:
                    yield ""
                for session in dict.fromkeys(event.session for event in waiting):
                    yield session
        finally:
            self._events.unsubscribe(subscription)
