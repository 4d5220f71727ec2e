"""What every client request passes, whatever its transport: who may ask, who answers, and until when."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.zmq import Answering
from daemon.gateway.peers import Peers, moved
from daemon.tenants import ALL, Client, Tenant

log = logging.getLogger(__name__)

Begin = Callable[[messages.ClientRequest, Client], Answering]
"""A ready answer, or what to await for a reply. Raises QueryError."""
FOR_ALL = (
    messages.Ask
    | messages.ListSessions
    | messages.Describe
    | messages.Answers
    | messages.ListQuestions
    | messages.Stats
    | messages.PromptRequest
    | messages.Push
)
"""What every tenant may ask, or push into its own sources; all else changes what others see, too, and is for
operators.
"""


class Queries:
    """Answers every request within ``max_wait_s`` seconds, by ``begin`` or by its session's owner.

    A session that a tenant does not see does not exist for it: it gets the same words. ``names()``: of all
    sessions. ``owner(session)``: the query address of the daemon that serves it, None for this one, empty for
    one that has told no address. A request that was forwarded to a daemon that isn't the owner (any more) is
    refused as `moved`, with the address, and so is every one where ``forwards`` is false.
    """

    def __init__(
        self,
        begin: Begin,
        access: Access,
        names: Callable[[], Iterable[str]],
        owner: Callable[[str], str | None],
        peers: Peers,
        max_wait_s: float,
        *,
        forwards: bool = True,
    ) -> None:
        self._begin, self._access, self._names = begin, access, names
        self._owner, self._peers, self._forwards = owner, peers, forwards
        self._max_wait_s = max_wait_s

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """A ready answer, or what to await. ``client``: who asks; ``since``: its arrival, monotonic ns."""
        session: str = getattr(request, "session", "")
        try:
            self._check(request, session, client)
            address = self._owner(session) if session else None
            if address is None:
                found = self._begin(request, client)
            elif not address or not self._forwards or client.forwarded:
                raise moved(session, address)
            else:
                found = partial(self._peers.forward, request, client.tenant, address)
        except messages.QueryError as error:
            return error.reply(request.id)
        if callable(found):
            return partial(self._wait, request, client.tenant, since, found, address or "")
        return _timed(found, since)

    def _check(self, request: messages.ClientRequest, session: str, client: Client) -> None:
        """Raises QueryError."""
        tenant = client.tenant
        if not isinstance(request, FOR_ALL):
            self._access.operate(client, str(request.__struct_config__.tag))
        if tenant.sessions == ALL:
            return
        if session and session not in (seen := tenant.seen(self._names())):
            raise messages.unknown_session(session, seen)
        if isinstance(request, messages.AddSession):
            name = str(request.settings.get("name", ""))
            if not tenant.sees(name):
                patterns = ", ".join(tenant.sessions) or "none"
                raise messages.QueryError("forbidden", f"{name!r} is no session of this tenant: {patterns}")

    async def _wait(
        self,
        request: messages.ClientRequest,
        tenant: Tenant,
        since: int,
        work: Callable[[], Awaitable[messages.Reply]],
        address: str,
    ) -> messages.Reply:
        """``address``: of the daemon that answers; empty for this one."""
        deadline_ms: int | None = getattr(request, "deadline_ms", None)
        wait_s = self._max_wait_s if deadline_ms is None else min(self._max_wait_s, deadline_ms / 1e3)
        try:
            async with asyncio.timeout(wait_s - (time.monotonic_ns() - since) / 1e9):
                reply = await work()
        except messages.QueryError as error:
            return error.reply(request.id)
        except TimeoutError:
            return messages.ErrorReply(request.id, "timeout", f"no answer within {wait_s:g} s", address)
        except Exception:
            log.exception("request %s failed", request)
            return messages.ErrorReply(request.id, "engine", "the daemon failed to answer; see its log")
        if isinstance(reply, messages.SessionsReply) and tenant.sessions != ALL:
            return msgspec.structs.replace(reply, sessions=visible(reply.sessions, tenant))
        return reply if address else _timed(reply, since)


def _timed(reply: messages.Reply, since: int) -> messages.Reply:
    """With the time that it took, where it says that."""
    if isinstance(reply, messages.AskReply | messages.FinishReply):
        return msgspec.structs.replace(reply, latency_ns=time.monotonic_ns() - since)
    return reply


def visible(sessions: Iterable[messages.SessionInfo], tenant: Tenant) -> tuple[messages.SessionInfo, ...]:
    """Those that a tenant sees."""
    return tuple(each for each in sessions if tenant.sees(each.name))
