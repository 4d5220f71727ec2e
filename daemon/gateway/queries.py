"""What every client request passes, whatever its transport: who may ask, who answers, and until when."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from msgspec.structs import replace

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.zmq import Answering
from daemon.gateway.peers import MOVING, Peers, moved
from daemon.tenants import ALL, Client, Tenant
from daemon.traces.trace_context import TraceContext, Tracer, current

log = logging.getLogger(__name__)

Begin = Callable[[messages.ClientRequest, Client], Answering]
"""A ready answer, or what to await for a reply. Raises QueryError."""
LOOK_S = 0.05
"""How often a request that waits for a session's owner looks who that is now."""
FORMER_S = 0.5
"""Longest wait for a session's former owner, which may be gone."""
UNKNOWN_S = 3.0
"""Longest wait for an owner of which no address is known."""
_TRACED = messages.Ask | messages.Open | messages.Complete | messages.GenerateElsewhere
"""What has a trace."""
FOR_ALL = (
    messages.Ask
    | messages.ListSessions
    | messages.Describe
    | messages.ShowPrompt
    | messages.Answers
    | messages.ListQuestions
    | messages.ListSignals
    | messages.ListVersions
    | messages.Quality
    | messages.Stats
    | messages.ListBudgets
    | messages.GetTrace
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
    one that has told no address. ``address()``: of this one. While a session moves, its requests wait for the
    new owner. ``former(session)``: who answered a session of ours before, where that is known. One that was
    forwarded to a daemon that isn't the owner (any more) is refused as `moved`, with
    the address, and so is every one where ``forwards`` is false.
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
        address: Callable[[], str] = lambda: "",
        former: Callable[[str], str] = lambda session: "",
        forwards: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        self._begin, self._access, self._names = begin, access, names
        self._owner, self._peers, self._forwards = owner, peers, forwards
        self._max_wait_s, self._address, self._former = max_wait_s, address, former
        self._tracer = tracer or Tracer()

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """A ready answer, or what to await. ``client``: who asks; ``since``: its arrival, monotonic ns.

        An ask, or a prompt, goes on its caller's trace, or the one that its transport has begun.
        """
        if not isinstance(request, _TRACED):
            return self._answer(request, client, since)
        began = None if request.traceparent else current.get()
        context = began or self._tracer.begin(request.traceparent)
        token = current.set(context)
        try:
            found = self._answer(request, client, since)
        finally:
            current.reset(token)
        return partial(_in_trace, context, found) if callable(found) else _traced(found, context)

    def _answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        session: str = getattr(request, "session", "")
        try:
            self._check(request, session, client)
            kept = isinstance(request, messages.KeptAnswers)
            address = self._owner(session) if session and not kept else None
            if address is None:
                found = self._here(request, client)
            elif not self._forwards or client.forwarded:
                raise moved(session, address)
            else:
                return partial(self.forward, request, client, since)
        except messages.QueryError as error:
            return error.reply(request.id)
        if callable(found):
            if isinstance(request, messages.ListSessions):
                found = partial(self._listed, found, client)
            return partial(self._wait, request, client.tenant, since, found)
        return _timed(found, since)

    async def forward(self, request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        """The reply of the session's owner; ``since``: as in `answer`."""
        work = partial(self._of_owner, request, client, since)
        return await self._wait(request, client.tenant, since, work)

    def _check(self, request: messages.ClientRequest, session: str, client: Client) -> None:
        """Raises QueryError."""
        tenant = client.tenant
        if isinstance(request, messages.GenerateElsewhere | messages.KeptAnswers):
            if not client.forwarded:
                raise messages.QueryError("forbidden", "only daemons of one group ask each other this")
        elif not isinstance(request, FOR_ALL):
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
    ) -> messages.Reply:
        wait_s = self._wait_s(request)
        try:
            async with asyncio.timeout(wait_s - (time.monotonic_ns() - since) / 1e9):
                reply = await work()
        except messages.QueryError as error:
            return error.reply(request.id)
        except TimeoutError:
            session = getattr(request, "session", "")
            address = self._owner(session) if session else None
            return messages.ErrorReply(request.id, "timeout", f"no answer within {wait_s:g} s", address or "")
        except Exception:
            log.exception("request %s failed", request)
            return messages.ErrorReply(request.id, "engine", "the daemon failed to answer; see its log")
        return _timed(self._told(reply, tenant), since)

    def _wait_s(self, request: messages.ClientRequest) -> float:
        deadline_ms: int | None = getattr(request, "deadline_ms", None)
        return self._max_wait_s if deadline_ms is None else min(self._max_wait_s, deadline_ms / 1e3)

    def _told(self, reply: messages.Reply, tenant: Tenant) -> messages.Reply:
        """As the tenant sees it, and with the owners of sessions."""
        match reply:
            case messages.SessionsReply():
                told = (self._with_owner(each) for each in visible(reply.sessions, tenant))
                return replace(reply, sessions=tuple(told))
            case messages.DescribeReply():
                return replace(reply, session=self._with_owner(reply.session))
            case _:
                return reply

    def _with_owner(self, info: messages.SessionInfo) -> messages.SessionInfo:
        """As its owner has said itself, or as far as this daemon knows."""
        if info.owner:
            return info
        owner = self._owner(info.name)
        return replace(info, owner=self._address() if owner is None else owner)

    # What other daemons serve.

    async def _of_owner(self, request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        """The reply of the session's owner, which is looked for until one takes it. Raises QueryError."""
        session: str = request.session  # type: ignore[union-attr]  # only such a request has an owner
        until = since / 1e9 + self._wait_s(request)
        while (address := self._owner(session)) is not None:
            if not self._forwards:
                raise moved(session, address)
            reply = None
            if address:
                asking = self._peers.forward(_sent_on(request), client.tenant, address)
                reply = await self._while_owner(asking, session)
            else:
                until = min(until, since / 1e9 + UNKNOWN_S)
            is_final = not (isinstance(reply, messages.ErrorReply) and reply.code in MOVING)
            if reply is not None and (is_final or time.monotonic() + LOOK_S > until):
                return reply
            if time.monotonic() + LOOK_S > until:
                raise moved(session, address)
            await asyncio.sleep(LOOK_S)
        found = self._here(request, client)
        return await found() if callable(found) else found

    async def _while_owner(self, asking: Awaitable[messages.Reply], session: str) -> messages.Reply | None:
        """The reply, or None where another daemon serves the session before there is one."""
        address, task = self._owner(session), asyncio.ensure_future(asking)
        try:
            while not task.done() and self._owner(session) == address:
                await asyncio.wait([task], timeout=LOOK_S)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def _here(self, request: messages.ClientRequest, client: Client) -> Answering:
        """A ready answer of this daemon's, or what to await. Raises QueryError."""
        found = self._begin(request, client)
        if callable(found) and isinstance(request, messages.Answers):
            return partial(self._handed_over, found, request, client)
        return found

    async def _handed_over(
        self, begin: Callable[[], Awaitable[messages.Reply]], request: messages.Answers, client: Client
    ) -> messages.Reply:
        """Of a session that came to us just now, what its former owner answered last."""
        reply, address = await begin(), self._former(request.session)
        if not address or not isinstance(reply, messages.AnswersReply) or reply.answers:
            return reply
        asked = messages.KeptAnswers(request.id, request.session)
        try:
            async with asyncio.timeout(FORMER_S):
                kept = await self._peers.forward(asked, client.tenant, address)
        except (TimeoutError, messages.QueryError):
            return reply
        if not isinstance(kept, messages.AnswersReply):
            return reply
        wanted = request.question
        return replace(kept, answers=tuple(a for a in kept.answers if wanted in ("", a.question)))

    async def _listed(self, begin: Callable[[], Awaitable[messages.Reply]], client: Client) -> messages.Reply:
        """All sessions, each as its owner tells it: owners are asked once, and all at once."""
        reply = await begin()
        if client.forwarded or not (self._forwards and isinstance(reply, messages.SessionsReply)):
            return reply
        owners = {each.name: self._owner(each.name) for each in reply.sessions}
        told = await self._peers.sessions(client.tenant, sorted(filter(None, {*owners.values()})))
        theirs = {
            each.name: each
            for address, found in told.items()
            if isinstance(found, tuple)
            for each in found
            if each.owner == address
        }

        def seen(info: messages.SessionInfo) -> messages.SessionInfo:
            owner = owners[info.name]
            if owner is None or (found := theirs.pop(info.name, None)) is None:
                why = told.get(owner or "", "moved")
                failed = "" if owner is None else "moved" if isinstance(why, tuple) else why
                return replace(info, owner=owner or "", owner_failure=failed)
            return found

        own = tuple(map(seen, reply.sessions))
        only_there = (each for name, each in theirs.items() if name not in owners)
        return replace(reply, sessions=(*own, *only_there))


async def _in_trace(context: TraceContext, work: Callable[[], Awaitable[messages.Reply]]) -> messages.Reply:
    """What ``work`` gives, in this trace."""
    token = current.set(context)
    try:
        return _traced(await work(), context)
    finally:
        current.reset(token)


def _traced(reply: messages.Reply, context: TraceContext) -> messages.Reply:
    """With its trace id, unless its owner has said it."""
    if not isinstance(reply, messages.AskReply | messages.FinishReply | messages.ErrorReply):
        return reply
    return reply if reply.trace_id else replace(reply, trace_id=context.trace_id)


def _sent_on(request: messages.ClientRequest) -> messages.ClientRequest:
    """For the daemon that answers it: in its caller's trace, if it has one."""
    context = current.get()
    if context is None or not context.parent_id or not isinstance(request, _TRACED):
        return request
    return replace(request, traceparent=context.traceparent)


def _timed(reply: messages.Reply, since: int) -> messages.Reply:
    """With the time that it took, where it says that."""
    if isinstance(reply, messages.AskReply | messages.FinishReply):
        return replace(reply, latency_ns=time.monotonic_ns() - since)
    return reply


def visible(sessions: Iterable[messages.SessionInfo], tenant: Tenant) -> tuple[messages.SessionInfo, ...]:
    """Those that a tenant sees."""
    return tuple(each for each in sessions if tenant.sees(each.name))
