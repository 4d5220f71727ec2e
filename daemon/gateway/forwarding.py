"""Requests about sessions that another daemon of the group serves: forwarded to it, once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from daemon.api import messages
from daemon.api.client import AsyncQueryClient
from daemon.api.zmq import Answering, AnswerQuery, forwarding_name
from daemon.tenants import Client, Tenant
from feeds.curve import Keys

log = logging.getLogger(__name__)


def moved(session: str, address: str) -> messages.QueryError:
    """Another daemon, at this query address if it has told one, serves the session."""
    where = f"by the daemon at {address}" if address else "by another daemon, which told no address"
    return messages.QueryError("moved", f"{session} is served {where}")


class Forwarding:
    """Answers by ``answer``, or has the owner of the session do it.

    ``owner(session)``: the query address of the daemon that serves it, None for this one, empty for one that
    has told no address. A request that was forwarded to a daemon that isn't the owner (any more) is refused
    as `moved`, with the address, and so is every one where ``forwards`` is false.
    """

    def __init__(
        self,
        answer: AnswerQuery,
        owner: Callable[[str], str | None],
        timeout_s: float,
        *,
        forwards: bool = True,
        keys: Keys | None = None,
    ) -> None:
        """``keys``: of all daemons' query sockets, where they have any."""
        self._answer, self._owner, self._timeout_s, self._forwards = answer, owner, timeout_s, forwards
        self._keys = keys
        self._clients: dict[tuple[str, str], AsyncQueryClient] = {}

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """See `daemon.api.zmq.AnswerQuery`."""
        session = getattr(request, "session", "")
        address = self._owner(session) if session else None
        if address is None:
            return self._answer(request, client, since)
        if not address or not self._forwards or client.forwarded:
            return moved(session, address).reply(request.id, address)
        return partial(self._forward, request, client, since, address)

    async def _forward(
        self, request: messages.ClientRequest, client: Client, since: int, address: str
    ) -> messages.Reply:
        deadline_ms: int | None = getattr(request, "deadline_ms", None)
        wait_s = self._timeout_s if deadline_ms is None else min(self._timeout_s, deadline_ms / 1e3)
        try:
            async with asyncio.timeout(wait_s - (time.monotonic_ns() - since) / 1e9):
                return await self._client(address, client.tenant).request(request)
        except TimeoutError:
            return messages.ErrorReply(request.id, "timeout", f"no answer within {wait_s:g} s", address)
        except messages.QueryError as error:
            log.warning("a request could not be forwarded to %s: %s", address, error)
            return error.reply(request.id, address)

    async def stop(self) -> None:
        """Close the connections to other daemons."""
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
