"""Prompts without a session, as the front keeps them: who may open how many, and who waits for what.

A prompt's id is drawn at random and known to nobody but the client that opened it, who may go on with it over
any connection. What ended is remembered for a while, so that a late request hears why.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from daemon import protocol as seam
from daemon.api.messages import (
    Append,
    Close,
    ClosedReply,
    Code,
    Complete,
    Finish,
    FinishReply,
    Open,
    PromptReply,
    QueryError,
    Update,
)

MOST_INPUTS = 16
"""Inputs of one prompt that the engine has not taken yet, above which the next is refused."""
REMEMBERED = 1024
"""Ended prompts whose end is remembered."""

_CODES: dict[str, Code] = {
    "bad_request": "bad_request",
    "bad_prompt": "bad_request",
    "too_long": "too_long",
    "abandoned": "abandoned",
    "stopping": "shutting_down",
}
_ANSWERED: tuple[Code, str] = ("finished", "the prompt is finished")


@dataclass(eq=False)
class OpenPrompt:
    """One that has not ended."""

    number: int
    id: str
    client: str
    inputs: deque[asyncio.Future[int]] = field(default_factory=deque)
    """Who waits for the engine to take an input, in the order the inputs were sent."""
    answer: asyncio.Future[seam.PromptDone] | None = None
    """Who waits for the answer; None while the prompt is unfinished."""


class OpenPrompts:
    """All clients' prompts, at most ``most`` at a time and ``most_each`` by one client. On the event loop."""

    def __init__(self, most: int, most_each: int, send: Callable[[seam.Command], None]) -> None:
        self._most, self._most_each, self._send = most, most_each, send
        self.untrained = False
        self._open: dict[str, OpenPrompt] = {}
        self._by_number: dict[int, OpenPrompt] = {}
        self._by_client: Counter[str] = Counter()
        self._ended: OrderedDict[str, tuple[Code, str]] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    # Told by the front.

    def heard(self, event: seam.PromptEvent) -> None:
        """The engine took an input, answered or failed."""
        prompt = self._by_number.get(event.prompt)
        if prompt is None:
            return  # given up meanwhile
        if isinstance(event, seam.PromptTaken):
            if prompt.inputs:
                _resolve(prompt.inputs.popleft(), event.tokens)
        elif isinstance(event, seam.PromptDone):
            if prompt.answer is not None:
                _resolve(prompt.answer, event)
            self._end(prompt, *_ANSWERED)
        else:
            self._end(prompt, _CODES.get(event.code, "engine"), event.message)

    def engine_gone(self, message: str) -> None:
        """None of them will be answered any more."""
        for prompt in list(self._open.values()):
            self._end(prompt, "engine", message)

    # For clients; see `daemon.api.zmq.PromptBackend`.

    async def open(self, request: Open, client: str) -> PromptReply:
        """Begin a prompt."""
        prompt = self._admit(client)
        try:
            tokens = await self._input(prompt, _opening(prompt, request, complete=False))
        except asyncio.CancelledError:  # its client never learns the id
            self._give_up(prompt)
            raise
        return PromptReply(request.id, prompt.id, tokens)

    async def append(self, request: Append) -> PromptReply:
        """Add to an unfinished prompt."""
        return await self._change(request, replaces=False)

    async def update(self, request: Update) -> PromptReply:
        """Replace an unfinished prompt."""
        return await self._change(request, replaces=True)

    async def finish(self, request: Finish) -> FinishReply:
        """Generate, and wait for the answer."""
        prompt = self._unfinished(request.prompt)
        return await self._answer(request.id, prompt, seam.FinishPrompt(prompt.number))

    async def complete(self, request: Complete, client: str) -> FinishReply:
        """A prompt all at once, and its answer."""
        prompt = self._admit(client)
        return await self._answer(request.id, prompt, _opening(prompt, request, complete=True))

    async def close(self, request: Close) -> ClosedReply:
        """Give a prompt up. One that has ended is closed already."""
        prompt = self._open.get(request.prompt)
        if prompt is not None:
            self._give_up(prompt)
        elif request.prompt not in self._ended:
            raise _unknown()
        return ClosedReply(request.id, request.prompt)

    def _admit(self, client: str) -> OpenPrompt:
        if not self._most:
            raise QueryError("bad_request", "this daemon takes no prompts: query.max_prompts is 0")
        if len(self._open) >= self._most:
            raise QueryError("busy", f"{self._most} prompts are already open")
        if self._by_client[client] >= self._most_each:
            raise QueryError("busy", f"this client has {self._most_each} prompts open already")
        prompt = OpenPrompt(next(self._numbers), secrets.token_hex(8), client)
        self._open[prompt.id] = self._by_number[prompt.number] = prompt
        self._by_client[client] += 1
        return prompt

    def _unfinished(self, prompt_id: str) -> OpenPrompt:
        prompt = self._open.get(prompt_id)
        if prompt is None and prompt_id in self._ended:
            raise QueryError(*self._ended[prompt_id])
        if prompt is None:
            raise _unknown()
        if prompt.answer is not None:
            raise QueryError(*_ANSWERED)
        return prompt

    async def _change(self, request: Append | Update, *, replaces: bool) -> PromptReply:
        prompt = self._unfinished(request.prompt)
        tokens = await self._input(prompt, seam.PromptInput(prompt.number, request.text, replaces))
        return PromptReply(request.id, prompt.id, tokens)

    async def _input(self, prompt: OpenPrompt, command: seam.PromptCommand) -> int:
        """Tokens of the prompt once the engine has taken the input."""
        if len(prompt.inputs) >= MOST_INPUTS:
            raise QueryError("busy", f"{MOST_INPUTS} inputs of this prompt wait to be taken")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        prompt.inputs.append(future)
        self._send(command)
        return await future

    async def _answer(self, request_id: int, prompt: OpenPrompt, command: seam.PromptCommand) -> FinishReply:
        prompt.answer = asyncio.get_running_loop().create_future()
        self._send(command)
        try:
            done = await prompt.answer
        except asyncio.CancelledError:
            self._give_up(prompt)
            raise
        return FinishReply(
            request_id,
            prompt.id,
            done.text,
            done.choice,
            done.logit_gap,
            self.untrained,
            done.prompt_tokens,
            done.answer_tokens,
            done.reused_tokens,
            done.recomputed_tokens,
            done.swapped_tokens,
            done.invalidated_tokens,
            done.ttft_ns,
            done.waits,
        )

    def _give_up(self, prompt: OpenPrompt) -> None:
        if prompt.id in self._open:
            self._end(prompt, "unknown_prompt", "the prompt was closed")
            self._send(seam.CancelPrompt(prompt.number))

    def _end(self, prompt: OpenPrompt, code: Code, message: str) -> None:
        """Forget it, but for why, and tell whoever waits."""
        del self._open[prompt.id], self._by_number[prompt.number]
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
                future.set_exception(QueryError(code, message))


def _opening(prompt: OpenPrompt, request: Open | Complete, *, complete: bool) -> seam.OpenPrompt:
    return seam.OpenPrompt(
        prompt.number, request.text, complete, request.max_tokens, request.choices, request.temperature
    )


def _unknown() -> QueryError:
    return QueryError("unknown_prompt", "there is no such prompt")


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
