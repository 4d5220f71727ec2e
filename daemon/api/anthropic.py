"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic API, as a pure translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from daemon.api.api_errors import ApiError, Reason, refuse, refuse_tools, stops_of
from daemon.api.extension import Extension, extended
from daemon.api.generation import (
    MAX_MESSAGES,
    Begun,
    CountTokens,
    Delta,
    Finish,
    Finished,
    Generate,
    ModelCatalog,
    Role,
    Turn,
)
from daemon.api.messages import Count, Natural, ReplyMetadata
from daemon.api.reply_writer import ReplyIdentity, Writer, sse

Object = dict[str, Any]
_TEXT: Object = {
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_Part = Annotated[Object, Meta(extra_json_schema=_TEXT)]
Content = str | Annotated[list[_Part], Meta(max_length=MAX_MESSAGES)]
_TYPES: dict[Reason, str] = {
    "unauthenticated": "authentication_error",
    "forbidden": "permission_error",
    "unknown_model": "not_found_error",
    "unknown_url": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "engine": "api_error",
    "rebuilding": "api_error",  # `overloaded_error` is of status 529
    "shutting_down": "api_error",
    "timeout": "timeout_error",
}
_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
}
UNSUPPORTED = ("tool_choice", "mcp_servers", "container", "thinking", "context_management")
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "mcp_servers": ([],),
    "thinking": ({"type": "disabled"},),
    "context_management": ({},),
}


class AnthropicMessage(msgspec.Struct, frozen=True):
    """A message of a request; several of one role in a row count as one conversation."""

    role: Role
    content: Content


class OutputConfig(msgspec.Struct, frozen=True):
    """``format``: JSON of a schema."""

    format: Object | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Any = None
    tool_choice: Any = None
    mcp_servers: Any = None
    container: Any = None
    thinking: Any = None
    context_management: Any = None


class MessageRequest(CountRequest, frozen=True, kw_only=True):
    """The members that this server reads; others are tolerated."""

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Natural | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    foretick: Extension | None = None


class Text(msgspec.Struct, frozen=True):
    """A block of text."""

    text: str
    type: str = "text"
    citations: None = None


class CacheCreation(msgspec.Struct, frozen=True):
    """Nothing is written to a cache that would be paid for."""

    ephemeral_1h_input_tokens: int = 0
    ephemeral_5m_input_tokens: int = 0


class AnthropicOutputDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens."""

    thinking_tokens: int = 0


class UsageSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens; ``input_tokens`` are those that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputDetails = AnthropicOutputDetails()
    server_tool_use: None = None


class AnthropicUsage(UsageSoFar, frozen=True, kw_only=True):
    """Tokens, and how they were served."""

    cache_creation: CacheCreation = CacheCreation()
    inference_geo: None = None
    service_tier: str = "standard"
    speed: None = None


U = TypeVar("U", bound=UsageSoFar)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: tuple[Text, ...]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    usage: AnthropicUsage
    container: None = None
    diagnostics: None = None
    foretick: ReplyMetadata | None


class MessageStart(msgspec.Struct, frozen=True):
    """The reply begins: its usage so far, and no text."""

    message: Reply
    type: str = "message_start"


class BlockStart(msgspec.Struct, frozen=True):
    """The text begins."""

    content_block: Text = Text("")
    index: int = 0
    type: str = "content_block_start"


class AnthropicTextDelta(msgspec.Struct, frozen=True):
    """More text."""

    text: str
    type: str = "text_delta"


class BlockDelta(msgspec.Struct, frozen=True):
    """More text."""

    delta: AnthropicTextDelta
    index: int = 0
    type: str = "content_block_delta"


class BlockStop(msgspec.Struct, frozen=True):
    """The text is whole."""

    index: int = 0
    type: str = "content_block_stop"


class Stopped(msgspec.Struct, frozen=True):
    """Why it ended."""

    stop_reason: str
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(msgspec.Struct, frozen=True):
    """The end, with the usage of the whole reply."""

    delta: Stopped
    usage: UsageSoFar
    foretick: ReplyMetadata
    type: str = "message_delta"


class MessageStop(msgspec.Struct, frozen=True):
    """Nothing follows."""

    type: str = "message_stop"


class Ping(msgspec.Struct, frozen=True):
    """Keeps a connection open."""

    type: str = "ping"


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """An error in Anthropic's shape."""

    type: str
    message: str


class Counted(msgspec.Struct, frozen=True):
    """The reply to `count_tokens`."""

    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model: the daemon's own, or a session."""

    id: str
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    line: None = None
    capabilities: None = None
    deprecated_at: None = None
    retires_at: None = None
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct, frozen=True):
    """All models."""

    data: tuple[ModelInfo, ...]
    first_id: str
    last_id: str
    has_more: bool = False


