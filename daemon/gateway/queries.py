"""Replies to client requests of any transport: dispatch, time limit, errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from daemon.api import messages
from daemon.api.pushes import Pushes
from daemon.api.zmq import Answering
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.generations import Generations
from daemon.gateway.label_requests import LabelRequests
from daemon.gateway.prompts import Prompts
from daemon.gateway.question_requests import Questions
from daemon.gateway.reconfigure import LiveSessions
from daemon.tenants import Client

log = logging.getLogger(__name__)


class Queries:
    """Answers every request within ``max_wait_s`` seconds."""

    def __init__(
        self,
        sessions: Sessions,
        generations: Generations,
        live: LiveSessions,
        questions: Questions,
        labels: LabelRequests,
        prompts: Prompts,
        max_wait_s: float,
        pushes: Pushes,
    ) -> None:
        self._sessions, self._live, self._questions, self._labels = sessions, live, questions, labels
        self._generations = generations
        self._prompts, self._max_wait_s = prompts, max_wait_s
        self._pushes = pushes

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        """A ready answer, or what to await. ``client``: who asks; ``since``: its arrival, monotonic ns."""
        work: Callable[[], Awaitable[messages.Reply]] = partial(self._answer, request, client)
        if isinstance(request, messages.Ask):
            try:
                found = self._generations.ask(request, client)
            except messages.QueryError as error:
                return error.reply(request.id)
            if not callable(found):
                return msgspec.structs.replace(found, latency_ns=time.monotonic_ns() - since)
            work = found
        return partial(self._wait, request, since, work)

    async def _wait(
        self, request: messages.ClientRequest, since: int, work: Callable[[], Awaitable[messages.Reply]]
    ) -> messages.Reply:
        deadline_ms: int | None = getattr(request, "deadline_ms", None)
        wait_s = self._max_wait_s if deadline_ms is None else min(self._max_wait_s, deadline_ms / 1e3)
        try:
            async with asyncio.timeout(wait_s - (time.monotonic_ns() - since) / 1e9):
                reply = await work()
        except messages.QueryError as error:
            return error.reply(request.id)
        except TimeoutError:
            return messages.ErrorReply(request.id, "timeout", f"no answer within {wait_s:g} s")
        except Exception:
            log.exception("request %s failed", request)
            return messages.ErrorReply(request.id, "engine", "the daemon failed to answer; see its log")
        if isinstance(reply, messages.AskReply | messages.FinishReply):
            return msgspec.structs.replace(reply, latency_ns=time.monotonic_ns() - since)
        return reply

    async def _answer(self, request: messages.ClientRequest, client: Client) -> messages.Reply:
        match request:
            case messages.Ask():
                raise AssertionError("asks are looked up before")
            case messages.ListSessions():
                return await self._sessions.sessions(request)
            case messages.Describe():
                return await self._questions.describe(request)
            case messages.AddSession():
                return await self._live.add(request)
            case messages.ChangeSession():
                return await self._live.change(request)
            case messages.RemoveSession():
                return await self._live.remove(request)
            case messages.Answers():
                return await self._sessions.answers(request)
            case messages.ListQuestions():
                return await self._questions.list(request)
            case messages.SetQuestion():
                return await self._questions.set(request)
            case messages.RemoveQuestion():
                return await self._questions.remove(request)
            case messages.Pause():
                return await self._questions.pause(request)
            case messages.Label():
                return await self._labels.label(request)
            case messages.Stats():
                return await self._sessions.stats(request, client.tenant)
            case messages.Open():
                return await self._prompts.open(request, client)
            case messages.Append() | messages.Update():
                return await self._prompts.append(request, client)
            case messages.Finish():
                return await self._prompts.finish(request, client)
            case messages.Complete():
                return await self._prompts.complete(request, client)
            case messages.Close():
                return await self._prompts.close(request, client)
            case messages.Push():
                return await self._pushes.push(request, client.tenant)
