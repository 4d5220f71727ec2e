"""What a tenant may ask of which sessions: one check for every request, before anything else sees it.

To a tenant a session that it does not see is one that does not exist: it gets the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.zmq import Answering, AnswerQuery
from daemon.tenants import ALL, Client, Tenant

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


LISTING = messages.ListSessions | messages.SessionRequest
"""What is answered by a list of sessions."""


class Visibility:
    """Answers by ``answer``. ``names()``: of all sessions."""

    def __init__(self, answer: AnswerQuery, access: Access, names: Callable[[], Iterable[str]]) -> None:
        self._answer, self._access, self._names = answer, access, names

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """See `daemon.api.zmq.AnswerQuery`."""
        try:
            self._check(request, client)
        except messages.QueryError as error:
            return error.reply(request.id)
        found = self._answer(request, client, since)
        if client.tenant.sessions == ALL or not isinstance(request, LISTING):
            return found
        return partial(_listed, found, client.tenant)

    def _check(self, request: messages.ClientRequest, client: Client) -> None:
        """Raises QueryError."""
        tenant = client.tenant
        if not isinstance(request, FOR_ALL):
            self._access.operate(client, str(request.__struct_config__.tag))
        if tenant.sessions == ALL:
            return
        session: str = getattr(request, "session", "")
        if session:
            seen = tenant.seen(self._names())
            if session not in seen:
                raise messages.unknown_session(session, seen)
        if isinstance(request, messages.AddSession):
            name = str(request.settings.get("name", ""))
            if not tenant.sees(name):
                patterns = ", ".join(tenant.sessions) or "none"
                raise messages.QueryError("forbidden", f"{name!r} is no session of this tenant: {patterns}")


def visible(sessions: Iterable[messages.SessionInfo], tenant: Tenant) -> tuple[messages.SessionInfo, ...]:
    """Those that a tenant sees."""
    return tuple(each for each in sessions if tenant.sees(each.name))


async def _listed(found: Answering, tenant: Tenant) -> messages.Reply:
    """A list of sessions, of which the reply has those that a tenant sees."""
    reply = await found() if callable(found) else found
    if not isinstance(reply, messages.SessionsReply):
        return reply
    return msgspec.structs.replace(reply, sessions=visible(reply.sessions, tenant))