def models(served: ModelCatalog) -> ModelList:
    """The reply to `GET /v1/models`."""
    since = datetime.fromtimestamp(served.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = tuple(
        ModelInfo(
            id=name,
            display_name=name,
            created_at=since,
            max_input_tokens=served.max_prompt_tokens,
            max_tokens=served.max_new_tokens,
        )
        for name in served.names
    )
    return ModelList(found, found[0].id, found[-1].id)


def error_body(problem: ApiError) -> dict[str, Any]:
    """The body of a failed request, and of a stream that fails."""
    kind = _TYPES.get(problem.reason, "invalid_request_error")
    return {"type": "error", "error": AnthropicErrorBody(kind, problem.message)}


class Messages:
    """See `daemon.api.reply_writer.Api`."""

    name = "messages"
    error = staticmethod(error_body)

    def wanted(self, asked: MessageRequest, served: ModelCatalog) -> list[Generate]:
        """The system's text, then the messages; a last one of the assistant is gone on with."""
        counted = self.counted(asked, served)
        schema = _schema(asked)
        temperature = asked.temperature
        if temperature is None:
            temperature = 0.0 if counted.session else 1.0
        if asked.top_p == 0:
            temperature = 0.0
        return [
            Generate(
                session=counted.session,
                turns=counted.turns,
                max_tokens=asked.max_tokens,
                temperature=temperature,
                top_p=asked.top_p or 1.0,
                top_k=asked.top_k or 0,
                stop=stops_of(asked.stop_sequences, "stop_sequences"),
                **extended(asked.foretick, schema),
                schema=schema,
                stream=bool(asked.stream),
            )
        ]

    def counted(self, asked: CountRequest, served: ModelCatalog) -> CountTokens:
        """The prompt alone. Raises ApiError."""
        session = _session(asked.model, served)
        for name in UNSUPPORTED:
            refuse(name, getattr(asked, name), HARMLESS.get(name, ()))
        refuse_tools("tools", asked.tools, asked.tool_choice, {"type": "none"})
        if not asked.messages:
            raise ApiError("bad_request", "messages: at least one message is required", "messages")
        system = [] if asked.system is None else [Turn("system", _text(asked.system, "system"))]
        said = [
            Turn(each.role, _text(each.content, f"messages.{n}.content"))
            for n, each in enumerate(asked.messages)
        ]
        return CountTokens(session=session, turns=(*system, *said))

    def whole(self, asked: MessageRequest, made: ReplyIdentity, done: Sequence[Finished]) -> Reply:
        """See `Api`."""
        (one,) = done
        return Reply(
            id=f"msg_{made.key}",
            model=made.model,
            content=(Text(one.text),),
            stop_reason=_REASONS[one.finish],
            stop_sequence=one.stop,
            usage=_usage(AnthropicUsage, one),
            foretick=one.metadata,
        )

    def writer(self, asked: MessageRequest, made: ReplyIdentity) -> Writer:
        """See `Api`."""
        return MessageWriter(made)


class MessageWriter:
    """message_start, content_block_start, ping, deltas, content_block_stop, message_delta, message_stop."""

    def __init__(self, made: ReplyIdentity) -> None:
        self._made = made

    def begun(self, index: int, event: Begun) -> Iterator[bytes]:
        """See `Writer`."""
        reply = Reply(
            id=f"msg_{self._made.key}",
            model=self._made.model,
            content=(),
            stop_reason=None,
            stop_sequence=None,
            usage=AnthropicUsage(
                input_tokens=event.prompt_tokens - event.reused_tokens,
                cache_read_input_tokens=event.reused_tokens,
                output_tokens=0,
            ),
            foretick=None,
        )
        yield _event(MessageStart(reply))
        yield _event(BlockStart())
        yield self.ping()

    def delta(self, index: int, event: Delta) -> Iterator[bytes]:
        """See `Writer`."""
        yield _event(BlockDelta(AnthropicTextDelta(event.text)))

    def finished(self, index: int, event: Finished) -> Iterator[bytes]:
        """See `Writer`."""
        yield _event(BlockStop())
        stopped = Stopped(_REASONS[event.finish], event.stop)
        yield _event(MessageDelta(stopped, _usage(UsageSoFar, event), event.metadata))
        yield _event(MessageStop())

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        return iter(())

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """See `Writer`."""
        yield sse(error_body(problem), "error")

    def ping(self) -> bytes:
        """See `Writer`."""
        return _event(Ping())


def _event(event: Any) -> bytes:
    return sse(event, event.type)


def _usage(kind: type[U], done: Finished) -> U:
    return kind(
        input_tokens=done.prompt_tokens - done.reused_tokens,
        cache_read_input_tokens=done.reused_tokens,
        output_tokens=done.answer_tokens,
    )


def _session(model: str, served: ModelCatalog) -> str:
    session = served.session_of(model)
    if session is not None:
        return session
    known = ", ".join(served.names)
    raise ApiError("unknown_model", f"model: {model!r} does not exist; there are: {known}", "model")


def _text(content: str | list[Object], here: str) -> str:
    """The text of a message's content. Raises ApiError for blocks that are no text."""
    if isinstance(content, str):
        return content
    texts = []
    for n, block in enumerate(content):
        kind, text = block.get("type"), block.get("text")
        if kind != "text" or not isinstance(text, str):
            where = f"{here}.{n}"
            raise ApiError("bad_request", f"{where}: only text is supported, not {kind!r}", where)
        texts.append(text)
    return "".join(texts)


def _schema(asked: MessageRequest) -> Object | None:
    form = asked.output_format or (asked.output_config and asked.output_config.format)
    match form:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    raise ApiError("bad_request", "output_config.format: only json_schema is supported", "output_config")
