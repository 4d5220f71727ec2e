"""`POST /v1/chat/completions`."""

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
    stops_of,
)
from daemon.api.generation import MAX_MESSAGES, Begun, Delta, Event, Finished, Generate, Logprob, ModelCatalog
from daemon.api.messages import Count, ReplyMetadata
from daemon.api.openai.common import (
    ChunkedRequest,
    ChunkWriter,
    Content,
    RoleName,
    Usage,
    error_body,
    finish_reason,
    penalty_of,
    sampling,
    schema_of,
    top_logprobs,
    turn_of,
    usage_of,
)

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "audio": (),
    "web_search_options": (),
    "modalities": (["text"],),
    "logit_bias": ({},),
}


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a request."""

    role: RoleName
    content: Content = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatRequest(ChunkedRequest, frozen=True, kw_only=True):
    """The members that this server reads."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Object | None = None
    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    modalities: Any = None


class ReplyMessage(msgspec.Struct, frozen=True):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: str | None = None
    annotations: tuple[Any, ...] = ()
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of the answer's tokens."""

    content: tuple[Logprob, ...]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    foretick: ReplyMetadata


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply. ``foretick``: what the first answer was read from, and how sure it is."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    service_tier: str = "default"
    system_fingerprint: str
    metadata: None = None
    moderation: None = None
    foretick: ReplyMetadata


class ChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: dict[str, str | None]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the stream. ``foretick`` comes with the end of an answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str = "default"
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None = None
    moderation: None = None
    foretick: ReplyMetadata | None = None


class ChatWriter(ChunkWriter):
    """Of each answer the role, its text, its end."""

    def __init__(self, asked: ChatRequest, made: ReplyIdentity) -> None:
        super().__init__(asked, made, answers=0)
        self._logprobs = bool(asked.logprobs)

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """See `Writer`."""
        match event:
            case Begun():
                first = {"role": "assistant", "content": "", "refusal": None}
                yield self._chunk(ChunkChoice(index, first))
            case Delta():
                logprobs = ChatLogprobs(event.logprobs) if self._logprobs else None
                yield self._chunk(ChunkChoice(index, {"content": event.text}, logprobs))
            case Finished():
                self._done[index] = event
                ended = ChunkChoice(index, {}, None, finish_reason(event.finish))
                yield self._chunk(ended, foretick=event.metadata)

    def _chunk(
        self, *choices: ChunkChoice, usage: Usage | None = None, foretick: ReplyMetadata | None = None
    ) -> bytes:
        return sse(
            ChatChunk(
                id=f"chatcmpl-{self._made.key}",
                created=self._made.created,
                model=self._made.model,
                system_fingerprint=self._made.fingerprint,
                choices=choices,
                usage=usage,
                foretick=foretick,
            )
        )


class Chat:
    """See `daemon.api.compatible.Api`."""

    name, path, summary = "chat", "/v1/chat/completions", "OpenAI: answer a chat"
    request, reply, harmless = ChatRequest, ChatCompletion, HARMLESS
    error, writer = staticmethod(error_body), ChatWriter

    def parse(self, asked: ChatRequest, served: ModelCatalog) -> list[Generate]:
        """One prompt, answered ``n`` times."""
        session = session_of(asked.model, served)
        refuse_all(asked, HARMLESS)
        refuse_tools("tools", asked.tools, asked.tool_choice, "none")
        refuse_tools("functions", asked.functions, asked.function_call, "none")
        if not asked.messages:
            raise ApiError("bad_request", "messages: give at least one", "messages")
        for n, message in enumerate(asked.messages):
            if message.tool_calls or message.function_call is not None:
                raise ApiError(
                    "bad_request", f"messages[{n}]: calls of tools are not supported", f"messages[{n}]"
                )
        schema = schema_of(asked.response_format, "response_format")
        one = Generate(
            session=session,
            turns=tuple(
                turn_of(each.role, each.content, f"messages[{n}]") for n, each in enumerate(asked.messages)
            ),
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            **sampling(asked, session, served.entry_of(asked.model).sampling),
            seed=asked.seed,
            stop=stops_of(asked.stop),
            **extended(asked.foretick, schema),
            schema=schema,
            penalty=penalty_of(asked, session),
            top_logprobs=top_logprobs(bool(asked.logprobs), asked.top_logprobs),
            stream=bool(asked.stream),
        )
        return [msgspec.structs.replace(one, index=index) for index in range(asked.n or 1)]

    def build_response(
        self, asked: ChatRequest, made: ReplyIdentity, done: Sequence[Finished]
    ) -> ChatCompletion:
        """See `Api`."""
        return ChatCompletion(
            id=f"chatcmpl-{made.key}",
            created=made.created,
            model=made.model,
            choices=tuple(
                ChatChoice(
                    index,
                    ReplyMessage(each.text),
                    ChatLogprobs(each.logprobs) if asked.logprobs else None,
                    finish_reason(each.finish),
                    each.metadata,
                )
                for index, each in enumerate(done)
            ),
            usage=usage_of(done, len(done)),
            system_fingerprint=made.fingerprint,
            foretick=done[0].metadata,
        )
