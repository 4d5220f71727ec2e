"""The gateway's side of prompts without a session: limits, and the requests that wait for them.

A prompt's id is random. Only the client that opened the prompt knows it, and may use it over any connection
of its tenant; to other tenants it is unknown.
The reason for a prompt's end is remembered for a while, for late requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.api.auth import Access
from daemon.gateway.prompt_quota import PromptQuota
from daemon.tenants import Client

MAX_INPUTS = 16
"""Limit of one prompt's inputs that the engine has not taken yet; beyond it inputs are refused."""
REMEMBERED = 1024
"""Ended prompts to remember."""

_ANSWERED: tuple[messages.Code, str] = ("finished", "the prompt is finished")


@dataclass(eq=False)
class PromptState:
    """A prompt that has not ended."""

    id: str
    client: Client
    inputs: deque[asyncio.Future[messages.PromptReply]] = field(default_factory=deque)
    """Requests waiting for the engine to take an input, in sending order."""
    answer: asyncio.Future[messages.FinishReply] | None = None
    """The request waiting for the answer; None while the prompt is unfinished."""
    tokens: int = 0
    """What its tenant is charged for at its end: its length, until the engine says what it computed."""


class Ended(NamedTuple):
    """A prompt that has ended: whose it was, and why."""

    tenant: str
    code: messages.Code
    message: str


class Prompts:
    """All clients' prompts, as far as there is ``room``. On the event loop.

    ``admit`` raises QueryError when no new prompt is admitted now; open ones go on. ``access`` is told the
    tokens that they take.
    """

    def __init__(
        self,
        room: PromptQuota,
        send: Callable[[protocol.Command], None],
        admit: Callable[[], None] = lambda: None,
        access: Access | None = None,
    ) -> None:
        self._room, self._send, self._may_admit, self._access = room, send, admit, access or Access()
        self._open: dict[str, PromptState] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def __len__(self) -> int:
        """Number of open prompts."""
        return len(self._open)

    # Called by the gateway.

    def on_event(self, event: protocol.PromptEvent) -> None:
        """The engine took an input, answered or failed."""
        prompt = self._open.get(event.prompt)
        if prompt is None:
            return  # closed meanwhile
        if isinstance(event, messages.PromptReply):
            prompt.tokens = max(prompt.tokens, event.prompt_tokens)
            if prompt.inputs:
                _resolve(prompt.inputs.popleft(), event)
        elif isinstance(event, messages.FinishReply):
            prompt.tokens = max(0, event.prompt_tokens - event.reused_tokens) + event.answer_tokens
            if prompt.answer is not None:
                _resolve(prompt.answer, event)
            self._end(prompt, *_ANSWERED)
        else:
            self._end(prompt, messages.code_of(event.code), event.message)

    def engine_gone(self, message: str) -> None:
        """Fail all prompts: the engine is gone."""
        for prompt in list(self._open.values()):
            self._end(prompt, "engine", message)

    # Called for clients; each raises QueryError.

    async def open(self, request: messages.Open, client: Client) -> messages.PromptReply:
        """Open a prompt."""
        prompt = self._admit(client)
        try:
            return await self._input(prompt, _opened(prompt, request))
        except BaseException:  # the client never learns the id
            self._give_up(prompt)
            raise

    async def append(
        self, request: messages.Append | messages.Update, client: Client
    ) -> messages.PromptReply:
        """Append to an unfinished prompt, or replace its text."""
        return await self._input(self._unfinished(request.prompt, client), request)

    async def finish(self, request: messages.Finish, client: Client) -> messages.FinishReply:
        """Finish a prompt and wait for the answer."""
        return await self._answer(request.id, self._unfinished(request.prompt, client), request)

    async def complete(self, request: messages.Complete, client: Client) -> messages.FinishReply:
        """Send a complete prompt and wait for the answer."""
        prompt = self._admit(client)
        return await self._answer(request.id, prompt, _opened(prompt, request))

    async def close(self, request: messages.Close, client: Client) -> messages.ClosedReply:
        """Close a prompt. Closing an ended prompt succeeds."""
        prompt = self._find(request.prompt, client)
        if isinstance(prompt, PromptState):
            self._give_up(prompt)
        return messages.ClosedReply(request.id, request.prompt)

    def _admit(self, client: Client) -> PromptState:
        self._room.check(client)
        self._access.tokens(client)
        self._may_admit()
        prompt_id = secrets.token_hex(8)
        prompt = self._open[prompt_id] = PromptState(prompt_id, client)
        self._room.take(client)
        return prompt

    def _find(self, prompt_id: str, client: Client) -> PromptState | Ended:
        """A prompt of the client's tenant; that of another one is as unknown as none. Raises QueryError."""
        prompt, ended = self._open.get(prompt_id), self._ended.get(prompt_id)
        if prompt is not None and prompt.client.tenant.name == client.tenant.name:
            return prompt
        if ended is not None and ended.tenant == client.tenant.name:
            return ended
        raise messages.QueryError("unknown_prompt", "there is no such prompt")

    def _unfinished(self, prompt_id: str, client: Client) -> PromptState:
        prompt = self._find(prompt_id, client)
        if isinstance(prompt, Ended):
            raise messages.QueryError(prompt.code, prompt.message)
        if prompt.answer is not None:
            raise messages.QueryError(*_ANSWERED)
        return prompt

    async def _input(self, prompt: PromptState, command: protocol.PromptCommand) -> messages.PromptReply:
        """The reply once the engine has taken the input."""
        if len(prompt.inputs) >= MAX_INPUTS:
            raise messages.QueryError("busy", f"{MAX_INPUTS} inputs of this prompt wait to be taken")
        future: asyncio.Future[messages.PromptReply] = asyncio.get_running_loop().create_future()
        prompt.inputs.append(future)
        self._send(command)
        return await future

    async def _answer(
        self, request_id: int, prompt: PromptState, command: protocol.PromptCommand
    ) -> messages.FinishReply:
        prompt.answer = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            return msgspec.structs.replace(await prompt.answer, id=request_id)
        except BaseException:
            self._give_up(prompt)
            raise

    def _give_up(self, prompt: PromptState) -> None:
        if prompt.id in self._open:
            self._end(prompt, "unknown_prompt", "the prompt was closed")
            self._send(messages.Close(0, prompt.id))

    def _end(self, prompt: PromptState, code: messages.Code, message: str) -> None:
        """Keep only the reason for a prompt's end, and fail the waiting requests."""
        del self._open[prompt.id]
        self._room.leave(prompt.client)
        self._access.charge(prompt.client, prompt.tokens)
        self._ended[prompt.id] = Ended(prompt.client.tenant.name, code, message)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        waiting: list[asyncio.Future[Any]] = [*prompt.inputs]
        if prompt.answer is not None:
            waiting.append(prompt.answer)
        for future in waiting:
            if not future.done():
                future.set_exception(messages.QueryError(code, message))


def _opened(prompt: PromptState, request: messages.Open | messages.Complete) -> protocol.OpenPrompt:
    tenant = prompt.client.tenant
    return protocol.OpenPrompt(prompt.id, request, tenant.salt(), tenant.name, tenant.weight)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
