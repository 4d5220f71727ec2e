"""How many prompts are open at a time: in all, and of each client and tenant."""

from collections import Counter

from daemon.api.messages import QueryError
from daemon.tenants import Client


class PromptQuota:
    """Counts prompts over all interfaces: at most ``most``, and ``max_each`` of one client."""

    def __init__(self, most: int, max_each: int) -> None:
        self._most, self._most_each = most, max_each
        self._by_client: Counter[tuple[str, str]] = Counter()
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of open prompts."""
        return self._by_tenant.total()

    def check(self, client: Client, n: int = 1) -> None:
        """Whether there is room for ``n`` more. Raises QueryError."""
        tenant = client.tenant
        if not self._most:
            raise QueryError("bad_request", "this daemon accepts no prompts: query.max_prompts is 0")
        if len(self) + n > self._most:
            raise QueryError("busy", f"{self._most} prompts may be open at a time")
        if tenant.max_prompts and self._by_tenant[tenant.name] + n > tenant.max_prompts:
            raise QueryError("busy", f"a tenant has {tenant.max_prompts} prompts at a time at most")
        if self._by_client[client.key] + n > self._most_each:
            raise QueryError("busy", f"a client has {self._most_each} prompts at a time at most")

    def take(self, client: Client, n: int = 1) -> None:
        """``n`` more are open."""
        self._by_client[client.key] += n
        self._by_tenant[client.tenant.name] += n

    def leave(self, client: Client, n: int = 1) -> None:
        """``n`` of them have ended."""
        self._by_client[client.key] -= n
        self._by_tenant[client.tenant.name] -= n
        # forget those without any
        if not self._by_client[client.key]:
            del self._by_client[client.key]
        if not self._by_tenant[client.tenant.name]:
            del self._by_tenant[client.tenant.name]
