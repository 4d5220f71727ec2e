"""How many requests are answered at a time, with room left for others than the tenant that asks most."""

from __future__ import annotations

from collections import Counter

from daemon.api.messages import QueryError
from daemon.tenants import LOCAL, Client


class InFlight:
    """At most ``most``, of which a tenant of the file has at most half."""

    def __init__(self, most: int) -> None:
        self._most, self._all = most, 0
        self._by_tenant: Counter[str] = Counter()

    def enter(self, client: Client) -> None:
        """One more is answered. Raises QueryError when there is no room."""
        name = client.tenant.name
        if self._all >= self._most:
            raise QueryError("busy", f"{self._most} requests are already being answered")
        half = max(1, self._most // 2)
        if client.tenant is not LOCAL and self._by_tenant[name] >= half:
            raise QueryError("busy", f"{half} requests of this tenant are already being answered")
        self._all += 1
        self._by_tenant[name] += 1

    def leave(self, client: Client) -> None:
        """One of them is done."""
        name = client.tenant.name
        self._all -= 1
        self._by_tenant[name] -= 1
        if not self._by_tenant[name]:
            del self._by_tenant[name]
