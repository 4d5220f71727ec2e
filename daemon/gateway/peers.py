"""Other daemons of the group, which serve some sessions: requests about these are forwarded, once."""

import logging

from daemon.api import messages
from daemon.api.client import AsyncQueryClient
from daemon.api.zmq import forwarding_name
from daemon.tenants import Tenant
from feeds.curve import Keys

log = logging.getLogger(__name__)


def moved(session: str, address: str) -> messages.QueryError:
    """Another daemon, at this query address if it has told one, serves the session."""
    where = f"by the daemon at {address}" if address else "by another daemon, which told no address"
    return messages.QueryError("moved", f"{session} is served {where}", address=address)


class Peers:
    """Connections to them. ``keys``: of all daemons' query sockets, where they have any."""

    def __init__(self, timeout_s: float, keys: Keys | None = None) -> None:
        self._timeout_s, self._keys = timeout_s, keys
        self._clients: dict[tuple[str, str], AsyncQueryClient] = {}

    async def forward(self, request: messages.ClientRequest, tenant: Tenant, address: str) -> messages.Reply:
        """The reply of the daemon at ``address``. Raises QueryError, with the address."""
        try:
            return await self._client(address, tenant).request(request)
        except messages.QueryError as error:
            log.warning("a request could not be forwarded to %s: %s", address, error)
            raise messages.QueryError(error.code, error.message, error.retry_after_s, address) from None

    async def stop(self) -> None:
        """Close the connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    def _client(self, address: str, tenant: Tenant) -> AsyncQueryClient:
        """A connection for each tenant, whose name says for whom."""
        key = address, tenant.name
        if key not in self._clients:
            name = forwarding_name(tenant.name)
            self._clients[key] = AsyncQueryClient(address, self._timeout_s, identity=name, keys=self._keys)
        return self._clients[key]
