"""Prompts without a session that clients open, extend and finish: limits, and who waits for them.

A prompt's id is random. Only the client that opened the prompt knows it, and may use it over any connection
of its tenant; to other tenants it is unknown. The reason for a prompt's end is remembered for a while, for
late requests.
"""

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.generation import (
    ExtendPrompt,
    Failed,
    Finished,
    FinishPrompt,
    Generate,
    TokensCounted,
)
from daemon.gateway.generations import Generations
from daemon.gateway.pending import PendingCommands, resolve
from daemon.gateway.prompt_quota import PromptQuota
from daemon.tenants import Client
from daemon.traces.trace_context import current

_ANSWERED: tuple[messages.Code, str] = ("finished", "the prompt is finished")
_Future = asyncio.Future[protocol.ReplyEvent]


@dataclass(eq=False)
class PromptState:
    """A prompt that has not ended."""

    id: str
    client: Client
    number: int = 0
    """Of its generation; 0 before the engine has it."""
    trace_id: str = ""
    inputs: deque[_Future] = field(default_factory=deque)
    """Requests waiting for the engine to take an input, in sending order."""
    answer: _Future | None = None
    """The request waiting for the answer; None while the prompt is unfinished."""

    def finish(self) -> _Future:
        """It is finished; returns what the answer comes to."""
        self.answer = asyncio.get_running_loop().create_future()
        return self.answer


class EndedPrompt(NamedTuple):
    """A prompt that has ended: whose it was, and why."""

    tenant: str
    code: messages.Code
    message: str


