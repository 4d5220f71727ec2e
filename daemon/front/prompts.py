"""The front's side of prompts without a session: limits per client, and the requests that wait for them.

A prompt's id is random. Only the client that opened the prompt knows it, and may use it over any connection.
The reason for a prompt's end is remembered for a while, for late requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from daemon import protocol
from daemon.api import messages

MAX_INPUTS = 16
"""Limit of one prompt's inputs that the engine has not taken yet; beyond it inputs are refused."""
REMEMBERED = 1024
"""Ended prompts to remember."""

_ANSWERED: tuple[messages.Code, str] = ("finished", "the prompt is finished")


@dataclass(eq=False)
class PromptState:
    """A prompt that has not ended."""

    id: str
    client: str
    inputs: deque[asyncio.Future[messages.PromptReply]] = field(default_factory=deque)
    """Requests waiting for the engine to take an input, in sending order."""
    answer: asyncio.Future[messages.FinishReply] | None = None
    """The request waiting for the answer; None while the prompt is unfinished."""


class Prompts:
    """All clients' prompts, at most ``most`` at a time and ``most_each`` per client. On the event loop.

    ``admit`` raises QueryError when no new prompt is admitted now; open ones go on.
    """

    def __init__(
        self,
        most: int,
        most_each: int,
        send: Callable[[protocol.Command], None],
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        self._most, self._most_each, self._send, self._may_admit = most, most_each, send, admit
        self._open: dict[str, PromptState] = {}
        self._by_client: Counter[str] = Counter()
        self._ended: OrderedDict[str, tuple[messages.Code, str]] = OrderedDict()

    def __len__(self) -> int:
        """Number of open prompts."""
        return len(self._open)

    # Called by the front.

    def heard(self, event: protocol.PromptEvent) -> None:
        """The engine took an input, answered or failed."""
        prompt = self._open.get(event.prompt)
        if prompt is None:
            return  # closed meanwhile
        if isinstance(event, messages.PromptReply):
            if prompt.inputs:
                _resolve(prompt.inputs.popleft(), event)
        elif isinstance(event, messages.FinishReply):
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

    async def open(self, request: messages.Open, client: str) -> messages.PromptReply:
        """Open a prompt."""
        prompt = self._admit(client)
        try:
            return await self._input(prompt, protocol.OpenPrompt(prompt.id, request))
        except asyncio.CancelledError:  # the client never learns the id
            self._give_up(prompt)
            raise

    async def append(self, request: messages.Append | messages.Update) -> messages.PromptReply:
        """Append to an unfinished prompt, or replace its text."""
        return await self._input(self._unfinished(request.prompt), request)

    async def finish(self, request: messages.Finish) -> messages.FinishReply:
        """Finish a prompt and wait for the answer."""
        return await self._answer(request.id, self._unfinished(request.prompt), request)

    async def complete(self, request: messages.Complete, client: str) -> messages.FinishReply:
        """Send a complete prompt and wait for the answer."""
        prompt = self._admit(client)
        return await self._answer(request.id, prompt, protocol.OpenPrompt(prompt.id, request))

    async def close(self, request: messages.Close) -> messages.ClosedReply:
        """Close a prompt. Closing an ended prompt succeeds."""
        prompt = self._open.get(request.prompt)
        if prompt is not None:
            self._give_up(prompt)
        elif request.prompt not in self._ended:
            raise _unknown()
        return messages.ClosedReply(request.id, request.prompt)

    def _admit(self, client: str) -> PromptState:
        if not self._most:
            raise messages.QueryError("bad_request", "this daemon accepts no prompts: query.max_prompts is 0")
        if len(self._open) >= self._most:
            raise messages.QueryError("busy", f"{self._most} prompts are already open")
        if self._by_client[client] >= self._most_each:
            raise messages.QueryError("busy", f"this client has {self._most_each} prompts open already")
        self._may_admit()
        prompt_id = secrets.token_hex(8)
        prompt = self._open[prompt_id] = PromptState(prompt_id, client)
        self._by_client[client] += 1
        return prompt

    def _unfinished(self, prompt_id: str) -> PromptState:
        prompt = self._open.get(prompt_id)
        if prompt is None and prompt_id in self._ended:
            raise messages.QueryError(*self._ended[prompt_id])
        if prompt is None:
            raise _unknown()
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
        self._send(command)
        try:
            return msgspec.structs.replace(await prompt.answer, id=request_id)
        except asyncio.CancelledError:
            self._give_up(prompt)
            raise

    def _give_up(self, prompt: PromptState) -> None:
        if prompt.id in self._open:
            self._end(prompt, "unknown_prompt", "the prompt was closed")
            self._send(messages.Close(0, prompt.id))

    def _end(self, prompt: PromptState, code: messages.Code, message: str) -> None:
        """Keep only the reason for a prompt's end, and fail the waiting requests."""
        del self._open[prompt.id]
        self._by_client[prompt.client] -= 1
        if not self._by_client[prompt.client]:
            del self._by_client[prompt.client]
        self._ended[prompt.id] = code, message
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        waiting: list[asyncio.Future[Any]] = [*prompt.inputs]
        if prompt.answer is not None:
            waiting.append(prompt.answer)
        for future in waiting:
            if not future.done():
                future.set_exception(messages.QueryError(code, message))


def _unknown() -> messages.QueryError:
    return messages.QueryError("unknown_prompt", "there is no such prompt")


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
