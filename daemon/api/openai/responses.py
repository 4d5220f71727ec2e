"""`POST /v1/responses`. Nothing is stored: a request brings its whole conversation."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.api.compatible import (
    ApiError,
    Object,
    ReplyIdentity,
    extended,
    refuse_all,
    refuse_tools,
    session_of,
    sse,
)
from daemon.api.generation import (
    MAX_MESSAGES,
    SESSION,
    Begun,
    Delta,
    Event,
    Finished,
    Generate,
    Logprob,
    ModelCatalog,
    Turn,
)
from daemon.api.messages import Count, ReplyMetadata
from daemon.api.openai.common import (
    PING,
    Content,
    GenerationRequest,
    error_body,
    sampling,
    schema_of,
    text_of,
    top_logprobs,
    turn_of,
)

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
}


_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier"),
    "user",
)
"""Members of the request that a reply repeats."""


class InputItem(msgspec.Struct, frozen=True):
    """A message of the input; its type may be left out."""

    type: str = "message"
    role: str = ""
    content: Content = None


class TextConfig(msgspec.Struct, frozen=True):
    """What the text must be."""

    format: Object | None = None
    verbosity: str | None = None


class ResponseRequest(GenerationRequest, frozen=True, kw_only=True):
    """The members that this server reads."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    reasoning: Object | None = None
    tools: Any = None
    tool_choice: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    context_management: Any = None


class OutputText(msgspec.Struct, frozen=True):
    """The answer's text."""

    text: str
    type: str = "output_text"
    annotations: tuple[Any, ...] = ()
    logprobs: tuple[Logprob, ...] = ()


class OutputMessage(msgspec.Struct, frozen=True):
    """The answer."""

    id: str
    status: str
    content: tuple[OutputText, ...]
    type: str = "message"
    role: str = "assistant"
    phase: None = None


class InputDetails(msgspec.Struct, frozen=True):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0
    cache_write_tokens_details: None = None


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    """Why an answer was cut."""

    reason: str = "max_output_tokens"


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The reply, in every state."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None
    status: str
    background: bool = False
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: tuple[OutputMessage, ...]
    parallel_tool_calls: bool
    previous_response_id: None = None
    conversation: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_diagnostics: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    prompt_cache_key: str | None
    reasoning: Object
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: Object
    tool_choice: str
    tools: tuple[Any, ...] = ()
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    foretick: ReplyMetadata | None


class ResponseWriter:
    """created, in_progress, output_item.added, content_part.added, deltas, the done events, completed."""

    def __init__(self, asked: ResponseRequest, made: ReplyIdentity) -> None:
        self._asked, self._made = asked, made
        self._item = f"msg_{made.key}"
        self._at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        self._number = 0

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """See `Writer`."""
        match event:
            case Begun():
                yield from self._created()
                item = OutputMessage(self._item, "in_progress", ())
                yield self._event("output_item.added", output_index=0, item=item)
                yield self._event("content_part.added", **self._at, part=OutputText(""))
            case Delta():
                logprobs = event.logprobs if _wants_logprobs(self._asked) else ()
                yield self._event("output_text.delta", **self._at, delta=event.text, logprobs=logprobs)
            case Finished():
                response = _finished(self._asked, self._made, event)
                (item,) = response.output
                (part,) = item.content
                yield self._event("output_text.done", **self._at, text=part.text, logprobs=part.logprobs)
                yield self._event("content_part.done", **self._at, part=part)
                yield self._event("output_item.done", output_index=0, item=item)
                yield self._event(response.status, response=response)

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        return iter(())

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """See `Writer`."""
        if not self._number:
            yield from self._created()
        code = "rate_limit_exceeded" if problem.reason == "busy" else "server_error"
        failure = ResponseFailure(code, problem.message)
        response = _response(self._asked, self._made, "failed", error=failure)
        yield self._event("failed", response=response)

    def ping(self) -> bytes:
        """See `Writer`."""
        return PING

    def _created(self) -> Iterator[bytes]:
        response = _response(self._asked, self._made, "in_progress")
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=response)

    def _event(self, kind: str, **members: Any) -> bytes:
        """An event of the stream; each has the next ``sequence_number``, from 0."""
        named = f"response.{kind}"
        event = {"type": named, "sequence_number": self._number, **members}
        self._number += 1
        return sse(event, named)


