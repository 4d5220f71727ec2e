"""How much clients may have under way: shares that leave room for other tenants."""

from collections import Counter
from collections.abc import Iterable

from daemon.api.messages import QueryError
from daemon.tenants import LOCAL, Tenant

Peer = tuple[str, int] | None
"""Address and port of the other end of a connection, which tell connections apart."""


def half_of(most: int) -> int:
    """What one tenant of the file may have of ``most``."""
    return max(1, most // 2)


REQUESTS = ("requests", "being answered")
"""What a `Quota` of requests says in a refusal."""


class Quota:
    """At most ``most`` of something at a time, of which a tenant of the file has at most half.

    ``what`` and ``state`` say in a refusal what there is too much of. Tenants go by their names.
    """

    def __init__(self, most: int, what: str, state: str, held: Iterable[str] = ()) -> None:
        self._most, self._what, self._state = most, what, state
        self._held = Counter(held)
        self._all = self._held.total()

    def __len__(self) -> int:
        """How many there are."""
        return self._all

    def check(self, name: str, n: int = 1, max_each: int = 0) -> None:
        """Raise QueryError unless there is room for ``n`` more. ``max_each``: of a tenant; 0: half."""
        if self._all + n > self._most:
            raise QueryError("busy", f"{self._most} {self._what} are already {self._state}")
        each = max_each or half_of(self._most)
        if name != LOCAL.name and self._held[name] + n > each:
            raise QueryError("busy", f"{each} {self._what} of this tenant are already {self._state}")

    def enter(self, name: str, n: int = 1, max_each: int = 0) -> None:
        """There are ``n`` more, if there is room as `check` says. Raises QueryError."""
        self.check(name, n, max_each)
        self.take(name, n)

    def take(self, name: str, n: int = 1) -> None:
        """There are ``n`` more, which were checked before; or fewer."""
        self._all += n
        self._held[name] += n
        if not self._held[name]:
            del self._held[name]

    def leave(self, name: str, n: int = 1) -> None:
        """There are ``n`` fewer."""
        self.take(name, -n)


class Connections:
    """At most ``most`` open connections of the HTTP port are served.

    A tenant has at most half of them, or its ``max_listeners`` if that is more. A connection counts for the
    tenant of its last request, and for no tenant before the first.
    """

    def __init__(self, most: int) -> None:
        self._most, self._share = most, Quota(most, "connections", "open")
        self._owners: dict[Peer, str | None] = {}
        """Names of the tenants."""

    def opened(self, peer: Peer) -> None:
        """A client connected."""
        self._owners[peer] = None

    def closed(self, peer: Peer) -> None:
        """The connection is gone."""
        name = self._owners.pop(peer, None)
        if name is not None:
            self._share.leave(name)

    def claim(self, peer: Peer, tenant: Tenant) -> None:
        """A request of ``tenant`` came over the connection. Raises QueryError when there is no room."""
        held = self._owners.get(peer)
        if held == tenant.name:
            return
        if held is None and len(self._owners) > self._most:
            raise QueryError("busy", f"{self._most} connections are already open")
        if held is not None:
            self._share.leave(held)
            self._owners[peer] = None
        self._share.enter(tenant.name, max_each=max(half_of(self._most), tenant.max_listeners))
        self._owners[peer] = tenant.name
