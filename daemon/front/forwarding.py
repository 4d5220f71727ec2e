"""Requests about sessions that another daemon of the group serves: forwarded to it, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from os import urandom

from daemon.api import messages
from daemon.api.async_client import AsyncQueryClient
from daemon.api.zmq import AnswerQuery

log = logging.getLogger(__name__)

PREFIX = b"foretick-forward/"
"""How the connections of daemons begin their names: what comes over one is never forwarded again."""


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
    ) -> None:
        self._answer, self._owner, self._timeout_s, self._forwards = answer, owner, timeout_s, forwards
        self._clients: dict[str, AsyncQueryClient] = {}

    async def answer(self, request: messages.ClientRequest, client: str, since: int) -> messages.Reply:
        """See `daemon.api.zmq.AnswerQuery`."""
        session = getattr(request, "session", "")
        address = self._owner(session) if session else None
        if address is None:
            return await self._answer(request, client, since)
        if not address or not self._forwards or client.startswith(PREFIX.hex()):
            where = f"by the daemon at {address}" if address else "by another daemon, which told no address"
            return messages.ErrorReply(request.id, "moved", f"{session} is served {where}", address)
        try:
            return await self._client(address).request(request)
        except messages.QueryError as error:
            log.warning("a request about %s could not be forwarded to %s: %s", session, address, error)
            return messages.ErrorReply(request.id, error.code, error.message, address)

    async def stop(self) -> None:
        """Close the connections to other daemons."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    def _client(self, address: str) -> AsyncQueryClient:
        if address not in self._clients:
            identity = PREFIX + urandom(8)
            self._clients[address] = AsyncQueryClient(address, self._timeout_s, identity=identity)
        return self._clients[address]
