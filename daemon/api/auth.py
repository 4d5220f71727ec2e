"""Who may ask now: keys, requests a second and tokens a minute, the same for every interface."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from daemon.api.messages import QueryError, TenantBudget
from daemon.tenants import LOCAL, Client, Tenant, Tenants, hash_of
from metrics.catalogue import OTHER
from metrics.store import CounterHandle, MetricStore
from support.token_bucket import TokenBucket

Transport = Literal["http", "websocket", "zeromq"]
Reason = Literal["missing", "malformed", "unknown"]
MAX_KEY_BYTES = 256
LOCAL_LABEL = "local"
_LEAST_S = 1e-9


def tenant_labels(tenants: Tenants) -> list[str]:
    """Values of the metrics' label `tenant`: those of the start, and what stands for all others."""
    return [LOCAL_LABEL, *tenants.names, *([OTHER] if tenants.required else ())]


class Access:
    """Finds the client of a request, and refuses it by raising QueryError. On one thread.

    ``clock``: monotonic seconds. ``window_s``: seconds of its share of the engine that a tenant may take at
    once. What is refused is counted, by tenant or, without one, by reason.
    """

    def __init__(
        self,
        tenants: Tenants | None = None,
        store: MetricStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        window_s: float = 10.0,
    ) -> None:
        self.tenants = tenants or Tenants()
        self._store = store or MetricStore.local({"tenant": tenant_labels(self.tenants)})
        self._clock, self.window_s = clock, window_s
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}
        self._engine: dict[str, TokenBucket] = {}
        self._engine_ns: dict[str, int] = {}
        self._counters: dict[tuple[str, str], CounterHandle] = {}

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self.tenants.required

    # Who is it?

    def by_key(self, key: str, transport: Transport, name: str) -> Client:
        """The client that sent an API key from the address ``name``."""
        if not key or len(key) > MAX_KEY_BYTES or not key.isascii():
            raise self.refused(transport, "malformed" if key else "missing")
        credential = hash_of(key)
        tenant = self.tenants.holder(credential)
        if tenant is None:
            raise self.refused(transport, "unknown")
        return Client(tenant, name, credential)

    def by_curve(self, public: str, name: str, on_behalf_of: str | None = None) -> Client:
        """The client on a CURVE connection. ``on_behalf_of``: the tenant that another daemon names, if one
        of the group says that it forwards.
        """
        tenant = self.tenants.holder(public)
        if tenant is not None and on_behalf_of is not None and self.tenants.is_own(public):
            tenant = self.tenants.named(on_behalf_of)
            if tenant is not None:
                return Client(tenant, name, public, forwarded=True)
        if tenant is None:
            raise self.refused("zeromq", "unknown")
        return Client(tenant, name, public)

    def again(self, client: Client, transport: Transport) -> Client:
        """The client of a connection that was found earlier: keys and limits may have changed."""
        if not self.required:
            return client
        tenant = self.tenants.holder(client.credential)
        if tenant is None:
            raise self.refused(transport, "unknown")
        return client if tenant is client.tenant else replace(client, tenant=tenant)

    def holds(self, client: Client) -> bool:
        """Whether its key still stands for the same tenant, with the same rights and limits.

        Without a key it is a part of the daemon itself.
        """
        own = not self.required or not client.credential
        return own or self.tenants.holder(client.credential) == client.tenant

    def refused(self, transport: Transport, reason: Reason) -> QueryError:
        """Counts a request without a right key; returns the error to raise, which does not repeat it."""
        self._store.inc("foretick_unauthenticated_total", reason=reason)
        told = {
            "missing": "a key is needed",
            "malformed": "this is no key",
            "unknown": "the key is not known",
        }
        return QueryError("unauthenticated", told[reason])

    # May it, now?

    def request(self, client: Client) -> None:
        """Admit one request, of any kind. One that was forwarded was admitted by the other daemon."""
        tenant = client.tenant
        if tenant.requests_per_second and not client.forwarded:
            bucket = self._bucket(
                self._requests, tenant, tenant.requests_per_second, max(1, tenant.requests_per_second)
            )
            now = self._clock()
            wait_s = bucket.wait(now)
            if wait_s:
                self._count(tenant, "rate")
                why = f"this tenant has {tenant.requests_per_second:g} requests a second"
                raise QueryError("busy", why, wait_s)
            bucket.take(now)
        self._count(tenant, "admitted")

    def operate(self, client: Client, what: str) -> None:
        """Admit what only operators may do."""
        if not client.tenant.operator:
            self._count(client.tenant, "forbidden")
            raise QueryError("forbidden", f"{what}: only operators may")

    def tokens(self, client: Client) -> None:
        """Admit a request that will take tokens, and time of the engine."""
        tenant, now = client.tenant, self._clock()
        if tenant.tokens_per_minute and (wait_s := self._token_bucket(tenant).wait(now)):
            self._count(tenant, "tokens")
            raise QueryError("busy", f"this tenant has {tenant.tokens_per_minute} tokens a minute", wait_s)
        if tenant.engine_share and (wait_s := self._engine_bucket(tenant).wait(now, _LEAST_S)):
            self._count(tenant, "engine")
            why = f"this tenant has {tenant.engine_share:.3g} of the engine's time, and has used it up"
            raise QueryError("busy", why, wait_s)

    def charge(self, client: Client, tokens: int, engine_ns: int = 0) -> None:
        """Charge it the tokens that were computed, and the time of the engine that they took."""
        # the limits may have changed since the request began
        tenant = self.tenants.named(client.tenant.name) or client.tenant
        if tenant.tokens_per_minute:
            self._token_bucket(tenant).take(self._clock(), tokens)
        if tokens:
            self._store.inc("foretick_tenant_tokens_total", tokens, tenant=self._label(tenant))
        if engine_ns and tenant.engine_share:
            self._engine_bucket(tenant).take(self._clock(), engine_ns / 1e9)
        if engine_ns:
            self._engine_ns[tenant.name] = self._engine_ns.get(tenant.name, 0) + engine_ns
            label = self._label(tenant)
            self._store.inc("foretick_tenant_engine_seconds_total", engine_ns, tenant=label)

    def budgets(self, client: Client) -> tuple[TenantBudget, ...]:
        """Of the client's tenant; for an operator, of all."""
        own = client.tenant
        names = self.tenants.names if own.operator and self.required else (own.name,)
        return tuple(self._budget(self.tenants.named(name) or own) for name in names)

    def _budget(self, tenant: Tenant) -> TenantBudget:
        used = wait_s = 0.0
        if tenant.engine_share:
            bucket, now = self._engine_bucket(tenant), self._clock()
            used, wait_s = bucket.used(now), bucket.wait(now, _LEAST_S)
        taken_s = self._engine_ns.get(tenant.name, 0) / 1e9
        return TenantBudget(tenant.name, tenant.engine_share, used, wait_s, taken_s)

    def _token_bucket(self, tenant: Tenant) -> TokenBucket:
        return self._bucket(self._tokens, tenant, tenant.tokens_per_minute / 60, tenant.tokens_per_minute)

    def _engine_bucket(self, tenant: Tenant) -> TokenBucket:
        share = tenant.engine_share
        return self._bucket(self._engine, tenant, share, share * self.window_s)

    def _bucket(self, kept: dict[str, TokenBucket], tenant: Tenant, rate: float, burst: float) -> TokenBucket:
        """The tenant's bucket; another rate begins with a full one."""
        bucket = kept.get(tenant.name)
        if bucket is None or (bucket.rate, bucket.burst) != (rate, burst):
            bucket = kept[tenant.name] = TokenBucket(rate, burst, self._clock())
        return bucket

    def _count(self, tenant: Tenant, outcome: str) -> None:
        counter = self._counters.get((tenant.name, outcome))
        if counter is None:
            label = self._label(tenant)
            counter = self._store.counter("foretick_tenant_requests_total", tenant=label, outcome=outcome)
            self._counters[tenant.name, outcome] = counter
        counter.inc()

    def _label(self, tenant: Tenant) -> str:
        """One that came after the start has no series of its own."""
        if tenant is LOCAL:
            return LOCAL_LABEL
        return self._store.known("tenant", tenant.name)