class Responses:
    """See `daemon.api.compatible.Api`."""

    name, path, summary = "responses", "/v1/responses", "OpenAI: answer an input"
    request, reply, harmless = ResponseRequest, Response, HARMLESS
    error, writer = staticmethod(error_body), ResponseWriter

    def parse(self, asked: ResponseRequest, served: ModelCatalog) -> list[Generate]:
        """The instructions, then the input's messages."""
        session = session_of(asked.model, served)
        refuse_all(asked, HARMLESS)
        refuse_tools("tools", asked.tools, asked.tool_choice, "none")
        schema = schema_of(asked.text.format if asked.text else None, "text.format")
        return [
            Generate(
                session=session,
                turns=_turns(asked),
                max_tokens=asked.max_output_tokens,
                **sampling(asked, session, served.entry_of(asked.model).sampling),
                **extended(asked.foretick, schema),
                schema=schema,
                top_logprobs=top_logprobs(_wants_logprobs(asked), asked.top_logprobs),
                stream=bool(asked.stream),
            )
        ]

    def build_response(
        self, asked: ResponseRequest, made: ReplyIdentity, done: Sequence[Finished]
    ) -> Response:
        """See `Api`."""
        return _finished(asked, made, done[0])


def _turns(asked: ResponseRequest) -> tuple[Turn, ...]:
    """The whole conversation. Raises ApiError for what is no message of text."""
    turns = [] if asked.instructions is None else [Turn("system", asked.instructions)]
    if isinstance(asked.input, str):
        return (*turns, Turn("user", asked.input))
    for n, item in enumerate(asked.input):
        if item.type != "message":
            raise ApiError("bad_request", f"input[{n}]: {item.type!r} is not supported", f"input[{n}]")
        turns.append(turn_of(item.role, text_of(item.content, f"input[{n}].content"), f"input[{n}]"))
    if not asked.input:
        raise ApiError("bad_request", "input: give at least one message", "input")
    return tuple(turns)


def _wants_logprobs(asked: ResponseRequest) -> bool:
    return "message.output_text.logprobs" in (asked.include or ()) or bool(asked.top_logprobs)


def _finished(asked: ResponseRequest, made: ReplyIdentity, done: Finished) -> Response:
    status = "incomplete" if done.finish == "length" else "completed"
    logprobs = done.logprobs if _wants_logprobs(asked) else ()
    item = OutputMessage(f"msg_{made.key}", status, (OutputText(done.text, logprobs=logprobs),))
    return _response(asked, made, status, done=done, output=(item,))


def _response(
    asked: ResponseRequest,
    made: ReplyIdentity,
    status: str,
    *,
    done: Finished | None = None,
    output: tuple[OutputMessage, ...] = (),
    error: ResponseFailure | None = None,
) -> Response:
    used = sampling(asked, asked.model if asked.model.startswith(SESSION) else "", made.sampling)
    text = asked.text or TextConfig()
    usage = None
    if done is not None:
        total = done.prompt_tokens + done.answer_tokens
        details = InputDetails(done.reused_tokens), OutputDetails()
        usage = ResponseUsage(done.prompt_tokens, details[0], done.answer_tokens, details[1], total)
    return Response(
        id=f"resp_{made.key}",
        created_at=made.created,
        completed_at=int(time.time()) if status == "completed" else None,
        status=status,
        error=error,
        incomplete_details=Incomplete() if status == "incomplete" else None,
        model=made.model,
        output=output,
        parallel_tool_calls=True if asked.parallel_tool_calls is None else asked.parallel_tool_calls,
        reasoning={"effort": None, "summary": None} | (asked.reasoning or {}),
        temperature=used["temperature"],
        text={"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        tool_choice=asked.tool_choice or "auto",
        tools=tuple(asked.tools or ()),
        top_logprobs=asked.top_logprobs or 0,
        top_p=used.get("top_p", 1.0),
        truncation=asked.truncation or "disabled",
        usage=usage,
        metadata=asked.metadata or {},
        foretick=done.metadata if done is not None else None,
        **{name: getattr(asked, name) for name in _REPEATED},
    )
