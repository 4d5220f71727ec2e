"""`POST /v1/completions`: plain text, or tokens, to be continued; with a session the text is a question."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from daemon.api.compatible import ApiError, ReplyIdentity, extended, refuse_all, session_of, sse, stops_of
from daemon.api.generation import Begun, Delta, Event, Finished, Generate, Logprob, ModelCatalog, Turn
from daemon.api.messages import ReplyMetadata
from daemon.api.openai.common import (
    MAX_ANSWERS,
    ChunkedRequest,
    ChunkWriter,
    Usage,
    error_body,
    finish_reason,
    penalty_of,
    sampling,
    top_logprobs,
    usage_of,
)

MAX_TOKENS = 16
"""Longest answer where the request does not say, as the API has it."""
HARMLESS: dict[str, tuple[Any, ...]] = {"suffix": ("",), "echo": (False,), "logit_bias": ({},)}


class CompletionRequest(ChunkedRequest, frozen=True, kw_only=True):
    """The members that this server reads."""

    prompt: str | list[Any]
    best_of: int | None = None
    logprobs: int | None = None
    suffix: Any = None
    echo: Any = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities in the shape of this API; ``text_offset`` in characters of the answer."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True):
    """An answer, or a piece of one."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply, and each event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None
    foretick: ReplyMetadata | None


class CompletionWriter(ChunkWriter):
    """Pieces of text, and the end of each answer."""

    def __init__(self, asked: CompletionRequest, made: ReplyIdentity) -> None:
        super().__init__(asked, made, answers=asked.n or 1)
        self._logprobs = asked.logprobs is not None
        self._written: dict[int, int] = {}

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """See `Writer`."""
        match event:
            case Begun():
                self._written[index] = 0
            case Delta():
                logprobs = _logprobs(event.logprobs, self._written[index]) if self._logprobs else None
                self._written[index] += sum(len(each.token) for each in event.logprobs)
                yield self._chunk(CompletionChoice(event.text, index, logprobs, None))
            case Finished():
                self._done[index] = event
                ended = CompletionChoice("", index, None, finish_reason(event.finish))
                yield self._chunk(ended, foretick=event.metadata)

    def _chunk(
        self, *choices: CompletionChoice, usage: Usage | None = None, foretick: ReplyMetadata | None = None
    ) -> bytes:
        return sse(_completion(self._made, choices, usage, foretick))


class Completions:
    """See `daemon.api.compatible.Api`."""

    name, path, summary = "completions", "/v1/completions", "OpenAI: continue a text"
    request, reply, harmless = CompletionRequest, Completion, HARMLESS
    error, writer = staticmethod(error_body), CompletionWriter

    def parse(self, asked: CompletionRequest, served: ModelCatalog) -> list[Generate]:
        """Each prompt, answered ``n`` times."""
        session = session_of(asked.model, served)
        refuse_all(asked, HARMLESS)
        answers = asked.n or 1
        if asked.best_of not in (None, answers):
            raise ApiError("bad_request", "best_of is not supported, unless it equals n", "best_of")
        prompts = _prompts(asked.prompt, served.max_prompt_tokens)
        if len(prompts) * answers > MAX_ANSWERS:
            why = f"prompt: at most {MAX_ANSWERS} answers to all prompts together"
            raise ApiError("bad_request", why, "prompt")
        one = Generate(
            session=session,
            max_tokens=asked.max_tokens or (None if session else MAX_TOKENS),
            **sampling(asked, session, served.entry_of(asked.model).sampling),
            seed=asked.seed,
            stop=stops_of(asked.stop),
            **extended(asked.foretick, None),
            penalty=penalty_of(asked, session),
            top_logprobs=top_logprobs(asked.logprobs is not None, asked.logprobs, "logprobs"),
            stream=bool(asked.stream),
        )
        return [
            msgspec.structs.replace(one, index=index, **_said(prompt, session))
            for prompt in prompts
            for index in range(answers)
        ]

    def build_response(
        self, asked: CompletionRequest, made: ReplyIdentity, done: Sequence[Finished]
    ) -> Completion:
        """See `Api`."""
        choices = (
            CompletionChoice(
                each.text,
                index,
                _logprobs(each.logprobs, 0) if asked.logprobs is not None else None,
                finish_reason(each.finish),
            )
            for index, each in enumerate(done)
        )
        return _completion(made, tuple(choices), usage_of(done, asked.n or 1), done[0].metadata)


def _completion(
    made: ReplyIdentity,
    choices: tuple[CompletionChoice, ...],
    usage: Usage | None,
    foretick: ReplyMetadata | None,
) -> Completion:
    return Completion(
        id=f"cmpl-{made.key}",
        created=made.created,
        model=made.model,
        system_fingerprint=made.fingerprint,
        choices=choices,
        usage=usage,
        foretick=foretick,
    )


def _prompts(prompt: str | list[Any], most: int) -> list[str | tuple[int, ...]]:
    """The prompts: a text, several, the tokens of one, or of several. Raises ApiError for anything else, and
    for more than ``most`` tokens.
    """
    # before each token is looked at
    for each in (prompt, *(prompt if len(prompt) <= MAX_ANSWERS else ())):
        if isinstance(each, list) and len(each) > max(most, MAX_ANSWERS):
            raise ApiError(
                "too_long", f"the prompt has {len(each)} tokens, the limit is {most} tokens", "prompt"
            )
    listed = [prompt] if isinstance(prompt, str) or all(type(each) is int for each in prompt) else prompt
    found: list[str | tuple[int, ...]] = []
    for each in listed:
        if isinstance(each, str) and each:
            found.append(each)
        elif isinstance(each, list) and each and all(type(token) is int for token in each):
            found.append(tuple(each))
        else:
            raise ApiError(
                "bad_request", "prompt: give texts or lists of tokens, none of them empty", "prompt"
            )
    if any(not 0 <= token < 2**31 for each in found if not isinstance(each, str) for token in each):
        raise ApiError("bad_request", "prompt has a token that no model has", "prompt")
    return found


def _said(prompt: str | tuple[int, ...], session: str) -> dict[str, Any]:
    """The member of a `Generate` that a prompt is. Raises ApiError for a session that is asked in tokens."""
    if not session:
        return {"text": prompt} if isinstance(prompt, str) else {"tokens": prompt}
    if not isinstance(prompt, str):
        raise ApiError("bad_request", "prompt: a session is asked in words, not in tokens", "prompt")
    return {"turns": (Turn("user", prompt),)}


def _logprobs(found: Sequence[Logprob], offset: int) -> CompletionLogprobs:
    offsets = []
    for each in found:
        offsets.append(offset)
        offset += len(each.token)
    return CompletionLogprobs(
        tuple(each.token for each in found),
        tuple(each.logprob for each in found),
        tuple({top.token: top.logprob for top in each.top_logprobs} for each in found),
        tuple(offsets),
    )
