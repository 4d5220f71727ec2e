"""Prompts without a session on the engine's side: text to tokens, requests of class POOL, answers to events.

A prompt is read as plain text: the tokenizer's begin-of-text token, if it has one, and then what the client
wrote, with no chat template and no system prompt around it. Special tokens that the text spells out are read
as such, so a client may bring a template of its own. Each appended piece is encoded on its own; the pieces'
tokens are joined, which need not be the tokens of the joined text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from daemon import protocol as seam
from engine.model.prompt import PromptFormat
from flash.questions import Prepared, Question
from flash.registry import check_choices
from scheduler.request import Event, Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.types import PriorityClass, PromptReader

NAME = "prompt"
"""What such a request is called in messages, in place of a session."""


@dataclass
class LivePrompt:
    """A prompt the scheduler works on. ``tokens``: its length, as of the newest input."""

    command: seam.OpenPrompt
    request: Request
    tokens: int


class EnginePrompts:
    """All live prompts. Commands come from one thread; answers go out on the scheduler's.

    ``open_prompt`` makes the reader of a prompt. No prompt and answer may take more than ``most_tokens``
    positions. All clients share one salt, since nobody is authenticated, and so the prefix cache.
    """

    def __init__(
        self,
        prompt: PromptFormat,
        scheduler: Scheduler,
        open_prompt: Callable[[], PromptReader],
        most_tokens: int,
        emit: Callable[[seam.EngineEvent], None],
    ) -> None:
        self._format = prompt
        self._scheduler = scheduler
        self._open_prompt = open_prompt
        self._most_tokens = most_tokens
        self._emit = emit
        self._live: dict[int, LivePrompt] = {}

    def handle(self, command: seam.PromptCommand) -> None:
        """Carry out one command. What is meant for a prompt that has ended is ignored: its end was told."""
        if isinstance(command, seam.OpenPrompt):
            self._begin(command)
            return
        live = self._live.get(command.prompt)
        if live is None:
            return
        if isinstance(command, seam.PromptInput):
            self._input(live, command)
        elif isinstance(command, seam.FinishPrompt):
            self._scheduler.finish(live.request.id)
        else:
            self._scheduler.cancel(live.request.id)

    def _begin(self, command: seam.OpenPrompt) -> None:
        tokens = self._format.plain(command.text)
        try:
            request = Request(
                RequestSpec(
                    cls=PriorityClass.POOL,
                    session=NAME,
                    prompt=tokens,
                    max_tokens=1 if command.choices else command.max_tokens,
                    on_done=partial(self._done, command),
                    open_prompt=self._open_prompt,
                    stop_ids=self._format.stop_ids,
                    choices=self._choices(command.choices),
                    temperature=command.temperature,
                    complete=command.complete,
                )
            )
        except ValueError as error:
            self._emit(seam.PromptFailed(command.prompt, "bad_request", str(error)))
            return
        if not self._fits(command.prompt, len(tokens), request):
            return
        live = self._live[command.prompt] = LivePrompt(command, request, len(tokens))
        self._scheduler.submit(request)
        self._emit(seam.PromptTaken(command.prompt, live.tokens))

    def _input(self, live: LivePrompt, command: seam.PromptInput) -> None:
        anew = command.replaces or not live.tokens
        tokens = self._format.plain(command.text) if anew else self._format.encode(command.text)
        length = len(tokens) if anew else live.tokens + len(tokens)
        if not self._fits(command.prompt, length, live.request):
            self._live.pop(command.prompt, None)
            self._scheduler.cancel(live.request.id)
            return
        live.tokens = length
        if anew:
            self._scheduler.replace(live.request.id, tokens)
        else:
            self._scheduler.extend(live.request.id, tokens)
        self._emit(seam.PromptTaken(command.prompt, length))

    def _fits(self, number: int, tokens: int, request: Request) -> bool:
        """Whether there are positions for it and its answer; if not, that is told."""
        needed = tokens + request.spec.max_tokens
        if needed <= self._most_tokens:
            return True
        message = f"prompt and answer take up to {needed} positions, there are {self._most_tokens}"
        self._emit(seam.PromptFailed(number, "too_long", message))
        return False

    def _choices(self, choices: tuple[str, ...]) -> tuple[int, ...] | None:
        """First token of each choice as it is written, for it goes on right behind the prompt."""
        if not choices:
            return None
        if not all(choices):
            raise ValueError("an empty choice")
        tokens = tuple(self._format.encode(choice)[0] for choice in choices)
        check_choices(Question(NAME, NAME, choices), Prepared((), tokens, frozenset()))
        return tokens

    def _done(self, command: seam.OpenPrompt, request: Request) -> None:
        if self._live.pop(command.prompt, None) is None:
            return  # its end was told when it was refused
        if request.state is not State.FINISHED:
            failure = request.error or Failure("cancelled", "nobody waited for the answer any more")
            self._emit(seam.PromptFailed(command.prompt, failure.code, failure.message))
            return
        choice = request.chosen(command.choices)
        first = request.first(Event.KV_ON_GPU)
        assert first is not None  # it has an answer
        self._emit(
            seam.PromptDone(
                command.prompt,
                self._format.decode(list(request.answer)) if choice is None else choice,
                choice,
                request.samples[0].gap,
                len(request.prompt),
                len(request.output),
                request.cached_tokens,
                request.recomputed_tokens,
                request.swapped_tokens,
                request.total_tokens_invalidated,
                first - request.last_chunk_ns,
                dict(request.waits),
            )
        )
