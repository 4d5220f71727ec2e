"""`/mcp`: agents over streamable HTTP, behind the same guard as all other routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.routing import Route

from daemon.api import messages
from daemon.api.events import Events, Filter
from daemon.api.guard import client_of
from daemon.api.http_requests import Requests
from daemon.api.mcp import Context, McpServer
from daemon.tenants import LOCAL, Client

PATH = "/mcp"
MAX_BYTES = 1 << 18
MAX_SESSIONS = 256
"""Connections of agents of the earlier revision, which has sessions of its own."""


class McpHttp:
    """The route, and the work behind it."""

    def __init__(self, requests: Requests, events: Events) -> None:
        self._requests, self._events = requests, events
        self._server = McpServer(self._ask, self._flashes)
        self._manager = StreamableHTTPSessionManager(
            self._server.sdk,
            # `daemon.api.guard` has checked host and origin
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=MAX_BYTES,
            max_sessions=MAX_SESSIONS,
        )
        self._closing = asyncio.Event()
        self.route = Route(PATH, StreamableHTTPASGIApp(self._manager))

    async def run(self) -> None:
        """Serve until `close`."""
        async with self._manager.run():
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
        chosen = Filter(kinds=frozenset(("flash_ready",)))
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
