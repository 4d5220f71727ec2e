"""Open connections of the HTTP port: so many, with room left for others than the tenant that opens most."""

from __future__ import annotations

from collections import Counter

from daemon.api.messages import QueryError
from daemon.tenants import LOCAL, Tenant

Peer = tuple[str, int] | None
"""Address and port of the other end, which tell connections apart."""


class Places:
    """At most ``most`` connections are served, of which a tenant of the file has at most half.

    One whose tenant may have more clients that listen has as many more. A connection belongs to nobody until
    its first request, and later to who sent the last one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Peer, str | None] = {}
        """Names of the tenants."""
        self._by_tenant: Counter[str] = Counter()

    def opened(self, peer: Peer) -> None:
        """A client connected."""
        self._open[peer] = None

    def closed(self, peer: Peer) -> None:
        """The connection is gone."""
        name = self._open.pop(peer, None)
        if name is not None:
            self._leave(name)

    def take(self, peer: Peer, tenant: Tenant) -> None:
        """A request of ``tenant`` came over the connection. Raises QueryError when there is no room."""
        held, name = self._open.get(peer), tenant.name
        if held == name:
            return
        if held is None and len(self._open) > self._most:
            raise QueryError("busy", f"{self._most} connections are open already")
        most = max(1, self._most // 2, tenant.max_listeners)
        if tenant is not LOCAL and self._by_tenant[name] >= most:
            raise QueryError("busy", f"{most} connections of this tenant are open already")
        if held is not None:
            self._leave(held)
        self._open[peer] = name
        self._by_tenant[name] += 1

    def _leave(self, name: str) -> None:
        self._by_tenant[name] -= 1
        if not self._by_tenant[name]:
            del self._by_tenant[name]
