"""The engine's side of prompts without a session: text to tokens, requests of class POOL, answers to events.

A prompt is plain text: the tokenizer's begin-of-text token, if it has one, then the client's text, without
chat template or system prompt. Special tokens spelled out in the text are recognised, so a client may bring
its own template. Each appended piece is encoded separately; the concatenated tokens may differ from the
tokens of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from daemon import protocol
from daemon.api.generation import Generate
from daemon.api.messages import Append, Close, Complete, Finish, FinishReply, Open, PromptReply, Update
from daemon.engine.answers import CANCELLED, Emit, generated
from engine.model.chat_format import PromptFormat
from flash.question import PreparedQuestion, Question
from flash.registry import check_choices
from regions.cache_priority import PrefixRetention
from regions.streaming_kv import StreamingPrompt
from scheduler.interfaces import PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler

NAME = "prompt"
"""Name of such a request in messages, in place of a session's."""


def retention_of(asked: Open | Complete | Generate, tenant: str) -> PrefixRetention:
    """How long the prefix cache keeps a prompt and its answer, out of its tenant's share."""
    return PrefixRetention(asked.retention_priority, round(asked.retention_seconds * 1e9), tenant)


@dataclass
class LivePrompt:
    """A prompt in the scheduler. ``tokens``: its length as of the newest input."""

    request: Request
    tokens: int


class EnginePrompts:
    """All live prompts. Commands come from one thread; answers go out on the scheduler's.

    ``open_prompt`` makes a prompt's reader, for a salt. Prompt and answer together may take at most
    ``max_tokens`` positions.
    """

    def __init__(
        self,
        prompt: PromptFormat,
        scheduler: Scheduler,
        open_prompt: Callable[[str], StreamingPrompt],
        max_tokens: int,
        untrained: bool,
        emit: Emit,
    ) -> None:
        self._format = prompt
        self._scheduler = scheduler
        self._open_prompt = open_prompt
        self._most_tokens = max_tokens
        self._untrained = untrained
        self._emit = emit
        self._live: dict[str, LivePrompt] = {}

    def handle(self, command: protocol.PromptCommand) -> None:
        """Carry out one command. Commands for an ended prompt are ignored: the gateway knows of its end."""
        if isinstance(command, protocol.OpenPrompt):
            self._open(command)
            return
        live = self._live.get(command.prompt)
        match command:
            case _ if live is None:
                pass
            case Append() | Update():
                self._input(live, command)
            case Finish():
                self._scheduler.finish(live.request.id)
            case Close():
                self._scheduler.cancel(live.request.id)

    def _open(self, command: protocol.OpenPrompt) -> None:
        asked = command.request
        if not self._may_fit(command.prompt, asked.text):
            return
        tokens = self._format.plain(asked.text)
        try:
            request = Request(
                RequestSpec(
                    cls=PriorityClass.POOL,
                    session=NAME,
                    prompt=tokens,
                    max_tokens=1 if asked.choices else asked.max_tokens,
                    on_done=partial(self._done, command),
                    open_prompt=partial(self._open_prompt, command.salt),
                    salt=command.salt,
                    stop_ids=self._format.stop_ids,
                    choices=self._choices(asked.choices),
                    temperature=asked.temperature,
                    complete=isinstance(asked, Complete),
                    tenant=command.tenant,
                    weight=command.weight,
                    retention=retention_of(asked, command.tenant),
                )
            )
        except ValueError as error:
            self._emit(protocol.PromptFailed(command.prompt, "bad_request", str(error)))
            return
        if not self._fits(command.prompt, len(tokens), request):
            return
        self._live[command.prompt] = LivePrompt(request, len(tokens))
        self._scheduler.submit(request)
        self._emit(PromptReply(asked.id, command.prompt, len(tokens)))

    def _input(self, live: LivePrompt, command: Append | Update) -> None:
        whole = isinstance(command, Update) or not live.tokens
        fits = self._may_fit(command.prompt, command.text)
        if fits:
            tokens = self._format.plain(command.text) if whole else self._format.encode(command.text)
            length = len(tokens) if whole else live.tokens + len(tokens)
            fits = self._fits(command.prompt, length, live.request)
        if not fits:
            self._live.pop(command.prompt, None)
            self._scheduler.cancel(live.request.id)
            return
        live.tokens = length
        if whole:
            self._scheduler.replace(live.request.id, tokens)
        else:
            self._scheduler.extend(live.request.id, tokens)
        self._emit(PromptReply(command.id, command.prompt, length))

    def _may_fit(self, prompt: str, text: str) -> bool:
        """Whether it is worth tokenising; reports the failure if not."""
        least = len(text) // self._format.longest_token
        if least <= self._most_tokens:
            return True
        message = f"the text takes at least {least} positions, but the limit is {self._most_tokens}"
        self._emit(protocol.PromptFailed(prompt, "too_long", message))
        return False

    def _fits(self, prompt: str, tokens: int, request: Request) -> bool:
        """Whether prompt and answer fit into the positions; reports the failure if not."""
        needed = tokens + request.spec.max_tokens
        if needed <= self._most_tokens:
            return True
        message = f"prompt and answer take up to {needed} positions, but the limit is {self._most_tokens}"
        self._emit(protocol.PromptFailed(prompt, "too_long", message))
        return False

    def _choices(self, choices: tuple[str, ...]) -> tuple[int, ...] | None:
        """First token of each choice as written, since it directly follows the prompt."""
        if not choices:
            return None
        if not all(choices):
            raise ValueError("an empty choice")
        tokens = tuple(self._format.encode(choice)[0] for choice in choices)
        check_choices(Question(NAME, NAME, choices), PreparedQuestion((), tokens, frozenset()))
        return tokens

    def _done(self, command: protocol.OpenPrompt, request: Request) -> None:
        if self._live.pop(command.prompt, None) is None:
            return  # its end was reported when it was refused
        if request.state is not State.FINISHED:
            failure = request.error or CANCELLED
            self._emit(protocol.PromptFailed(command.prompt, failure.code, failure.message))
            return
        first = request.first(LifecycleEvent.KV_ON_GPU)
        assert first is not None  # already answered
        self._emit(
            FinishReply(
                id=command.request.id,
                prompt=command.prompt,
                **generated(request, command.request.choices, self._format.decode),
                untrained=self._untrained,
                prompt_tokens=len(request.prompt),
                answer_tokens=len(request.output),
                reused_tokens=request.cached_tokens,
                recomputed_tokens=request.recomputed_tokens,
                swapped_tokens=request.swapped_tokens,
                invalidated_tokens=request.total_tokens_invalidated,
                ttft_ns=first - request.last_chunk_ns,
                waits=dict(request.waits),
            )
        )
