"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic API, as a pure translation."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from daemon.api.compatible import (
    ApiError,
    Extension,
    Object,
    Reason,
    ReplyIdentity,
    extended,
    refuse_all,
    refuse_tools,
    session_of,
    sse,
    stops_of,
)
from daemon.api.generation import (
    MAX_MESSAGES,
    Begun,
    Delta,
    Event,
    Finish,
    Finished,
    Generate,
    ModelCatalog,
    Role,
    Turn,
)
from daemon.api.messages import Count, Natural, ReplyMetadata
from daemon.api.openai.common import sampling, text_of

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
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "mcp_servers": ([],),
    "container": (),
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


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """An error in Anthropic's shape."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the Anthropic API writes it."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


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


def error_body(problem: ApiError) -> AnthropicError:
    """See `daemon.api.compatible.ErrorBody`."""
    kind = _TYPES.get(problem.reason, "invalid_request_error")
    return AnthropicError(error=AnthropicErrorBody(kind, problem.message))


class MessageWriter:
    """message_start, content_block_start, ping, deltas, content_block_stop, message_delta, message_stop."""

    def __init__(self, _: MessageRequest, made: ReplyIdentity) -> None:
        self._made = made

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """See `Writer`."""
        match event:
            case Begun():
                reply = Reply(
                    id=f"msg_{self._made.key}",
                    model=self._made.model,
                    content=(),
                    stop_reason=None,
                    stop_sequence=None,
                    usage=_usage(AnthropicUsage, event),
                    foretick=None,
                )
                yield _event("message_start", message=reply)
                yield _event("content_block_start", content_block=Text(""), index=0)
                yield self.ping()
            case Delta():
                delta = {"text": event.text, "type": "text_delta"}
                yield _event("content_block_delta", delta=delta, index=0)
            case Finished():
                yield _event("content_block_stop", index=0)
                stopped = {
                    "stop_reason": _REASONS[event.finish],
                    "stop_sequence": event.stop,
                    "stop_details": None,
                    "container": None,
                }
                usage = _usage(UsageSoFar, event, event.answer_tokens)
                yield _event("message_delta", delta=stopped, usage=usage, foretick=event.metadata)
                yield _event("message_stop")

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        return iter(())

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """See `Writer`."""
        yield sse(error_body(problem), "error")

    def ping(self) -> bytes:
        """See `Writer`."""
        return _event("ping")


class Messages:
    """See `daemon.api.compatible.Api`."""

    name, path, summary = "messages", "/v1/messages", "Anthropic: answer messages"
    request, reply, harmless = MessageRequest, Reply, HARMLESS
    error, writer = staticmethod(error_body), MessageWriter

    def parse(self, asked: MessageRequest, served: ModelCatalog) -> list[Generate]:
        """The system's text, then the messages; a last one of the assistant is gone on with."""
        counted = self.counted(asked, served)
        schema = _schema(asked)
        return [
            Generate(
                session=counted.session,
                turns=counted.turns,
                max_tokens=asked.max_tokens,
                **sampling(asked, counted.session, served.entry_of(asked.model).sampling),
                stop=stops_of(asked.stop_sequences, "stop_sequences"),
                **extended(asked.foretick, schema),
                schema=schema,
                stream=bool(asked.stream),
            )
        ]

    def counted(self, asked: CountRequest, served: ModelCatalog) -> Generate:
        """The prompt alone. Raises ApiError."""
        session = session_of(asked.model, served)
        refuse_all(asked, HARMLESS)
        refuse_tools("tools", asked.tools, asked.tool_choice, {"type": "none"})
        if not asked.messages:
            raise ApiError("bad_request", "messages: at least one message is required", "messages")
        system = [] if asked.system is None else [Turn("system", text_of(asked.system, "system", ("text",)))]
        said = [
            Turn(each.role, text_of(each.content, f"messages.{n}.content", ("text",)))
            for n, each in enumerate(asked.messages)
        ]
        return Generate(session=session, turns=(*system, *said))

    def build_response(self, asked: MessageRequest, made: ReplyIdentity, done: Sequence[Finished]) -> Reply:
        """See `Api`."""
        (one,) = done
        return Reply(
            id=f"msg_{made.key}",
            model=made.model,
            content=(Text(one.text),),
            stop_reason=_REASONS[one.finish],
            stop_sequence=one.stop,
            usage=_usage(AnthropicUsage, one, one.answer_tokens),
            foretick=one.metadata,
        )


def _event(kind: str, **members: Any) -> bytes:
    return sse({**members, "type": kind}, kind)


def _usage(kind: type[U], event: Begun | Finished, output: int = 0) -> U:
    return kind(
        input_tokens=event.prompt_tokens - event.reused_tokens,
        cache_read_input_tokens=event.reused_tokens,
        output_tokens=output,
    )


def _schema(asked: MessageRequest) -> Object | None:
    form = asked.output_format or (asked.output_config and asked.output_config.format)
    match form:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    raise ApiError("bad_request", "output_config.format: only json_schema is supported", "output_config")