class Prompts:
    """All clients' prompts, as far as there is ``room``. On the event loop.

    ``admit`` raises QueryError when no new prompt is admitted now; open ones go on. ``max_inputs``: of one
    prompt that the engine has not taken yet; beyond it inputs are refused. ``remembered``: ended prompts.
    """

    def __init__(
        self,
        generations: Generations,
        pending: PendingCommands,
        room: PromptQuota,
        access: Access,
        admit: Callable[[], None] = lambda: None,
        *,
        max_inputs: int = 16,
        remembered: int = 1024,
    ) -> None:
        self._generations, self._pending = generations, pending
        self._max_inputs, self._remembered = max_inputs, remembered
        self._room, self._access, self._may_admit = room, access, admit
        self._open: dict[str, PromptState] = {}
        self._ended: OrderedDict[str, EndedPrompt] = OrderedDict()

    def __len__(self) -> int:
        """Number of open prompts."""
        return len(self._open)

    # Each raises QueryError.

    async def open(self, request: messages.Open, client: Client) -> messages.PromptReply:
        """Open a prompt."""
        prompt = self._admit(client)
        try:
            return await self._input(prompt, request.id, lambda: self._start(prompt, request))
        except BaseException:  # the client never learns the id
            self._give_up(prompt)
            raise

    async def append(
        self, request: messages.Append | messages.Update, client: Client
    ) -> messages.PromptReply:
        """Append to an unfinished prompt, or replace its text."""
        prompt = self._unfinished(request.prompt, client)
        command = ExtendPrompt(prompt.number, request.text, isinstance(request, messages.Update))
        return await self._input(prompt, request.id, lambda: self._pending.send(command))

    async def finish(self, request: messages.Finish, client: Client) -> messages.FinishReply:
        """Finish a prompt and wait for the answer."""
        prompt = self._unfinished(request.prompt, client)
        return await self._answer(prompt, request.id, lambda: self._pending.send(FinishPrompt(prompt.number)))

    async def complete(self, request: messages.Complete, client: Client) -> messages.FinishReply:
        """Send a complete prompt and wait for the answer."""
        prompt = self._admit(client)
        return await self._answer(prompt, request.id, lambda: self._start(prompt, request))

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
        context = current.get()
        trace_id = "" if context is None else context.trace_id
        prompt = self._open[prompt_id] = PromptState(prompt_id, client, trace_id=trace_id)
        self._room.take(client)
        return prompt

    def _start(self, prompt: PromptState, request: messages.Open | messages.Complete) -> None:
        asked = Generate(
            text=request.text,
            max_tokens=request.max_tokens,
            choices=request.choices,
            temperature=request.temperature,
            exact=True,
            complete=isinstance(request, messages.Complete),
            salt=prompt.client.tenant.salt(),
            retention_priority=request.retention_priority,
            retention_seconds=request.retention_seconds,
        )
        (prompt.number,) = self._generations.start([(asked, partial(self._on_event, prompt))], prompt.client)

    def _on_event(self, prompt: PromptState, event: protocol.ReplyEvent) -> None:
        """The engine took an input, answered or failed."""
        if prompt.id not in self._open:
            return  # closed meanwhile
        match event:
            case TokensCounted() if prompt.inputs:
                resolve(prompt.inputs.popleft(), event)
            case Finished():
                if prompt.answer is not None:
                    resolve(prompt.answer, event)
                self._end(prompt, *_ANSWERED)
            case Failed():
                self._end(prompt, event.code, event.message)

    def _find(self, prompt_id: str, client: Client) -> PromptState | EndedPrompt:
        """A prompt of the client's tenant; that of another one is as unknown as none. Raises QueryError."""
        prompt, ended = self._open.get(prompt_id), self._ended.get(prompt_id)
        if prompt is not None and prompt.client.tenant.name == client.tenant.name:
            return prompt
        if ended is not None and ended.tenant == client.tenant.name:
            return ended
        raise messages.QueryError("unknown_prompt", "there is no such prompt")

    def _unfinished(self, prompt_id: str, client: Client) -> PromptState:
        prompt = self._find(prompt_id, client)
        if isinstance(prompt, EndedPrompt):
            raise messages.QueryError(prompt.code, prompt.message)
        if prompt.answer is not None:
            raise messages.QueryError(*_ANSWERED)
        return prompt

    async def _input(
        self, prompt: PromptState, number: int, send: Callable[[], None]
    ) -> messages.PromptReply:
        """The reply to request ``number`` once the engine has taken the input."""
        if len(prompt.inputs) >= self._max_inputs:
            raise messages.QueryError("busy", f"{self._max_inputs} inputs of this prompt wait to be taken")
        future: _Future = asyncio.get_running_loop().create_future()
        prompt.inputs.append(future)
        send()
        taken = await future
        assert isinstance(taken, TokensCounted)
        return messages.PromptReply(number, prompt.id, taken.tokens)

    async def _answer(
        self, prompt: PromptState, number: int, send: Callable[[], None]
    ) -> messages.FinishReply:
        answer = prompt.finish()
        try:
            send()
            done = await answer
        except BaseException:
            self._give_up(prompt)
            raise
        assert isinstance(done, Finished)
        assert done.stats is not None
        return messages.FinishReply(
            id=number,
            prompt=prompt.id,
            text=done.text,
            choice=done.metadata.choice,
            logit_gap=done.metadata.logit_gap,
            untrained=done.metadata.untrained,
            prompt_tokens=done.prompt_tokens,
            answer_tokens=done.answer_tokens,
            reused_tokens=done.reused_tokens,
            trace_id=prompt.trace_id,
            **msgspec.structs.asdict(done.stats),
        )

    def _give_up(self, prompt: PromptState) -> None:
        if prompt.id in self._open:
            self._end(prompt, "unknown_prompt", "the prompt was closed")
            if prompt.number:
                self._generations.cancel(prompt.number)

    def _end(self, prompt: PromptState, code: messages.Code, message: str) -> None:
        """Keep only the reason for a prompt's end, and fail the waiting requests."""
        del self._open[prompt.id]
        self._room.leave(prompt.client)
        self._ended[prompt.id] = EndedPrompt(prompt.client.tenant.name, code, message)
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        for future in [*prompt.inputs, *([] if prompt.answer is None else [prompt.answer])]:
            resolve(future, Failed(prompt.number, code, message))
