"""Other daemons of the group, which serve some sessions: requests about these are forwarded, once."""

import asyncio
import logging
from collections.abc import Iterable

from daemon.api import messages
from daemon.api.client import AsyncQueryClient
from daemon.api.zmq import forwarding_name
from daemon.tenants import Tenant
from feeds.curve import Keys
from metrics.store import MetricStore

log = logging.getLogger(__name__)

LIST_WAIT_S = 1.0
"""Longest wait for another daemon's list of sessions."""
MOVING = ("moved", "shutting_down")
"""What a daemon says of a session that it serves no longer."""


def moved(session: str, address: str) -> messages.QueryError:
    """Another daemon, at this query address if it has told one, serves the session."""
    where = f"by the daemon at {address}" if address else "by another daemon, which told no address"
    return messages.QueryError("moved", f"{session} is served {where}", address=address)


class Peers:
    """Connections to them. ``keys``: of all daemons' query sockets, where they have any."""

    def __init__(self, timeout_s: float, keys: Keys | None = None, store: MetricStore | None = None) -> None:
        self._timeout_s, self._keys, self._store = timeout_s, keys, store or MetricStore.local({})
        self._clients: dict[tuple[str, str], AsyncQueryClient] = {}

    async def forward(self, request: messages.ClientRequest, tenant: Tenant, address: str) -> messages.Reply:
        """The reply of the daemon at ``address``. Raises QueryError, with the address."""
        try:
            reply = await self._client(address, tenant).request(request)
        except messages.QueryError as error:
            self._count("failed")
            log.warning("a request could not be forwarded to %s: %s", address, error)
            raise messages.QueryError(error.code, error.message, error.retry_after_s, address) from None
        is_moving = isinstance(reply, messages.ErrorReply) and reply.code in MOVING
        self._count("moved" if is_moving else "answered")
        return reply

    async def sessions(
        self, tenant: Tenant, addresses: Iterable[str]
    ) -> dict[str, tuple[messages.SessionInfo, ...] | messages.Code]:
        """What the daemons at these addresses say of all sessions, or why they do not; asked all at once."""

        async def ask(address: str) -> tuple[messages.SessionInfo, ...] | messages.Code:
            try:
                async with asyncio.timeout(LIST_WAIT_S):
                    reply = await self.forward(messages.ListSessions(0), tenant, address)
            except TimeoutError:
                self._count("failed")
                return "timeout"
            except messages.QueryError as error:
                return error.code
            if isinstance(reply, messages.ErrorReply):
                return reply.code
            assert isinstance(reply, messages.SessionsReply)  # to that request
            return reply.sessions

        asked = list(addresses)
        return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))

    async def stop(self) -> None:
        """Close the connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    def _count(self, outcome: str) -> None:
        self._store.inc("foretick_peer_requests_total", outcome=outcome)

    def _client(self, address: str, tenant: Tenant) -> AsyncQueryClient:
        """A connection for each tenant, whose name says for whom."""
        key = address, tenant.name
        if key not in self._clients:
            name = forwarding_name(tenant.name)
            self._clients[key] = AsyncQueryClient(address, self._timeout_s, identity=name, keys=self._keys)
        return self._clients[key]
