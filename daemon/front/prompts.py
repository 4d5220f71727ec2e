"""Prompts without a session, as the front keeps them: who may open how many, and who waits for what.

A prompt's id is drawn at random. Only the client that opened it knows it, and may continue it over any
connection. Why a prompt ended is remembered for a while, for requests that come late.
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
"""Inputs of one prompt that the engine has not taken yet, above which the next is refused."""
REMEMBERED = 1024
"""Ended prompts whose end is remembered."""

_ANSWERED: tuple[messages.Code, str] = ("finished", "the prompt is finished")


@dataclass(eq=False)
class PromptState:
    """One that has not ended."""

    id: str
    client: str
    inputs: deque[asyncio.Future[messages.PromptReply]] = field(default_factory=deque)
    """Who waits for the engine to take an input, in the order the inputs were sent."""
    answer: asyncio.Future[messages.FinishReply] | None = None
    """Who waits for the answer; None while the prompt is unfinished."""


class Prompts:
    """All clients' prompts, at most ``most`` at a time and ``most_each`` by one client. On the event loop."""

    def __init__(self, most: int, most_each: int, send: Callable[[protocol.Command], None]) -> None:
        self._most, self._most_each, self._send = most, most_each, send
        self._open: dict[str, PromptState] = {}
        self._by_client: Counter[str] = Counter()
        self._ended: OrderedDict[str, tuple[messages.Code, str]] = OrderedDict()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    # Told by the front.

    def heard(self, event: protocol.PromptEvent) -> None:
        """The engine took an input, answered or failed."""
        prompt = self._open.get(event.prompt)
        if prompt is None:
            return  # given up meanwhile
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
        """None of them will be answered any more."""
        for prompt in list(self._open.values()):
            self._end(prompt, "engine", message)

    # Asked by clients; each raises QueryError.

    async def open(self, request: messages.Open, client: str) -> messages.PromptReply:
        """Begin a prompt."""
        prompt = self._admit(client)
        try:
            return await self._input(prompt, protocol.OpenPrompt(prompt.id, request))
        except asyncio.CancelledError:  # its client never learns the id
            self._give_up(prompt)
            raise

    async def append(self, request: messages.Append | messages.Update) -> messages.PromptReply:
        """Add to an unfinished prompt, or replace it."""
        return await self._input(self._unfinished(request.prompt), request)

    async def finish(self, request: messages.Finish) -> messages.FinishReply:
        """Generate, and wait for the answer."""
        return await self._answer(request.id, self._unfinished(request.prompt), request)

    async def complete(self, request: messages.Complete, client: str) -> messages.FinishReply:
        """A prompt all at once, and its answer."""
        prompt = self._admit(client)
        return await self._answer(request.id, prompt, protocol.OpenPrompt(prompt.id, request))

    async def close(self, request: messages.Close) -> messages.ClosedReply:
        """Give a prompt up. One that has ended is closed already."""
        prompt = self._open.get(request.prompt)
        if prompt is not None:
            self._give_up(prompt)
        elif request.prompt not in self._ended:
            raise _unknown()
        return messages.ClosedReply(request.id, request.prompt)

    def _admit(self, client: str) -> PromptState:
        if not self._most:
            raise messages.QueryError("bad_request", "this daemon takes no prompts: query.max_prompts is 0")
        if len(self._open) >= self._most:
            raise messages.QueryError("busy", f"{self._most} prompts are already open")
        if self._by_client[client] >= self._most_each:
            raise messages.QueryError("busy", f"this client has {self._most_each} prompts open already")
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
        """Remember only why it ended, and tell the requests that wait."""
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
