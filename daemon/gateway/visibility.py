"""What a tenant may ask of which sessions: one check for every request, before anything else sees it.

To a tenant a session that it does not see is one that does not exist: it gets the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.zmq import AnswerQuery, AtOnce, never
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


class Visibility:
    """Answers by ``answer``. ``names()``: of all sessions."""

    def __init__(
        self,
        answer: AnswerQuery,
        access: Access,
        names: Callable[[], Iterable[str]],
        fast_path: AtOnce = never,
    ) -> None:
        self._answer, self._access, self._names = answer, access, names
        self._at_once = fast_path

    async def answer(self, request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        """See `daemon.api.zmq.AnswerQuery`."""
        try:
            self._check(request, client)
        except messages.QueryError as error:
            return error.reply(request.id)
        reply = await self._answer(request, client, since)
        if isinstance(reply, messages.SessionsReply) and client.tenant.sessions != ALL:
            return msgspec.structs.replace(reply, sessions=visible(reply.sessions, client.tenant))
        return reply

    def fast_path(self, request: messages.ClientRequest, client: Client, since: int) -> messages.Reply | None:
        """See `daemon.api.zmq.AtOnce`. Only of what every tenant may ask: a refusal is counted once."""
        if not isinstance(request, messages.Ask):
            return None
        try:
            self._check(request, client)
        except messages.QueryError:
            return None
        return self._at_once(request, client, since)

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
