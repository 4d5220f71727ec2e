"""From a client's request to its reply, whatever carried it: who answers, how long, with what error."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from daemon.api.messages import (
    Answers,
    Append,
    Ask,
    AskReply,
    Close,
    Complete,
    ErrorReply,
    Finish,
    FinishReply,
    Open,
    QueryError,
    Reply,
    Request,
    Stats,
    Update,
)
from daemon.api.messages import Sessions as ListSessions
from daemon.front.prompts import Prompts
from daemon.front.sessions import Sessions

log = logging.getLogger(__name__)


class Queries:
    """Answers every request. One may take ``max_wait_s`` seconds."""

    def __init__(self, sessions: Sessions, prompts: Prompts, max_wait_s: float) -> None:
        self._sessions, self._prompts, self._max_wait_s = sessions, prompts, max_wait_s

    async def answer(self, request: Request, client: str, since: int) -> Reply:
        """The reply. ``client``: who counts as one; ``since``: the request's arrival, monotonic ns."""
        try:
            async with asyncio.timeout(self._max_wait_s):
                reply = await self._answer(request, client)
        except QueryError as error:
            return ErrorReply(request.id, error.code, error.message)
        except TimeoutError:
            return ErrorReply(request.id, "timeout", f"no answer within {self._max_wait_s:g} s")
        except Exception:
            log.exception("request %s failed", request)
            return ErrorReply(request.id, "engine", "the daemon failed to answer; its log says why")
        if isinstance(reply, AskReply | FinishReply):
            return msgspec.structs.replace(reply, latency_ns=time.monotonic_ns() - since)
        return reply

    async def _answer(self, request: Request, client: str) -> Reply:
        match request:
            case Ask():
                return await self._sessions.ask(request)
            case ListSessions():
                return await self._sessions.sessions(request)
            case Answers():
                return await self._sessions.answers(request)
            case Stats():
                return await self._sessions.stats(request)
            case Open():
                return await self._prompts.open(request, client)
            case Append():
                return await self._prompts.append(request)
            case Update():
                return await self._prompts.update(request)
            case Finish():
                return await self._prompts.finish(request)
            case Complete():
                return await self._prompts.complete(request, client)
            case Close():
                return await self._prompts.close(request)
